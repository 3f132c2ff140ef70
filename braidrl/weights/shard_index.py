"""The shard index: the block of each tensor on each rank. Tensors whose names differ only in numbers share one entry.

model.layers.0.mlp.up_proj.weight ╮
model.layers.1.mlp.up_proj.weight ┼─▶ model.layers.*.mlp.up_proj.weight, numbers 0 1 2 ..., shape, type, block      one line for each rank
model.layers.2.mlp.up_proj.weight ╯
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from braidrl.cluster.process_groups import all_gather_bytes
from braidrl.cluster.world import Ranks
from braidrl.data.messages import pack_message, unpack_message
from braidrl.weights.boxes import Box, Slices
from braidrl.weights.publisher import check_shapes
from braidrl.weights.reshard_plan import TensorGroup
from braidrl.weights.shards import box_of, by_tensor, local_shard

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


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

    def merged_part(self) -> Tensor:
        """Return this rank's block with its adapter merged."""


@dataclass(frozen=True)
class WeightPart:
    """This rank's local part of a tensor, with all of its names (tied tensors have several) and its adapter, if any."""

    names: list[str]
    tensor: Tensor | AdaptedTensor
    slices: Slices | None = None
    """The slice of the global tensor that a plain (non-DTensor) tensor holds."""
    kept: float = 0.0
    """The weight of the old values when a block is put (EMA decay)."""

    @cached_property
    def box(self) -> Box:
        """The local block of the global tensor."""
        if self.slices is not None:
            return self.slices.boxes[self.names[0]]
        return box_of(self.tensor) if isinstance(self.tensor, Tensor) else self.tensor.box

    @property
    def device(self) -> torch.device:
        return self.tensor.device

    @property
    def shape(self) -> torch.Size:
        """The global shape."""
        return self.tensor.shape if self.slices is None else self.slices.shapes[self.names[0]]

    @property
    def local(self) -> Tensor:
        """The local shard of a part without an adapter."""
        assert isinstance(self.tensor, Tensor)
        return local_shard(self.tensor)

    @property
    def is_merged_together(self) -> bool:
        """Return whether `values` merges a sharded adapter, so that all its ranks must call it at the same time."""
        return not isinstance(self.tensor, Tensor) and self.tensor.is_sharded

    def block(self, box: Box) -> Tensor:
        """Return a block of the global tensor as a view of this part, which contains it."""
        return self.local[box.within(self.box)]

    def values(self) -> Tensor:
        """Return the local values with adapters merged; all ranks of a sharded tensor call this at the same time."""
        return local_shard(self.tensor) if isinstance(self.tensor, Tensor) else self.tensor.merged_part()

    @torch.no_grad()
    def put(self, block: Tensor, box: Box) -> None:
        """Write a block of the global tensor into this part, which has no adapter."""
        own = self.block(box)
        if self.kept:
            own.lerp_(block.to(own), 1.0 - self.kept)
        elif own.data_ptr() != block.data_ptr():
            own.copy_(block)


Parts = Callable[[], Mapping[str, WeightPart]]
"""Returns a rank's parts as they are now."""


def weight_parts(
    model: nn.Module | Mapping[str, Tensor | AdaptedTensor], slices: Slices | None = None
) -> dict[str, WeightPart]:
    """Return this rank's parts of a model by each tensor's first name.

    Args:
        model: A module, or its tensors by name, a tied one under each of its names.
        slices: The shapes and blocks of a sharded model of plain tensors.
    """
    named = model.state_dict(keep_vars=True) if isinstance(model, nn.Module) else model
    return {names[0]: WeightPart(names, tensor, slices) for names, tensor in by_tensor(named)}


def full_parts(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, WeightPart]:
    """Return full tensors as parts; names that share memory are one tied tensor."""
    found: dict[tuple[int, torch.Size], WeightPart] = {}
    for name, tensor in tensors:
        part = found.setdefault((tensor.data_ptr(), tensor.shape), WeightPart([], tensor.detach()))
        part.names.append(name)
    return {part.names[0]: part for part in found.values()}


def check_parts(given: Mapping[str, torch.Size], parts: Mapping[str, WeightPart]) -> None:
    """Raise ValueError if the shapes do not match a rank's parts; a pipeline rank holds only some of the tensors."""
    expected = {alias: part.shape for part in parts.values() for alias in part.names}
    check_shapes({name: shape for name, shape in given.items() if name in expected}, expected)


