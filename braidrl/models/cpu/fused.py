"""Weights that are multiplied with the same input, side by side in one storage.

    q_proj.weight │ k_proj.weight │ v_proj.weight        the module's own parameters, each a view
    └──────────────── fused (H + 2K) · D ───────┘        one matrix product in place of three

Nothing is copied after `side_by_side`: an optimizer's step on the parameters is the fused weight's at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


@torch.no_grad()
def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor:
    """One tensor of all parameters, joined in their first dimension, whose storage they share from now on.

    Where they lie so already they stay where they are; else their data moves, and the parameters are the same objects as before.
    """
    joined = _joined(parameters)
    if joined is None:
        joined = torch.cat([parameter.detach() for parameter in parameters])
        start = 0
        for parameter in parameters:
            parameter.data = joined[start : start + len(parameter)]
            start += len(parameter)
    return joined


def _joined(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """The tensor that parameters lying one after the other in one storage make up; None where they do not."""
    first = parameters[0]
    address, storage = first.data_ptr(), first.untyped_storage().data_ptr()
    for parameter in parameters:
        same = parameter.untyped_storage().data_ptr() == storage and parameter.data_ptr() == address
        if not same or not parameter.is_contiguous() or parameter.shape[1:] != first.shape[1:]:
            return None
        address += parameter.numel() * parameter.element_size()
    shape = (sum(len(parameter) for parameter in parameters), *first.shape[1:])
    return first.detach().as_strided(shape, first.stride())
