"""The streaming schedule, step by step: what is given out, what waits for what, and what leaves."""

import random
from collections import defaultdict

import pytest

from braidrl.data.rows import Uid
from braidrl.flow import Flow, Kind, Scope, Stage, actor, reference
from braidrl.flow.batches import Sizes, UpdatesInProgress
from braidrl.flow.selecting import started_too_many
from braidrl.queue.table import Lease
from braidrl.runtimes.streaming.schedule import StreamSchedule
from braidrl.weights.versions import LoadingSchedule

SELECT = Stage("informative", "informative", None, kind=Kind.SELECT, reads=("tokens",), scope=Scope.GROUP)
UPDATE = Stage("actor.update", "update", "actor", kind=Kind.TRAIN, reads=("tokens", "old_log_probs"))
UPDATE_NOW = Stage("actor.update", "update", "actor", kind=Kind.TRAIN, reads=("tokens",))
UPDATE_SCORED = Stage("actor.update", "update", "actor", kind=Kind.TRAIN, reads=("tokens", "score"))
UPDATE_AFTER = Stage("actor.update", "update", "actor", kind=Kind.TRAIN, reads=("tokens", "ref_log_probs"))
PLAIN = Flow("plain", [actor.generate(), actor.log_probs(), UPDATE])
AT_ONCE = Flow("at once", [actor.generate(), SELECT, UPDATE_NOW])
SELECTING = Flow("selecting", [actor.generate(), SELECT, actor.log_probs(), UPDATE])


TRAIN = "train.actor"


def begin(flow: Flow, staleness: int = 0) -> StreamSchedule:
    return StreamSchedule(flow, Sizes(5, 2, 2, 2, max_staleness=staleness))


def admit(schedule: StreamSchedule, first: int, engine: int = 0, samples: int = 2) -> list[Uid]:
    groups = range(first, first + schedule.admission.groups_wanted(engine))
    uids = [(0, group, sample) for group in groups for sample in range(samples)]
    schedule.admission.admit(uids)
    schedule.admission.close()
    return uids


def work(schedule: StreamSchedule, name: str, most: int = 99, version: int = 0) -> list[Uid]:
    """One worker takes what is ready and does it."""
    lease = schedule.take(name, "worker", 0.0, 1.0, most)
    return finish(schedule, lease, version) if lease else []


def finish(schedule: StreamSchedule, lease: Lease, version: int = 0) -> list[Uid]:
    """Complete a lease; return the rows that it still held."""
    rows = schedule.tasks.complete(lease)
    schedule.done(lease.task, rows, dict.fromkeys(rows, version))
    return rows


def finish_iteration(schedule: StreamSchedule) -> None:
    """A trainer takes what is ready, makes all steps, and ends the batch."""
    work(schedule, TRAIN)
    steps(schedule)
    schedule.publish()


def steps(schedule: StreamSchedule) -> None:
    stage, batch = schedule.flow["actor.update"], schedule.progress.coming
    assert batch is not None
    while schedule.progress.may_step(stage):
        schedule.progress.stepped(stage.name)
    assert schedule.progress.due_publication() == batch.iteration


def test_updates_accumulate_as_rows_arrive_in_order_of_steps() -> None:
    schedule = StreamSchedule(PLAIN, Sizes(5, 4, 2, 4, epochs=2))
    uids = admit(schedule, 0)
    work(schedule, "actor.generate")
    batch, progress = schedule.progress.batches[1], UpdatesInProgress(4, 4)
    leases = [schedule.take(TRAIN, "trainer", 0.0, 9.0, 4) for _ in range(2)]
    trained: list[list[Uid]] = [[] for _ in range(4)]
    for lease in leases:
        assert lease is not None
        progress.add(lease, batch.updates_of(lease.rows))
        for piece, places in progress.take():
            trained[0] += [piece.rows[place] for place in places]
    assert progress.is_complete and schedule.progress.rows_trained() == (0, 16)
    for number in range(1, 4):
        progress.steps_made += 1
        schedule.progress.stepped("actor.update")
        assert progress.is_complete
        trained[number] = [piece.rows[place] for piece, places in progress.take() for place in places]
    assert sorted(trained[0] + trained[1]) == sorted(trained[2] + trained[3]) == sorted(uids)
    updates = schedule.sizes.updates(1, [uid[1] for uid in uids], [uid[2] for uid in uids])
    assert [[uids[row] for row in rows] for rows in updates] == [sorted(rows) for rows in trained]
    assert schedule.progress.due_publication() is None and schedule.progress.rows_trained() == (12, 16)


