"""Plans from one layout to another: every wanted element comes exactly once, from itself where it is there, from replicas in turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.models.parallel.boxes import Box
from braidrl.models.weights.plan import Boxes, Move, assign_writers, in_rounds, plan_moves

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any block of a tensor, an empty one included."""
    starts = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for at, size in zip(starts, shape, strict=True)]
    return Box(tuple(starts), tuple(sizes))


@st.composite
def layouts(draw: st.DrawFn, complete: bool = True) -> tuple[dict[str, tuple[int, ...]], list[Boxes], list[Boxes]]:
    """Shapes; what each rank has, of which one has everything; and what each wants."""
    shapes = draw(st.dictionaries(st.sampled_from("abc"), SHAPES, min_size=1))
    ranks = draw(st.integers(1, 5))

    def some() -> list[Boxes]:
        return [
            {name: [draw(boxes(shape))] for name, shape in shapes.items() if draw(st.booleans())}
            for _ in range(ranks)
        ]  # fmt: skip

    sources, targets = some(), some()
    if complete:
        sources[draw(st.integers(0, ranks - 1))] = {name: [Box.whole(shape)] for name, shape in shapes.items()}
    return shapes, sources, targets


def elements(shape: tuple[int, ...], box: Box) -> set[int]:
    """Numbers of a block's elements in the whole tensor: the plain way."""
    count = int(torch.Size(shape).numel())
    return set(torch.arange(count).view(shape)[box.slices].flatten().tolist())


@given(layouts())
def test_every_wanted_element_comes_once_from_a_rank_that_has_it(
    given_: tuple[dict[str, tuple[int, ...]], list[Boxes], list[Boxes]],
) -> None:
    shapes, sources, targets = given_
    moves = list(plan_moves(sources, targets))
    arrived: Counter[tuple[int, str, int]] = Counter()
    for move in moves:
        block = elements(shapes[move.name], move.box)
        (held,) = sources[move.source][move.name]
        assert block <= elements(shapes[move.name], held), "nobody sends what it does not have"
        if not move.stays:
            own = sources[move.target].get(move.name, [Box.whole(())][:0])
            assert not any(block & elements(shapes[move.name], box) for box in own), "what is there does not travel"
        arrived.update((move.target, move.name, element) for element in block)
    wanted = {
        (rank, name, element)
        for rank, some in enumerate(targets)
        for name, found in some.items()
        for box in found
        for element in elements(shapes[name], box)
    }
    assert arrived.keys() == wanted and set(arrived.values()) <= {1}


@given(layouts(), st.integers(1, 40), st.sampled_from([2, 4, 8]))
def test_rounds_are_the_same_moves_with_a_bound_for_every_rank(
    given_: tuple[dict[str, tuple[int, ...]], list[Boxes], list[Boxes]], limit: int, item: int
) -> None:
    shapes, sources, targets = given_
    moves = list(plan_moves(sources, targets))
    sizes = {name: item if name == "a" else 4 for name in shapes}
    rounds = list(in_rounds(moves, sizes, limit))
    for found in rounds:
        assert len({sizes[move.name] for move in found}) == 1, "one kind of number in a buffer"
        for end in ("source", "target"):
            total: Counter[int] = Counter()
            for move in found:
                total[getattr(move, end)] += move.box.elements * sizes[move.name]
            assert max(total.values()) <= max(limit, item, 4)

    def elementwise(some: Iterable[Move]) -> Counter[tuple[str, int, int, int]]:
        return Counter(
            (move.name, move.source, move.target, element)
            for move in some
            for element in elements(shapes[move.name], move.box)
        )

    assert elementwise(move for found in rounds for move in found) == elementwise(moves)


def test_replicas_take_turns_and_those_of_the_same_machine_come_first() -> None:
    names, whole = [f"layer {n}" for n in range(12)], Box.whole((3, 4))
    have: Boxes = {name: [whole] for name in names}
    sources: list[Boxes] = [have, have, have, {}]
    targets: list[Boxes] = [{}, {}, {}, have]
    assert Counter(m.source for m in plan_moves(sources, targets)) == {0: 4, 1: 4, 2: 4}
    near = plan_moves(sources, targets, ["one", "two", "two", "two"])
    assert Counter(m.source for m in near) == {1: 6, 2: 6}


def test_what_no_rank_has_is_said() -> None:
    upper = Box((0, 0), (2, 4))
    with pytest.raises(ValueError, match=r"no rank has head at \(2, 0\), which rank 1 wants"):
        list(plan_moves([{"head": [upper]}, {}], [{}, {"head": [Box.whole((4, 4))]}]))


@given(layouts(complete=False), st.data())
def test_ranks_that_write_together_write_everything_once_and_first_what_they_have(
    given_: tuple[dict[str, tuple[int, ...]], list[Boxes], list[Boxes]], data: st.DataObject
) -> None:
    shapes, sources, _ = given_
    here = data.draw(st.lists(st.sampled_from(range(len(sources))), min_size=1, unique=True).map(sorted))
    written = assign_writers(sources, shapes, here)
    for name, shape in shapes.items():
        count: Counter[int] = Counter()
        for rank, found in enumerate(written):
            for box in found.get(name, ()):
                assert rank in here
                block = elements(shape, box)
                count.update(block)
                own = {e for held in sources[rank].get(name, ()) for e in elements(shape, held)}
                others = {e for r in here for held in sources[r].get(name, ()) for e in elements(shape, held)}
                assert block <= own or not block & others
        assert set(count) == elements(shape, Box.whole(shape)) and set(count.values()) == {1}


@given(st.data())
def test_a_block_less_another_is_the_rest_of_it_and_pieces_are_no_larger_than_asked(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    one, other = data.draw(boxes(shape)), data.draw(boxes(shape))
    limit = data.draw(st.integers(1, 20))
    rest = [elements(shape, box) for box in one.without(other)]
    assert sum(map(len, rest)) == len(set().union(*rest)) and set().union(*rest) == elements(shape, one) - elements(
        shape, other
    )
    cut = one.cut(limit)
    assert all(piece.elements <= limit for piece in cut)
    if one.elements:
        assert sorted(e for piece in cut for e in elements(shape, piece)) == sorted(elements(shape, one))
