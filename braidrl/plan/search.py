"""Placement search after HybridFlow's Algorithm 1 (arXiv 2409.19256): set partitions of roles, devices per set, layouts.

partitions of the roles ──▶ devices of each set ──▶ choices of each set ──makespan──▶ the best of each partition
        pruned by a lower bound of each set                                        the runtime's own order of calls

A placement of another framework is one partition, with a filter for choices (`like`, `braid plan CONFIG --like NAME`):

deepspeed-chat   all roles on all devices; ZeRO-3 to train, tensor parallelism within a node to generate     arXiv 2308.01320
openrlhf         separate devices for each role and for engines; ZeRO-3                                       arXiv 2405.11143
nemo-aligner     actor and reference on one half, critic and reward on the other; one layout for all         arXiv 2405.01481
verl             all roles on all devices; separate layouts to train, infer and generate                     arXiv 2409.19256

The paper sums seconds within a set and takes the maximum across sets, phase by phase. Here an iteration's calls are scheduled as the
hybrid runtime makes them; the results are equal if phases do not overlap.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from braidrl.cluster.device_kinds import NodeGroup
from braidrl.cluster.pools import GENERATE
from braidrl.errors import UserError, suggest
from braidrl.plan.choices import Choice, Choices, RolePart, SetChoice
from braidrl.plan.problem import Problem
from braidrl.plan.rates import Cost
from braidrl.plan.simulation import Runtime, Simulation

FINEST = 32
"""Most units that allocations split the devices into, so that a search over a thousand devices takes seconds."""
NAMES = ("deepspeed-chat", "openrlhf", "nemo-aligner", "verl")
"""The placements of `like`."""
RoleSets = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Plan:
    """A runtime, a placement and the predicted seconds of an iteration."""

    runtime: Runtime
    sets: tuple[SetChoice, ...]
    seconds: float
    costs: Mapping[str, Cost]
    """The cost of each stage, in the flow's order."""
    starts: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Start and end of each stage's call, in seconds."""
    staleness: int = 0
    simulation: Simulation | None = None
    """The simulated run of a streaming plan."""

    @cached_property
    def name(self) -> str:
        return " | ".join(f"{'+'.join(one.roles)} x{one.devices}" for one in self.sets)


@dataclass
class Considered:
    """Counters of a search."""

    partitions: int = 0
    allocations: int = 0
    layouts: int = 0
    cut: int = 0
    """Partitions and allocations pruned by a bound."""


def partitions(items: Sequence[str]) -> Iterator[RoleSets]:
    """Yield every set partition of the items (Bell number)."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for others in itertools.combinations(rest, size):
            left = tuple(item for item in rest if item not in others)
            for more in partitions(left):
                yield ((first, *others), *more)


def allocations(devices: int, sets: int, unit: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every allocation of all devices to sets, each a multiple of `unit`: C(devices / unit - 1, sets - 1) of them."""
    units = devices // unit
    for cuts in itertools.combinations(range(1, units), sets - 1):
        ends = (0, *cuts, units)
        yield tuple((b - a) * unit for a, b in itertools.pairwise(ends))