def test_a_batch_is_published_after_its_rows_and_steps_are_done() -> None:
    schedule = begin(PLAIN)
    uids = admit(schedule, 0)
    work(schedule, "actor.generate")
    lease = schedule.take(TRAIN, "trainer", 0.0, 9.0, 99)
    assert lease is not None
    for _ in range(2):
        schedule.progress.stepped("actor.update")
    assert schedule.progress.due_publication() is None
    finish(schedule, lease)
    assert schedule.progress.due_publication() == 1
    assert schedule.publish().uids == uids and not schedule.tasks.rows


def test_next_batch_trains_after_publication_of_its_version() -> None:
    schedule = begin(PLAIN, staleness=1)
    first, second = admit(schedule, 0), admit(schedule, 2)
    assert len(work(schedule, "actor.generate", most=8)) == 4 and len(work(schedule, "actor.generate", most=8)) == 4
    assert work(schedule, TRAIN) == first
    assert work(schedule, TRAIN) == []
    steps(schedule)
    schedule.publish()
    assert work(schedule, TRAIN) == second
    steps(schedule)
    schedule.publish()
    assert schedule.progress.published == 2 and schedule.max_staleness_seen == 1


def test_leases_of_a_trainers_ranks_grow_and_shrink_within_an_update() -> None:
    schedule, leases = StreamSchedule(PLAIN, Sizes(1, 32, 2, 64)), list[int]()
    admit(schedule, 0)
    while work(schedule, "actor.generate", most=1):
        # Eight ranks get rows that come one by one.
        lease = schedule.take(TRAIN, "trainer", 0.0, 9.0, most=99, ranks=8)
        leases += [len(lease.rows)] if lease is not None else []
    assert leases == [8, 8, 16, 16, 8, 8]


def test_leases_of_a_trainer_wait_for_no_more_rows_than_they_hold() -> None:
    schedule, leases = StreamSchedule(PLAIN, Sizes(1, 16, 2, 16)), list[int]()
    admit(schedule, 0)
    while work(schedule, "actor.generate", most=1):
        lease = schedule.take(TRAIN, "trainer", 0.0, 9.0, most=2, ranks=2)
        leases += [len(lease.rows)] if lease is not None else []
    assert leases == 16 * [2]


def test_batch_started_before_checkpoint_trains_unchanged() -> None:
    schedule, again = begin(PLAIN, staleness=1), begin(PLAIN, staleness=1)
    admit(schedule, 0)
    second = admit(schedule, 2)
    work(schedule, "actor.generate")
    lease = schedule.take("actor.generate", "engine", 0.0, 99.0, 1, engine_version=0)
    assert lease is not None and schedule.admission.older_batches() == [], "no version is older than the first"
    finish_iteration(schedule)
    assert schedule.admission.older_batches() == [2] and not schedule.progress.is_drawn(2)
    finish(schedule, lease)
    work(schedule, "actor.generate")
    assert schedule.progress.is_drawn(2)
    again.admission.resume(1, schedule.admission.sampling.settled(), {})
    again.admission.restore_batch(dict.fromkeys(second, 0))
    assert (
        again.admission.older_batches() == [2]
        and again.progress.is_drawn(2)
        and again.admission.sampling.admitted == schedule.admission.sampling.admitted
    )
    assert again.progress.batches[2].updates_of(second) == schedule.progress.batches[2].updates_of(second)
    finish_iteration(again)
    assert again.progress.published == 2 and again.max_staleness_seen == 1 and not again.tasks.rows


