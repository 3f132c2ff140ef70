"""Waves end with the first kept groups by number, for any order of arrival, and account for every group."""

import json
import random
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.errors import UserError
from braidrl.flow.selecting import UNFINISHED, GroupSelector, Selection, Verdict

rates = st.sampled_from([0.1, 0.3, 0.7, 1.0])
policies = st.sampled_from(["drop", "keep"])


def judge(group: int, rate: float, seed: int) -> str | None:
    """Return a verdict that depends on the group alone, as a real one does."""
    draw = random.Random(f"{seed}/{group}").random()
    return None if draw < rate else ("all_correct" if draw > (1 + rate) / 2 else "all_wrong")


def run(
    sampling: GroupSelector,
    batches: int,
    verdict: Callable[[int, int], Verdict],
    arrival: random.Random,
    shuffled: bool,
) -> tuple[list[Selection], int]:
    """Run `sampling` through several batches; groups arrive in portions and, if `shuffled`, in any order."""
    outcomes: list[Selection] = []
    admitted = 0
    for version in range(batches):
        sampling.begin(version)
        while (groups := sampling.batch()) is None or (sampling.surplus == "keep" and sampling.pending):
            if count := sampling.next_wave():
                sampling.admit(range(admitted, admitted + count))
                admitted += count
            waiting = list(sampling.pending)
            if shuffled:
                arrival.shuffle(waiting)
            portion = waiting[: arrival.randint(1, len(waiting))] if shuffled else waiting
            sampling.decide({group: verdict(group, version) for group in portion})
            sampling = GroupSelector.restored(json.loads(json.dumps(sampling.state())))
        outcomes.append(sampling.finish())
        assert outcomes[-1].groups == groups
    return outcomes, admitted


@given(st.integers(1, 9), rates, policies, st.integers(0, 999), st.integers(0, 999))
def test_arrival_changes_neither_batches_nor_counts(
    target: int, rate: float, policy: str, seed: int, order: int
) -> None:
    def verdict(group: int, version: int) -> Verdict:
        return Verdict(judge(group, rate, seed), version)

    staleness = 1 if policy == "keep" else 0
    runs = [
        run(GroupSelector(target, 10_000, policy, staleness), 5, verdict, random.Random(order), shuffled)  # type: ignore[arg-type]
        for shuffled in (False, True)
    ]
    assert runs[0] == runs[1]


@given(st.integers(1, 9), rates, policies, st.integers(0, 999))
def test_every_admitted_group_ends_once_and_batches_hold_the_first_kept(
    target: int, rate: float, policy: str, seed: int
) -> None:
    sampling = GroupSelector(target, 10_000, policy, 1)  # type: ignore[arg-type]
    outcomes, admitted = run(
        sampling, 6, lambda group, version: Verdict(judge(group, rate, seed), version), random.Random(seed), True
    )
    ended = [group for outcome in outcomes for group in (*outcome.groups, *outcome.released)]
    assert sorted((*ended, *outcomes[-1].surplus)) == list(range(admitted))
    for outcome in outcomes:
        assert len(outcome.groups) == target and list(outcome.groups) == sorted(outcome.groups)
        assert all(judge(group, rate, seed) is None for group in outcome.groups)
        assert sum(outcome.dropped.values()) == len(outcome.released)
        over_number = {group for group in outcome.released if group > outcome.groups[-1]}
        if policy == "drop":
            assert outcome.dropped.get("surplus", 0) == len(over_number) and not outcome.surplus
            reasons = Counter(judge(group, rate, seed) for group in outcome.released if group not in over_number)
            assert outcome.dropped == Counter({"surplus": len(over_number)} if over_number else {}) + reasons
    if policy == "keep":
        first_kept = [group for group in range(admitted) if judge(group, rate, seed) is None]
        assert [group for outcome in outcomes for group in outcome.groups] == first_kept[: 6 * target]


def test_a_flow_that_selects_nothing_takes_one_wave_of_the_batch() -> None:
    sampling = GroupSelector(4, 100)
    sampling.begin(0)
    assert sampling.next_wave() == 4
    sampling.admit([0, 1, 2, 3])
    assert sampling.next_wave() == 0 and sampling.batch() is None
    sampling.decide({group: Verdict() for group in (3, 1, 0, 2)})
    assert sampling.next_wave() == 0 and sampling.finish() == Selection((0, 1, 2, 3), {}, (), ())


def test_later_waves_follow_the_share_kept_and_never_exceed_a_batch() -> None:
    sampling = GroupSelector(32, 1000)
    sampling.begin(0)
    sampling.admit(range(sampling.next_wave()))
    sampling.decide({group: Verdict(None if group < 16 else "all_wrong") for group in range(32)})
    assert sampling.next_wave() == 32
    sampling.admit(range(32, 64))
    sampling.decide({group: Verdict(None if group < 46 else "all_wrong") for group in range(32, 64)})
    # 2 of 32 are missing, 30 of 64 were kept.
    assert sampling.next_wave() == 5


def test_a_batch_is_known_before_later_groups_but_waits_for_kept_surplus() -> None:
    for policy in ("drop", "keep"):
        sampling = GroupSelector(2, 100, policy, 1)
        sampling.begin(0)
        sampling.admit([0, 1])
        sampling.decide({0: Verdict("all_wrong"), 1: Verdict()})
        sampling.admit([2, 3])
        sampling.decide({3: Verdict()})
        assert sampling.batch() is None, "group 2 can still be kept before group 3"
        sampling.admit([4])
        sampling.decide({2: Verdict()})
        assert sampling.batch() == (1, 2)
        if policy == "drop":
            assert sampling.finish() == Selection((1, 2), {"all_wrong": 1, "surplus": 2}, (0, 3, 4), ())
        else:
            with pytest.raises(ValueError, match="1 groups are undecided"):
                sampling.finish()
            sampling.decide({4: Verdict("all_correct")})
            assert sampling.finish() == Selection((1, 2), {"all_wrong": 1, "all_correct": 1}, (0, 4), (3,))
            sampling.begin(1)
            assert sampling.next_wave() == 1


