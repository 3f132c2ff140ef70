"""The search for the fastest plan of each runtime.

hybrid     partitions of the roles ──▶ devices of each set ──▶ choices of each set
    ──makespan──▶ the best of each partition
               pruned by a lower bound of each set                            the runtime's order of calls
streaming  devices of each worker group ──lower bound: its busiest group──▶ in order of the bound
    ──simulation──▶ the best

The search of partitions is HybridFlow's Algorithm 1 (arXiv 2409.19256). The paper sums seconds within a set and takes
the maximum across sets, phase by phase. Here an iteration's calls are scheduled as the hybrid runtime makes them; the
results are equal if phases do not overlap. A streaming plan is simulated with the runtime's schedule.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from braidrl.cluster.device_kinds import NodeGroup
from braidrl.cluster.pools import GENERATE
from braidrl.config.section import MOST_PROCESSES
from braidrl.errors import UserError
from braidrl.flow import Kind
from braidrl.flow.batches import Sizes
from braidrl.flow.selecting import older_slots
from braidrl.plan.choices import Choice, Choices, RolePart, SetChoice
from braidrl.plan.problem import USABLE, Problem
from braidrl.plan.rates import Cost
from braidrl.plan.simulation import Runtime, Simulation, Streaming, Workload
from braidrl.runtimes.prepare.deployment import deploy
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.runtimes.streaming.groups import worker_groups

FINEST = 32
"""Most units that allocations split the devices into, so that a search over a thousand devices takes seconds."""
ITERATIONS, SKIPPED = 6, 2
"""Simulated iterations of a streaming plan, and the first ones that its time does not count."""
MOST_ROWS = 96
"""Most rows of a simulated iteration; in larger batches, each simulated row stands for several."""
MOST_SIMULATED = 24
"""Most allocations that are simulated, the most promising first."""
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

    @cached_property
    def name(self) -> str:
        return " | ".join(f"{'+'.join(choice.roles)} x{choice.devices}" for choice in self.sets)


def partitions(items: Sequence[str]) -> Iterator[RoleSets]:
    """Yield every set partition of the items (Bell number)."""
    if not items:
        yield ()
        return
    first, rest = items[0], items[1:]
    for size in range(len(rest) + 1):
        for companions in itertools.combinations(rest, size):
            left = tuple(item for item in rest if item not in companions)
            for more in partitions(left):
                yield ((first, *companions), *more)


def allocations(devices: int, sets: int, unit: int = 1) -> Iterator[tuple[int, ...]]:
    """Yield every allocation of all devices to sets, each a multiple of `unit`: C(devices / unit - 1, sets - 1) of
    them.
    """
    units = devices // unit
    for cuts in itertools.combinations(range(1, units), sets - 1):
        ends = (0, *cuts, units)
        yield tuple((b - a) * unit for a, b in itertools.pairwise(ends))


def unit_of(group: NodeGroup) -> int:
    """Return the allocation unit of a node group: the smallest divisor that gives at most FINEST parts."""
    return next(n for n in range(1, group.size + 1) if group.size % n == 0 and group.size // n <= FINEST)


PARTS: tuple[RolePart, RolePart] = ("model", "generate")


class Search:
    """A search over one problem."""

    def __init__(
        self,
        problem: Problem,
        keep: int = 8,
        until: float | None = None,
        allowed: Callable[[Choice], bool] | None = None,
    ) -> None:
        """Prepare a search that returns at most `keep` plans, one per partition, and ends at `until` on the monotonic
        clock, once it has a plan.
        """
        self.problem, self.keep, self.until, self.has_plan = problem, keep, until, False
        self.choices = Choices(problem, allowed, self.is_over)

    def is_over(self) -> bool:
        """Return True if the time is over and there is a plan."""
        return self.has_plan and self.until is not None and time.monotonic() > self.until

    def colocated(self, runtime: Runtime) -> list[Plan]:
        """Return the best plan in which all roles share all devices; empty if they do not fit."""
        group = max(self.problem.cluster.groups, key=lambda group: group.size)
        choice = self.choices.of_set(tuple(self.problem.flow.roles), group, group.size)
        self.has_plan |= choice is not None
        return [] if choice is None else [synchronous_plan(self.problem, runtime, [choice])]

    def hybrid(self) -> list[Plan]:
        """Return the best plan of each partition, fastest first.

        Raises UserError, which names enough devices, if the models do not fit.
        """
        plans: list[Plan] = []
        problem, roles = self.problem, tuple(self.problem.flow.roles)
        for partition in sorted(partitions(roles), key=len):
            if self.is_over():
                return plans
            if problem.splits(partition):
                continue
            plan = self.best_of(partition, plans[self.keep - 1].seconds if len(plans) >= self.keep else math.inf)
            if plan is not None:
                plans = sorted([*plans, plan], key=lambda plan: plan.seconds)[: self.keep]
        if plans:
            return plans
        refused = f"the models of flow {problem.flow.name} fit on no allocation of {problem.cluster}"
        for group in problem.cluster.groups:
            for nodes in (2**power for power in range(1, 11)):
                wider = group.model_copy(update={"nodes": group.nodes * nodes})
                if wider.size > MOST_PROCESSES:
                    break
                if self.choices.of_set(roles, wider, wider.size):
                    smallest = f"{wider.nodes}x{wider.devices}x{wider.kind}"
                    raise UserError(f"{refused}; the smallest that fits is --devices {smallest}")
        for group in problem.cluster.groups:
            if fault := self.engine_without_room(group):
                raise UserError(f"{refused}: {fault}")
        largest = max(problem.models.values(), key=lambda model: model.use.shape.parameters)
        raise UserError(
            f"{refused}, nor of up to {MOST_PROCESSES:,} devices: {largest.role} has "
            f"{largest.use.shape.parameters / 1e9:.1f}B parameters; choose a kind with more memory"
        )

    def engine_without_room(self, group: NodeGroup) -> str | None:
        """Return a log line if a role's model fits on a group of nodes but its engine does not; otherwise None."""
        for role in (role for role, model in self.problem.models.items() if model.generates):
            trains, generates = (bool(self.choices.of_role(role, group, group.size, part)) for part in PARTS)
            if trains and not generates:
                engine = self.problem.config.rollout.engine
                remedy = "write rollout.engine=vllm, which divides a model over more devices"
                return (
                    f"{role} can train there, but its {engine} engine has too little memory on each {group.kind}; "
                    f"{remedy if engine == 'embedded' else 'choose a kind with more memory'}"
                )
        return None

    def best_of(self, partition: RoleSets, limit: float = math.inf) -> Plan | None:
        """Return the fastest plan of a partition; None if it does not fit, or takes at least `limit` seconds an
        iteration.
        """
        quickest: Plan | None = None
        for assignment in self.assignments(len(partition)):
            if self.is_over():
                return quickest
            sets: list[SetChoice] = []
            for roles, (group, size) in zip(partition, assignment, strict=True):
                choice = self.choices.of_set(roles, group, size)
                # Lower bound: an iteration takes at least as long as each set is busy.
                if choice is None or choice.busy >= limit:
                    break
                sets.append(choice)
            else:
                plan = synchronous_plan(self.problem, "hybrid", sets)
                if plan.seconds < limit:
                    quickest, limit, self.has_plan = plan, plan.seconds, True
        return quickest

    def assignments(self, count: int) -> Iterator[list[tuple[NodeGroup, int]]]:
        """Yield each assignment of `count` sets of roles to kinds of devices, with the devices of each set.

        Each used node group gives all of its devices to its sets.
        """
        for groups in itertools.product(self.problem.cluster.groups, repeat=count):
            members = {group: [i for i, candidate in enumerate(groups) if candidate == group] for group in groups}
            ways = [
                [
                    dict(zip(indices, sizes, strict=True))
                    for sizes in allocations(group.size, len(indices), unit_of(group))
                ]
                for group, indices in members.items()
            ]
            for picked in itertools.product(*ways):
                size_of = {i: size for by_set in picked for i, size in by_set.items()}
                yield [(group, size_of[i]) for i, group in enumerate(groups)]

    def streaming(self, staleness: int) -> Plan | None:
        """Return the fastest streaming plan with this maximum staleness; None if a worker group does not fit."""
        config, kinds = self.problem.config, self.problem.cluster.kinds
        members = worker_groups(deploy(config.model_copy(update={"runtime": "streaming"}), self.problem.flow))
        bounded: list[tuple[float, list[SetChoice]]] = []
        for assignment in self.assignments(len(members)):
            if self.is_over():
                break
            sets: list[SetChoice] = []
            # The fastest choice of each worker group that fits its devices.
            for member, (group, devices) in zip(members, assignment, strict=True):
                room = kinds[group.kind].memory * USABLE
                part: RolePart = "generate" if member.kind == "generate" else "model"
                if member.policies:
                    # Their engines are in the same processes.
                    chosen = self.choices.of_set((str(member.role), *member.policies), group, devices, part)
                    if chosen is None or chosen.budget is not None:
                        break
                    named = {role + GENERATE: choice for role, choice in chosen.roles.items()}
                    sets.append(replace(chosen, roles=named))
                    continue
                options = self.choices.of_role(str(member.role), group, devices, part)
                fitting = [option for option in options if option.peak <= room]
                if part == "generate" and config.streaming.weights == "rolling":
                    # One engine generates while another loads.
                    fitting = [
                        option for option in fitting if option.use.engine is None or devices > option.use.engine.divisor
                    ]
                if not fitting:
                    break
                choice = min(fitting, key=lambda option: option.busy)
                sets.append(SetChoice(group, devices, {member.name: choice}, choice.costs, choice.peak))
            if len(sets) == len(members):
                bounded.append((max(option.busy for option in sets), sets))
        quickest: Plan | None = None
        for bound, sets in sorted(bounded, key=lambda pair: pair[0])[:MOST_SIMULATED]:
            # Lower bound: an iteration takes at least as long as each group's work.
            if self.is_over() or (quickest is not None and bound >= quickest.seconds):
                break
            plan = streaming_plan(self.problem, sets, staleness)
            if quickest is None or plan.seconds < quickest.seconds:
                quickest = plan
        return quickest


