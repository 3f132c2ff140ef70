"""Blocks of a rank are copied to the ranks that may replace it."""

from __future__ import annotations

from braidrl.runtimes.replicas import distance_to_neighbour, unreplicated_blocks
from braidrl.weights.boxes import Box
from braidrl.weights.reshard_plan import ShardIndex, describe

SHAPE = (6, 4)


def index_of(boxes: list[Box], machines: list[str]) -> ShardIndex:
    """Return the index of ranks that each hold one block of two tensors."""
    ranks = [describe(([name], SHAPE, "float32", box) for name in ("a.1", "a.2")) for box in boxes]
    return ShardIndex(ranks, machines, ["a."])


def rows(start: int, end: int) -> Box:
    return Box.whole(SHAPE).along(0, start, end)


def test_blocks_that_one_rank_has_go_to_its_neighbour() -> None:
    shards = [rows(0, 2), rows(2, 4), rows(4, 6)]
    (group,) = unreplicated_blocks(index_of(shards, ["one"] * 3))
    assert sorted(group.wanted) == [(0, shards[2]), (1, shards[0]), (2, shards[1])]


def test_blocks_that_several_ranks_have_stay_where_they_are() -> None:
    halves = [rows(0, 3), rows(3, 6)]
    for boxes in ([*halves, *halves], [Box.whole(SHAPE)] * 3):
        assert not any(group.wanted for group in unreplicated_blocks(index_of(boxes, ["one"] * len(boxes))))


def test_an_empty_shard_and_a_rank_alone_need_no_copy() -> None:
    boxes = [rows(0, 6), rows(6, 6)]
    (group, *others) = unreplicated_blocks(index_of(boxes, ["one"] * 2))
    assert not others and list(group.wanted) == [(1, boxes[0])]
    assert not any(group.wanted for group in unreplicated_blocks(index_of([Box.whole(SHAPE)], ["one"])))


def test_the_neighbour_is_on_another_machine_if_all_can_have_one_there() -> None:
    assert distance_to_neighbour(["a", "a", "b", "b"]) == 2
    assert distance_to_neighbour(["a", "b", "a", "b"]) == 1
    assert distance_to_neighbour(["a"] * 4) == 1
    assert distance_to_neighbour(["a", "a", "a", "b"]) == 1
    assert distance_to_neighbour(["a"]) == 1