def test_admission_runs_ahead_by_the_allowed_staleness_and_no_further() -> None:
    on_policy, ahead = begin(PLAIN), begin(PLAIN, staleness=1)
    first, second = admit(on_policy, 0), admit(on_policy, 2)
    lease = on_policy.take("actor.generate", "engine", 0.0, 9.0, 99, engine_version=0)
    assert lease is not None and sorted(lease.rows) == first, "the rows of the next batch wait for the next version"
    assert on_policy.take("actor.generate", "other", 0.0, 9.0, 99, engine_version=0) is None
    newer = on_policy.take("actor.generate", "other", 0.0, 9.0, 99, engine_version=1)
    assert newer is not None and sorted(newer.rows) == second
    assert on_policy.admission.groups_wanted(0) == 0 and on_policy.admission.groups_wanted(1) == 2
    admit(ahead, 0)
    admit(ahead, 2)
    assert ahead.admission.groups_wanted(0) == 0 and ahead.admission.groups_wanted(1) == 2


def test_an_engine_that_lags_behind_the_published_version_holds_admission_back() -> None:
    schedule = begin(PLAIN)
    admit(schedule, 0)
    work(schedule, "actor.generate")
    finish_iteration(schedule)
    admit(schedule, 2)
    assert schedule.progress.published == 1
    assert schedule.admission.groups_wanted(0) == 0 and schedule.admission.groups_wanted(1) == 2


def judge(schedule: StreamSchedule, reasons: dict[int, str | None]) -> None:
    """The main process gives verdicts on all groups that are ready, which must be these."""
    rows = schedule.groups_to_judge("informative")
    assert {uid[1] for uid in rows} == set(reasons)
    schedule.judged("informative", rows, {group: why for group, why in reasons.items() if why is not None})


def test_dropped_groups_leave_and_are_replaced_before_the_batch_is_known() -> None:
    schedule = begin(SELECTING)
    admit(schedule, 0)
    work(schedule, "actor.generate")
    judge(schedule, {0: "all_wrong", 1: None})
    assert schedule.admission.close() is None
    refill = admit(schedule, 2)
    assert {uid[1] for uid in refill} == {2, 3}
    work(schedule, "actor.generate")
    judge(schedule, {2: None, 3: None})
    outcome = schedule.admission.close()
    assert outcome is not None and outcome.groups == (1, 2)
    assert outcome.dropped == {"all_wrong": 1, "surplus": 1} and outcome.released == (0, 3)
    assert {uid[1] for uid in schedule.tasks.rows} == {1, 2}


def test_batch_closes_before_surplus_and_its_rows_leave_their_leases() -> None:
    schedule = begin(SELECTING)
    admit(schedule, 0)
    work(schedule, "actor.generate")
    judge(schedule, {0: "all_wrong", 1: None})
    admit(schedule, 2)
    lease = schedule.take("actor.generate", "slow", 0.0, 9.0, 4)
    assert lease is not None and lease.rows == ((0, 2, 0), (0, 2, 1), (0, 3, 0), (0, 3, 1))
    rows = schedule.tasks.complete(lease, [0, 1])
    schedule.done("actor.generate", rows, dict.fromkeys(rows, 0))
    judge(schedule, {2: None})
    outcome = schedule.admission.close()
    assert outcome is not None and outcome.groups == (1, 2) and outcome.dropped == {"all_wrong": 1, "surplus": 1}
    assert schedule.admission.dropped == {lease: [(0, 3, 0), (0, 3, 1)]}
    assert schedule.tasks.complete(lease, [2, 3]) == []


def test_rows_of_dead_or_hanging_worker_are_leased_again() -> None:
    schedule = begin(PLAIN)
    uids = admit(schedule, 0)
    lease = schedule.take("actor.generate", "dies", 0.0, 10.0, 2)
    silent = schedule.take("actor.generate", "silent", 0.0, 1.0, 2)
    assert lease is not None and silent is not None and [*lease.rows, *silent.rows] == uids
    assert schedule.take("actor.generate", "other", 0.0, 1.0, 2) is None
    schedule.tasks.give_up(schedule.tasks.leases.of("dies"))
    schedule.tasks.give_up(schedule.tasks.leases.expired(2.0))
    assert work(schedule, "actor.generate") == uids
    assert finish(schedule, silent) == []


def test_engines_may_load_together_only_between_two_batches() -> None:
    schedule = begin(SELECTING)
    assert schedule.admission.is_generation_over()
    admit(schedule, 0)
    assert not schedule.admission.is_generation_over()
    work(schedule, "actor.generate")
    assert not schedule.admission.is_generation_over(), "the batch may need another wave"
    judge(schedule, {0: None, 1: None})
    assert schedule.admission.close() is not None and schedule.admission.is_generation_over()


