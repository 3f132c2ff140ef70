"""Plans from one layout to another: every wanted element comes exactly once, from itself where it is there, from
replicas in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.weights.boxes import Box
from braidrl.weights.reshard_plan import Blocks, Moves, Piece, RankPlan, TensorGroup, plan_moves, shared_blocks

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=3).map(tuple)
Element = tuple[int, int]
"""A tensor's number, and an element's in it."""


@st.composite
def boxes(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    """Any block of a tensor, an empty one included."""
    starts = [draw(st.integers(0, size)) for size in shape]
    sizes = [draw(st.integers(0, size - at)) for at, size in zip(starts, shape, strict=True)]
    return Box(tuple(starts), tuple(sizes))


@st.composite
def layouts(draw: st.DrawFn, complete: bool = True) -> tuple[int, list[TensorGroup]]:
    """A number of ranks, and groups of tensors: what each rank has, of which one has everything, and what each
    wants.
    """
    ranks, item, count, groups = draw(st.integers(1, 5)), draw(st.sampled_from([2, 4, 8])), 0, []
    for name in "abc"[: draw(st.integers(1, 3))]:
        shape, tensors = draw(SHAPES), draw(st.integers(1, 3))
        held, expected = ({rank: draw(boxes(shape)) for rank in range(ranks) if draw(st.booleans())} for _ in range(2))
        if complete:
            held[draw(st.integers(0, ranks - 1))] = Box.whole(shape)
        numbers = list(range(count, count + tensors))
        groups.append(TensorGroup(numbers, name, shape, item, list(held.items()), list(expected.items())))
        count += tensors
    return ranks, groups


def elements(shape: tuple[int, ...], box: Box) -> set[int]:
    """Return the indices of a block's elements in the full tensor, computed naively."""
    count = int(torch.Size(shape).numel())
    return set(torch.arange(count).view(shape)[box.slices].flatten().tolist())


def shape_of(groups: list[TensorGroup]) -> dict[int, tuple[int, ...]]:
    return {tensor: group.shape for group in groups for tensor in group.tensors}


def of_rank(blocks: str, groups: list[TensorGroup], rank: int) -> set[Element]:
    """Return the elements that a rank holds or wants."""
    return {
        (tensor, element)
        for group in groups
        for owner, box in getattr(group, blocks)
        for tensor in group.tensors
        for element in elements(group.shape, box)
        if owner == rank
    }


def moved(moves: Moves, groups: list[TensorGroup]) -> Iterator[tuple[int, Element]]:
    """Yield the peer and each element of a rank's moves in one direction."""
    shapes = shape_of(groups)
    for tensor, number in zip(moves.tensors.tolist(), moves.block_of.tolist(), strict=True):
        block = moves.blocks[number]
        yield from ((block.peer, (tensor, element)) for element in sorted(elements(shapes[tensor], block.box)))


@st.composite
def machines(draw: st.DrawFn) -> tuple[int, list[TensorGroup], list[int]]:
    """Any layouts, and the machine of each rank."""
    ranks, groups = draw(layouts())
    return ranks, groups, [draw(st.integers(0, 2)) for _ in range(ranks)]


@given(machines())
def test_every_wanted_element_comes_once_and_crosses_to_a_machine_once(
    given_: tuple[int, list[TensorGroup], list[int]],
) -> None:
    ranks, groups, where = given_
    plans = [plan_moves(groups, rank, ranks, where) for rank in range(ranks)]
    crossed: dict[int, Counter[Element]] = {machine: Counter() for machine in range(3)}
    for rank, plan in enumerate(plans):
        stayed = [
            (t, e) for t, result in plan.stays.items() for box in result for e in elements(shape_of(groups)[t], box)
        ]
        received = list(moved(plan.receives, groups))
        relayed = [(relay, element) for relay, moves in plan.relayed.items() for _, element in moved(moves, groups)]
        arrived = Counter([*stayed, *(element for _, element in (*received, *relayed))])
        assert set(arrived) == of_rank("wanted", groups, rank) and set(arrived.values()) <= {1}
        assert set(stayed) <= of_rank("held", groups, rank)
        assert not {e for _, e in (*received, *relayed)} & of_rank("held", groups, rank), (
            "what is there does not travel"
        )
        for peer, element in received:
            assert element in of_rank("held", groups, peer), "ranks send only what they hold"
            assert (rank, element) in list(moved(plans[peer].sends, groups))
            crossed[where[rank]].update([element] if where[peer] != where[rank] else ())
        for relay, element in relayed:
            assert where[relay] == where[rank] and (rank, element) in passed_on(plans[relay].receives, groups)
    assert sum(plan.sends.total for plan in plans) == sum(plan.receives.total for plan in plans)
    for machine, result in crossed.items():
        here = [rank for rank in range(ranks) if where[rank] == machine]
        expected, held = ({e for rank in here for e in of_rank(kind, groups, rank)} for kind in ("wanted", "held"))
        assert set(result) == expected - held and set(result.values()) <= {1}


