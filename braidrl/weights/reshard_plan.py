"""The reshard plan: which blocks each rank sends to and receives from each other rank, to go from one layout to another.

has        rank 0: upper half   rank 1: lower half         wants    rank 0: left half    rank 1: left half
                                                                    ─────────────────────────────────────
moves      upper left:  0 ─▶ 0 (stays)   0 ─▶ 1      lower left:  1 ─▶ 0    1 ─▶ 1 (stays)

Each rank plans its own moves alone, once per group of tensors that are sharded alike, such as one matrix of all layers. The boxes
that ranks hold cut a tensor into cells. A rank copies the cells that it holds locally; the holders of a cell send it round-robin.
Pure functions of the two layouts.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidrl.weights.boxes import Box

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Blocks = Sequence[tuple[int, Box]]
"""(Rank, block) pairs; a rank may appear several times."""


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
class Moves:
    """One rank's moves in one direction, sorted by peer and then by tensor, which both ends can derive."""

    peers: Ints
    tensors: Ints
    boxes: Ints
    """The index of each move's block in `shapes`."""
    item_bytes: Ints
    shapes: Sequence[Box]
    sizes: Ints
    """The bytes of each move."""

    @property
    def total(self) -> int:
        """The bytes of all moves."""
        return int(self.sizes.sum())

    def of_item(self, item_bytes: int) -> "Moves":
        """Return the moves of tensors of one element size."""
        kept = self.item_bytes == item_bytes
        return replace(
            self, peers=self.peers[kept], tensors=self.tensors[kept], boxes=self.boxes[kept],
            item_bytes=self.item_bytes[kept], sizes=self.sizes[kept],
        )  # fmt: skip


@dataclass(frozen=True)
class RankPlan:
    """One rank's plan: blocks to copy locally, by tensor, and moves to and from other ranks."""

    stays: dict[int, list[Box]]
    sends: Moves
    receives: Moves


class Found:
    """A collector of one rank's moves."""

    def __init__(self) -> None:
        self.shapes: list[Box] = []
        self._tensors: list[Ints] = []
        self._about: list[tuple[int, ...]] = []

    def add(self, tensors: Ints, item_bytes: int, peer: int, box: Box, order: int) -> None:
        """Add the move of one block of each of these tensors; `order` sorts the moves of a tensor."""
        self._tensors.append(tensors)
        self._about.append((peer, order, len(self.shapes), item_bytes, box.elements * item_bytes))
        self.shapes.append(box)

    def moves(self) -> Moves:
        """Return the moves sorted by peer, tensor and cell."""
        about = np.array(self._about, dtype=np.int64).reshape(-1, 5)
        peers, order, boxes, items, sizes = np.repeat(about, [len(some) for some in self._tensors], axis=0).T
        tensors = np.concatenate([np.empty(0, dtype=np.int64), *self._tensors])
        place = np.lexsort((order, tensors, peers))
        return Moves(peers[place], tensors[place], boxes[place], items[place], self.shapes, sizes[place])


def plan_moves(
    groups: Iterable[TensorGroup], rank: int, ranks: int, machines: Sequence[Hashable] | None = None
) -> RankPlan:
    """Plan one rank's moves, so that each rank receives every element that it wants exactly once.

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
    sends, receives = Found(), Found()
    for number, group in enumerate(groups):
        cells = Cells(group, places)
        missing = cells.needs.any(1) & ~cells.holds.any(1)
        if missing.any():
            cell = int(missing.argmax())
            lacking = int(places.ranks[cells.needs[cell].argmax()])
            raise ValueError(f"no rank has {group.name} at {cells.box(cell).offsets}, which rank {lacking} wants")
        own = [box for holder, box in group.wanted if holder == rank]
        place = places.place_of[rank]
        for cell in np.nonzero(cells.wanted[:, place] & cells.holds[:, place])[0].tolist():
            kept = [piece for box in own if (piece := cells.box(cell).overlap(box))]
            for tensor in group.tensors if kept else ():
                stays.setdefault(tensor, []).extend(kept)
        cells.receive(rank, own, number, receives)
        cells.send(rank, number, sends)
    return RankPlan(stays, sends.moves(), receives.moves())


@dataclass(frozen=True)
class Places:
    """Ranks sorted by machine: `ranks[place]`, `place_of[rank]`, and the first and end place of each place's machine."""

    ranks: Ints
    place_of: Ints
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, machines: Sequence[Hashable]) -> "Places":
        """Number machines by their first rank."""
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        machine_of = np.array([numbers[machine] for machine in machines], dtype=np.int64)
        ranks = np.argsort(machine_of, kind="stable")
        ordered = machine_of[ranks]
        return cls(
            ranks, np.argsort(ranks), np.searchsorted(ordered, ordered), np.searchsorted(ordered, ordered, "right")
        )


