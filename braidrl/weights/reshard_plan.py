"""The reshard plan: which blocks each rank sends to and receives from each other rank, to go from one layout to another.

has        rank 0: upper half   rank 1: lower half         wants    rank 0: left half    rank 1: left half
                                                                    ─────────────────────────────────────
moves      upper left:  0 ─▶ 0 (stays)   0 ─▶ 1      lower left:  1 ─▶ 0    1 ─▶ 1 (stays)

node A ─ holder ──once──▶ relay ──▶ other ranks of node B that want the same cell      relays take turns, cell by cell and tensor by tensor

Each rank plans its own moves alone, once per group of tensors that are sharded alike, such as one matrix of all layers. The boxes
that ranks hold and want cut a tensor into cells. A rank copies the cells that it holds locally; the holders of a cell send it
round-robin. Pure functions of the two layouts, which the shard index describes, one line per rank and kind of tensor:

model.layers.0.mlp.up_proj.weight ╮
model.layers.1.mlp.up_proj.weight ┴─▶ model.layers.*.mlp.up_proj.weight, numbers 0 1 ..., shape, type, block
"""

import re
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from braidrl.cluster.process_groups import all_gather_bytes
from braidrl.cluster.world import Ranks
from braidrl.data.messages import pack_message, unpack_message
from braidrl.weights.boxes import Box
from braidrl.weights.shards import WeightPart

NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Blocks = Sequence[tuple[int, Box]]
"""(Rank, block) pairs; a rank may appear several times."""


class Tensors(NamedTuple):
    """One rank's blocks of tensors whose names differ only in numbers; `numbers` lists those of each tensor as text."""

    names: tuple[str, ...]
    numbers: str
    shape: tuple[int, ...]
    dtype: str
    box: Box


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape and dtype that are sharded alike: each rank holds the same block of all, and wants the same block."""

    tensors: Sequence[int]
    """Their indices in the order of all tensors."""
    name: str
    """The name of one of them, for messages."""
    shape: tuple[int, ...]
    item_bytes: int
    held: Blocks
    wanted: Blocks = ()


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
    about = ((p.names, p.shape, str(p.tensor.dtype).removeprefix("torch."), p.box) for p in parts.values())
    message = bytearray(pack_message((machine, describe(about))))
    of_all: list[Any] = [message]
    if ranks.group is not None:
        with ranks.meeting("shard index of the weights"):
            of_all = all_gather_bytes(message, ranks.group)
    # Replicas send equal messages, which are parsed once.
    messages = [bytes(one) for one in of_all]
    read = {one: unpack_message(one, tuple[str, list[Tensors]]) for one in dict.fromkeys(messages)}
    return ShardIndex([read[one][1] for one in messages], [read[one][0] for one in messages])


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


class Found(NamedTuple):
    """A block of some tensors that moves, or is passed on, to or from a peer."""

    tensors: Ints
    item_bytes: int
    peer: int
    box: Box
    cell: int
    onward: tuple[int, ...]


@dataclass(frozen=True)
class Moves:
    """One rank's moves in one direction, sorted by stream and then by tensor and cell, which both ends can derive.

    A stream is what goes to, or comes from, one peer and is passed on to the same ranks.
    """

    peers: Ints
    tensors: Ints
    streams: Ints
    boxes: Ints
    """The index of each move's block in `shapes` and `onward`."""
    item_bytes: Ints
    sizes: Ints
    """The bytes of each move."""
    shapes: Sequence[Box]
    onward: Sequence[tuple[int, ...]]
    """The ranks to which the receiver passes the block on."""

    @classmethod
    def of(cls, found: Sequence[Found]) -> "Moves":
        """Sort moves."""
        onward = [one.onward for one in found]
        place = {ranks: number for number, ranks in enumerate(sorted(set(onward)))}
        about = [
            (one.peer, place[one.onward], one.cell, number, one.item_bytes, one.box.elements * one.item_bytes)
            for number, one in enumerate(found)
        ]
        counts = [len(one.tensors) for one in found]
        columns = np.repeat(np.array(about, dtype=np.int64).reshape(-1, 6), counts, axis=0)
        tensors = np.concatenate([np.empty(0, dtype=np.int64), *(one.tensors for one in found)])
        order = np.lexsort((columns[:, 2], tensors, columns[:, 1], columns[:, 0]))
        peers, after, _, boxes, items, sizes = columns[order].T
        streams = peers * (len(place) + 1) + after
        return cls(peers, tensors[order], streams, boxes, items, sizes, [one.box for one in found], onward)

    @property
    def total(self) -> int:
        """The bytes of all moves."""
        return int(self.sizes.sum())

    def of_item(self, item_bytes: int) -> "Moves":
        """Return the moves of tensors of one element size."""
        kept = self.item_bytes == item_bytes
        return Moves(
            self.peers[kept], self.tensors[kept], self.streams[kept], self.boxes[kept], self.item_bytes[kept],
            self.sizes[kept], self.shapes, self.onward,
        )  # fmt: skip


