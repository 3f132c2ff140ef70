"""The plan from one layout of a model's weights to another: which of its blocks a rank sends to whom, and which it gets from whom.

has        rank 0: upper half   rank 1: lower half         wants    rank 0: left half    rank 1: left half
                                                                    ─────────────────────────────────────
moves      upper left:  0 ─▶ 0 (stays)   0 ─▶ 1      lower left:  1 ─▶ 0    1 ─▶ 1 (stays)

Each rank plans its own moves alone, once for all tensors of a group: those that lie on the ranks alike, such as a matrix of all layers.
The boxes that ranks have cut a tensor into cells. A rank copies locally the cells that it has; the ranks that have a cell take turns in
sending it. Pure functions of who has what.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from braidrl.models.parallel.boxes import Box

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Blocks = Sequence[tuple[int, Box]]
"""Ranks and a block of each; a rank may come several times."""


@dataclass(frozen=True)
class TensorGroup:
    """Tensors of one shape and type of which every rank has the same block, and wants the same."""

    tensors: Sequence[int]
    """Their numbers in the order of all tensors."""
    name: str
    """One of them, for messages."""
    shape: tuple[int, ...]
    item_bytes: int
    held: Blocks
    wanted: Blocks = ()


@dataclass(frozen=True)
class Moves:
    """One rank's moves in one direction, by peer and then in the order of tensors, which both ends know."""

    peers: Ints
    tensors: Ints
    boxes: Ints
    """For each move, the index of its block in `shapes`."""
    item_bytes: Ints
    shapes: Sequence[Box]
    sizes: Ints
    """Bytes of each move."""

    @property
    def total(self) -> int:
        """Bytes of all moves."""
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
    """What one rank does: blocks that it copies locally, by tensor, and the moves to and from other ranks."""

    stays: dict[int, list[Box]]
    sends: Moves
    receives: Moves


@dataclass
class Found:
    """Moves of one rank while they are collected."""

    columns: list[Ints] = field(default_factory=list)
    shapes: list[Box] = field(default_factory=list)

    def add(self, group: TensorGroup, numbers: Ints, peer: int, box: Box, order: int) -> None:
        """Add the move of a block for some of a group's tensors."""
        tensors = np.asarray(group.tensors, dtype=np.int64)[numbers]
        constants = (peer, len(self.shapes), group.item_bytes, box.elements * group.item_bytes, order)
        self.shapes.append(box)
        self.columns.append(np.stack([tensors, *(np.full_like(tensors, value) for value in constants)]))

    def moves(self) -> Moves:
        """Return the moves by peer, then by tensor, then in the order of its cells."""
        table = np.concatenate(self.columns, axis=1) if self.columns else np.empty((6, 0), dtype=np.int64)
        tensors, peers, boxes, items, sizes, _ = table[:, np.lexsort((table[5], table[0], table[1]))]
        return Moves(peers, tensors, boxes, items, self.shapes, sizes)


def plan_moves(
    groups: Iterable[TensorGroup], rank: int, ranks: int, machines: Sequence[Hashable] | None = None
) -> RankPlan:
    """Return the moves of one rank by which each rank gets every element that it wants exactly once.

    Args:
        groups: All tensors.
        rank: Whose moves.
        ranks: The number of ranks.
        machines: Each rank's machine: a block comes from a rank of the same machine if possible.

    Raises:
        ValueError: For an element that no rank has.
    """
    places = Places.of(machines or [None] * ranks)
    stays: dict[int, list[Box]] = {}
    sends, receives = Found(), Found()
    for number, group in enumerate(groups):
        cells = Cells(group, places)
        cells.check_complete()
        own = [box for holder, box in group.wanted if holder == rank]
        for box in cells.kept(rank, own):
            for tensor in group.tensors:
                stays.setdefault(tensor, []).append(box)
        cells.receive(rank, own, number, receives)
        cells.send(rank, number, sends)
    return RankPlan(stays, sends.moves(), receives.moves())


