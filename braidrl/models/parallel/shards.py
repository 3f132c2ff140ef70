"""What one rank has of a parameter that several divide; of one that nobody divides, all of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from braidrl.models.parallel.boxes import Box


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Of each parameter, whole; tied ones once."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def local_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """This rank's part of a gradient, after what the ranks of a divided parameter have each computed of it is summed."""
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    return local_part(gradient.redistribute(placements=parameter.placements))


def parts_of(parameter: Tensor) -> int:
    """Into how many different parts the ranks divide a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = parameter.device_mesh.shape
    return math.prod(s for s, p in zip(sizes, parameter.placements, strict=True) if not p.is_replicate())


def box_of(parameter: Tensor) -> Box:
    """Where in the whole parameter this rank's part is."""
    if not isinstance(parameter, DTensor):
        return Box.whole(parameter.shape)
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(start, shape)


def part_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """What this rank has of a whole tensor that is divided as the parameter is."""
    return box_of(parameter).of(tensor) if isinstance(parameter, DTensor) else tensor


def as_part(local: Tensor, parameter: Tensor) -> Tensor:
    """A rank's part as a tensor that knows the whole, divided as the parameter is."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def whole(tensor: Tensor) -> Tensor:
    """The tensor from all its parts, on every rank; all ranks call this at the same time."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
