"""Local shards of parameters that may be DTensors, and their storage. A plain tensor is its own only shard."""

import ctypes
import mmap
from collections.abc import Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from braidrl.weights.boxes import Box

NamedTensor = TypeVar("NamedTensor")
"""A rank's local form of a tensor."""


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    """Return the global shape of each parameter by name; tied ones once."""
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def local_shard(tensor: Tensor) -> Tensor:
    """Return the local shard of the global tensor, in the same memory."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def box_of(parameter: Tensor) -> Box:
    """Return the block of the global parameter that the local shard holds."""
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


def by_tensor(named: Mapping[str, NamedTensor]) -> list[tuple[list[str], NamedTensor]]:
    """Group the names of tied tensors: each tensor once, with all of its names."""
    found: dict[int, tuple[list[str], NamedTensor]] = {}
    for name, tensor in named.items():
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the tensors' storages on this rank, each once."""
    found = {(s := local_shard(tensor).untyped_storage())._cdata: s for tensor in tensors}
    return list(found.values())


def empty(storage: UntypedStorage) -> None:
    """Free a storage's memory; on a CPU, its full pages."""
    if storage.is_cuda:
        storage.resize_(0)
        return
    # Torch refuses to resize a storage that numpy has seen, as after any checkpoint. Freed pages of a mapped file show the file again.
    start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        ctypes.memset(start, 0, end - start)
        return
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, end - last)
    madvise = ctypes.CDLL(None).madvise
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), ctypes.c_int(mmap.MADV_DONTNEED))


def occupy(storage: UntypedStorage, size: int) -> None:
    """Reallocate an emptied storage, uninitialised; on a CPU, the first access does this."""
    if storage.is_cuda:
        storage.resize_(size)
