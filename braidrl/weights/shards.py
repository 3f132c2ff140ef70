"""Local shards of parameters that may be DTensors; a plain tensor is its own and only shard."""

import math

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from braidrl.weights.boxes import Box


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the global shape of each parameter by name; tied ones once."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of the global tensor, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def local_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Reduce a gradient over the ranks that hold partial sums, and return the local shard."""
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    return local_shard(gradient.redistribute(placements=parameter.placements))


def num_shards(parameter: Tensor) -> int:
    """Return the number of different shards of a parameter."""
    if not isinstance(parameter, DTensor):
        return 1
    sizes = parameter.device_mesh.shape
    return math.prod(s for s, p in zip(sizes, parameter.placements, strict=True) if not p.is_replicate())


def box_of(parameter: Tensor) -> Box:
    """Return the block of the global parameter that the local shard is."""
    if not isinstance(parameter, DTensor):
        return Box.whole(parameter.shape)
    shape, start = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return Box(start, shape)


def shard_of(tensor: Tensor, parameter: Tensor) -> Tensor:
    """Return this rank's shard of a full tensor, sharded like `parameter`."""
    return box_of(parameter).of(tensor) if isinstance(parameter, DTensor) else tensor


def as_dtensor(local: Tensor, parameter: Tensor) -> Tensor:
    """Return a local shard as a DTensor, sharded like `parameter`."""
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False,
        shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank; all ranks call this at the same time."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()