def snapshot(parts: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
    """Return copies of parts on their devices, with adapters merged; all ranks of a sharded model call this at the same time."""
    return {
        name: WeightPart(part.names, part.values().clone(), Slices({name: part.shape}, {name: part.box}))
        for name, part in parts.items()
    }


class Tensors(NamedTuple):
    """One rank's blocks of tensors whose names differ only in numbers; `numbers` lists those of each tensor as text."""

    names: tuple[str, ...]
    numbers: str
    shape: tuple[int, ...]
    dtype: str
    box: Box


@dataclass(frozen=True)
class ShardIndex:
    """The blocks of each rank, and the ranks' machines; ranks with equal values share memory."""

    ranks: Sequence[Sequence[Tensors]]
    machines: Sequence[str]

    @cached_property
    def tensors(self) -> dict[str, Tensors]:
        """The tensors by name, layer by layer, in an order that is equal on all ranks."""
        kinds = {(said.names[0], said.numbers): said for rank in self.ranks for said in rank}
        order = {
            named(said.names[0], numbers): (tuple(map(int, numbers)), place, said)
            for place, said in enumerate(kinds.values())
            for numbers in numbers_in(said.numbers)
        }
        return {name: said for name, (*_, said) in sorted(order.items(), key=lambda one: one[1][:2])}

    @cached_property
    def names(self) -> dict[str, list[str]]:
        """All names of each tensor, with ties collected over all ranks."""
        found: dict[str, dict[str, None]] = {}
        for patterns, text in dict.fromkeys((said.names, said.numbers) for rank in self.ranks for said in rank):
            for numbers in numbers_in(text):
                every = [named(pattern, numbers) for pattern in patterns]
                found.setdefault(every[0], {}).update(dict.fromkeys(every))
        return {name: list(every) for name, every in found.items()}

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: said.shape for name, said in self.tensors.items()}

    @cached_property
    def dtypes(self) -> dict[str, torch.dtype]:
        return {name: getattr(torch, said.dtype) for name, said in self.tensors.items()}

    @cached_property
    def by_pattern(self) -> dict[tuple[str, tuple[int, ...]], dict[str, list[tuple[int, Box]]]]:
        """(Rank, block) pairs by (pattern, shape), then by numbers."""
        found: dict[tuple[str, tuple[int, ...]], dict[str, list[tuple[int, Box]]]] = {}
        for rank, own in enumerate(self.ranks):
            for said in own:
                found.setdefault((said.names[0], said.shape), {}).setdefault(said.numbers, []).append((rank, said.box))
        return found

    def groups(self, wanted: "ShardIndex | None" = None) -> list[TensorGroup]:
        """Return the tensors in groups that are sharded alike, in this index and in `wanted`.

        Raises:
            ValueError: A wanted tensor is on no rank in this shape.
        """
        place_of = {name: place for place, name in enumerate(self.tensors)}
        held, targets = self.by_pattern, wanted.by_pattern if wanted else {}
        found = []
        for pattern, shape in {**held, **targets}:
            here, there = held.get((pattern, shape), {}), targets.get((pattern, shape), {})
            # Tensors are sharded alike if the same entries list their numbers.
            listed_in: dict[tuple[str, ...], list[str]] = {}
            for text in dict.fromkeys([*here, *there]):
                for numbers in numbers_in(text):
                    listed_in.setdefault(numbers, []).append(text)
            alike: dict[frozenset[str], list[str]] = {}
            for numbers, texts in listed_in.items():
                alike.setdefault(frozenset(texts), []).append(named(pattern, numbers))
            for some, names in alike.items():
                if names[0] not in place_of or not here:
                    raise ValueError(f"no rank has {names[0]} of shape {shape}")
                item_bytes = self.dtypes[names[0]].itemsize
                blocks = ([block for text in some for block in of_text.get(text, ())] for of_text in (here, there))
                found.append(TensorGroup([place_of[n] for n in names], names[0], shape, item_bytes, *blocks))
        return found


def numbers_in(text: str) -> list[tuple[str, ...]]:
    """Return the numbers of each tensor of an entry; one empty tuple for a name without numbers."""
    return [tuple(one.split(".")) if one else () for one in text.split(" ")]


def named(pattern: str, numbers: Iterable[str]) -> str:
    """Return a pattern with numbers in place of its asterisks."""
    parts = pattern.split("*")
    return "".join(part for pair in zip(parts, (*numbers, ""), strict=True) for part in pair)


def gather_shard_index(parts: Mapping[str, WeightPart], ranks: Ranks, machine: str = "") -> ShardIndex:
    """Gather the shard index of all ranks; each passes its own parts at the same time."""
    message = bytearray(pack_message((machine, described(parts))))
    of_all: list[Any] = [message]
    if ranks.group is not None:
        with ranks.meeting("shard index of the weights"):
            of_all = all_gather_bytes(message, ranks.group)
    return read_index([bytes(one) for one in of_all])


def read_index(messages: Sequence[bytes]) -> ShardIndex:
    """Parse the messages of all ranks; replicas send equal ones, which are parsed once."""
    read = {message: unpack_message(message, tuple[str, list[Tensors]]) for message in dict.fromkeys(messages)}
    return ShardIndex([read[message][1] for message in messages], [read[message][0] for message in messages])


def described(parts: Mapping[str, WeightPart]) -> list[Tensors]:
    """Describe parts (see `describe`)."""
    return describe((p.names, p.shape, str(p.tensor.dtype).removeprefix("torch."), p.box) for p in parts.values())


def describe(blocks: Iterable[tuple[Sequence[str], Sequence[int], str, Box]]) -> list[Tensors]:
    """Describe names, global shapes, dtypes and blocks; tensors that differ only in numbers are one entry."""
    found: dict[tuple[tuple[str, ...], tuple[int, ...], str, Box], list[str]] = {}
    for names, shape, dtype, box in blocks:
        patterns = tuple(NUMBER.sub("*", name) for name in names)
        numbers = {".".join(NUMBER.findall(name)) for name in names}
        if len(numbers) > 1:
            patterns, numbers = tuple(names), {""}
        found.setdefault((patterns, tuple(shape), dtype, box), []).append(numbers.pop())
    return [
        Tensors(patterns, " ".join(numbers), shape, dtype, box)
        for (patterns, shape, dtype, box), numbers in found.items()
    ]