@dataclass(frozen=True)
class RankPlan:
    """One rank's plan: blocks to copy locally, by tensor, and moves to and from other ranks."""

    stays: dict[int, list[Box]]
    sends: Moves
    receives: Moves
    relayed: dict[int, Moves]
    """By relay, the moves to it that it passes on to this rank."""

    def of_item(self, item_bytes: int) -> "RankPlan":
        """Return the moves of tensors of one element size."""
        relayed = {relay: moves.of_item(item_bytes) for relay, moves in self.relayed.items()}
        return RankPlan({}, self.sends.of_item(item_bytes), self.receives.of_item(item_bytes), relayed)


def plan_moves(
    groups: Iterable[TensorGroup], rank: int, ranks: int, machines: Sequence[Hashable] | None = None
) -> RankPlan:
    """Plan one rank's moves, so that each rank receives every element that it wants exactly once.

    An element crosses once to a machine whose ranks want it and do not hold it: to its relay, which passes it on to the others there.

    Args:
        groups: All tensors.
        rank: The rank to plan.
        ranks: The number of ranks.
        machines: Each rank's machine; blocks come from the same machine if possible.

    Raises:
        ValueError: A wanted element is on no rank.
    """
    places = Places.of(machines or [None] * ranks)
    stays: dict[int, list[Box]] = {}
    sends: list[Found] = []
    receives: list[Found] = []
    relayed: dict[int, list[Found]] = {}
    for number, group in enumerate(groups):
        held, wanted = ([box for owner, box in some if owner == rank] for some in (group.held, group.wanted))
        if kept := [piece for box in held for other in wanted if (piece := box.overlap(other))]:
            stays |= dict.fromkeys(group.tensors, kept)
        cells, tensors = Cells(group, places), np.asarray(group.tensors, dtype=np.int64)
        for cell, giver, target, chosen in cells.moves_with(rank, number):
            to = receives if target == rank else sends if giver == rank else relayed.setdefault(target, [])
            peer = target if giver == rank else giver
            to.append(Found(tensors[chosen], group.item_bytes, peer, cells.box(cell), cell, cells.onward(cell, target)))
    return RankPlan(stays, Moves.of(sends), Moves.of(receives), {r: Moves.of(some) for r, some in relayed.items()})


@dataclass(frozen=True)
class Places:
    """Ranks sorted by machine: `ranks[place]`, `place_of[rank]`, each place's machine, and the first place of each machine."""

    ranks: Ints
    place_of: Ints
    machines: Ints
    firsts: Ints

    @classmethod
    def of(cls, machines: Sequence[Hashable]) -> "Places":
        """Number machines by their first rank."""
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        machine_of = np.array([numbers[machine] for machine in machines], dtype=np.int64)
        ranks = np.argsort(machine_of, kind="stable")
        ordered = machine_of[ranks]
        return cls(ranks, np.argsort(ranks), ordered, np.unique(ordered, return_index=True)[1])