@pytest.mark.parametrize("staleness", [0, 1, 2, 3])
def test_version_of_a_batch_follows_from_its_number_however_late_weights_arrive(staleness: int) -> None:
    for seed in range(20):
        chance, started, first = random.Random(seed), defaultdict[int, set[int]](set), 0
        schedule, loading = begin(PLAIN, staleness), LoadingSchedule("end")
        loading.join("engine")
        while schedule.progress.published < schedule.sizes.iterations:
            match chance.choice(["admit", "generate", "train", "weights arrive"]):
                case "admit":
                    first += len(admit(schedule, first, loading.target)) // 2
                case "generate" if order := loading.load("engine", 0):
                    loading.loaded("engine", order.version)
                case "generate":
                    version = loading.engines["engine"].version
                    lease = schedule.take("actor.generate", "engine", 0.0, 1.0, chance.randint(1, 4), version)
                    for _, group, _ in finish(schedule, lease, version) if lease else ():
                        started[schedule.admission.iteration_of[group]].add(version)
                case "train":
                    work(schedule, TRAIN)
                    while schedule.progress.may_step(UPDATE) and schedule.progress.is_drawn(
                        schedule.progress.published + 1
                    ):
                        schedule.progress.stepped(UPDATE.name)
                    if schedule.progress.due_publication():
                        schedule.publish()
                case _:
                    loading.advance(schedule.progress.published, schedule.admission.is_generation_over(loading.target))
        assert started == {number: {max(0, number - 1 - staleness)} for number in range(1, 6)}


def test_engines_keep_a_version_until_the_next_batch_has_started_on_it() -> None:
    schedule = begin(PLAIN, staleness=1)
    for iteration in (1, 2):
        admit(schedule, 2 * iteration)
        work(schedule, "actor.generate")
    finish_iteration(schedule)
    finish_iteration(schedule)
    # Version 2 is published before the main process has opened the third batch, which version 1 may start.
    assert schedule.admission.opened == 2 and schedule.admission.is_generation_over(0)
    assert not schedule.admission.is_generation_over(1)
    admit(schedule, 6, engine=1)
    assert not schedule.admission.is_generation_over(1)
    work(schedule, "actor.generate")
    assert schedule.admission.opened == 3 and schedule.admission.is_generation_over(1)


def test_trainer_with_a_group_stage_takes_whole_groups_beyond_row_limit() -> None:
    normalized = Stage(
        "normalized", "normalized", None, kind=Kind.COMPUTE, reads=("version",), writes=("score",), scope=Scope.GROUP
    )
    schedule = begin(Flow("grouped", [actor.generate(), normalized, UPDATE_SCORED]))
    uids = admit(schedule, 0)
    lease = schedule.take("actor.generate", "engine", 0.0, 9.0, 3)
    assert lease is not None
    finish(schedule, lease)
    assert work(schedule, TRAIN, most=1) == uids[:2] and work(schedule, TRAIN, most=1) == []


def test_replacement_trainer_trains_rows_again() -> None:
    schedule = begin(PLAIN, staleness=1)
    uids, second = admit(schedule, 0), admit(schedule, 2)
    assert len(work(schedule, "actor.generate", most=4)) == 4 and len(work(schedule, "actor.generate", most=4)) == 4
    lost = schedule.take(TRAIN, "lost", 0.0, 1.0, 3)
    assert lost is not None
    schedule.progress.stepped("actor.update")
    schedule.tasks.give_up(schedule.tasks.leases.of("lost"))
    schedule.progress.train_again()
    assert schedule.progress.rows_trained() == (0, 4)
    assert work(schedule, TRAIN) == uids
    # Another trained role's worker dies after this one is done.
    schedule.progress.train_again()
    assert work(schedule, TRAIN) == uids
    steps(schedule)
    assert schedule.publish().uids == uids
    schedule.progress.train_again()
    finish_iteration(schedule)
    assert schedule.progress.published == 2 and not schedule.tasks.rows and {uid[1] for uid in second} == {2, 3}


