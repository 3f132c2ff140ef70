"""The schedule in virtual time leaves no row lost, doubled, stale or stuck, for any durations, failures and sizes; its
times are exact.
"""

import time
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidrl.algorithms.random import uniform
from braidrl.data.rows import Uid
from braidrl.flow import Flow, Kind, Scope, Stage, actor, critic, reference, reward
from braidrl.flow.batches import Sizes, trained_on
from braidrl.flow.flow import is_optimized
from braidrl.flow.stage import When
from braidrl.plan.simulation import Deadlock, Runtime
from tests.plan.durations import busy_shares, long_tailed
from tests.plan.simulator import simulate
from tests.plan.synchronous import Account, AnyWorkload, Fate


def compute(
    name: str, reads: tuple[str, ...], writes: tuple[str, ...], scope: Scope = Scope.ROW, kind: Kind = Kind.COMPUTE
) -> Stage:
    return Stage(name, name, None, kind=kind, reads=reads, writes=writes, scope=scope)


def train(role: str, reads: tuple[str, ...]) -> Stage:
    return Stage(f"{role}.update", "update", role, kind=Kind.TRAIN, reads=reads)


NORMALIZED = compute("normalized", ("reward",), ("advantage",), Scope.GROUP)
GRPO = Flow("grpo", [actor.generate(), reward.verify(), NORMALIZED, train("actor", ("advantage",))])
DAPO = Flow(
    "dapo",
    [
        actor.generate(),
        reward.verify(),
        compute("informative", ("correct",), (), Scope.GROUP, Kind.SELECT),
        NORMALIZED,
        actor.log_probs(),
        train("actor", ("advantage", "old_log_probs")),
        reference.update(source="actor", decay=0.9),
    ],
)
PPO = Flow(
    "ppo",
    [
        actor.generate(),
        reward.score(),
        reference.log_probs(),
        critic.values(),
        actor.log_probs(),
        compute("gae", ("values", "reward", "ref_log_probs"), ("raw", "returns")),
        compute("whiten", ("raw",), ("advantages",), Scope.BATCH),
        train("critic", ("values", "returns")),
        train("actor", ("advantages", "old_log_probs")),
    ],
)
SELECTING = Flow("selecting", [*DAPO.stages[:4], train("actor", ("advantage",))])
# The critic trains alone at first, the reference follows every other iteration, and a check runs from the third on.
WARM_UP = Flow(
    "warm-up",
    [
        *PPO.stages[:-1],
        replace(PPO.stages[-1], when=When(start=2)),
        reference.update(source="actor", when=When(every=2)),
        replace(compute("check", ("advantages",), ("checked",)), when=When(start=3)),
    ],
)
RUNTIMES: list[Runtime] = ["eager", "hybrid", "distributed", "streaming"]


def random_seconds(seed: int) -> object:
    return lambda stage, uid: float(uniform(seed, stage, *uid)) ** 4 * 3


def random_fate(seed: int, share: float) -> object:
    def fate(lease: int) -> Fate:
        number = float(uniform(seed, "fate", lease))
        return "dies" if number < share / 2 else "late" if number < share else "done"

    return fate


@st.composite
def workloads(draw: st.DrawFn) -> AnyWorkload:
    flow = draw(st.sampled_from([GRPO, DAPO, PPO, WARM_UP]))
    seed = draw(st.integers(0, 10_000))
    prompts, samples = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    rows = prompts * samples
    staleness = draw(st.integers(0, 2))
    surplus = draw(st.sampled_from(["drop", "keep"])) if staleness else "drop"
    sizes = Sizes(
        iterations=draw(st.integers(1, 6)),
        prompts_per_step=prompts,
        samples_per_prompt=samples,
        rows_per_update=draw(st.sampled_from([n for n in range(1, rows + 1) if rows % n == 0])),
        epochs=draw(st.integers(1, 2)),
        max_staleness=staleness,
        surplus=surplus,
        seed=seed,
        older_groups=draw(st.none() | st.integers(0, prompts)) if staleness and surplus == "drop" else None,
        partial_rollout=surplus == "keep" and draw(st.booleans()),
    )
    keep, failing = draw(st.sampled_from([0.3, 0.8])), draw(st.sampled_from([0.0, 0.3]))
    return AnyWorkload(
        flow,
        sizes,
        random_seconds(seed),  # type: ignore[arg-type]
        workers={stage.name: draw(st.integers(1, 3)) for stage in flow.stages},
        pools={stage.name: draw(st.sampled_from("abc")) for stage in flow.stages},
        ranks=draw(st.integers(1, 4)),
        dispatch_rows=draw(st.integers(1, 5)),
        loading=draw(st.sampled_from(["end", "delayed", "rolling", "interrupt"])),
        verdict=lambda group: None if float(uniform(seed, "keep", group)) < keep else "all_wrong",
        fate=random_fate(seed, failing),  # type: ignore[arg-type]
        most_seconds=draw(st.sampled_from([0.02, 0.2, 1.0])),
        lease_seconds=50.0,
    )


