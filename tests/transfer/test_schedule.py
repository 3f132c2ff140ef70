"""The streaming schedule, step by step: what is given out, what waits for what, and what leaves."""

import pytest

from braidrl.flow import Flow, Kind, Scope, Stage, actor, reference
from braidrl.flow.batches import Sizes
from braidrl.flow.readiness import Uid
from braidrl.flow.stage import Signature
from braidrl.transfer.queue.tasks import LeaseLost
from braidrl.transfer.schedule import StreamSchedule

SELECT = Stage("informative", "informative", None, Signature(Kind.SELECT, ("tokens",), scope=Scope.GROUP))
UPDATE = Stage("actor.update", "update", "actor", Signature(Kind.TRAIN, ("tokens", "old_log_probs")))
UPDATE_AFTER = Stage("actor.update", "update", "actor", Signature(Kind.TRAIN, ("tokens", "ref_log_probs")))
PLAIN = Flow("plain", [actor.generate(), actor.log_probs(), UPDATE])
SELECTING = Flow("selecting", [actor.generate(), SELECT, actor.log_probs(), UPDATE])


def begin(flow: Flow, staleness: int = 0) -> StreamSchedule:
    return StreamSchedule(flow, Sizes(5, 2, 2, 2, max_staleness=staleness))


def admit(schedule: StreamSchedule, first: int, engine: int = 0) -> list[Uid]:
    groups = range(first, first + schedule.groups_wanted(engine))
    uids = [(0, group, sample) for group in groups for sample in range(2)]
    schedule.admit(uids)
    schedule.close()
    return uids


def work(schedule: StreamSchedule, stage: str, most: int = 99, version: int = 0) -> list[Uid]:
    """One worker takes what is ready and does it."""
    lease = schedule.take(stage, "worker", 0.0, 1.0, most)
    return list(schedule.acknowledge(lease.number, 0.0, version).rows) if lease else []


def finish_iteration(schedule: StreamSchedule) -> None:
    while schedule.due_publication() is None:
        work(schedule, "actor.log_probs")
        work(schedule, "actor.update")
        for stage in schedule.due_steps():
            schedule.stepped(stage)
    schedule.publish()


def test_the_first_step_waits_until_old_log_probs_of_the_whole_batch_are_there() -> None:
    schedule = begin(PLAIN)
    uids = admit(schedule, 0)
    work(schedule, "actor.generate")
    update = schedule.batches[1].updates["actor.update"][0]
    leases = [lease for _ in uids if (lease := schedule.take("actor.log_probs", "worker", 0.0, 1.0, 1))]
    leases.sort(key=lambda lease: lease.rows[0] not in update.rows)
    for lease in leases[:2]:
        schedule.acknowledge(lease.number, 0.0)
    assert sorted(work(schedule, "actor.update")) == sorted(update.rows), "accumulating does not wait"
    assert schedule.due_steps() == []
    for lease in leases[2:]:
        schedule.acknowledge(lease.number, 0.0)
    assert schedule.due_steps() == ["actor.update"]
    schedule.stepped("actor.update")
    assert schedule.due_steps() == [] and schedule.due_publication() is None
    assert sorted(work(schedule, "actor.update")) == sorted(set(uids) - set(update.rows))
    schedule.stepped("actor.update")
    assert schedule.due_publication() == 1
    assert schedule.publish().uids == uids and not schedule.tasks.rows


def test_log_probs_of_the_next_batch_wait_for_the_version_that_it_is_trained_on() -> None:
    schedule = begin(PLAIN, staleness=1)
    first, second = admit(schedule, 0), admit(schedule, 2)
    assert len(work(schedule, "actor.generate", most=8)) == 4 and len(work(schedule, "actor.generate", most=8)) == 4
    assert work(schedule, "actor.log_probs") == first
    assert work(schedule, "actor.log_probs") == []
    finish_iteration(schedule)
    assert work(schedule, "actor.log_probs") == second
    finish_iteration(schedule)
    assert schedule.published == 2 and schedule.max_staleness_seen == 1


def test_admission_runs_ahead_by_the_allowed_staleness_and_no_further() -> None:
    on_policy, ahead = begin(PLAIN), begin(PLAIN, staleness=1)
    admit(on_policy, 0)
    assert on_policy.groups_wanted(0) == 0 and on_policy.groups_wanted(1) == 2
    admit(ahead, 0)
    admit(ahead, 2)
    assert ahead.groups_wanted(0) == 0 and ahead.groups_wanted(1) == 2


def test_an_engine_that_lags_behind_the_published_version_holds_admission_back() -> None:
    schedule = begin(PLAIN)
    admit(schedule, 0)
    work(schedule, "actor.generate")
    finish_iteration(schedule)
    assert schedule.published == 1 and schedule.groups_wanted(0) == 0 and schedule.groups_wanted(1) == 2


