"""Plans for the streaming runtime: devices per worker group, simulated with the runtime's own schedule.

devices of each group ──lower bound: its busiest group──▶ in order of the bound ──simulation──▶ seconds per iteration
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from braidrl.cluster.device_kinds import NodeGroup
from braidrl.data.rows import Uid
from braidrl.flow import Kind, Stage
from braidrl.flow.batches import Sizes
from braidrl.flow.selecting import older_places
from braidrl.plan.choices import Choice, Choices, RolePart
from braidrl.plan.problem import USABLE, Problem
from braidrl.plan.rates import Cost
from braidrl.plan.search import Plan, allocations, unit_of
from braidrl.plan.sets import SetChoice
from braidrl.plan.simulation import Streaming
from braidrl.plan.workload import Workload

ITERATIONS = 6
SKIPPED = 2
MOST_ROWS = 96
"""Most rows of a simulated iteration; in larger batches, each simulated row stands for several."""
MOST_SIMULATED = 24
"""Most allocations that are simulated, the most promising first."""


@dataclass(frozen=True)
class PlannedMember:
    """A worker group that needs devices: a role's model, or its engines."""

    name: str
    role: str
    part: RolePart


def members(problem: Problem) -> list[PlannedMember]:
    """Return the worker groups of a flow that need devices."""
    found = []
    for model in problem.models.values():
        if model.generates:
            found.append(PlannedMember(f"{model.role}.generate", model.role, "generate"))
        if model.computes:
            found.append(PlannedMember(model.role, model.role, "model"))
    return found


class StreamingSearch:
    """A search over the devices of worker groups; each device holds a full copy of its group's model."""

    def __init__(self, problem: Problem) -> None:
        problem.check_stages()
        self.problem = problem
        self.choices = Choices(problem, laid_out=False)
        self.members = members(problem)
        self.simulated = 0

    def best(self, staleness: int) -> Plan | None:
        """Return the fastest plan with this maximum staleness; None if a group does not fit."""
        found = [(max(one.busy for one in sets), sets) for sets in self._allocated()]
        quickest: Plan | None = None
        for bound, sets in sorted(found, key=lambda pair: pair[0])[:MOST_SIMULATED]:
            # Lower bound: an iteration takes at least as long as each group's work.
            if quickest is not None and bound >= quickest.seconds:
                break
            plan = self.plan(sets, staleness)
            if quickest is None or plan.seconds < quickest.seconds:
                quickest = plan
        return quickest

    def _allocated(self) -> Iterator[list[SetChoice]]:
        for group in self.problem.cluster.groups:
            if group.size // unit_of(group) < len(self.members):
                continue
            for sizes in allocations(group.size, len(self.members), unit_of(group)):
                sets = [self.member_set(one, group, n) for one, n in zip(self.members, sizes, strict=True)]
                if all(one is not None for one in sets):
                    yield [one for one in sets if one is not None]

    def member_set(self, member: PlannedMember, group: NodeGroup, devices: int) -> SetChoice | None:
        """Return the fastest choice of a worker group that fits the devices; None if none fits."""
        room = self.problem.kind(group).memory * USABLE
        options = self.choices.of_role(member.role, group, devices, member.part)
        fitting = [one for one in options if one.peak <= room]
        if not fitting:
            return None
        choice = min(fitting, key=lambda one: one.busy)
        return SetChoice(group, devices, {member.name: choice}, choice.costs, choice.peak)

    def plan(self, sets: Sequence[SetChoice], staleness: int) -> Plan:
        """Return the plan of these groups, timed by simulation."""
        costs = {name: cost for one in sets for name, cost in one.costs.items()}
        every = {
            stage.name: costs.get(stage.name) or self.problem.compute_cost(stage, sets[0].group)
            for stage in self.problem.flow.stages
        }
        devices = {name: one.devices for one in sets for name in one.costs}
        result = Streaming(self.workload(sets, every, devices, staleness)).simulate()
        self.simulated += 1
        seconds = self.problem.with_runtime("streaming", result.seconds_per_iteration(SKIPPED))
        return Plan("streaming", tuple(sets), seconds, every, {}, staleness, result)

    def workload(
        self, sets: Sequence[SetChoice], costs: Mapping[str, Cost], devices: Mapping[str, int], staleness: int
    ) -> Workload:
        """Return the workload to simulate; in large batches, each of its rows stands for several."""
        config = self.problem.config
        samples = config.rollout.samples_per_prompt
        prompts = max(1, min(config.trainer.prompts_per_step, MOST_ROWS // samples))
        scale = config.trainer.prompts_per_step / prompts
        rows = prompts * samples
        updates = math.gcd(self.problem.updates, rows)
        sizes = Sizes(
            ITERATIONS, prompts, samples, rows // updates, config.trainer.epochs, staleness,
            older_groups=older_places(config.streaming.on_policy_share, prompts),
        )  # fmt: skip
        seconds = {
            stage.name: self._row_seconds(stage, sets, costs, devices, scale, staleness)
            for stage in self.problem.flow.stages
        }
        lengths = self.problem.lengths
        picks = [int(i * (len(lengths) - 1) / max(1, rows - 1)) for i in range(rows)]
        responses = lengths.ordered[picks] / lengths.ordered[picks].mean()
        order = [(i * 7919) % rows for i in range(rows)] if math.gcd(rows, 7919) == 1 else list(range(rows))

        def row_seconds(stage: str, uid: Uid) -> float:
            share = float(responses[order[(uid[1] * samples + uid[2]) % rows]])
            return seconds[stage] * share

        workers = {stage.name: self._workers(stage, sets, devices, scale) for stage in self.problem.flow.stages}
        dispatch = max(1, round(config.streaming.dispatch_rows / scale))
        return Workload(
            self.problem.flow, sizes, row_seconds, workers=workers, dispatch_rows=dispatch,
            loading=config.streaming.weights,
        )  # fmt: skip

    def _engine(self, stage: Stage, sets: Sequence[SetChoice]) -> Choice:
        return next(one.roles[f"{stage.role}.generate"] for one in sets if f"{stage.role}.generate" in one.roles)

    def _workers(self, stage: Stage, sets: Sequence[SetChoice], devices: Mapping[str, int], scale: float) -> int:
        """Return the number of simulated workers: one per slot for generation, else one per device."""
        count = devices.get(stage.name, 1)
        if stage.kind is not Kind.GENERATE:
            return count
        engine = self._engine(stage, sets).use.engine
        assert engine is not None
        return max(1, round(count * engine.slots / scale))

    def _row_seconds(
        self, stage: Stage, sets: Sequence[SetChoice], costs: Mapping[str, Cost], devices: Mapping[str, int], scale: float,
        staleness: int,
    ) -> float:  # fmt: skip
        """Return the seconds of a simulated row of mean length on one worker."""
        total = costs[stage.name].seconds
        lengths = self.problem.lengths
        if stage.kind is not Kind.GENERATE:
            passes = self.problem.config.trainer.epochs if stage.kind is Kind.TRAIN else 1
            return total * devices.get(stage.name, 1) / len(lengths) * scale / passes
        engine = self._engine(stage, sets).use.engine
        assert engine is not None
        count = devices[stage.name]
        if staleness == 0:
            # On-policy iterations start and end with idle slots: use the mean decode step of `total`.
            steps = total / float(lengths.ordered[-1]) if engine.slots * count >= len(lengths) else 0.0
            if steps:
                return steps * float(lengths.responses.mean())
        # Slots are always full: throughput is that of the engine.
        return total * min(engine.slots * count, len(lengths) * (1 + staleness)) / len(lengths)