class Cells:
    """The cells of a tensor group. `holds` and `needs` (cells, ranks) mark the ranks, by place, that hold or lack a cell."""

    def __init__(self, group: TensorGroup, places: Places) -> None:
        self.group, self.places, self.tensors = group, places, np.asarray(group.tensors, dtype=np.int64)
        edges = [{0, size} for size in group.shape]
        for box in {box for _, box in group.held if box.elements}:
            for axis, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                edges[axis] |= {at, at + size}
        self.edges = [sorted(some) for some in edges]
        self.counts = tuple(len(some) - 1 for some in self.edges)
        self.holds, self.wanted = self._marked(group.held), self._marked(group.wanted)
        self.needs = self.wanted & ~self.holds

    def _marked(self, blocks: Iterable[tuple[int, Box]]) -> Bools:
        marks = np.zeros((*self.counts, len(self.places.ranks)), dtype=np.bool_)
        by_box: dict[Box, list[int]] = {}
        for rank, box in blocks:
            by_box.setdefault(box, []).append(rank)
        for box, ranks in by_box.items():
            if box.elements:
                overlapped = tuple(
                    slice(bisect_right(edges, at) - 1, bisect_left(edges, at + size))
                    for edges, at, size in zip(self.edges, box.offsets, box.sizes, strict=True)
                )
                marks[overlapped][..., self.places.place_of[ranks]] = True
        return marks.reshape(-1, marks.shape[-1])

    def box(self, cell: int) -> Box:
        """Return the block of a cell."""
        at = np.unravel_index(cell, self.counts) if self.counts else ()
        starts = tuple(edges[i] for edges, i in zip(self.edges, at, strict=True))
        sizes = tuple(edges[i + 1] - edges[i] for edges, i in zip(self.edges, at, strict=True))
        return Box(starts, sizes)

    def receive(self, rank: int, own: Sequence[Box], number: int, found: Found) -> None:
        """Add the moves to a rank; `number` of the group offsets the round-robin."""
        place = int(self.places.place_of[rank])
        cells = np.nonzero(self.needs[:, place])[0]
        if not len(cells):
            return
        holds = self.holds[cells]
        rows, places = np.arange(len(cells)), np.full(len(cells), place)
        at = Turns(holds, self.needs[cells], self.places).sender(rows, places, number, len(self.tensors))
        # `nonzero` lists the holders cell by cell; `counts` gives each cell's first.
        counts = holds.sum(1)
        senders = self.places.ranks[np.nonzero(holds)[1][(np.cumsum(counts) - counts)[:, None] + at]]
        for cell, by_tensor in zip(cells.tolist(), senders, strict=True):
            for piece, order in self._pieces(cell, own):
                for sender in set(by_tensor.tolist()):
                    found.add(self.tensors[by_tensor == sender], self.group.item_bytes, sender, piece, order)

    def send(self, rank: int, number: int, found: Found) -> None:
        """Add the moves from a rank."""
        place = int(self.places.place_of[rank])
        cells = np.nonzero(self.holds[:, place])[0]
        rows, places = np.nonzero(self.needs[cells])
        if not len(rows):
            return
        turns = Turns(self.holds[cells], self.needs[cells], self.places)
        own = turns.holders[rows, place]
        chosen = turns.sender(rows, places, number, len(self.tensors)) == own[:, None]
        wanted: dict[int, list[Box]] = {}
        for target, box in self.group.wanted:
            wanted.setdefault(target, []).append(box)
        for pair in np.nonzero(chosen.any(1))[0]:
            target = int(self.places.ranks[places[pair]])
            for piece, order in self._pieces(int(cells[rows[pair]]), wanted[target]):
                found.add(self.tensors[chosen[pair]], self.group.item_bytes, target, piece, order)

    def _pieces(self, cell: int, wanted: Sequence[Box]) -> list[tuple[Box, int]]:
        """Return the wanted pieces of a cell, each with its sort key within the tensor's moves."""
        one = self.box(cell)
        pieces = ((one.overlap(box), cell * len(wanted) + number) for number, box in enumerate(wanted))
        return [(piece, order) for piece, order in pieces if piece is not None]