def test_dropped_groups_leave_and_are_replaced_before_the_batch_is_known() -> None:
    schedule = begin(SELECTING)
    uids = admit(schedule, 0)
    work(schedule, "actor.generate")
    lease = schedule.take("informative", "worker", 0.0, 1.0, 99)
    assert lease is not None and list(lease.rows) == uids
    schedule.select(lease.number, 0.5, {0: "all_wrong", 1: None})
    assert schedule.close() is None
    refill = admit(schedule, 2)
    assert {uid[1] for uid in refill} == {2, 3}
    work(schedule, "actor.generate")
    held = schedule.take("informative", "slow", 0.0, 1.0, 99)
    assert held is not None and list(held.rows) == refill
    schedule.select(held.number, 0.5, {2: None, 3: None})
    outcome = schedule.close()
    assert outcome is not None and outcome.groups == (1, 2)
    assert outcome.dropped == {"all_wrong": 1, "surplus": 1} and outcome.released == (0, 3)
    assert {uid[1] for uid in schedule.tasks.rows} == {1, 2}


def test_a_batch_closes_while_surplus_is_still_generated_and_its_late_answer_is_refused() -> None:
    schedule = begin(SELECTING)
    admit(schedule, 0)
    work(schedule, "actor.generate")
    lease = schedule.take("informative", "worker", 0.0, 1.0, 99)
    assert lease is not None
    schedule.select(lease.number, 0.0, {0: "all_wrong", 1: None})
    admit(schedule, 2)
    assert work(schedule, "actor.generate", most=2) == [(0, 2, 0), (0, 2, 1)]
    generating = schedule.take("actor.generate", "slow", 0.0, 9.0, 2)
    assert generating is not None and generating.rows == ((0, 3, 0), (0, 3, 1))
    lease = schedule.take("informative", "worker", 0.0, 1.0, 99)
    assert lease is not None
    schedule.select(lease.number, 0.0, {2: None})
    outcome = schedule.close()
    assert outcome is not None and outcome.groups == (1, 2) and outcome.dropped == {"all_wrong": 1, "surplus": 1}
    with pytest.raises(LeaseLost):
        schedule.acknowledge(generating.number, 1.0, 0)


def test_what_a_dead_or_silent_worker_held_is_given_to_the_next() -> None:
    schedule = begin(PLAIN)
    uids = admit(schedule, 0)
    lease = schedule.take("actor.generate", "dies", 0.0, 10.0, 2)
    silent = schedule.take("actor.generate", "silent", 0.0, 1.0, 2)
    assert lease is not None and silent is not None and [*lease.rows, *silent.rows] == uids
    assert schedule.take("actor.generate", "other", 0.0, 1.0, 2) is None
    schedule.fail_holder("dies")
    schedule.tasks.give_up(schedule.tasks.leases.expired(2.0))
    assert work(schedule, "actor.generate") == uids
    with pytest.raises(LeaseLost):
        schedule.acknowledge(silent.number, 2.0, 0)


def test_engines_may_load_together_only_between_two_batches() -> None:
    schedule = begin(SELECTING)
    assert schedule.is_generation_over()
    admit(schedule, 0)
    assert not schedule.is_generation_over()
    work(schedule, "actor.generate")
    assert not schedule.is_generation_over(), "the batch may need another wave"
    lease = schedule.take("informative", "worker", 0.0, 1.0, 99)
    assert lease is not None
    schedule.select(lease.number, 0.0, {0: None, 1: None})
    assert schedule.close() is not None and schedule.is_generation_over()


def test_group_stages_take_whole_groups_even_where_a_lease_holds_fewer_rows() -> None:
    schedule = begin(SELECTING)
    uids = admit(schedule, 0)
    work(schedule, "actor.generate")
    lease = schedule.take("informative", "worker", 0.0, 1.0, 1)
    assert lease is not None and list(lease.rows) == uids[:2]


def test_inference_after_an_update_in_the_list_waits_for_it() -> None:
    """Its weights are those after the update: here of a reference that takes the actor's before it is asked."""
    follow = Stage("reference.update", "update", "reference", Signature(Kind.TRAIN, ()), {"source": "actor"})
    schedule = begin(Flow("following", [actor.generate(), follow, reference.log_probs(), UPDATE_AFTER]))
    admit(schedule, 0)
    assert work(schedule, "actor.generate")
    assert work(schedule, "reference.log_probs") == []
    assert schedule.due_steps() == ["reference.update"]
    schedule.stepped("reference.update")
    assert len(work(schedule, "reference.log_probs")) == 4
