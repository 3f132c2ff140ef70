"""Plans for the streaming runtime: devices per worker group, simulated with the runtime's own schedule.

devices of each group ──lower bound: its busiest group──▶ in order of the bound ──simulation──▶ seconds per iteration
"""

import math
from collections.abc import Mapping, Sequence

from braidrl.flow import Kind
from braidrl.flow.batches import Sizes
from braidrl.flow.selecting import older_places
from braidrl.plan.choices import Choices, RolePart, SetChoice
from braidrl.plan.problem import USABLE, Problem
from braidrl.plan.rates import Cost
from braidrl.plan.search import Plan, allocations, costs_of, unit_of
from braidrl.plan.simulation import Streaming, Workload
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.runtimes.streaming.groups import worker_groups

ITERATIONS = 6
SKIPPED = 2
MOST_ROWS = 96
"""Most rows of a simulated iteration; in larger batches, each simulated row stands for several."""
MOST_SIMULATED = 24
"""Most allocations that are simulated, the most promising first."""


class StreamingSearch:
    """A search over the devices of worker groups, each with a layout or engines of its own."""

    def __init__(self, problem: Problem) -> None:
        problem.check_stages()
        self.problem = problem
        self.choices = Choices(problem)
        self.groups = [group for group in worker_groups(problem.config, problem.flow, None) if group.role]
        """The worker groups that need devices."""

    def best(self, staleness: int) -> Plan | None:
        """Return the fastest plan with this maximum staleness; None if a group does not fit."""
        found: list[tuple[float, list[SetChoice]]] = []
        rolling = self.problem.config.streaming.weights == "rolling"
        for group in self.problem.cluster.groups:
            room = self.problem.cluster.kinds[group.kind].memory * USABLE
            for sizes in allocations(group.size, len(self.groups), unit_of(group)):
                sets: list[SetChoice] = []
                # The fastest choice of each worker group that fits its devices.
                for member, devices in zip(self.groups, sizes, strict=True):
                    part: RolePart = "generate" if member.kind == "generate" else "model"
                    options = self.choices.of_role(str(member.role), group, devices, part)
                    fitting = [one for one in options if one.peak <= room]
                    if part == "generate" and rolling:
                        # One engine generates while another loads.
                        fitting = [one for one in fitting if one.use.engine is None or devices > one.use.engine.divisor]
                    if fitting:
                        choice = min(fitting, key=lambda one: one.busy)
                        sets.append(SetChoice(group, devices, {member.name: choice}, choice.costs, choice.peak))
                if len(sets) == len(self.groups):
                    found.append((max(one.busy for one in sets), sets))
        quickest: Plan | None = None
        for bound, sets in sorted(found, key=lambda pair: pair[0])[:MOST_SIMULATED]:
            # Lower bound: an iteration takes at least as long as each group's work.
            if quickest is not None and bound >= quickest.seconds:
                break
            plan = self.plan(sets, staleness)
            if quickest is None or plan.seconds < quickest.seconds:
                quickest = plan
        return quickest

    def plan(self, sets: Sequence[SetChoice], staleness: int) -> Plan:
        """Return the plan of these groups, timed by simulation."""
        costs = costs_of(self.problem, sets)
        result = Streaming(self.workload(sets, costs, staleness)).simulate()
        seconds = self.problem.with_runtime("streaming", result.seconds_per_iteration(SKIPPED))
        return Plan("streaming", tuple(sets), seconds, costs, {}, staleness, result)

    def workload(self, sets: Sequence[SetChoice], costs: Mapping[str, Cost], staleness: int) -> Workload:
        """Return the workload to simulate; in large batches, each of its rows stands for several."""
        config, flow, lengths = self.problem.config, self.problem.flow, self.problem.lengths
        samples = config.rollout.samples_per_prompt
        prompts = max(1, min(config.trainer.prompts_per_step, MOST_ROWS // samples))
        scale = config.trainer.prompts_per_step / prompts
        rows = prompts * samples
        updates = math.gcd(self.problem.updates, rows)
        sizes = Sizes(
            ITERATIONS, prompts, samples, rows // updates, config.trainer.epochs, staleness,
            older_groups=older_places(config.streaming.on_policy_share, prompts),
        )  # fmt: skip
        # Stages without a model run where their rows are.
        workers = dict[str, int]()
        seconds = {name: cost.seconds / len(lengths) * scale for name, cost in costs.items()}
        for consumer in Consumers(flow):
            one = next((one for one in sets if consumer.group in one.roles), None)
            if one is None:
                continue
            layout = one.roles[consumer.group].use.layout
            shared = consumer.group not in flow.changed_roles and not layout.is_replicated
            count = 1 if shared else layout.data or 1
            for stage in consumer.stages:
                if stage.kind is Kind.GENERATE:
                    count, seconds[stage.name] = self._engines(one, costs[stage.name], scale, staleness)
                elif stage.name in one.costs:
                    passes = config.trainer.epochs if stage.kind is Kind.TRAIN else 1
                    seconds[stage.name] *= count / passes
            workers |= dict.fromkeys((consumer.name, *(stage.name for stage in consumer.stages)), count)
        picks = [int(i * (len(lengths) - 1) / max(1, rows - 1)) for i in range(rows)]
        responses = lengths.ordered[picks] / lengths.ordered[picks].mean()
        order = [(i * 7919) % rows for i in range(rows)] if math.gcd(rows, 7919) == 1 else list(range(rows))

        update = max((costs[stage.name].weights for stage in flow.stages if stage.kind is Kind.GENERATE), default=0.0)
        dispatch = max(1, round(config.streaming.dispatch_rows / scale))
        return Workload(
            flow, sizes,
            lambda stage, uid: seconds[stage] * float(responses[order[(uid[1] * samples + uid[2]) % rows]]), workers=workers,
            dispatch_rows=dispatch, loading=config.streaming.weights, receive_seconds=update,
        )  # fmt: skip

    def _engines(self, one: SetChoice, cost: Cost, scale: float, staleness: int) -> tuple[int, float]:
        """Return the number of simulated engines, one for each slot, and the seconds of a simulated row of mean length on one."""
        total, lengths = cost.seconds - cost.weights, self.problem.lengths
        (choice,) = one.roles.values()
        engine = choice.use.engine
        slots = engine.slots * max(1, one.devices // engine.divisor) if engine else len(lengths)
        workers = max(1, round(slots / scale))
        if staleness == 0 and slots >= len(lengths):
            # On-policy iterations start and end with idle slots: use the mean decode step of `total`.
            return workers, total / float(lengths.ordered[-1]) * float(lengths.responses.mean())
        # Slots are always full: throughput is that of the engine.
        return workers, total * min(slots, len(lengths) * (1 + staleness)) / len(lengths)
