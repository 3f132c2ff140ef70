"""The search finds the very optimum that trying everything finds, and counts what it looks at as the formulas say."""

from __future__ import annotations

import itertools
import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidrl.cluster.device_kinds import Cluster, NodeGroup, read_cluster
from braidrl.config import parse_config
from braidrl.config.section import MOST_PROCESSES
from braidrl.errors import UserError
from braidrl.flow.batches import Sizes
from braidrl.plan.choices import LONG, Choice, Choices, SetChoice, in_order, layouts
from braidrl.plan.configured import overlay_of
from braidrl.plan.problem import Problem
from braidrl.plan.rates import Cost
from braidrl.plan.search import FINEST, Search, allocations, call_times, partitions, synchronous_plan, unit_of
from braidrl.runtimes.memory.budget import CACHE
from braidrl.runtimes.prepare.deployment import deploy
from tests.plan.problems import GIB, cluster, problem, write_sizes
from tests.plan.simulator import simulate
from tests.plan.synchronous import AnyWorkload
from tests.plan.test_simulator import DAPO, GRPO, PPO
from tests.tiny import ROOT

MIB = 1 << 20
BELL = [1, 1, 2, 5, 15, 52, 203]


@pytest.mark.parametrize("count", range(7))
def test_there_are_bells_number_of_partitions_and_each_is_one(count: int) -> None:
    items = "abcdef"[:count]
    result = {frozenset(frozenset(part) for part in partition) for partition in partitions(items)}
    assert len(result) == len(list(partitions(items))) == BELL[count]
    assert all(sorted(item for part in partition for item in part) == list(items) for partition in result)


@given(st.integers(1, 16), st.integers(1, 4))
def test_allocations_are_all_ways_to_divide_the_devices(devices: int, sets: int) -> None:
    result = list(allocations(devices, sets))
    assert len(result) == len(set(result)) == math.comb(devices - 1, sets - 1)
    assert all(sum(sizes) == devices and min(sizes) >= 1 for sizes in result)