def assert_each_row_is_trained_once(work: AnyWorkload, result: Account) -> None:
    """Assert that each row was trained once per train stage and epoch, dropped with a reason, or is still in work."""
    trained = [uid for groups in result.batches[: work.sizes.iterations] for uid in work.uids(groups)]
    expected = Counter(
        ((stage.name, epoch), uid)
        for iteration, groups in enumerate(result.batches[: work.sizes.iterations], 1)
        for stage in work.flow.stages
        if is_optimized(stage) and stage.when.includes(iteration)
        for epoch in range(work.sizes.epochs)
        for uid in work.uids(groups)
    )
    assert result.trained == expected
    ended = Counter([*trained, *work.uids(result.released)])
    assert set(ended.values()) == {1} and set(ended) <= result.admitted
    assert sum(result.dropped.values()) == len(result.released)
    assert len(result.ends) == work.sizes.iterations and result.ends == sorted(result.ends)
    assert 0 <= result.staleness <= work.sizes.max_staleness
    for iteration, versions in enumerate(result.versions, 1):
        older = sum(version < trained_on(iteration) for version in versions)
        assert work.sizes.older_groups is None or older <= work.sizes.older_groups * work.sizes.samples_per_prompt
    for groups in result.batches:
        assert len(groups) == work.sizes.prompts_per_step
        assert not work.flow.sampling_segment or all(work.verdict(group) is None for group in groups)


@settings(max_examples=80)
@given(workloads())
def test_streaming_trains_every_row_once_under_any_failures(work: AnyWorkload) -> None:
    assert_each_row_is_trained_once(work, simulate("streaming", work))


def test_lease_expiring_at_the_time_of_a_take_is_released() -> None:
    seconds = {"actor.generate": 0.05, "reward.verify": 1.0}
    work = AnyWorkload(
        GRPO,
        Sizes(1, 1, 1, 1),
        lambda stage, uid: seconds.get(stage, 0.0),
        fate=lambda lease: "late" if lease == 1 else "done",
        lease_seconds=50.0,
    )
    assert (
        0.05 + 50.0 == 50.0 * 1.001
    )  # When the first lease, of generation, would have been looked for a thousandth late.
    assert_each_row_is_trained_once(work, simulate("streaming", work))


@given(workloads(), st.sampled_from(RUNTIMES[:3]))
def test_the_other_runtimes_train_every_row_once(work: AnyWorkload, runtime: Runtime) -> None:
    assert_each_row_is_trained_once(work, simulate(runtime, work))


@pytest.mark.soak
@given(workloads())
def test_all_runtimes_train_equal_groups_per_iteration_on_policy(work: AnyWorkload) -> None:
    if work.sizes.max_staleness == 0:
        results = [simulate(runtime, work) for runtime in RUNTIMES]
        for result in results[1:]:
            assert (result.batches, result.dropped) == (results[0].batches, results[0].dropped)
            assert result.staleness == 0


def inference_heavy(pools: dict[str, str]) -> AnyWorkload:
    seconds = {"reward.score": 2.0, "reference.log_probs": 3.0, "critic.values": 1.0, "actor.generate": 4.0}
    flow = Flow(
        "three",
        [
            actor.generate(),
            reward.score(),
            reference.log_probs(),
            critic.values(),
            compute("join", ("values", "reward", "ref_log_probs"), ("advantages",)),
            train("actor", ("advantages",)),
        ],
    )
    return AnyWorkload(flow, Sizes(5, 4, 2, 8), lambda stage, uid: seconds.get(stage, 0.0) / 8, pools=pools)


def test_inference_roles_overlap_in_separate_pools_and_add_up_in_one() -> None:
    one = dict.fromkeys(
        ["actor.generate", "reward.score", "reference.log_probs", "critic.values", "actor.update"], "one"
    )
    assert simulate("hybrid", inference_heavy({})).seconds_per_iteration() == pytest.approx(4 + 3)
    assert simulate("hybrid", inference_heavy(one)).seconds_per_iteration() == pytest.approx(4 + 2 + 3 + 1)
    two = {"reward.score": "a", "critic.values": "a"}
    assert simulate("hybrid", inference_heavy(two)).seconds_per_iteration() == pytest.approx(4 + 3)
    assert simulate("eager", inference_heavy({})).seconds_per_iteration() == pytest.approx(10)


def test_ranks_divide_the_work_and_meet_where_they_must() -> None:
    work = inference_heavy({})
    assert simulate("distributed", work).seconds_per_iteration() == pytest.approx(10)
    quicker = AnyWorkload(work.flow, work.sizes, work.seconds, ranks=4)
    assert simulate("distributed", quicker).seconds_per_iteration() == pytest.approx(2.5)