def synchronous_plan(problem: Problem, runtime: Runtime, sets: Sequence[SetChoice]) -> Plan:
    """Return the plan of these sets of devices, with its calls scheduled as a runtime makes them."""
    costs = costs_of(problem, sets)
    # Only hybrid runs sets in parallel; stages without a model run with the first set.
    set_of = {name: i for i, choice in enumerate(sets) for name in choice.costs} if runtime == "hybrid" else {}
    pools = {name: set_of.get(name, 0) for name in costs}
    times = call_times(problem.flow.predecessors, pools, {name: cost.seconds for name, cost in costs.items()})
    seconds = problem.with_runtime(runtime, max(end for _, end in times.values()))
    return Plan(runtime, tuple(sets), seconds, costs, times)


def call_times(
    before: Mapping[str, Sequence[str]], pools: Mapping[str, object], seconds: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    """Return the start and end of each stage's call in one hybrid iteration.

    A call starts after the stages `before` it; a pool runs its calls in order.
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
    """Return the cost of each stage of the flow; stages without a model have configured or calibrated seconds."""
    costs = {name: cost for choice in sets for name, cost in choice.costs.items()}
    for stage in problem.flow.stages:
        if stage.name not in costs:
            per_row = problem.rates[sets[0].group.kind].stages.get(stage.type, 0.0)
            seconds = problem.seconds.get(stage.name, per_row * len(problem.rows_of(stage)))
            costs[stage.name] = Cost(overhead=seconds)
    return {stage.name: costs[stage.name] for stage in problem.flow.stages}


def streaming_plan(problem: Problem, sets: Sequence[SetChoice], staleness: int) -> Plan:
    """Return the plan of these worker groups, timed by simulation."""
    costs = costs_of(problem, sets)
    result = Streaming(workload(problem, sets, costs, staleness)).simulate()
    seconds = problem.with_runtime("streaming", result.seconds_per_iteration(SKIPPED))
    return Plan("streaming", tuple(sets), seconds, costs, {}, staleness, result)


def workload(problem: Problem, sets: Sequence[SetChoice], costs: Mapping[str, Cost], staleness: int) -> Workload:
    """Return the workload to simulate; in large batches, each simulated row stands for several."""
    config, lengths = problem.config, problem.lengths
    samples = config.rollout.samples_per_prompt
    prompts = max(1, min(config.trainer.prompts_per_step, MOST_ROWS // samples))
    scale = config.trainer.prompts_per_step / prompts
    rows = prompts * samples
    workers, seconds = worker_seconds(problem, sets, costs, staleness, scale)
    picks = [int(i * (len(lengths) - 1) / max(1, rows - 1)) for i in range(rows)]
    responses = lengths.ordered[picks] / lengths.ordered[picks].mean()
    order = [(i * 7919) % rows for i in range(rows)] if math.gcd(rows, 7919) == 1 else list(range(rows))
    sizes = Sizes(
        ITERATIONS,
        prompts,
        samples,
        rows // math.gcd(problem.updates, rows),
        config.trainer.epochs,
        staleness,
        older_groups=older_slots(config.streaming.on_policy_share, prompts),
    )
    weights = max((costs[s.name].weights for s in problem.flow.stages if s.kind is Kind.GENERATE), default=0.0)
    # A file is written during the next batch, and then read; the workers of a process group receive weights in one
    # step.
    load, receive = (weights / 2, 0.0) if problem.publishes_files else (0.0, weights)
    return Workload(
        problem.flow,
        sizes,
        lambda stage, uid: seconds[stage] * float(responses[order[(uid[1] * samples + uid[2]) % rows]]),
        workers=workers,
        dispatch_rows=max(1, round(config.streaming.dispatch_rows / scale)),
        loading=config.streaming.weights,
        load_seconds=load,
        receive_seconds=receive,
    )


def worker_seconds(
    problem: Problem, sets: Sequence[SetChoice], costs: Mapping[str, Cost], staleness: int, scale: float
) -> tuple[dict[str, int], dict[str, float]]:
    """Return the simulated workers of each consumer and stage, and the seconds of a row of mean length, for `scale`
    rows, on one of them.

    Each slot of an engine is a simulated worker. Stages without a model run on the workers that hold their rows.
    """
    lengths, flow, workers = problem.lengths, problem.flow, dict[str, int]()
    seconds = {name: cost.seconds / len(lengths) * scale for name, cost in costs.items()}
    for consumer in Consumers(flow):
        choice = next((choice for choice in sets if consumer.group in choice.roles), None)
        if choice is None:
            continue
        use = choice.roles[consumer.group].use
        shared = consumer.group not in flow.changed_roles and not use.layout.is_replicated
        count = 1 if shared else use.layout.data or 1
        for stage in consumer.stages:
            if stage.kind is Kind.GENERATE:
                total, engine = costs[stage.name].seconds - costs[stage.name].weights, use.engine
                slots = engine.slots * max(1, choice.devices // engine.divisor) if engine else len(lengths)
                count = max(1, round(slots / scale))
                if staleness == 0 and slots >= len(lengths):
                    # On-policy iterations start and end with idle slots: use the mean decode step of `total`.
                    seconds[stage.name] = total / float(lengths.ordered[-1]) * float(lengths.responses.mean())
                else:
                    # Slots are always full: throughput is that of the engine.
                    seconds[stage.name] = total * min(slots, len(lengths) * (1 + staleness)) / len(lengths)
            elif stage.name in choice.costs:
                seconds[stage.name] *= count / (problem.config.trainer.epochs if stage.kind is Kind.TRAIN else 1)
        workers |= dict.fromkeys((consumer.name, *(stage.name for stage in consumer.stages)), count)
    return workers, seconds
