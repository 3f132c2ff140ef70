"""A user's advantage of scope group that reads payload."""

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import advantages


@advantages.register(writes=["advantage"], scope="group")
def against_group(tokens: Ragged, group: torch.Tensor) -> torch.Tensor:
    """Return by how much a row's mean token is above the mean of its group's rows."""
    means = tokens.with_values(tokens.values.double()).row_means()
    return means - torch.stack([means[group == number].mean() for number in group])