def long_tailed_streaming(staleness: int, loading: str = "rolling", flow: Flow = GRPO) -> AnyWorkload:
    """8 generating and 4 training workers, training as long as generation on average, longest row ten times the median.

    Where the flow selects, half of the groups are dropped, and a row that is trained on costs twice as much.
    """
    rows, samples = 16, 4
    lengths = long_tailed(seed=3, median=1.0, longest=10.0, among=rows)
    mean = sum(lengths((0, group, sample)) for group in range(400) for sample in range(samples)) / 1600

    def seconds(stage: str, uid: Uid) -> float:
        # 8 workers generate at rows' own lengths, 4 train: half the seconds per row make both take as long.
        return {"actor.generate": lengths(uid), "actor.update": mean if flow is SELECTING else mean / 2}.get(stage, 0.0)

    return AnyWorkload(
        flow,
        Sizes(60, rows // samples, samples, rows, max_staleness=staleness),
        seconds,
        workers={"actor.generate": 8, "actor.update": 4},
        loading=loading,  # type: ignore[arg-type]
        verdict=lambda group: None if float(uniform(7, "keep", group)) < 0.5 else "all_wrong",
    )


def test_slot_of_a_finished_row_idles_for_one_decode_step() -> None:
    def seconds(stage: str, uid: Uid) -> float:
        return (2.0, 3.0, 2.0)[uid[2]] if stage == "actor.generate" else 0.0

    work = AnyWorkload(GRPO, Sizes(1, 1, 3, 3), seconds, slots=2)
    assert simulate("streaming", work).ends == [4.0]
    assert simulate("streaming", replace(work, step_seconds=1.0)).ends == [5.0]


def test_staleness_of_one_gives_half_more_throughput_with_long_tails() -> None:
    on_policy, ahead = simulate("streaming", long_tailed_streaming(0)), simulate("streaming", long_tailed_streaming(1))
    assert on_policy.seconds_per_iteration() > 1.5 * ahead.seconds_per_iteration()
    assert (on_policy.staleness, ahead.staleness) == (0, 1)
    # And this is why: who generates no longer waits for the longest answer.
    engines = [f"actor.generate/{number}" for number in range(8)]
    shares = [sum(busy_shares(result)[name] for name in engines) / 8 for result in (on_policy, ahead)]
    assert shares[1] > 1.5 * shares[0]


def test_time_with_an_on_policy_share_lies_between_the_extremes() -> None:
    results = []
    for staleness, older in ((1, None), (1, 2), (0, None)):
        work = long_tailed_streaming(staleness)
        result = simulate("streaming", replace(work, sizes=replace(work.sizes, older_groups=older)))
        own = [sum(v == n for v in versions) / len(versions) for n, versions in enumerate(result.versions)]
        results.append((result.seconds_per_iteration(), min(own), sum(own) / len(own)))
    seconds, least, mean = zip(*results, strict=True)
    assert seconds[0] < seconds[1] < seconds[2]
    assert least[1] == 0.5 and mean[0] < 0.1 < mean[1] < 0.6 and least[2] == 1


def test_selection_overlaps_with_training_and_with_the_next_batch() -> None:
    on_policy, ahead = (simulate("streaming", long_tailed_streaming(n, flow=SELECTING)) for n in (0, 1))
    assert on_policy.seconds_per_iteration() > 1.5 * ahead.seconds_per_iteration()
    assert (on_policy.staleness, ahead.staleness) == (0, 1)
    started, ended = dict[int, float](), dict[int, float]()
    for span in on_policy.spans:
        if span.stage == "actor.update":
            started.setdefault(span.iteration, span.start)
        elif span.stage == "actor.generate":
            ended[span.iteration] = max(span.end, ended.get(span.iteration, 0.0))
    assert all(started[iteration] < ended[iteration] for iteration in range(1, 61))


def test_delayed_update_policy_gains_less_than_rolling() -> None:
    times = [
        simulate("streaming", long_tailed_streaming(staleness, loading)).seconds_per_iteration()
        for staleness, loading in ((1, "rolling"), (1, "delayed"), (0, "rolling"))
    ]
    assert times == sorted(times) and times[0] < times[1] < times[2]


@pytest.mark.soak
def test_a_thousand_iterations_take_seconds() -> None:
    work = AnyWorkload(
        GRPO, Sizes(1000, 4, 2, 8, max_staleness=1), lambda stage, uid: 1.0, workers={"actor.generate": 4}
    )
    began = time.thread_time()
    assert_each_row_is_trained_once(work, simulate("streaming", work))
    assert time.thread_time() - began < 10


def test_a_flow_that_cannot_go_on_is_called_a_deadlock() -> None:
    work = AnyWorkload(GRPO, Sizes(2, 2, 2, 4), lambda stage, uid: 1.0, workers={"reward.verify": 0})
    with pytest.raises(Deadlock, match=r"8 rows .*behind version 0"):
        simulate("streaming", work)


def test_long_tails_have_the_asked_median_and_longest() -> None:
    lengths = long_tailed(seed=0, median=2.0, longest=20.0, among=64)
    drawn = sorted(lengths((0, group, 0)) for group in range(2000))
    assert drawn[1000] == pytest.approx(2.0, rel=0.1) and drawn[-1] == pytest.approx(20.0)
    assert sum(length == drawn[-1] for length in drawn) == pytest.approx(2000 / 64, rel=0.5)
