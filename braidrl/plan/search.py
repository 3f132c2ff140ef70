"""Placement search after HybridFlow's Algorithm 1 (arXiv 2409.19256): set partitions of roles, devices per set, layouts.

partitions of the roles ──▶ devices of each set ──▶ choices of each set (sets.py) ──makespan──▶ the best of each partition
        pruned by a lower bound of each set                                        the runtime's own order of calls

The paper sums seconds within a set and takes the maximum across sets, phase by phase. Here an iteration's calls are scheduled as the
hybrid runtime makes them; the results are equal if phases do not overlap.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from braidrl.cluster.device_kinds import NodeGroup
from braidrl.errors import UserError
from braidrl.plan.choices import Choice
from braidrl.plan.problem import Problem
from braidrl.plan.rates import Cost
from braidrl.plan.sets import SetChoice, Sets
from braidrl.plan.simulation import Runtime, call_times
from braidrl.plan.workload import Simulation

FINEST = 32
"""Most units that allocations split the devices into, so that a search over a thousand devices takes seconds."""
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
        """Return the placement as text."""
        return " | ".join(f"{'+'.join(one.roles)} x{one.devices}" for one in self.sets)

    @property
    def devices(self) -> int:
        """Return the number of devices in use."""
        return sum(one.devices for one in self.sets)


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
    """Yield every allocation of all devices to sets: C(devices / unit - 1, sets - 1) of them.

    Args:
        devices: The number of devices.
        sets: The number of sets.
        unit: Each set gets a positive multiple of this.
    """
    units = devices // unit
    for cuts in itertools.combinations(range(1, units), sets - 1):
        ends = (0, *cuts, units)
        yield tuple((b - a) * unit for a, b in itertools.pairwise(ends))


class Search:
    """A search over one problem; `considered` counts its work."""

    def __init__(
        self,
        problem: Problem,
        keep: int = 8,
        until: float | None = None,
        allowed: Callable[[Choice], bool] | None = None,
    ) -> None:
        """Prepare the search.

        Args:
            problem: The planning problem.
            keep: Most plans to return, one per partition.
            until: Deadline on the monotonic clock, in seconds.
            allowed: Filter for the choices of a role; None allows all.
        """
        problem.check_stages()
        self.problem, self.keep, self.until = problem, keep, until
        self.considered = Considered()
        self.sets = Sets(problem, allowed)
        self.edges = {
            stage.name: [edge.source for edge in problem.flow.edges if edge.target == stage.name]
            for stage in problem.flow.stages
        }

    def hybrid(self) -> list[Plan]:
        """Return the best plan of each partition, fastest first, at most `keep` of them.

        Raises:
            UserError: The models fit in no allocation; names the smallest number of devices that works.
        """
        found: list[Plan] = []
        roles = tuple(self.problem.flow.roles)
        for partition in sorted(partitions(roles), key=len):
            if found and self.until is not None and time.monotonic() > self.until:
                break
            self.considered.partitions += 1
            plan = self.best_of(partition, found[self.keep - 1].seconds if len(found) >= self.keep else math.inf)
            if plan is not None:
                found = sorted([*found, plan], key=lambda plan: plan.seconds)[: self.keep]
        self.considered.layouts = self.sets.choices.layouts_tried
        if not found:
            raise UserError(self.least())
        return found

    def best_of(self, partition: RoleSets, limit: float = math.inf) -> Plan | None:
        """Return the fastest plan of a partition.

        Args:
            partition: The sets of roles that share devices.
            limit: Upper bound on the seconds of an iteration.

        Returns:
            The plan, or None if it does not fit or is not faster.
        """
        quickest: Plan | None = None
        for groups in itertools.product(self.problem.cluster.groups, repeat=len(partition)):
            for sizes in self._sizes(groups):
                self.considered.allocations += 1
                bar = min(limit, quickest.seconds if quickest else math.inf)
                plan = self._quickest(partition, groups, sizes, bar)
                quickest = plan or quickest
        return quickest

    def _sizes(self, groups: Sequence[NodeGroup]) -> Iterator[tuple[int, ...]]:
        """Yield the number of devices of each set, given each set's node group; all devices of a used group are allocated."""
        by_group = {group: [i for i, other in enumerate(groups) if other == group] for group in groups}
        ways = [
            [dict(zip(places, sizes, strict=True)) for sizes in allocations(group.size, len(places), unit_of(group))]
            for group, places in by_group.items()
        ]
        for picked in itertools.product(*ways):
            sizes = {place: size for one in picked for place, size in one.items()}
            yield tuple(sizes[i] for i in range(len(groups)))

    def _quickest(
        self, partition: RoleSets, groups: Sequence[NodeGroup], sizes: Sequence[int], bar: float
    ) -> Plan | None:
        sets: list[SetChoice] = []
        for roles, group, size in zip(partition, groups, sizes, strict=True):
            found = self.sets.of_set(roles, group, size)
            # Lower bound: an iteration takes at least as long as each set is busy.
            if found is None or found.busy >= bar:
                self.considered.cut += 1
                return None
            sets.append(found)
        plan = self.plan("hybrid", sets)
        return plan if plan.seconds < bar else None

    def plan(self, runtime: Runtime, sets: Sequence[SetChoice]) -> Plan:
        """Return a plan with its calls scheduled as a runtime makes them.

        Args:
            runtime: The runtime that makes the calls.
            sets: The roles of each set of devices, with their deployments.
        """
        modelled = {name: cost for one in sets for name, cost in one.costs.items()}
        costs = {
            stage.name: modelled.get(stage.name) or self.problem.compute_cost(stage, sets[0].group)
            for stage in self.problem.flow.stages
        }
        # Only hybrid runs sets in parallel; stages without a model run with the first set.
        set_of = {name: i for i, one in enumerate(sets) for name in one.costs} if runtime == "hybrid" else {}
        pools = {name: set_of.get(name, 0) for name in costs}
        times = call_times(self.edges, pools, {name: cost.seconds for name, cost in costs.items()})
        seconds = self.problem.with_runtime(runtime, max(end for _, end in times.values()))
        return Plan(runtime, tuple(sets), seconds, costs, times)

    def colocated(self, runtime: Runtime) -> list[Plan]:
        """Return the best plan in which all roles share all devices; empty if they do not fit."""
        roles = tuple(self.problem.flow.roles)
        group = max(self.problem.cluster.groups, key=lambda group: group.size)
        found = self.sets.of_set(roles, group, group.size)
        return [] if found is None else [self.plan(runtime, [found])]

    def least(self) -> str:
        """Return an error message with the smallest number of devices on which the models fit."""
        roles = tuple(self.problem.flow.roles)
        for group in self.problem.cluster.groups:
            for nodes in (2**power for power in range(1, 11)):
                wider = group.model_copy(update={"nodes": group.nodes * nodes})
                if self.sets.of_set(roles, wider, wider.size):
                    return (
                        f"the models of flow {self.problem.flow.name} fit on no allocation of {self.problem.cluster}; "
                        f"the smallest that fits is --devices {wider.nodes}x{wider.devices}x{wider.kind}"
                    )
        largest = max(self.problem.models.values(), key=lambda model: model.shape.parameters)
        return (
            f"the models of flow {self.problem.flow.name} fit on no allocation of {self.problem.cluster}, nor of a thousand times as "
            f"many devices: {largest.role} has {largest.shape.parameters / 1e9:.1f}B parameters; choose a kind with more memory"
        )


def unit_of(group: NodeGroup) -> int:
    """Return the allocation unit of a node group: the smallest divisor that gives at most FINEST parts."""
    return next(n for n in range(1, group.size + 1) if group.size % n == 0 and group.size // n <= FINEST)


__all__ = ["Considered", "Plan", "RoleSets", "Search", "allocations", "partitions", "unit_of"]
