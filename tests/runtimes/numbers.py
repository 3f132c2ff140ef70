"""A user-defined stage that gives the second batch an advantage of NaN or infinity."""

import torch

from braidrl.algorithms.registry import shapes


@shapes.register(writes=["advantage"])
def breaks(advantage, group, sample):
    """Return the advantages; groups are numbered through the whole run, four in a step."""
    return torch.where((group == 5) & (sample == 1), torch.nan, advantage)