def test_surplus_older_than_the_bound_is_dropped_as_stale() -> None:
    sampling = GroupSelector(1, 100, "keep", max_staleness=1)
    sampling.begin(0)
    sampling.admit([0, 1, 2])
    sampling.decide({group: Verdict(version=0) for group in range(3)})
    assert sampling.finish().surplus == (1, 2)
    sampling.begin(1)
    assert sampling.next_wave() == 0 and sampling.finish() == Selection((1,), {}, (), (2,))
    sampling.begin(2)
    assert sampling.next_wave() == 1
    sampling.admit([3])
    sampling.decide({3: Verdict(version=2)})
    assert sampling.finish() == Selection((3,), {"stale": 1}, (2,), ())


def test_an_epoch_without_a_kept_group_ends_with_an_explanation() -> None:
    sampling = GroupSelector(16, 64)
    sampling.begin(0)
    for start in (0, 16, 32, 48):
        assert sampling.next_wave() == 16
        sampling.admit(range(start, start + 16))
        wave = {group: Verdict("all_wrong", scores=(0.1, group / 100)) for group in range(start, start + 16)}
        if start < 48:
            sampling.decide(wave)
    with pytest.raises(
        UserError,
        match=(r"64 groups.*all wrong: 64;.*0.1 to 0.63\).*dynamic_sampling=rewards"),
    ):
        sampling.decide(wave)


@given(st.permutations(range(6)))
def test_the_end_of_a_hopeless_run_does_not_depend_on_arrival(order: list[int]) -> None:
    def ended(consecutive_dropped: int, waves: list[list[int]]) -> bool:
        sampling = GroupSelector(2, 3)
        sampling.begin(0)
        sampling.admit(range(6))
        try:
            for wave in waves:
                sampling.decide({g: Verdict("all_wrong" if g < consecutive_dropped else None) for g in wave})
                if sampling.batch():
                    break
        except UserError:
            return True
        return False

    assert not ended(2, [[group] for group in order]) and not ended(2, [order])
    assert ended(3, [[group] for group in order]) and ended(3, [order])


def test_mistakes_of_a_runtime_are_refused() -> None:
    sampling = GroupSelector(2, 10)
    sampling.begin(0)
    sampling.admit([5, 7])
    with pytest.raises(ValueError, match="numbers only rise"):
        sampling.admit([6])
    sampling.decide({5: Verdict()})
    with pytest.raises(ValueError, match="group 5 is not awaited"):
        sampling.decide({5: Verdict()})
    with pytest.raises(ValueError, match="before this one is not finished"):
        sampling.begin(1)
    with pytest.raises(ValueError, match="not complete"):
        sampling.finish()


def test_surplus_cannot_be_kept_on_policy() -> None:
    with pytest.raises(UserError, match=r"max_staleness=0 forbids; write trainer.max_staleness=1"):
        GroupSelector(2, 10, surplus="keep")


@pytest.mark.parametrize(("over", "missing", "started"), [(1.0, 10, 10), (1.1, 10, 11), (1.5, 3, 5), (2.0, 4, 8)])
def test_over_sampling_scales_the_first_wave(over: float, missing: int, started: int) -> None:
    sampling = GroupSelector(missing, 100, over_sampling=over)
    sampling.begin(0)
    assert sampling.next_wave() == started


def test_unfinished_groups_stay_pending_and_other_groups_start() -> None:
    sampling = GroupSelector(2, 100, "keep", max_staleness=1)
    sampling.begin(0)
    sampling.admit(range(sampling.next_wave()))
    sampling.decide({0: Verdict(), 1: Verdict(UNFINISHED)})
    assert sampling.next_wave() == 2 and sampling.finish_now() == []
    sampling.admit([2, 3])
    sampling.decide({2: Verdict(), 3: Verdict(UNFINISHED)})
    assert sampling.finish() == Selection((0, 2), {}, (), ())
    sampling = GroupSelector.restored(json.loads(json.dumps(sampling.state())))
    sampling.begin(1)
    assert sampling.pending == [1, 3] and sampling.next_wave() == 0
    sampling.decide({1: Verdict(version=0), 3: Verdict(UNFINISHED)})
    sampling.admit(range(4, 4 + sampling.next_wave()))
    sampling.decide(dict.fromkeys(sampling.pending, Verdict(UNFINISHED)))
    # Two batches' worth are not suspended: the missing rows are finished, the first group first.
    assert sampling.next_wave() == 0 and sampling.finish_now() == [3]
    sampling.decide({3: Verdict(version=0)})
    assert sampling.finish().groups == (1, 3)
    assert sampling.pending and min(sampling.pending) > 3


def test_groups_admitted_ahead_never_change_the_batch() -> None:
    sampling = GroupSelector(8, 100)
    sampling.begin(0)
    assert sampling.groups_wanted() == 8
    sampling.admit(range(8))
    sampling.decide({group: Verdict("all_wrong") for group in range(4)})
    assert sampling.next_wave() == 0 and sampling.groups_wanted() == 4, "four groups are certain to be missing"
    sampling.admit(range(8, 12))
    sampling.decide({group: Verdict() for group in range(4, 12)})
    assert sampling.members() == [(group, group - 4, group - 4) for group in range(4, 12)]
    # In waves, eight more would have been started after the first eight.
    assert sampling.next_wave() == 4 and not sampling.is_complete()