class Cells:
    """The cells of a tensor group, cut by the edges of all blocks. Arrays (cells, places) mark ranks, by place.

    `holds` marks the ranks that hold a cell, `needs` those that want it and do not hold it, `far` those whose machine lacks it too.
    """

    def __init__(self, group: TensorGroup, places: Places) -> None:
        """Cut the tensor. Raises ValueError if a wanted cell is on no rank."""
        self.places, self.tensors = places, len(group.tensors)
        edges = [{0, size} for size in group.shape]
        for box in {box for _, box in (*group.held, *group.wanted) if box.elements}:
            for axis, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                edges[axis] |= {at, at + size}
        self.edges = [sorted(some) for some in edges]
        self.counts = tuple(len(some) - 1 for some in self.edges)
        self.holds, wanted = self._marked(group.held), self._marked(group.wanted)
        self.needs = wanted & ~self.holds
        ends = [*places.firsts[1:].tolist(), len(places.ranks)]
        near = np.stack([self.holds[:, a:b].any(1) for a, b in zip(places.firsts.tolist(), ends, strict=True)], axis=1)
        missing = self.needs.any(1) & ~near.any(1)
        if missing.any():
            cell = int(missing.argmax())
            lacking = int(places.ranks[self.needs[cell].argmax()])
            raise ValueError(f"no rank has {group.name} at {self.box(cell).offsets}, which rank {lacking} wants")
        self.far = np.zeros_like(self.needs) if near.all() else self.needs & ~near[:, places.machines]

    def _marked(self, blocks: Iterable[tuple[int, Box]]) -> Bools:
        marks = np.zeros((*self.counts, len(self.places.ranks)), dtype=np.bool_)
        by_box: dict[Box, list[int]] = {}
        for rank, box in blocks:
            by_box.setdefault(box, []).append(rank)
        for box, ranks in by_box.items():
            if box.elements:
                inside = tuple(
                    slice(bisect_left(edges, at), bisect_left(edges, at + size))
                    for edges, at, size in zip(self.edges, box.offsets, box.sizes, strict=True)
                )
                marks[inside][..., self.places.place_of[ranks]] = True
        return marks.reshape(-1, marks.shape[-1])

    def box(self, cell: int) -> Box:
        """Return the block of a cell."""
        at = np.unravel_index(cell, self.counts) if self.counts else ()
        starts = tuple(edges[i] for edges, i in zip(self.edges, at, strict=True))
        sizes = tuple(edges[i + 1] - edges[i] for edges, i in zip(self.edges, at, strict=True))
        return Box(starts, sizes)

    def onward(self, cell: int, rank: int) -> tuple[int, ...]:
        """Return the other ranks of a rank's machine to which it passes a cell on if it receives the cell from another machine."""
        place = self.places.place_of[rank]
        if not self.far[cell, place]:
            return ()
        mates = self.far[cell] & (self.places.machines == self.places.machines[place])
        return tuple(other for other in self.places.ranks[mates].tolist() if other != rank)

    def moves_with(self, rank: int, number: int) -> Iterator[tuple[int, int, int, Bools]]:
        """Yield (cell, giver, receiver, tensors) of the moves from a rank, to it, and to relays that pass the cell on to it.

        Holders of a cell on the receiver's machine give it in turn, otherwise all holders do, to one rank of each machine in turn.
        Each tensor continues the turns of the last; `number` of the group offsets them.
        """
        places, own = self.places, int(self.places.place_of[rank])
        cells = np.nonzero(self.holds[:, own] | self.needs[:, own])[0]
        holds, needs, far = self.holds[cells], self.needs[cells], self.far[cells]
        takes = needs & holds[:, [own]] | far & far[:, [own]] & (places.machines == places.machines[own])
        takes[:, own] = needs[:, own]
        rows, targets = np.nonzero(takes)
        if not len(rows):
            return
        is_far, machine = far[rows, targets], places.machines[targets]
        starts, ends = places.firsts[machine], np.append(places.firsts, len(places.ranks))[machine + 1]
        holders, needing, needing_far = _sums_before(holds), _sums_before(needs), _sums_before(far)
        needing_machines = _sums_before(np.logical_or.reduceat(far, places.firsts, axis=1))
        turns = np.arange(self.tensors)

        first = np.where(is_far, 0, holders[rows, starts])
        choices = np.where(is_far, holders[rows, -1], holders[rows, ends] - first)
        turn = np.where(is_far, needing_machines[rows, machine], needing[rows, targets] - needing[rows, starts])
        served = np.where(is_far, needing_machines[rows, -1], needing[rows, ends] - needing[rows, starts])
        chosen = first[:, None] + (turn[:, None] + number + turns * served[:, None]) % choices[:, None]
        # `nonzero` lists the holders cell by cell.
        counts = holders[:, -1]
        givers = np.nonzero(holds)[1][(np.cumsum(counts) - counts)[rows][:, None] + chosen]

        mates = np.where(is_far, needing_far[rows, ends] - needing_far[rows, starts], 1)
        rank_in_turn = np.where(is_far, needing_far[rows, targets] - needing_far[rows, starts], 0)
        is_direct = (cells[rows][:, None] + number + turns) % mates[:, None] == rank_in_turn[:, None]
        # Of moves to others this rank's own, unless it waits for a relay to pass them on.
        is_direct &= ((targets == own) | far[rows, own])[:, None] | (givers == own)
        for pair in np.nonzero(is_direct.any(1))[0].tolist():
            for giver in set(givers[pair][is_direct[pair]].tolist()):
                of_giver = is_direct[pair] & (givers[pair] == giver)
                yield int(cells[rows[pair]]), int(places.ranks[giver]), int(places.ranks[targets[pair]]), of_giver


def _sums_before(marks: Bools) -> NDArray[np.int32]:
    """Return the exclusive prefix sums of marks, with the total last: (cells, ranks + 1)."""
    sums = np.zeros((marks.shape[0], marks.shape[1] + 1), dtype=np.int32)
    np.cumsum(marks, axis=1, out=sums[:, 1:])
    return sums


def shared_blocks(group: TensorGroup, ranks: Sequence[int]) -> list[tuple[int, Box]]:
    """Divide the elements of a group's tensors among `ranks`, which write one file together.

    A block is divided equally among the ranks that hold it, or among all if none does.
    """
    place_of = {rank: place for place, rank in enumerate(ranks)}
    held = [(place_of[rank], box) for rank, box in group.held if rank in place_of]
    cells = Cells(replace(group, held=held, wanted=()), Places.of([None] * len(ranks)))
    found = []
    for cell, holds in enumerate(cells.holds):
        writers = np.nonzero(holds)[0].tolist() or range(len(ranks))
        parts = cells.box(cell).divided(len(writers))
        found += [(ranks[writer], part) for writer, part in zip(writers, parts, strict=False)]
    return found
