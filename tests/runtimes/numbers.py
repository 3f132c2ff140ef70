"""A stage of a user's own after which the second batch has an advantage that is no number."""

import torch

from braidrl.algorithms.registry import shapes


@shapes.register(writes=["advantage"])
def breaks(advantage, group, sample):
    """Groups are numbered through the whole run, four in a step."""
    return torch.where((group == 5) & (sample == 1), torch.nan, advantage)