class Search:
    """A search over one problem; `considered` counts its work."""

    def __init__(
        self, problem: Problem, keep: int = 8, until: float | None = None,
        allowed: Callable[[Choice], bool] | None = None,
    ) -> None:  # fmt: skip
        """Prepare a search that returns at most `keep` plans, one per partition, and ends at `until` on the monotonic clock."""
        problem.check_stages()
        self.problem, self.keep, self.until = problem, keep, until
        self.considered = Considered()
        self.choices = Choices(problem, allowed)
        self.edges = {
            stage.name: [edge.source for edge in problem.flow.edges if edge.target == stage.name]
            for stage in problem.flow.stages
        }

    def hybrid(self) -> list[Plan]:
        """Return the best plan of each partition, fastest first, at most `keep` of them.

        Raises UserError if the models fit in no allocation; it names the smallest number of devices that works.
        """
        found: list[Plan] = []
        problem, roles = self.problem, tuple(self.problem.flow.roles)
        for partition in sorted(partitions(roles), key=len):
            if found and self.until is not None and time.monotonic() > self.until:
                break
            self.considered.partitions += 1
            plan = self.best_of(partition, found[self.keep - 1].seconds if len(found) >= self.keep else math.inf)
            if plan is not None:
                found = sorted([*found, plan], key=lambda plan: plan.seconds)[: self.keep]
        self.considered.layouts = self.choices.layouts_tried
        if found:
            return found
        refused = f"the models of flow {problem.flow.name} fit on no allocation of {problem.cluster}"
        for group in problem.cluster.groups:
            for nodes in (2**power for power in range(1, 11)):
                wider = group.model_copy(update={"nodes": group.nodes * nodes})
                if self.choices.of_set(roles, wider, wider.size):
                    smallest = f"{wider.nodes}x{wider.devices}x{wider.kind}"
                    raise UserError(f"{refused}; the smallest that fits is --devices {smallest}")
        largest = max(problem.models.values(), key=lambda model: model.shape.parameters)
        raise UserError(
            f"{refused}, nor of a thousand times as many devices: {largest.role} has "
            f"{largest.shape.parameters / 1e9:.1f}B parameters; choose a kind with more memory"
        )

    def best_of(self, partition: RoleSets, limit: float = math.inf) -> Plan | None:
        """Return the fastest plan of a partition; None if it does not fit, or takes at least `limit` seconds an iteration."""
        quickest: Plan | None = None
        for groups in itertools.product(self.problem.cluster.groups, repeat=len(partition)):
            # Each used node group gives all of its devices to its own sets.
            members = {group: [i for i, other in enumerate(groups) if other == group] for group in groups}
            ways = [
                [dict(zip(own, sizes, strict=True)) for sizes in allocations(group.size, len(own), unit_of(group))]
                for group, own in members.items()
            ]
            for picked in itertools.product(*ways):
                self.considered.allocations += 1
                size_of = {i: size for one in picked for i, size in one.items()}
                bar = min(limit, quickest.seconds if quickest else math.inf)
                sets: list[SetChoice] = []
                for i, (roles, group) in enumerate(zip(partition, groups, strict=True)):
                    found = self.choices.of_set(roles, group, size_of[i])
                    # Lower bound: an iteration takes at least as long as each set is busy.
                    if found is None or found.busy >= bar:
                        self.considered.cut += 1
                        break
                    sets.append(found)
                else:
                    plan = self.plan("hybrid", sets)
                    quickest = plan if plan.seconds < bar else quickest
        return quickest

    def plan(self, runtime: Runtime, sets: Sequence[SetChoice]) -> Plan:
        """Return the plan of these sets of devices, with its calls scheduled as a runtime makes them."""
        costs = costs_of(self.problem, sets)
        # Only hybrid runs sets in parallel; stages without a model run with the first set.
        set_of = {name: i for i, one in enumerate(sets) for name in one.costs} if runtime == "hybrid" else {}
        pools = {name: set_of.get(name, 0) for name in costs}
        times = call_times(self.edges, pools, {name: cost.seconds for name, cost in costs.items()})
        seconds = self.problem.with_runtime(runtime, max(end for _, end in times.values()))
        return Plan(runtime, tuple(sets), seconds, costs, times)

    def colocated(self, runtime: Runtime) -> list[Plan]:
        """Return the best plan in which all roles share all devices; empty if they do not fit."""
        group = max(self.problem.cluster.groups, key=lambda group: group.size)
        found = self.choices.of_set(tuple(self.problem.flow.roles), group, group.size)
        return [] if found is None else [self.plan(runtime, [found])]


