"""The reshard plan: which blocks each rank sends to and receives from each other rank, to go from one layout to
another, in rounds.

has        rank 0: upper half   rank 1: lower half         wants    rank 0: left half    rank 1: left half
                                                                    ─────────────────────────────────────
moves      upper left:  0 ─▶ 0 (stays)   0 ─▶ 1      lower left:  1 ─▶ 0    1 ─▶ 1 (stays)

node A ─ holder ─once─▶ relay
    ─▶ other ranks of node B that want the same cell  relays take turns, cell by cell and tensor by tensor

Each rank plans its own moves alone, once per group of tensors that are sharded alike, such as one matrix of all layers.
The boxes that ranks hold and want cut a tensor into cells. A rank copies the cells that it holds locally; the holders
of a cell send it round-robin. Pure functions of the two layouts, which the shard index describes: per rank a line for
all tensors with the same block.
"""

import re
import zlib
from bisect import bisect_left
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from braidrl.cluster.peers import Peers
from braidrl.cluster.world import Ranks
from braidrl.data.messages import pack_message, unpack_message
from braidrl.weights.boxes import Box
from braidrl.weights.shards import WeightPart

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
"""A number in a tensor's name, such as that of its layer."""
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Blocks = Sequence[tuple[int, Box]]
"""(Rank, block) pairs; a rank may appear several times."""


class Tensors(NamedTuple):
    """Tensors that one rank holds with the same block.

    `names` is compressed text: a line for each tensor, with all names of a tied tensor.
    """

    names: bytes
    shape: tuple[int, ...]
    dtype: str
    box: Box


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape and dtype that are sharded alike: a rank holds, and wants, the same block of all."""

    tensors: Sequence[int]
    """Their indices in the order of all tensors."""
    name: str
    """The name of one tensor, for messages."""
    shape: tuple[int, ...]
    item_bytes: int
    held: Blocks
    wanted: Blocks = ()


@dataclass(frozen=True)
class ShardIndex:
    """The blocks of each rank, and the ranks' machines; ranks with equal values share memory."""

    ranks: Sequence[Sequence[Tensors]]
    machines: Sequence[str]
    order: Sequence[str] = ()
    """The tensor names without layer numbers, in the model's order."""

    @cached_property
    def tensors(self) -> dict[str, WeightPart]:
        """The full tensors by name, on the meta device with all of their names: layer by layer, in the model's order,
        on every rank.
        """
        parts: dict[str, WeightPart] = {}
        every = dict.fromkeys((entry.names, entry.shape, entry.dtype) for entries in self.ranks for entry in entries)
        for text, shape, dtype in every:
            for first, *others in names_in(text):
                if first not in parts:
                    parts[first] = WeightPart([first], torch.empty(shape, dtype=getattr(torch, dtype), device="meta"))
                parts[first].names.extend(name for name in others if name not in parts[first].names)
        position_of = {name: position for position, name in enumerate(self.order)}

        def place_of(name: str) -> tuple[list[int], int]:
            return [int(number) for number in NUMBER.findall(name)], position_of.get(NUMBER.sub("", name), 0)

        return {name: parts[name] for name in sorted(parts, key=place_of)}

    def groups(self, receiving: "ShardIndex | None" = None) -> list[TensorGroup]:
        """Return groups of tensors that are sharded alike, here and in `receiving`.

        Raises ValueError if no rank here holds one of them.
        """
        blocks: dict[tuple[tuple[int, ...], bytes], tuple[list[tuple[int, Box]], list[tuple[int, Box]]]] = {}
        for side, index in enumerate((self, receiving)):
            for rank, entries in enumerate(index.ranks if index else ()):
                for entry in entries:
                    blocks.setdefault((entry.shape, entry.names), ([], []))[side].append((rank, entry.box))
        # Tensors of one shape are sharded alike if the same entries list them.
        listed_in: dict[tuple[str, tuple[int, ...]], list[bytes]] = {}
        for shape, text in blocks:
            for names in names_in(text):
                listed_in.setdefault((names[0], shape), []).append(text)
        alike: dict[tuple[tuple[int, ...], tuple[bytes, ...]], list[str]] = {}
        for (name, shape), lines in listed_in.items():
            alike.setdefault((shape, tuple(lines)), []).append(name)
        place_of, groups = {name: position for position, name in enumerate(self.tensors)}, []
        for (shape, texts), names in alike.items():
            held, targets = ([block for text in texts for block in blocks[shape, text][side]] for side in (0, 1))
            if not held:
                raise ValueError(f"no rank has {names[0]} of shape {shape}")
            item_bytes = self.tensors[names[0]].tensor.dtype.itemsize
            groups.append(TensorGroup([place_of[name] for name in names], names[0], shape, item_bytes, held, targets))
        return groups