@dataclass(frozen=True)
class Places:
    """Ranks in the order of machines: `ranks[place]`, `place_of[rank]`, and where the machine of each place begins and ends."""

    ranks: Ints
    place_of: Ints
    starts: Ints
    ends: Ints

    @classmethod
    def of(cls, machines: Sequence[Hashable]) -> "Places":
        """Number machines in the order of their first ranks."""
        numbers = {machine: number for number, machine in enumerate(dict.fromkeys(machines))}
        machine_of = np.array([numbers[machine] for machine in machines], dtype=np.int64)
        ranks = np.argsort(machine_of, kind="stable")
        ordered = machine_of[ranks]
        return cls(
            ranks, np.argsort(ranks), np.searchsorted(ordered, ordered), np.searchsorted(ordered, ordered, "right")
        )


class Cells:
    """The cells of a group's tensors: `holds` and `needs` say which rank, by its place, has a cell and wants some of it, (cells, ranks)."""

    def __init__(self, group: TensorGroup, places: Places) -> None:
        self.group, self.places = group, places
        held = [(rank, box) for rank, box in group.held if box.elements]
        edges = [{0, size} for size in group.shape]
        for box in {box for _, box in held}:
            for axis, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
                edges[axis] |= {at, at + size}
        self.edges = [np.array(sorted(some), dtype=np.int64) for some in edges]
        self.counts = tuple(len(some) - 1 for some in self.edges)
        self.holds = self._marked(held)
        self.wanted = self._marked((rank, box) for rank, box in group.wanted if box.elements)
        self.needs = self.wanted & ~self.holds

    def _marked(self, blocks: Iterable[tuple[int, Box]]) -> Bools:
        marks = np.zeros((*self.counts, len(self.places.ranks)), dtype=np.bool_)
        for rank, box in blocks:
            marks[(*self._touched(box), self.places.place_of[rank])] = True
        return marks.reshape(-1, marks.shape[-1])

    def _touched(self, box: Box) -> tuple[slice, ...]:
        """Return along each axis the cells that a block overlaps."""
        return tuple(
            slice(int(np.searchsorted(edges, at, "right")) - 1, int(np.searchsorted(edges, at + size, "left")))
            for edges, at, size in zip(self.edges, box.offsets, box.sizes, strict=True)
        )

    def box(self, cell: int) -> Box:
        """Return the block that is a cell."""
        at = np.unravel_index(cell, self.counts) if self.counts else ()
        starts = [int(edges[i]) for edges, i in zip(self.edges, at, strict=True)]
        ends = [int(edges[i + 1]) for edges, i in zip(self.edges, at, strict=True)]
        return Box(tuple(starts), tuple(end - start for start, end in zip(starts, ends, strict=True)))

    def check_complete(self) -> None:
        """Raise ValueError for a cell that somebody wants and nobody has."""
        missing = self.needs.any(1) & ~self.holds.any(1)
        if missing.any():
            cell = int(missing.argmax())
            rank = int(self.places.ranks[self.needs[cell].argmax()])
            raise ValueError(f"no rank has {self.group.name} at {self.box(cell).offsets}, which rank {rank} wants")

    def kept(self, rank: int, own: Sequence[Box]) -> list[Box]:
        """Return the blocks that a rank wants and has."""
        place = self.places.place_of[rank]
        cells = np.nonzero(self.wanted[:, place] & self.holds[:, place])[0].tolist()
        return [piece for cell in cells for box in own if (piece := self.box(cell).overlap(box))]

    def receive(self, rank: int, own: Sequence[Box], number: int, found: Found) -> None:
        """Add what a rank gets from others; `number` is the group's: it says who begins."""
        place = int(self.places.place_of[rank])
        cells = np.nonzero(self.needs[:, place])[0]
        if not len(cells):
            return
        turns = self._turns(cells)
        places = np.full(len(cells), place)
        rows = np.arange(len(cells))
        at = turns.sender(rows, places, number, len(self.group.tensors))
        # The holders of each cell, one cell after the other.
        holders = np.nonzero(self.holds[cells])[1]
        begins = np.cumsum(self.holds[cells].sum(1)) - self.holds[cells].sum(1)
        senders = self.places.ranks[holders[begins[:, None] + at]]
        for cell, by_tensor in zip(cells, senders, strict=True):
            for piece, order in self._pieces(int(cell), own):
                for sender in np.unique(by_tensor):
                    found.add(self.group, np.nonzero(by_tensor == sender)[0], int(sender), piece, order)

    def send(self, rank: int, number: int, found: Found) -> None:
        """Add what a rank sends to others."""
        place = int(self.places.place_of[rank])
        cells = np.nonzero(self.holds[:, place])[0]
        rows, places = np.nonzero(self.needs[cells])
        if not len(rows):
            return
        turns = self._turns(cells)
        own = turns.before_holders[rows, place]
        chosen = turns.sender(rows, places, number, len(self.group.tensors)) == own[:, None]
        wanted: dict[int, list[Box]] = {}
        for target, box in self.group.wanted:
            wanted.setdefault(target, []).append(box)
        for pair in np.nonzero(chosen.any(1))[0]:
            target = int(self.places.ranks[places[pair]])
            for piece, order in self._pieces(int(cells[rows[pair]]), wanted[target]):
                found.add(self.group, np.nonzero(chosen[pair])[0], target, piece, order)

    def _pieces(self, cell: int, wanted: Sequence[Box]) -> list[tuple[Box, int]]:
        """Return what of a cell is wanted, each piece with its place in the order of the tensor's moves."""
        one = self.box(cell)
        pieces = ((one.overlap(box), cell * len(wanted) + number) for number, box in enumerate(wanted))
        return [(piece, order) for piece, order in pieces if piece is not None]

    def _turns(self, cells: Ints) -> "Turns":
        return Turns.of(self.holds[cells], self.needs[cells], self.places)