def call_times(
    before: Mapping[str, Sequence[str]], pools: Mapping[str, object], seconds: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return start and end of each stage's call in one iteration of the hybrid runtime; a pool runs its calls in order.

    `before` has the stages that each stage waits for, in the flow's order.
    """
    free: dict[object, float] = {}
    times: dict[str, tuple[float, float]] = {}
    for stage, needed in before.items():
        start = free.get(pools[stage], 0.0)
        for name in needed:
            if name in times and times[name][1] > start:
                start = times[name][1]
        free[pools[stage]] = start + seconds[stage]
        times[stage] = (start, free[pools[stage]])
    return times


def costs_of(problem: Problem, sets: Sequence[SetChoice]) -> dict[str, Cost]:
    """Return the cost of each stage of the flow; stages without a model take given or calibrated seconds."""
    modelled = {name: cost for one in sets for name, cost in one.costs.items()}
    costs: dict[str, Cost] = {}
    for stage in problem.flow.stages:
        if stage.name in modelled:
            costs[stage.name] = modelled[stage.name]
        elif stage.name in problem.seconds:
            costs[stage.name] = Cost(overhead=problem.seconds[stage.name])
        else:
            each = problem.rates[sets[0].group.kind].stages.get(stage.type, 0.0)
            costs[stage.name] = Cost(overhead=each * len(problem.rows_of(stage)))
    return costs


def unit_of(group: NodeGroup) -> int:
    """Return the allocation unit of a node group: the smallest divisor that gives at most FINEST parts."""
    return next(n for n in range(1, group.size + 1) if group.size % n == 0 and group.size // n <= FINEST)


def like(problem: Problem, name: str) -> Plan:
    """Return the best plan within another framework's placement. Raises UserError for an unknown name, or if the models do not fit."""
    if name not in NAMES:
        raise UserError(f"--like: unknown placement {name!r}. {suggest(name, NAMES)}")
    search = Search(problem)
    roles = tuple(problem.flow.roles)
    if name == "openrlhf":
        plan = apart(search)
    elif name == "nemo-aligner":
        plan = fixed(search, halves(problem), same_layout)
    else:
        plan = fixed(search, (roles,), sharded if name == "deepspeed-chat" else lambda choice: True)
    if plan is None:
        raise UserError(
            f"--like {name}: the models of flow {problem.flow.name} do not fit in this placement on {problem.cluster}"
        )
    return plan


def sharded(choice: Choice) -> bool:
    """Return whether the layout is plain ZeRO-3."""
    layout = choice.use.layout
    return (
        layout.tensor == layout.pipeline == layout.sequence == 1 and layout.shard == "full" and not choice.use.inference
    )


def same_layout(choice: Choice) -> bool:
    """Return whether a role uses only tensor and pipeline parallelism, and generates in its training layout."""
    layout, engine = choice.use.layout, choice.use.engine
    plain = layout.shard in ("none", "optimizer") and layout.sequence == 1 and not choice.use.inference
    return plain and (engine is None or engine.divisor == layout.tensor)


def halves(problem: Problem) -> RoleSets:
    """Split the roles: those that generate or provide frozen log-probs, and the others."""
    models = problem.models
    first = tuple(role for role, model in models.items() if model.generates or (not model.trained and not model.scalar))
    second = tuple(role for role in models if role not in first)
    return (first, second) if second else (first,)


def fixed(search: Search, partition: RoleSets, allowed: Callable[[Choice], bool]) -> Plan | None:
    """Return the best plan of one partition whose sets have equal numbers of devices. Raises UserError if these do not divide so."""
    group = max(search.problem.cluster.groups, key=lambda group: group.size)
    size, left = divmod(group.size, len(partition))
    if left:
        names = " | ".join("+".join(roles) for roles in partition)
        raise UserError(
            f"--devices: {group.size} devices do not divide into {len(partition)} equal parts for {names}; "
            f"write a multiple of {len(partition)}"
        )
    known = Choices(search.problem, allowed)
    sets = [found for roles in partition if (found := known.of_set(roles, group, size))]
    return search.plan("hybrid", sets) if len(sets) == len(partition) else None


def apart(search: Search) -> Plan | None:
    """Return the fastest plan with separate devices for each role and for engines."""
    problem = search.problem
    group = max(problem.cluster.groups, key=lambda group: group.size)
    models, engines = Choices(problem, sharded), Choices(problem)
    members: list[tuple[str, str, Choices, RolePart]] = [(role, role, models, "model") for role in problem.models]
    generating = [role for role, model in problem.models.items() if model.generates]
    members += [(role + GENERATE, role, engines, "generate") for role in generating]
    unit = unit_of(group)
    while group.size % (unit * 2) == 0 and group.size // (unit * 2) >= 2 * len(members):
        unit *= 2
    quickest: Plan | None = None
    for sizes in allocations(group.size, len(members), unit):
        sets = [
            replace(found, roles={name: found.roles[role]})
            for (name, role, known, part), size in zip(members, sizes, strict=True)
            if (found := known.of_set((role,), group, size, part))
        ]
        if len(sets) < len(members):
            continue
        plan = search.plan("hybrid", sets)
        quickest = plan if quickest is None or plan.seconds < quickest.seconds else quickest
    return quickest
