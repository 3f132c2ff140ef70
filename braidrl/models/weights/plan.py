"""The plan from one layout of a model's weights to another: which rank sends which block to which. Pure functions of who has what.

has        rank 0: upper half   rank 1: lower half         wants    rank 0: left half    rank 1: left half
                                                                    ─────────────────────────────────────
plan       upper left:  0 ─▶ 0 (stays)   0 ─▶ 1      lower left:  1 ─▶ 0    1 ─▶ 1 (stays)
rounds     the same in order, cut where a rank would have more than `limit` bytes in flight

A rank copies locally what it has; replicas of a block take turns in sending it.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from braidrl.models.parallel.boxes import Box

Boxes = Mapping[str, Sequence[Box]]
"""One rank's blocks of each tensor, by name."""
Holders = dict[Box, list[int]]
"""The ranks that have a block."""


@dataclass(frozen=True)
class Move:
    """A block of a tensor that goes from rank `source` to rank `target`, or stays where these are equal."""

    name: str
    box: Box
    source: int
    target: int

    @property
    def stays(self) -> bool:
        return self.source == self.target


def plan_moves(
    sources: Sequence[Boxes], targets: Sequence[Boxes], machines: Sequence[Hashable] | None = None
) -> Iterator[Move]:
    """Yield moves by which each rank gets every element that it wants exactly once, in the order of tensors.

    Args:
        sources: The blocks that each rank has.
        targets: The blocks that each rank wants.
        machines: Each rank's machine: a block comes from a rank of the same machine if possible, then from the one that sent least so far.

    Raises:
        ValueError: For an element that no rank has.
    """
    where = machines or [None] * len(sources)
    holders = holders_of(sources)
    sent = [0] * len(sources)
    for name in dict.fromkeys(name for wanted in (*sources, *targets) for name in wanted):
        for target, wanted in enumerate(targets):
            for box in wanted.get(name, ()):
                yield from _covering(Move(name, box, target, target), holders.get(name, {}), sent, where)


def holders_of(sources: Sequence[Boxes]) -> dict[str, Holders]:
    """Return the blocks of each tensor, and the ranks that have each."""
    found: dict[str, Holders] = {}
    for rank, held in enumerate(sources):
        for name, boxes in held.items():
            for box in boxes:
                if box.elements:
                    found.setdefault(name, {}).setdefault(box, []).append(rank)
    return found


def _covering(wanted: Move, holders: Holders, sent: list[int], where: Sequence[Hashable]) -> Iterator[Move]:
    """Yield the moves that bring one block; adds to `sent` the elements that each rank sends for it."""
    target = wanted.target
    missing = [wanted.box] if wanted.box.elements else []
    for box, ranks in sorted(holders.items(), key=lambda held: target not in held[1]):
        pieces = [piece for part in missing if (piece := part.overlap(box))]
        missing = [left for part in missing for left in part.without(box)]
        for piece in pieces:
            source = target
            if target not in ranks:
                source = min(ranks, key=lambda rank: (where[rank] != where[target], sent[rank], rank))
                sent[source] += piece.elements
            yield replace(wanted, box=piece, source=source)
        if not missing:
            return
    if missing:
        raise ValueError(f"no rank has {wanted.name} at {missing[0].offsets}, which rank {target} wants")


def in_rounds(moves: Iterable[Move], item_bytes: Mapping[str, int], limit: int) -> Iterator[list[Move]]:
    """Cut moves, in order, into rounds in which no rank sends, or receives, more than `limit` bytes.

    `item_bytes` is the element size by tensor; a round has tensors of one element size. A single element always passes.
    """
    begun: list[Move] = []
    full: Counter[tuple[bool, int]] = Counter()
    size = 0
    for move in moves:
        item = item_bytes[move.name]
        for box in move.box.cut(limit // item):
            ends = ((True, move.source), (False, move.target))
            if begun and (item != size or any(full[end] + box.elements * item > limit for end in ends)):
                yield begun
                begun = []
                full.clear()
            size = item
            begun.append(replace(move, box=box))
            for end in ends:
                full[end] += box.elements * item
    if begun:
        yield begun


def assign_writers(sources: Sequence[Boxes], shapes: Mapping[str, Sequence[int]], ranks: Sequence[int]) -> list[Boxes]:
    """Assign every element of every tensor to one of `ranks`, for ranks that write one file together; returns blocks by rank.

    A block goes to the rank that has it, of several to the one with the least so far; a block that none has, to the least loaded.
    """
    holders = holders_of([held if rank in ranks else {} for rank, held in enumerate(sources)])
    given: list[dict[str, list[Box]]] = [{} for _ in sources]
    load = dict.fromkeys(ranks, 0)

    def give(name: str, box: Box, able: Sequence[int]) -> None:
        rank = min(able, key=lambda one: (load[one], one))
        load[rank] += box.elements
        given[rank].setdefault(name, []).append(box)

    for name, shape in shapes.items():
        missing = [Box.whole(shape)]
        for box, able in holders.get(name, {}).items():
            for piece in [piece for part in missing if (piece := part.overlap(box))]:
                give(name, piece, able)
            missing = [left for part in missing for left in part.without(box)]
        for box in missing:
            give(name, box, ranks)
    return list(given)