def passed_on(moves: Moves, groups: list[TensorGroup]) -> list[tuple[int, Element]]:
    """Return the receivers and elements of the blocks that a rank passes on."""
    shapes = shape_of(groups)
    return [
        (rank, (tensor, element))
        for tensor, number in zip(moves.tensors.tolist(), moves.block_of.tolist(), strict=True)
        for rank in moves.blocks[number].onward
        for element in elements(shapes[tensor], moves.blocks[number].box)
    ]


@given(machines(), st.integers(80, 160))
def test_both_ends_agree_on_each_round_within_the_byte_limit(
    given_: tuple[int, list[TensorGroup], list[int]], limit: int
) -> None:
    ranks, groups, where = given_
    plans, item = [plan_moves(groups, rank, ranks, where) for rank in range(ranks)], groups[0].item_bytes
    count = max(plan.rounds_needed(limit) for plan in plans)
    sent, received = (
        [[in_round(moves.pieces(number, count), groups) for number in range(count)] for moves in some]
        for some in ([plan.sends for plan in plans], [plan.receives for plan in plans])
    )
    for number in range(count):
        passes = [passed_in_round(plan.receives.pieces(number, count), groups) for plan in plans]
        passed = [in_round(plan.passed(number, count), groups) for plan in plans]
        for side in ([one[number] for one in sent], [one[number] for one in received], passes, passed):
            assert all(sum(map(len, result.values())) * item <= limit for result in side)
        for rank in range(ranks):
            for peer, result in sent[rank][number].items():
                assert result == received[peer][number][rank], "in the same order"
            for peer, result in passes[rank].items():
                assert result == passed[peer][rank], "in the same order"
    for rank, plan in enumerate(plans):
        for side, moves in ((sent, plan.sends), (received, plan.receives)):
            counted = Counter((peer, e) for one in side[rank] for peer, result in one.items() for e in result)
            assert counted == Counter(moved(moves, groups))
            assert_first_and_last(moves, side[rank])


def passed_in_round(pieces: Iterable[Piece], groups: list[TensorGroup]) -> dict[int, list[Element]]:
    """Return the elements that a relay passes on in a round by receiver, in order."""
    return in_round((piece._replace(peer=peer) for piece in pieces for peer in piece.onward), groups)


def in_round(pieces: Iterable[Piece], groups: list[TensorGroup]) -> dict[int, list[Element]]:
    """Return the elements of a round by peer, in order."""
    result: dict[int, list[Element]] = {}
    for piece in pieces:
        some = torch.arange(int(torch.Size(shape_of(groups)[piece.tensor]).numel())).view(
            shape_of(groups)[piece.tensor]
        )
        result.setdefault(piece.peer, []).extend((piece.tensor, e) for e in some[piece.box.slices].flatten().tolist())
    return result


def assert_first_and_last(moves: Moves, rounds: list[dict[int, list[Element]]]) -> None:
    tensors = 9
    seen: dict[int, list[int]] = {}
    for number, one in enumerate(rounds):
        for tensor in {tensor for result in one.values() for tensor, _ in result}:
            seen.setdefault(tensor, []).append(number)
    first, last = moves.first_and_last(len(rounds), tensors)
    assert first.tolist() == [min(seen.get(tensor, [len(rounds)])) for tensor in range(tensors)]
    assert last.tolist() == [max(seen.get(tensor, [-1])) for tensor in range(tensors)]


def alike(held: Blocks, wanted: Blocks, tensors: int, shape: tuple[int, ...] = (3, 4)) -> TensorGroup:
    return TensorGroup(range(tensors), "layer", shape, 4, held, wanted)


def test_replicas_take_turns_and_those_of_the_same_machine_come_first() -> None:
    whole = Box.whole((3, 4))
    group = alike([(rank, whole) for rank in range(3)], [(3, whole)], 12)

    def senders(machines: list[str] | None) -> Counter[int]:
        moves = plan_moves([group], 3, 4, machines).receives
        return Counter(moves.blocks[number].peer for number in moves.block_of.tolist())

    assert senders(None) == {0: 4, 1: 4, 2: 4}
    assert senders(["one", "two", "two", "two"]) == {1: 6, 2: 6}
    sent = plan_moves([group], 1, 4, ["one", "two", "two", "two"]).sends
    assert len(sent.tensors) == 6 and plan_moves([group], 0, 4, ["one", "two", "two", "two"]).sends.total == 0