def test_inference_after_an_update_in_the_list_waits_for_it() -> None:
    """Its weights are those after the update: here of a reference that takes the actor's before it is asked."""
    follow = Stage("reference.update", "update", "reference", {"source": "actor"}, kind=Kind.TRAIN)
    schedule = begin(Flow("following", [actor.generate(), follow, reference.log_probs(), UPDATE_AFTER]))
    admit(schedule, 0)
    assert work(schedule, "actor.generate")
    assert work(schedule, "reference.log_probs") == []
    assert schedule.progress.may_step(follow) and not schedule.progress.may_step(UPDATE_AFTER)
    schedule.progress.stepped("reference.update")
    assert not schedule.progress.may_step(follow) and schedule.progress.may_step(UPDATE_AFTER)
    assert len(work(schedule, "reference.log_probs")) == 4


def decided(schedule: StreamSchedule, reasons: dict[int, str | None], version: int = 0) -> None:
    """Generates and selects some groups, whatever else is ready."""
    for group in reasons:
        lease = schedule.tasks.lease("actor.generate", schedule.admission.rows_of[group], "engine", 0.0, 9.0)
        assert lease is not None
        finish(schedule, lease, version)
    selected(schedule, reasons)


def selected(schedule: StreamSchedule, reasons: dict[int, str | None]) -> None:
    task = schedule.tasks.tasks["informative"]
    rows = [uid for group in reasons for uid in schedule.admission.rows_of[group]]
    assert task.are_free(rows)
    task.finish(rows)
    schedule.judged("informative", rows, {group: why for group, why in reasons.items() if why is not None})
    schedule.admission.close()


def trained(schedule: StreamSchedule) -> set[int]:
    return {uid[1] for uid in work(schedule, TRAIN)}


def test_kept_group_trains_once_its_selection_is_certain() -> None:
    schedule = StreamSchedule(AT_ONCE, Sizes(3, 4, 2, 8))
    admit(schedule, 0)
    decided(schedule, {2: None})
    assert trained(schedule) == {2}, "whatever becomes of 0 and 1, three places are left before it"
    decided(schedule, {0: "all_wrong"})
    admit(schedule, 4)
    decided(schedule, {5: None})
    assert trained(schedule) == set(), "1, 3 and 4 could all be kept"
    decided(schedule, {4: "all_wrong"})
    assert trained(schedule) == {5} and schedule.admission.is_open
    decided(schedule, {1: None, 3: None})
    assert trained(schedule) == {1, 3} and not schedule.admission.is_open


def test_group_joins_its_update_once_position_is_certain() -> None:
    sizes = Sizes(3, 4, 2, 2, seed=1)
    schedule, closed = StreamSchedule(AT_ONCE, sizes), StreamSchedule(PLAIN, sizes)
    admit(schedule, 0)
    admit(closed, 0)
    decided(schedule, {3: None, 1: None, 2: None})
    assert trained(schedule) == set()
    decided(schedule, {0: None})
    uids = schedule.progress.batches[1].uids
    assert schedule.progress.batches[1].updates_of(uids) == closed.progress.batches[1].updates_of(uids)
    assert trained(schedule) == {0, 1, 2, 3}


def test_groups_admitted_ahead_of_decisions_are_returned_on_policy() -> None:
    schedule = StreamSchedule(AT_ONCE, Sizes(3, 8, 2, 16))
    admit(schedule, 0)
    decided(schedule, {0: "all_wrong", 1: "all_wrong", 2: None, 3: None})
    assert {uid[1] for uid in admit(schedule, 8)} == {8, 9, 10, 11}, "as many as are missing, and two more"
    decided(schedule, dict.fromkeys([4, 5, 6, 7, 8, 9]))
    # In waves three would have followed the first eight.
    assert not schedule.admission.is_open and schedule.admission.sampling.admitted == 10
    assert {uid[1] for uid in schedule.tasks.rows} == {2, 3, 4, 5, 6, 7, 8, 9}