@dataclass(frozen=True)
class Turns:
    """Who sends a cell to whom, (cells, ranks): of the `choices` holders from `first` on the one whose turn it is."""

    before_holders: Ints
    """Holders at places before each."""
    first: Ints
    choices: Ints
    turn: Ints
    """How many are served before this rank by the same holders."""
    served: Ints
    """How many these holders serve."""

    @classmethod
    def of(cls, holds: Bools, needs: Bools, places: Places) -> "Turns":
        """Let ranks be served by the holders of their machine, those of machines without one by all."""
        before_holders = _sums_before(holds)
        local = before_holders[:, places.ends] - before_holders[:, places.starts]
        near = local > 0
        far = _sums_before(needs & ~near)
        here = _sums_before(needs)
        begun = here[:, places.starts]
        return cls(
            before_holders[:, :-1],
            np.where(near, before_holders[:, places.starts], 0),
            np.where(near, local, before_holders[:, -1:]),
            np.where(near, here[:, :-1] - begun, far[:, :-1]),
            np.where(near, here[:, places.ends] - begun, far[:, -1:]),
        )

    def sender(self, rows: Ints, places: Ints, number: int, tensors: int) -> Ints:
        """Return which of a cell's holders serves these pairs, (pairs, tensors): the next tensor goes on where the last one stopped."""
        first, choices, turn, served = (
            a[rows, places, None] for a in (self.first, self.choices, self.turn, self.served)
        )
        return first + (turn + number + np.arange(tensors) * served) % choices


def _sums_before(marks: Bools) -> Ints:
    """Return how many marks come before each place, and last how many there are: (cells, ranks + 1)."""
    sums = np.zeros((marks.shape[0], marks.shape[1] + 1), dtype=np.int64)
    np.cumsum(marks, axis=1, out=sums[:, 1:])
    return sums


def shared_blocks(group: TensorGroup, ranks: Sequence[int]) -> list[tuple[int, Box]]:
    """Divide the elements of a group's tensors among `ranks`, which write one file together.

    A block that some of them have is divided equally among these, one that none has among all.
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
