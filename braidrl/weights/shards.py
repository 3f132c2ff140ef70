"""A rank's part of each tensor: a plain tensor, a DTensor's local shard, or a weight with an adapter; and the memory
below it.
"""

import ctypes
import mmap
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

import torch
from torch import Tensor, UntypedStorage, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from braidrl.weights.boxes import Box, Slices
from braidrl.weights.publisher import check_shapes

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
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather the full tensor on every rank; all ranks call this at the same time."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def by_tensor(named: Mapping[str, NamedTensor]) -> list[tuple[list[str], NamedTensor]]:
    """Group the names of tied tensors: each tensor once, with all of its names."""
    tensors: dict[int, tuple[list[str], NamedTensor]] = {}
    for name, tensor in named.items():
        tensors.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(tensors.values())


def storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return the tensors' storages on this rank, each once."""
    return list({(s := local_shard(tensor).untyped_storage())._cdata: s for tensor in tensors}.values())


def empty(storage: UntypedStorage) -> None:
    """Free a storage's memory; on a CPU, its full pages."""
    if storage.is_cuda:
        storage.resize_(0)
        return
    # Torch refuses to resize a storage that numpy has accessed, as after any checkpoint. Freed pages of a mapped file
    # show the file's content again.
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


class AdaptedTensor(Protocol):
    """A weight with a low-rank adapter that is merged on demand."""

    shape: torch.Size
    """The global shape."""
    dtype: torch.dtype
    device: torch.device
    box: Box
    """The block of the global weight on this rank."""
    is_sharded: bool
    """True if the adapter is sharded: all of its ranks must merge it at the same time."""

    def merged_part(self, box: Box | None = None) -> Tensor:
        """Return a block of this rank's shard, by default all of it, with its adapter merged."""


class AdaptedBlock:
    """The block `held` of a weight with an adapter, as the block `box` of another tensor of a global `shape`."""

    def __init__(self, weight: AdaptedTensor, held: Box, shape: torch.Size, box: Box) -> None:
        self.weight, self.held, self.shape, self.box = weight, held, shape, box
        self.dtype, self.device, self.is_sharded = weight.dtype, weight.device, weight.is_sharded

    def merged_part(self, box: Box | None = None) -> Tensor:
        """Return the block, or a block of it, with its adapter merged."""
        merged = self.weight.merged_part(self.held).view(self.box.sizes)
        return merged if box is None else box.of(merged, self.box)


@dataclass(frozen=True)
class WeightPart:
    """This rank's local part of a tensor, with all of its names (tied tensors have several) and its adapter, if any."""

    names: list[str]
    tensor: Tensor | AdaptedTensor
    sliced: tuple[torch.Size, Box] | None = None
    """The global shape, and the block that a plain (non-DTensor) tensor holds; None for the full tensor."""
    decay: float = 0.0
    """The weight of the old values when a block is written (EMA decay)."""
    other_parts: tuple["WeightPart", ...] = ()
    """Further blocks of the tensor on this rank, such as a copy of another rank's."""

    @cached_property
    def box(self) -> Box:
        """The local block of the global tensor."""
        if self.sliced is not None:
            return self.sliced[1]
        return box_of(self.tensor) if isinstance(self.tensor, Tensor) else self.tensor.box

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.tensor.shape if self.sliced is None else self.sliced[0]

    @property
    def local(self) -> Tensor:
        """The local shard of a part without an adapter."""
        assert isinstance(self.tensor, Tensor)
        return local_shard(self.tensor)

    @property
    def is_merged_together(self) -> bool:
        """Return True if `merged` merges a sharded adapter, so that all its ranks must call it at the same time."""
        return not isinstance(self.tensor, Tensor) and self.tensor.is_sharded

    @property
    def boxes(self) -> list[Box]:
        """All blocks of the global tensor on this rank."""
        return [self.box, *(other.box for other in self.other_parts)]

    def block(self, box: Box) -> Tensor:
        """Return a block of the global tensor as a view of this part, which contains it."""
        part = next((part for part in (self, *self.other_parts) if part.box.contains(box)), self)
        return box.of(part.local, part.box)

    def renamed(self, name: str, held: Box, shape: torch.Size, box: Box) -> "WeightPart":
        """Return a block of this part as the block `box` of another tensor of a `shape`."""
        if isinstance(self.tensor, Tensor):
            return WeightPart([name], self.block(held).view(box.sizes), (shape, box))
        return WeightPart([name], AdaptedBlock(self.tensor, held, shape, box))

    def merged(self) -> "WeightPart":
        """Return this part as a plain tensor with its adapter merged; ranks that shard it call this together."""
        local = local_shard(self.tensor) if isinstance(self.tensor, Tensor) else self.tensor.merged_part()
        return WeightPart(self.names, local, (self.shape, self.box), other_parts=self.other_parts)

    @torch.no_grad()
    def put(self, block: Tensor, box: Box) -> None:
        """Write a block of the global tensor into this part, which has no adapter."""
        local_block = self.block(box)
        if self.decay:
            local_block.lerp_(block.to(local_block), 1.0 - self.decay)
        elif local_block.data_ptr() != block.data_ptr():
            local_block.copy_(block)

    def put_blocks(self, full: Tensor) -> None:
        """Write all blocks of this part from the full tensor."""
        for part in (self, *self.other_parts):
            part.put(part.box.of(full), part.box)


Parts = Callable[[], Mapping[str, WeightPart]]
"""Returns a rank's parts as they are now."""


def weight_parts(
    model: nn.Module | Mapping[str, Tensor | AdaptedTensor], slices: Slices | None = None
) -> dict[str, WeightPart]:
    """Return this rank's parts of a module, or of tensors by all of their names; `slices` describe a model of sharded
    plain tensors.
    """
    named = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    parts = {}
    for names, tensor in by_tensor(named):
        sliced = None if slices is None else (slices.shapes[names[0]], slices.boxes[names[0]])
        parts[names[0]] = WeightPart(names, tensor, sliced)
    return parts


def full_parts(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, WeightPart]:
    """Return full tensors as parts; names that share memory are one tied tensor."""
    parts_by_storage: dict[tuple[int, torch.Size], WeightPart] = {}
    for name, tensor in tensors:
        part = parts_by_storage.setdefault((tensor.data_ptr(), tensor.shape), WeightPart([], tensor.detach()))
        part.names.append(name)
    return {part.names[0]: part for part in parts_by_storage.values()}


def check_parts(shapes: Mapping[str, torch.Size], parts: Mapping[str, WeightPart]) -> None:
    """Raise ValueError if the shapes do not match a rank's parts; a pipeline rank holds only some of the tensors."""
    expected = {alias: part.shape for part in parts.values() for alias in part.names}
    check_shapes({name: shape for name, shape in shapes.items() if name in expected}, expected)


def snapshot(parts: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
    """Return copies of parts on their devices, with adapters merged; ranks of a sharded model call this together."""
    return {name: replace(merged := part.merged(), tensor=merged.local.clone()) for name, part in parts.items()}