@given(st.integers(1, 200), st.integers(1, 16))
def test_allocations_are_of_at_most_so_many_equal_parts(nodes: int, devices: int) -> None:
    group = NodeGroup(kind="test", nodes=nodes, devices=devices)
    unit = unit_of(group)
    assert group.size % unit == 0 and group.size // unit <= FINEST
    assert all(group.size % finer or group.size // finer > FINEST for finer in range(1, unit))


def soonest_of_all(search: Choices, roles: tuple[str, ...], size: int) -> SetChoice | None:
    """Return the fastest combination of choices for roles that share devices, by brute force."""
    group = search.problem.cluster.groups[0]
    every = [list(search.every_choice(search.problem.models[role], group, size)) for role in roles]
    result = [
        one
        for picked in itertools.product(*every)
        if (one := search.together(dict(zip(roles, picked, strict=True)), group, size))
    ]
    return min(result, key=lambda one: one.busy, default=None)


def brute_force(asked: Problem) -> float:
    """Return the least seconds over all partitions, allocations and layouts, without bounds, Pareto fronts or
    caches.
    """
    choices, quickest = Choices(asked), math.inf
    known: dict[tuple[tuple[str, ...], int], SetChoice | None] = {}
    for partition in partitions(asked.flow.roles):
        for sizes in allocations(asked.cluster.size, len(partition)):
            sets = []
            for roles, size in zip(partition, sizes, strict=True):
                if (roles, size) not in known:
                    known[roles, size] = soonest_of_all(choices, roles, size)
                sets.append(known[roles, size])
            if all(sets):
                quickest = min(quickest, synchronous_plan(asked, "hybrid", [one for one in sets if one]).seconds)
    return quickest


# Memory: room for everything, for some at a time, and for hardly anything; models that layouts divide, and up to
# sixteen devices.
@pytest.mark.parametrize(
    ("nodes", "devices", "divided", "memory"),
    [
        pytest.param(1, 2, 2, 12 * MIB, marks=pytest.mark.soak),
        (2, 2, 1, 80 * GIB),
        pytest.param(2, 2, 1, 6 * MIB, marks=pytest.mark.soak),
        pytest.param(2, 2, 1, 4 * MIB, marks=pytest.mark.soak),
        pytest.param(2, 8, 1, 80 * GIB, marks=pytest.mark.soak),
        pytest.param(2, 8, 1, 4 * MIB, marks=pytest.mark.soak),
    ],
)
def test_search_finds_the_optimum_of_brute_force(
    tmp_path: Path, nodes: int, devices: int, divided: int, memory: int
) -> None:
    large, small = write_sizes(tmp_path / "large", 128, divided, divided), write_sizes(tmp_path / "small", 64, 1, 1)
    roles = {"reference": {"model": str(small)}, "reward": {"model": str(small)}}
    asked = problem(large, cluster(nodes, devices, memory), roles=roles, rows=16, max_tokens_per_device=96)
    try:
        result = Search(asked).hybrid()[0].seconds
    except UserError:
        result = math.inf
    assert result == pytest.approx(brute_force(asked), rel=1e-12)
    assert memory < 8 * MIB or result < math.inf


def test_context_parallelism_is_tried_for_long_rows_alone(tmp_path: Path) -> None:
    asked = problem(write_sizes(tmp_path / "m", 64, 2, 2), cluster(1, 8))
    shape, group = asked.models["actor"].use.shape, asked.cluster.groups[0]
    of_long, of_short = (list(layouts(shape, 8, group, True, longest)) for longest in (LONG, LONG - 1))
    assert all(layout.resolve(8) == layout for layout in of_long), "every layout uses all devices"
    # Two heads are shared by `tensor` and `sequence`, and `context` takes the devices that are left.
    assert max(layout.context for layout in of_long) == 4 and {layout.context for layout in of_short} == {1}


def test_pruned_search_tries_all_partitions_and_keeps_the_optimum(tmp_path: Path) -> None:
    asked = problem(write_sizes(tmp_path / "m", 64, 2, 2), cluster(2, 8))
    result = Search(asked, keep=15).hybrid()
    assert len({frozenset(frozenset(one.roles) for one in plan.sets) for plan in result}) == 15
    uncut = Choices(asked)
    every = [
        synchronous_plan(asked, "hybrid", [one for one in sets if one]).seconds
        for partition in partitions(asked.flow.roles)
        for sizes in allocations(16, len(partition))
        if all(sets := [uncut.of_set(r, asked.cluster.groups[0], n) for r, n in zip(partition, sizes, strict=True)])
    ]
    assert result[0].seconds == min(every)


@given(st.lists(st.lists(st.floats(0.1, 9), min_size=1, max_size=4), min_size=1, max_size=3))
def test_combinations_come_in_order_and_none_is_left_out(seconds: list[list[float]]) -> None:
    options = [
        [Choice(None, {"s": Cost(compute=value)}, {}, 0) for value in sorted(own)]  # type: ignore[arg-type]
        for own in seconds
    ]
    sums = [busy for busy, _ in in_order(options)]
    assert sums == sorted(sums) and len(sums) == math.prod(map(len, seconds))


@settings(max_examples=25)
@given(st.data())
def test_calls_are_laid_out_as_the_hybrid_runtime_lays_them_out(data: st.DataObject) -> None:
    flow = data.draw(st.sampled_from([GRPO, PPO, DAPO]))
    seconds = {stage.name: data.draw(st.floats(0.0, 5.0)) for stage in flow.stages}
    pools = {stage.name: data.draw(st.sampled_from("abc")) for stage in flow.stages}
    work = AnyWorkload(flow, Sizes(1, 1, 1, 1), lambda stage, uid: seconds[stage], pools=pools)
    ends = max(end for _, end in call_times(flow.predecessors, pools, seconds).values())
    assert ends == pytest.approx(simulate("hybrid", work).ends[0])


def test_models_that_fit_nowhere_are_refused_with_the_smallest_cluster_that_fits(tmp_path: Path) -> None:
    asked = problem(write_sizes(tmp_path / "m", 128, 2, 2), cluster(1, 1, 10 * MIB))
    with pytest.raises(UserError, match=r"1x1xtest; .*--devices \d+x1xtest"):
        Search(asked).hybrid()


@pytest.mark.soak
def test_models_that_fit_on_no_number_of_devices_are_refused_in_a_line(tmp_path: Path) -> None:
    """Layouts for thousands of nodes are tried up to the most processes of a run, and no further."""
    asked = problem(write_sizes(tmp_path / "m", 128, 2, 2), cluster(64, 8, 1))
    with pytest.raises(UserError, match=rf"up to {MOST_PROCESSES:,} devices: .*more memory"):
        Search(asked).hybrid()


def test_more_devices_than_a_run_has_processes_are_refused() -> None:
    with pytest.raises(UserError, match=f"--devices: 9000x8xH100-80GB are 72,000 devices.*{MOST_PROCESSES:,}"):
        read_cluster("9000x8xH100-80GB")


def test_mixed_kinds_put_each_set_on_one_kind(tmp_path: Path) -> None:
    fast, slow = cluster(1, 2, speed=1e12, name="fast"), cluster(1, 2, speed=1e11, name="slow")
    both = Cluster(groups=(*fast.groups, *slow.groups), kinds={**fast.kinds, **slow.kinds})
    model = write_sizes(tmp_path / "m")
    plans = Search(problem(model, both)).hybrid()
    assert {one.group.kind for plan in plans for one in plan.sets} == {"fast", "slow"}
    assert plans[0].seconds <= Search(problem(model, fast)).hybrid()[0].seconds
    # Five worker groups need the devices of both kinds, and the configuration says which has which.
    groups = [group.model_copy(update={"devices": 3}) for group in both.groups]
    asked = problem(model, Cluster(groups=tuple(groups), kinds=both.kinds))
    streaming = Search(asked).streaming(1)
    assert streaming is not None
    overlay = overlay_of(streaming, asked)
    workers = overlay["streaming"]["workers"]
    assert {name: (group["workers"], group["kind"]) for name, group in workers.items()} == {
        name: (one.devices, one.group.kind) for one in streaming.sets for name in one.roles
    }
    assert {group["kind"] for group in workers.values()} == {"fast", "slow"}
    changed = {"runtime": "streaming", "streaming": overlay["streaming"], "cluster": overlay["cluster"]}
    pools = deploy(parse_config({**asked.config.model_dump(mode="json"), **changed}), asked.flow).pools
    assert {pool.name: pool.kind for pool in pools} == {name: group["kind"] for name, group in workers.items()}


def test_an_embedded_engine_with_devices_of_its_own_has_the_whole_model(tmp_path: Path) -> None:
    asked = problem(write_sizes(tmp_path / "m"), cluster(1, 4))
    every = Choices(asked).of_role("actor", asked.cluster.groups[0], 4, "generate")
    assert {one.use.engine.divisor for one in every if one.use.engine} == {1}


def test_roles_that_play_have_engines_and_share_the_devices_of_one_stage(tmp_path: Path) -> None:
    league = str(ROOT / "examples" / "nim" / "league.yaml")
    asked = replace(problem(write_sizes(tmp_path / "m"), cluster(1, 5), league), seconds={"actor.generate": 3.0})
    roles, group = ("actor", "older", "newer"), asked.cluster.groups[0]
    together = Choices(asked).of_set(roles, group, 4)
    assert together is not None and together.costs["actor.generate"].overhead == 3.0
    assert all(CACHE in together.roles[role].resident for role in roles)
    assert [set(one.roles) for plan in Search(asked).hybrid() for one in plan.sets] == [set(roles)]
    streaming = Search(asked).streaming(1)
    assert streaming is not None and streaming.seconds >= 3.0
    (generating,) = [one for one in streaming.sets if "actor.generate" in one.roles]
    assert set(generating.roles) == {f"{role}.generate" for role in roles}
    counts = overlay_of(streaming, asked)["streaming"]["workers"]
    changed = {"runtime": "streaming", "streaming": {"workers": counts}}
    pools = deploy(parse_config({**asked.config.model_dump(mode="json"), **changed}), asked.flow).pools
    assert {pool.name: pool.workers for pool in pools} == counts


@pytest.mark.parametrize("nodes", [2, pytest.param(128, marks=pytest.mark.soak)])
def test_many_devices_are_planned_for_in_seconds(tmp_path: Path, nodes: int) -> None:
    model = write_sizes(tmp_path / "70b", 8192, 80, 64, 32000)
    asked = problem(
        model, cluster(nodes, 8, 640 * GIB, speed=5e14), rows=1024, response=1024, max_tokens_per_device=8192
    )
    began = time.thread_time()
    search = Search(asked)
    assert search.hybrid()
    # Twice what it is allowed on a machine that does nothing else.
    assert time.thread_time() - began < 20


def test_a_model_whose_engine_alone_has_no_room_is_refused_with_another_engine(tmp_path: Path) -> None:
    asked = problem(write_sizes(tmp_path / "m", 1024, 2, 2), cluster(8, 8, 30 * MIB))
    with pytest.raises(UserError, match=r"actor can train there, .*rollout\.engine=vllm"):
        Search(asked).hybrid()
