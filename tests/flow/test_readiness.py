"""A stage sees rows when what it waits for is written, in the portions of its scope, and once."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.flow import Flow, Kind, Scope, Stage, actor, critic, reference, reward
from braidrl.flow.flow import ADMISSION
from braidrl.flow.readiness import (
    Consumer,
    StageProgress,
    complete_groups,
    complete_sets,
    ready_rows,
    waits_for,
    weights_wait_for,
)
from braidrl.flow.stage import Signature


def compute(
    name: str, reads: tuple[str, ...], writes: tuple[str, ...], scope: Scope = Scope.ROW, kind: Kind = Kind.COMPUTE
) -> Stage:
    return Stage(name, name, None, Signature(kind, reads, writes, scope=scope))


def train(role: str, reads: tuple[str, ...]) -> Stage:
    return Stage(f"{role}.update", "update", role, Signature(Kind.TRAIN, reads))


def ppo() -> Flow:
    return Flow(
        "ppo",
        [
            actor.generate(),
            reward.verify(),
            reference.log_probs(),
            critic.values(),
            actor.log_probs(),
            compute("whiten", ("values", "reward", "ref_log_probs"), ("advantages", "returns"), Scope.BATCH),
            train("critic", ("values", "returns")),
            train("actor", ("advantages", "old_log_probs")),
        ],
    )


def dapo() -> Flow:
    return Flow(
        "dapo",
        [
            actor.generate(),
            reward.verify(),
            compute("informative", ("correct",), (), Scope.GROUP, Kind.SELECT),
            compute("normalized", ("reward",), ("advantage",), Scope.GROUP),
            train("actor", ("advantage",)),
        ],
    )


def uids(groups: int, size: int = 2) -> list[tuple[int, int, int]]:
    return [(0, group, sample) for group in range(groups) for sample in range(size)]


def test_a_stage_waits_for_its_writers_and_for_every_select_before_it() -> None:
    assert waits_for(ppo())["whiten"] == (ADMISSION, "critic.values", "reward.verify", "reference.log_probs")
    assert waits_for(dapo())["normalized"] == (ADMISSION, "reward.verify", "informative")
    assert waits_for(dapo())["informative"] == (ADMISSION, "reward.verify")


def test_the_first_step_waits_for_inference_with_the_same_weights() -> None:
    waits = weights_wait_for(ppo())
    assert waits["actor.update"] == ("actor.log_probs",) and waits["critic.update"] == ("critic.values",)
    twice = Flow("twice", [actor.generate(), train("critic", ("tokens",)), train("critic", ("tokens",))])
    assert weights_wait_for(twice) == {"critic.update": (), "critic.update_2": ("critic.update",)}


bits = st.lists(st.booleans(), min_size=8, max_size=8).map(np.array)


@given(bits, bits, bits)
def test_rows_are_ready_when_all_is_written_and_nothing_consumed(
    one: np.ndarray, two: np.ndarray, consumed: np.ndarray
) -> None:
    assert ready_rows([one, two], consumed).tolist() == [
        bool(a and b and not c) for a, b, c in zip(one, two, consumed, strict=True)
    ]


@given(bits, st.lists(st.integers(-5, 5), min_size=8, max_size=8))
def test_groups_are_complete_when_every_row_is_ready_wherever_it_lies(ready: np.ndarray, groups: list[int]) -> None:
    complete = complete_groups(ready, np.array(groups))
    for row, group in enumerate(groups):
        assert complete[row] == all(ready[other] for other in range(8) if groups[other] == group)


def test_sets_of_rows_are_complete_one_by_one() -> None:
    assert complete_sets(np.array([True, False, True]), [[0], [0, 1], [2, 0], []]) == [0, 2, 3]


def test_rows_become_ready_in_the_portions_of_their_scope() -> None:
    progress = StageProgress(dapo())
    progress.admit(uids(2))
    select, advantage = Consumer("informative"), Consumer("normalized")
    progress.write("actor.generate", uids(2))
    progress.write("reward.verify", [(0, 0, 0), (0, 1, 0), (0, 1, 1)])
    assert progress.ready(select) == [(0, 1, 0), (0, 1, 1)]
    progress.consume(select, [(0, 1, 0), (0, 1, 1)])
    assert progress.ready(select) == [] and progress.ready(advantage) == []
    progress.write("informative", [(0, 1, 0), (0, 1, 1)])
    assert progress.ready(advantage) == [(0, 1, 0), (0, 1, 1)]
    assert progress.ready(advantage, among=[(0, 1, 1), (0, 0, 0)]) == [(0, 1, 1)]


def test_a_stage_of_batch_scope_gets_all_rows_of_its_batch_or_none() -> None:
    progress = StageProgress(ppo())
    progress.admit(uids(3))
    batch, whiten = uids(2), Consumer("whiten")
    for stage in ("actor.generate", "reward.verify", "reference.log_probs"):
        progress.write(stage, batch)
    progress.write("critic.values", batch[:3])
    assert progress.ready(whiten, among=batch) == []
    progress.write("critic.values", batch[3:])
    assert progress.ready(whiten, among=batch) == batch
    with pytest.raises(ValueError, match="say which rows"):
        progress.ready(whiten)


@given(st.data())
def test_whatever_the_order_each_consumer_gets_each_row_once(data: st.DataObject) -> None:
    flow = Flow(
        "f",
        [
            compute("a", ("prompt",), ("x",)),
            compute("b", ("prompt",), ("y",)),
            compute("both", ("x", "y"), ("z",), Scope.GROUP),
            train("actor", ("z",)),
        ],
    )
    progress = StageProgress(flow, epochs=2)
    progress.admit(uids(3))
    seen: list[tuple[Consumer, tuple[int, int, int]]] = []
    while ready := {c: rows for c in progress.consumers if (rows := progress.ready(c))}:
        consumer = data.draw(st.sampled_from(sorted(ready)))
        rows = ready[consumer]
        if flow[consumer.stage].scope is Scope.ROW:
            rows = data.draw(st.lists(st.sampled_from(rows), min_size=1, unique=True))
        progress.consume(consumer, rows)
        if data.draw(st.booleans()):
            progress.give_back(consumer, rows)
            progress.consume(consumer, rows)
        if flow[consumer.stage].kind is not Kind.TRAIN:
            progress.write(consumer.stage, rows)
        seen += [(consumer, row) for row in rows]
    assert sorted(seen) == sorted((consumer, row) for consumer in progress.consumers for row in uids(3))


def test_rows_that_leave_take_their_bits_with_them() -> None:
    progress = StageProgress(dapo())
    progress.admit(uids(3))
    progress.write("actor.generate", uids(3)[1:])
    progress.forget([(0, 0, 1), (0, 1, 0)])
    assert progress.uids == [(0, 0, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]
    assert progress.ready(Consumer("reward.verify")) == progress.uids[1:]
    assert progress.is_written("actor.generate", [(0, 2, 1)]) and not progress.is_written("actor.generate", [(0, 0, 0)])
    progress.admit([(0, 1, 0)])
    assert progress.ready(Consumer("actor.generate")) == [*progress.uids]


def test_what_cannot_be_is_refused() -> None:
    progress = StageProgress(dapo())
    progress.admit(uids(1))
    with pytest.raises(ValueError, match="admitted twice"):
        progress.admit([(0, 0, 1)])
    with pytest.raises(ValueError, match="not ready"):
        progress.consume(Consumer("reward.verify"), [(0, 0, 0)])
    progress.write("actor.generate", [(0, 0, 0)])
    with pytest.raises(ValueError, match="second time"):
        progress.write("actor.generate", uids(1))