class Turns:
    """The sender of each (cell, receiver): round-robin over holders on the same machine, otherwise over all holders."""

    def __init__(self, holds: Bools, needs: Bools, places: Places) -> None:
        """Count, for each place (cells, ranks + 1), the ranks before it that hold a cell, need it, or need it from another machine."""
        self.places, self.holders, self._here = places, _sums_before(holds), _sums_before(needs)
        starts, machine_of = np.unique(places.starts, return_inverse=True)
        near = np.logical_or.reduceat(holds, starts, axis=1)
        self._far = np.zeros_like(self._here) if near.all() else _sums_before(needs & ~near[:, machine_of])

    def sender(self, rows: Ints, places: Ints, number: int, tensors: int) -> Ints:
        """Return the index of the holder that serves each pair, (pairs, tensors); each tensor continues the round-robin of the last."""
        start, end = self.places.starts[places], self.places.ends[places]
        first = self.holders[rows, start]
        local = self.holders[rows, end] - first
        begun = self._here[rows, start]
        turn = np.where(local, self._here[rows, places] - begun, self._far[rows, places])
        served = np.where(local, self._here[rows, end] - begun, self._far[rows, -1])
        choices = np.where(local, local, self.holders[rows, -1])
        rotated = turn[:, None] + number + np.arange(tensors) * served[:, None]
        found: Ints = np.where(local, first, 0)[:, None] + rotated % choices[:, None]
        return found


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


def rounds_needed(moves: Moves, limit_bytes: int) -> int:
    """Return the number of rounds that keep a rank's moves in one direction within `limit_bytes` each.

    Raises:
        ValueError: The limit is less than one element per peer.
    """
    if not moves.total:
        return 0
    # Rounds end at whole elements: each peer may need one extra element in a round.
    room = limit_bytes - len(np.unique(moves.peers)) * int(moves.item_bytes.max())
    if room <= 0:
        raise ValueError(f"{limit_bytes} bytes are too few for a round with {len(np.unique(moves.peers))} peers")
    return -(-moves.total // room)


class Piece(NamedTuple):
    """The part of a move within one round."""

    peer: int
    tensor: int
    box: Box


class Schedule:
    """A rank's moves in one direction, of one element size, split into `count` rounds."""

    def __init__(self, moves: Moves, count: int) -> None:
        self.moves, self.count = moves, count
        self.peers, begins = np.unique(moves.peers, return_index=True)
        self._begins = np.append(begins, len(moves.peers))
        done = np.cumsum(moves.sizes)
        self._totals = np.diff(np.append(0, done)[self._begins])
        # The byte offset of each move among its peer's moves.
        self._starts = done - moves.sizes - np.repeat(np.append(0, done)[begins], np.diff(self._begins))

    def first_rounds(self, tensors: int) -> Ints:
        """Return the first round that needs each tensor; `count` if none does."""
        found = np.full(tensors, self.count, dtype=np.int64)
        np.minimum.at(found, self.moves.tensors, self._rounds_of(self._starts))
        return found

    def last_rounds(self, tensors: int) -> Ints:
        """Return the last round that needs each tensor; -1 if none does."""
        found = np.full(tensors, -1, dtype=np.int64)
        last_elements = self._starts + self.moves.sizes - self.moves.item_bytes
        np.maximum.at(found, self.moves.tensors, self._rounds_of(last_elements))
        return found

    def _rounds_of(self, starts: Ints) -> Ints:
        """Return the rounds of the elements at these byte offsets, one per move."""
        totals = np.repeat(self._totals, np.diff(self._begins))
        return ((starts + 1) * self.count - 1) // totals

    def pieces(self, number: int) -> Iterator[Piece]:
        """Yield the pieces of a round, by peer and in an order that both ends derive."""
        for place, peer in enumerate(self.peers):
            begin, end, total = int(self._begins[place]), int(self._begins[place + 1]), int(self._totals[place])
            start, stop = total * number // self.count, total * (number + 1) // self.count
            starts = self._starts[begin:end]
            first = begin + max(0, int(np.searchsorted(starts, start, "right")) - 1)
            for move in range(first, begin + int(np.searchsorted(starts, stop))):
                # The part of the move whose elements start within these bytes.
                at, item = int(self._starts[move]), int(self.moves.item_bytes[move])
                box = self.moves.shapes[self.moves.boxes[move]]
                for part in box.span(max(0, -((at - start) // item)), min(box.elements, -((at - stop) // item))):
                    yield Piece(int(peer), int(self.moves.tensors[move]), part)