def test_with_staleness_groups_admitted_ahead_belong_to_the_next_batch() -> None:
    schedule = StreamSchedule(AT_ONCE, Sizes(3, 2, 2, 4, max_staleness=1))
    assert len(admit(schedule, 0)) == 4 * 2, "those of the batch after this may be started too"
    assert schedule.admission.iteration_of == {0: 1, 1: 1, 2: 2, 3: 2}
    decided(schedule, {2: None, 0: None, 1: None})
    assert [uid[1] for uid in schedule.progress.batches[1].uids[::2]] == [0, 1]
    assert set(schedule.admission.rows_of) == {0, 1, 2, 3}, "2 waits and 3 is generated"
    assert schedule.admission.groups_wanted(0) == 0 and schedule.admission.opened == 2
    decided(schedule, {3: None})
    assert not schedule.admission.is_open and [uid[1] for uid in schedule.progress.batches[2].uids[::2]] == [2, 3]


@pytest.mark.parametrize("engine", [0, 1])
def test_group_too_stale_for_next_batch_is_surplus(engine: int) -> None:
    schedule = StreamSchedule(AT_ONCE, Sizes(4, 8, 1, 8, max_staleness=1))
    admit(schedule, 0, samples=1)
    decided(schedule, dict.fromkeys(range(8)))
    assert schedule.admission.groups_wanted(0) == 0 and schedule.admission.opened == 2
    decided(schedule, {8: "all_wrong", 9: "all_wrong", 10: None, 11: None})
    assert [uid[1] for uid in admit(schedule, 16, samples=1)] == [16, 17, 18, 19]
    decided(schedule, dict.fromkeys(range(12, 17)))
    leases = [schedule.take("actor.generate", "engine", 0.0, 9.0, 1, engine_version=engine) for _ in range(3)]
    assert [lease.rows[0][1] for lease in leases if lease] == [17, 18, 19]
    assert leases[0] is not None
    finish(schedule, leases[0], engine)
    selected(schedule, {17: None})
    assert not schedule.admission.is_open
    assert set(schedule.admission.rows_of) == {*range(8), 10, 11, *range(12, 18)} | ({19} if engine else set())


def test_engines_load_together_while_groups_need_next_version() -> None:
    schedule = StreamSchedule(AT_ONCE, Sizes(4, 8, 1, 8, max_staleness=1))
    admit(schedule, 0, samples=1)
    decided(schedule, dict.fromkeys(range(8)))
    assert schedule.admission.groups_wanted(0) == 0 and schedule.admission.opened == 2
    decided(schedule, {8: "all_wrong", 9: "all_wrong", 10: None, 11: None})
    admit(schedule, 16, samples=1)
    decided(schedule, dict.fromkeys(range(12, 18)))
    assert not schedule.admission.is_open and 19 in schedule.admission.rows_of
    assert schedule.admission.groups_wanted(0) == 0
    assert schedule.take("actor.generate", "engine", 0.0, 9.0, 1, engine_version=0) is None
    assert schedule.admission.is_generation_over(), "else engines would keep version 0, with which 19 may not begin"
    lease = schedule.take("actor.generate", "engine", 0.0, 9.0, 1, engine_version=1)
    assert lease is not None and not schedule.admission.is_generation_over()


def started(schedule: StreamSchedule, version: int) -> list[int]:
    """The groups whose rows an engine of this version is given, and does."""
    groups = []
    while lease := schedule.take("actor.generate", "engine", 0.0, 9.0, 1, engine_version=version):
        groups += [group for _, group, _ in finish(schedule, lease, version)]
    return groups


def test_groups_beyond_stale_share_wait_for_batch_version() -> None:
    schedule = StreamSchedule(PLAIN, Sizes(5, 4, 1, 4, max_staleness=1, older_groups=1))
    admit(schedule, 0, samples=1)
    admit(schedule, 4, samples=1)
    assert started(schedule, 0) == [0, 1, 2, 3, 4] and schedule.admission.groups_wanted(0) == 0
    assert schedule.admission.is_generation_over(0), "engines that load together load what 5 to 7 wait for"
    finish_iteration(schedule)
    admit(schedule, 8, engine=1, samples=1)
    assert not schedule.admission.is_generation_over(1)
    assert started(schedule, 0) == [], "one that lags may not begin them"
    assert started(schedule, 1) == [5, 6, 7, 8]
    finish_iteration(schedule)
    assert schedule.versions.oldest[0, 8, 0] == 1