def describe(blocks: Iterable[tuple[Sequence[str], Sequence[int], str, Box]]) -> list[Tensors]:
    """Describe names, global shapes, dtypes and blocks; tensors that differ only in their names are one entry."""
    by_shape: dict[tuple[tuple[int, ...], str, Box], list[str]] = {}
    for names, shape, dtype, box in blocks:
        by_shape.setdefault((tuple(shape), dtype, box), []).append("\t".join(names))
    return [Tensors(zlib.compress("\n".join(lines).encode()), *about) for about, lines in by_shape.items()]


def names_in(text: bytes) -> list[list[str]]:
    """Expand an entry into the names of each of its tensors."""
    return [line.split("\t") for line in zlib.decompress(text).decode().split("\n")]


def gather_shard_index(parts: Mapping[str, WeightPart], ranks: Ranks, machine: str = "") -> ShardIndex:
    """All-gather the shard index; each rank passes its parts at the same time."""
    order = list(dict.fromkeys(NUMBER.sub("", name) for name in parts))
    dtypes = {name: str(part.tensor.dtype).removeprefix("torch.") for name, part in parts.items()}
    about = ((p.names, p.shape, dtypes[name], box) for name, p in parts.items() for box in p.boxes)
    message = bytearray(pack_message((machine, order, describe(about))))
    of_all: list[Any] = [message]
    if ranks.group is not None:
        with ranks.meeting("shard index of the weights"):
            of_all = Peers(ranks.group).all_gather(message, 0)
    # Replicas send equal messages, which are parsed once.
    messages = [bytes(content) for content in of_all]
    read = {
        content: unpack_message(content, tuple[str, list[str], list[Tensors]]) for content in dict.fromkeys(messages)
    }
    machines, orders, tensors = zip(*(read[content] for content in messages), strict=True)
    return ShardIndex(tensors, machines, list(dict.fromkeys(name for order in orders for name in order)))


class MovedBlock(NamedTuple):
    """A block of some tensors that moves to or from a peer, and that the receiver forwards to the ranks `onward`."""

    tensors: Ints
    peer: int
    box: Box
    cell: int
    onward: tuple[int, ...] = ()


class Piece(NamedTuple):
    """The part of a move within one round."""

    peer: int
    tensor: int
    box: Box
    onward: tuple[int, ...]