def test_ranks_of_another_machine_take_turns_as_relays() -> None:
    """Two engines of two tensor ranks: each slice crosses once, by one engine for half of the tensors."""
    whole, slices = Box.whole((4, 4)), [Box((0, 0), (2, 4)), Box((2, 0), (2, 4))]
    group = alike([(0, whole), (1, whole)], [(2 + rank, slices[rank % 2]) for rank in range(4)], 8, (4, 4))
    where = ["A", "A", "B", "B", "B", "B"]
    plans = [plan_moves([group], rank, 6, where) for rank in range(6)]
    size = 8 * 16 * 4
    assert [plan.sends.total for plan in plans] == [size // 2, size // 2, 0, 0, 0, 0]
    assert [plan.receives.total for plan in plans] == [0, 0] + [size // 4] * 4
    assert [{peer: moves.total for peer, moves in plan.relayed.items()} for plan in plans[2:]] == [
        {4: size // 4},
        {5: size // 4},
        {2: size // 4},
        {3: size // 4},
    ]


@pytest.mark.parametrize("wanting", [1, 3, 5, 8])
def test_replicas_send_equal_numbers_of_tensors(wanting: int) -> None:
    """Also where they are more, or fewer, than those who want a block."""
    whole = Box.whole((3, 4))
    group = alike([(rank, whole) for rank in range(4)], [(4 + rank, whole) for rank in range(wanting)], 8)
    plans = [plan_moves([group], rank, 12) for rank in range(4)]
    assert [len(plan.sends.tensors) for plan in plans] == [8 * wanting // 4] * 4


def test_every_round_uses_each_link_equally() -> None:
    """Also that of a rank with few bytes for many: 64 ranks, of which one of two pipeline ranks has twice as many
    layers.
    """
    ranks, rows = 64, 256
    held = [(rank, Box((rank * 4, 0), (4, 128))) for rank in range(ranks)]
    expected = [(rank, Box((0, rank % 8 * 16), (rows, 16))) for rank in range(ranks)]
    plan: RankPlan = plan_moves([alike(held, expected, 12, (rows, 128))], 5, ranks)
    limit = plan.receives.total // 5
    count = replace(plan, sends=Moves([], 4)).rounds_needed(limit)
    assert count <= 6, "five rounds of the bucket, and one for ends that are not whole"
    sizes = [sum(piece.box.elements * 4 for piece in plan.receives.pieces(number, count)) for number in range(count)]
    assert max(sizes) - min(sizes) <= 4 * ranks and sum(sizes) == plan.receives.total


def test_what_no_rank_has_is_said() -> None:
    group = alike([(0, Box((0, 0), (2, 4)))], [(1, Box.whole((4, 4)))], 1, (4, 4))
    with pytest.raises(ValueError, match=r"layer at \(2, 0\),.*rank 1"):
        plan_moves([group], 0, 2)


def test_byte_limit_below_one_element_per_peer_is_refused() -> None:
    group = alike([(0, Box.whole((3, 4)))], [(1, Box.whole((3, 4))), (2, Box.whole((3, 4)))], 1)
    with pytest.raises(ValueError, match=r"8 bytes .*round with 2 streams"):
        plan_moves([group], 0, 3).rounds_needed(8)


@given(layouts(complete=False), st.data())
def test_ranks_write_every_element_once_preferring_their_own_blocks(
    given_: tuple[int, list[TensorGroup]], data: st.DataObject
) -> None:
    ranks, groups = given_
    here = data.draw(st.lists(st.sampled_from(range(ranks)), min_size=1, unique=True).map(sorted))
    for group in groups:
        count: Counter[int] = Counter()
        others = {e for rank, box in group.held if rank in here for e in elements(group.shape, box)}
        for rank, box in shared_blocks(group, here):
            block = elements(group.shape, box)
            own = {e for owner, held in group.held if owner == rank for e in elements(group.shape, held)}
            assert rank in here and (block <= own or not block & others)
            count.update(block)
        assert set(count) == elements(group.shape, Box.whole(group.shape)) and set(count.values()) == {1}


def test_replicas_write_equal_shares() -> None:
    whole = alike([(rank, Box.whole((12, 5))) for rank in range(3)], [], 4, (12, 5))
    assert [box.elements for _, box in shared_blocks(whole, [0, 1, 2])] == [20, 20, 20]
    assert [rank for rank, _ in shared_blocks(replace(whole, held=whole.held[:1]), [1, 2])] == [1, 2]


@given(st.data())
def test_spans_and_parts_of_a_block_cover_the_right_elements(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    one = data.draw(boxes(shape))
    start = data.draw(st.integers(0, one.elements))
    end = data.draw(st.integers(start, one.elements))
    whole = torch.arange(int(torch.Size(shape).numel())).view(shape)
    result = [e for box in one.span(start, end) for e in whole[box.slices].flatten().tolist()]
    assert result == whole[one.slices].flatten().tolist()[start:end]
    parts = [elements(shape, box) for box in one.divided(data.draw(st.integers(1, 5)))]
    assert sorted(e for part in parts for e in part) == sorted(elements(shape, one))