def test_dropped_group_frees_place_in_stale_share() -> None:
    schedule = StreamSchedule(AT_ONCE, Sizes(5, 4, 1, 4, max_staleness=1, older_groups=2))
    admit(schedule, 0, samples=1)
    decided(schedule, dict.fromkeys(range(4)))
    assert schedule.admission.groups_wanted(0) == 0 and schedule.admission.opened == 2, "4 to 7 went ahead"
    assert started(schedule, 0) == [4, 5] and not schedule.admission.is_generation_over(0), (
        "a verdict may give their places to others"
    )
    selected(schedule, {4: "all_wrong"})
    assert started(schedule, 0) == [6]
    selected(schedule, {5: None, 6: None})
    assert started(schedule, 0) == [] and schedule.admission.is_open and schedule.admission.is_generation_over(0)
    assert started(schedule, 1) == [7], "whatever the batch still needs is of its own version"


def test_groups_admitted_ahead_start_when_open_batch_needs_them() -> None:
    schedule = StreamSchedule(AT_ONCE, Sizes(5, 4, 1, 4, max_staleness=1, older_groups=1))
    admit(schedule, 0, samples=1)
    assert started(schedule, 0) == [0, 1, 2, 3, 4], "4 may be older in the next batch"
    selected(schedule, {0: "all_wrong", 1: "all_wrong"})
    assert started(schedule, 0) == [5, 6], "4 and 5 should be needed for this one, and 6 has the place in the next"


def test_started_groups_without_place_come_first() -> None:
    assert started_too_many({3: 0, 4: None, 5: 0, 6: 1, 7: None}, 2) == {3}
    assert started_too_many({3: 0, 5: 0}, 0) == {3, 5} and started_too_many({3: 0}, 2) == set()


def setting_aside(prompts: int) -> StreamSchedule:
    return StreamSchedule(PLAIN, Sizes(5, prompts, 1, prompts, max_staleness=1, surplus="keep", partial_rollout=True))


def leased(schedule: StreamSchedule, version: int) -> Lease:
    lease = schedule.take("actor.generate", "engine", 0.0, 1.0, 1, engine_version=version)
    assert lease is not None
    return lease


def test_suspended_row_resumes_and_finishes_in_next_batch() -> None:
    schedule = setting_aside(2)
    admit(schedule, 0, samples=1)
    long, short = leased(schedule, 0), leased(schedule, 0)
    assert schedule.admission.may_suspend(long.rows[0])
    schedule.suspend(long, {long.rows[0]: 0})
    finish(schedule, short)
    assert schedule.admission.close() is None, "its place is another group's"
    assert admit(schedule, 2, samples=1) == work(schedule, "actor.generate") == [(0, 2, 0), (0, 3, 0)]
    outcome = schedule.admission.close()
    assert outcome is not None and (outcome.groups, outcome.surplus) == ((1, 2), (3,))
    assert schedule.admission.groups_wanted(0) == 0 and not schedule.admission.is_open, (
        "with one version for going on it is started by its own"
    )
    finish_iteration(schedule)
    assert schedule.admission.groups_wanted(1) == 0 and schedule.admission.is_open
    assert schedule.admission.sampling.pending == [0]
    again = leased(schedule, 1)
    assert again.rows == long.rows and not schedule.admission.may_suspend(again.rows[0])
    finish(schedule, again)
    outcome = schedule.admission.close()
    assert outcome is not None and outcome.groups == (0, 3)
    finish_iteration(schedule)
    assert schedule.max_staleness_seen == 1


def test_first_groups_finish_when_suspended_ones_fill_staleness() -> None:
    schedule = setting_aside(1)
    admit(schedule, 0, samples=1)
    first = leased(schedule, 0)
    schedule.suspend(first, {first.rows[0]: 0})
    assert schedule.admission.close() is None and schedule.admission.groups_wanted(0) == 0
    to_its_end = leased(schedule, 0)
    assert to_its_end.rows == ((0, 0, 0),) and not schedule.admission.may_suspend(to_its_end.rows[0])
    finish(schedule, to_its_end)
    outcome = schedule.admission.close()
    assert outcome is not None and outcome.groups == (0,)