class Moves:
    """One rank's moves in one direction: blocks of tensors, sorted by stream, tensor and cell, which both ends can
    derive.

    A stream has one peer and one set of ranks to which it is forwarded. Each round has an equal part of each stream.
    """

    def __init__(self, blocks: Sequence[MovedBlock], item_bytes: int) -> None:
        """Sort the moves of tensors with elements of `item_bytes`."""
        self.blocks, self.item_bytes = blocks, item_bytes
        number_of = {ranks: number for number, ranks in enumerate(sorted({block.onward for block in blocks}))}
        about = [(b.peer, number_of[b.onward], b.cell, number, b.box.elements) for number, b in enumerate(blocks)]
        counts = [len(block.tensors) for block in blocks]
        columns = np.repeat(np.array(about, dtype=np.int64).reshape(-1, 5), counts, axis=0)
        tensors = np.concatenate([np.empty(0, dtype=np.int64), *(block.tensors for block in blocks)])
        order = np.lexsort((columns[:, 2], tensors, columns[:, 1], columns[:, 0]))
        peers, after, _, self.block_of, self.elements = columns[order].T
        self.tensors = tensors[order]
        begins = np.unique(peers * (len(number_of) + 1) + after, return_index=True)[1]
        self.streams = np.append(begins, len(order))
        """The first move of each stream, and the end of the last."""
        before = np.append(0, np.cumsum(self.elements))
        self.totals = np.diff(before[self.streams])
        """The elements of each stream."""
        self.starts = before[:-1] - np.repeat(before[begins], np.diff(self.streams))
        """Where in its stream each move starts, in elements."""

    @property
    def total(self) -> int:
        """The bytes of all moves."""
        return int(self.elements.sum()) * self.item_bytes

    def first_and_last(self, rounds: int, tensors: int) -> tuple[Ints, Ints]:
        """Return the first and the last of `rounds` that needs each of the `tensors`; `rounds` and -1 if none does."""
        first, last = np.full(tensors, rounds, dtype=np.int64), np.full(tensors, -1, dtype=np.int64)
        totals = np.repeat(self.totals, np.diff(self.streams))
        # The round of element e of a stream of T is the last n with T * n // rounds <= e.
        np.minimum.at(first, self.tensors, ((self.starts + 1) * rounds - 1) // totals)
        np.maximum.at(last, self.tensors, ((self.starts + self.elements) * rounds - 1) // totals)
        return first, last

    def pieces(self, number: int, rounds: int) -> Iterator[Piece]:
        """Yield the pieces of a round, by peer and in an order that both ends derive."""
        for (begin, end), total in zip(pairwise(self.streams.tolist()), self.totals.tolist(), strict=True):
            start, stop = total * number // rounds, total * (number + 1) // rounds
            starts = self.starts[begin:end]
            first = begin + max(0, int(np.searchsorted(starts, start, "right")) - 1)
            for move in range(first, begin + int(np.searchsorted(starts, stop))):
                block, tensor, at = self.blocks[self.block_of[move]], int(self.tensors[move]), int(self.starts[move])
                for part in block.box.span(max(0, start - at), min(block.box.elements, stop - at)):
                    yield Piece(block.peer, tensor, part, block.onward)


@dataclass(frozen=True)
class RankPlan:
    """One rank's plan: blocks to copy locally, by tensor, and moves to and from other ranks."""

    stays: dict[int, list[Box]]
    sends: Moves
    receives: Moves
    relayed: dict[int, Moves]
    """By relay, its incoming moves that it forwards to this rank."""

    def passed(self, number: int, rounds: int) -> Iterator[Piece]:
        """Yield the pieces that relays forward to this rank in a round."""
        for relay, moves in sorted(self.relayed.items()):
            yield from (piece._replace(peer=relay, onward=()) for piece in moves.pieces(number, rounds))

    def rounds_needed(self, limit_bytes: int) -> int:
        """Return the number of rounds that keeps each direction of a rank within `limit_bytes`. Raises ValueError below
        one element per stream.
        """
        needed, item = 0, self.sends.item_bytes
        relayed = [*self.relayed.values()]
        for every, passes_on in (([self.sends], 0), ([self.receives], 0), ([self.receives], 1), (relayed, 0)):
            total = streams = 0
            for moves in every:
                times = np.array([len(block.onward) if passes_on else 1 for block in moves.blocks], dtype=np.int64)
                times = times[moves.block_of]
                total += item * int((moves.elements * times).sum())
                streams += int(times[moves.streams[:-1]].sum())
            # Rounds end at whole elements: each stream may need one extra element in a round.
            room = limit_bytes - streams * item
            if total and room <= 0:
                raise ValueError(f"{limit_bytes} bytes are too few for a round with {streams} streams")
            needed = max(needed, -(-total // room) if total else 0)
        return needed


def plan_moves(
    groups: Sequence[TensorGroup], rank: int, ranks: int, machines: Sequence[Hashable] | None = None
) -> RankPlan:
    """Plan one rank's moves so that each rank receives each requested element exactly once.

    An element crosses once to a machine whose ranks want it and do not hold it: to its relay, which forwards it to the
    other ranks there. The tensors of all `groups` have elements of one size. Raises ValueError if a wanted element is
    on no rank.
    """
    stays, relayed = dict[int, list[Box]](), dict[int, list[MovedBlock]]()
    sends, receives = list[MovedBlock](), list[MovedBlock]()
    for number, group in enumerate(groups):
        held, requested = ([box for owner, box in boxes if owner == rank] for boxes in (group.held, group.wanted))
        if kept := [piece for box in held for wanted_box in requested if (piece := box.overlap(wanted_box))]:
            stays |= dict.fromkeys(group.tensors, kept)
        for giver, target, block in Cells(group, machines or [None] * ranks).moves_of(rank, number):
            to = receives if target == rank else sends if giver == rank else relayed.setdefault(target, [])
            to.append(block)
    item = groups[0].item_bytes if groups else 1
    passed = {relay: Moves(boxes, item) for relay, boxes in relayed.items()}
    return RankPlan(stays, Moves(sends, item), Moves(receives, item), passed)


class Cells:
    """The cells of a tensor group, cut by the edges of all blocks.

    `holds` marks the ranks that hold a cell, `needs` those that want it and do not hold it: (cells, slots), with a slot
    per rank, in the order of machines.
    """

    def __init__(self, group: TensorGroup, machines: Sequence[Hashable]) -> None:
        """Cut the tensor. Raises ValueError if a wanted cell is on no rank."""
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        machine_of = np.array([numbers[machine] for machine in machines], dtype=np.int64)
        self.ranks = np.argsort(machine_of, kind="stable")
        """The rank at each place."""
        self.firsts = np.searchsorted(machine_of[self.ranks], np.arange(len(numbers) + 1))
        """The first place of each machine, and the end of the last."""
        self.tensors = np.asarray(group.tensors, dtype=np.int64)
        edges = [{0, size} for size in group.shape]
        for box in {box for _, box in (*group.held, *group.wanted) if box.elements}:
            for axis, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                edges[axis] |= {at, at + size}
        self.edges = [sorted(cuts) for cuts in edges]
        self.counts = tuple(len(cuts) - 1 for cuts in self.edges)
        self.holds = self._marked(group.held)
        self.needs = self._marked(group.wanted) & ~self.holds
        missing = self.needs.any(1) & ~self.holds.any(1)
        if missing.any():
            cell = int(missing.argmax())
            lacking = int(self.ranks[self.needs[cell].argmax()])
            raise ValueError(f"no rank has {group.name} at {self.box(cell).offsets}, which rank {lacking} wants")

    def _marked(self, blocks: Iterable[tuple[int, Box]]) -> Bools:
        marks, place_of = np.zeros((*self.counts, len(self.ranks)), dtype=np.bool_), np.argsort(self.ranks)
        by_box: dict[Box, list[int]] = {}
        for rank, box in blocks:
            by_box.setdefault(box, []).append(rank)
        for box, ranks in by_box.items():
            if box.elements:
                inside = tuple(
                    slice(bisect_left(edges, at), bisect_left(edges, at + size))
                    for edges, at, size in zip(self.edges, box.offsets, box.sizes, strict=True)
                )
                marks[inside][..., place_of[ranks]] = True
        return marks.reshape(-1, marks.shape[-1])

    def box(self, cell: int) -> Box:
        """Return the block of a cell."""
        at = np.unravel_index(cell, self.counts) if self.counts else ()
        ends = [edges[i : i + 2] for edges, i in zip(self.edges, at, strict=True)]
        return Box(tuple(start for start, _ in ends), tuple(end - start for start, end in ends))

    def moves_of(self, rank: int, number: int) -> Iterator[tuple[int, int, MovedBlock]]:
        """Yield sender, receiver and block of the moves from a rank, to it, and to relays that forward a cell to it.

        Holders of a cell on the receiver's machine send it round-robin. If there are none, all holders send it, to one
        rank of each machine in turn. Each tensor continues the rotation of the last; `number` of the group offsets it.
        """
        row, tensors = int(np.flatnonzero(self.ranks == rank)[0]), np.arange(len(self.tensors))
        here = int(np.searchsorted(self.firsts, row, "right")) - 1
        cells = np.flatnonzero(self.holds[:, row] | self.needs[:, row])
        near, needy = (
            np.logical_or.reduceat(marks[cells], self.firsts[:-1], axis=1) for marks in (self.holds, self.needs)
        )
        for cell, is_near, is_needy in zip(cells.tolist(), near, needy, strict=True):
            gives, far, box = self.holds[cell, row], np.flatnonzero(is_needy & ~is_near), self.box(cell)
            for machine in np.flatnonzero(is_needy) if gives else [here]:
                begin, end = self.firsts[machine : machine + 2]
                needing = begin + np.flatnonzero(self.needs[cell, begin:end])
                is_far = not is_near[machine]
                holders = np.flatnonzero(self.holds[cell] if is_far else self.holds[cell, begin:end])
                if is_far:
                    givers = holders[(np.searchsorted(far, machine) + number + tensors * len(far)) % len(holders)]
                for turn, target in enumerate(needing.tolist()):
                    if is_far:
                        # The machine's ranks take turns to receive a tensor and forward it to the others.
                        chosen = (cell + number + tensors) % len(needing) == turn
                        onward = tuple(self.ranks[needing[needing != target]].tolist())
                    elif gives or target == row:
                        givers = begin + holders[(turn + number + tensors * len(needing)) % len(holders)]
                        chosen, onward = np.ones(len(tensors), dtype=np.bool_), ()
                    else:
                        continue
                    if gives:
                        chosen &= givers == row
                    for giver in sorted(set(givers[chosen].tolist())):
                        peer, moved = target if gives else giver, self.tensors[chosen & (givers == giver)]
                        block = MovedBlock(moved, int(self.ranks[peer]), box, cell, onward)
                        yield int(self.ranks[giver]), int(self.ranks[target]), block


def shared_blocks(group: TensorGroup, ranks: Sequence[int]) -> list[tuple[int, Box]]:
    """Divide each block of a group's tensors equally among the `ranks` that hold it, or among all if none does.

    The ranks then write one file.
    """
    place_of = {rank: position for position, rank in enumerate(ranks)}
    held = [(place_of[rank], box) for rank, box in group.held if rank in place_of]
    cells = Cells(replace(group, held=held, wanted=()), [None] * len(ranks))
    blocks = []
    for cell, holds in enumerate(cells.holds):
        writers = np.flatnonzero(holds).tolist() or range(len(ranks))
        parts = cells.box(cell).divided(len(writers))
        blocks += [(ranks[writer], part) for writer, part in zip(writers, parts, strict=False)]
    return blocks
