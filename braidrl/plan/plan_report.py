"""The report of a plan: a table, the best plan's stages, roles and timeline, and why the others are slower.

plans ──▶ table, breakdown, reasons ──▶ terminal          best plan ──spans──▶ the page that `braid timeline` draws
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from braidrl.config.layout import AXES, ParallelLayout
from braidrl.observe.timeline import timeline_page
from braidrl.observe.trace import Span
from braidrl.plan.choices import Choice
from braidrl.plan.problem import Problem
from braidrl.plan.rates import Cost
from braidrl.plan.search import Plan
from braidrl.runtimes.memory.budget import in_units

SHOWN = 0.005
"""Differences below this share of an iteration are not listed as reasons."""


def show(problem: Problem, plans: Sequence[Plan], console: Console) -> None:
    """Print the plans, fastest first, with the breakdown of the first and the reasons against the others."""
    lengths = problem.lengths
    console.print(
        f"flow {problem.flow.name} on {problem.cluster}: {problem.rows:,} rows of {lengths.tokens / len(lengths):,.0f} tokens "
        f"on average, the longest {lengths.longest:,}", soft_wrap=True,
    )  # fmt: skip
    console.print(plans_table(problem, plans))
    console.print(stages_table(plans[0]))
    console.print(roles_table(plans[0]))
    for number, plan in enumerate(plans[1:], 2):
        console.print(
            f"{number} is {plan.seconds - plans[0].seconds:,.3g} s slower: {reason(plan, plans[0])}", soft_wrap=True
        )


def table(title: str, columns: Sequence[str], right: range) -> Table:
    """Return an empty table; the columns `right` are right-aligned."""
    found = Table(*columns, title=title, title_justify="left")
    for i in right:
        found.columns[i].justify = "right"
    return found


def plans_table(problem: Problem, plans: Sequence[Plan]) -> Table:
    """Return a table with a row for each plan."""
    columns = ("", "runtime", "placement", "seconds", "tokens/s/device", "memory", "bound by")
    lines = table("plans", columns, range(3, 6))
    for number, plan in enumerate(plans, 1):
        runtime = plan.runtime + (f", staleness {plan.staleness}" if plan.staleness else "")
        lines.add_row(
            str(number), runtime, plan.name, f"{plan.seconds:,.3g}", f"{tokens_per_second(problem, plan):,.1f}",
            in_units(max(one.memory for one in plan.sets)), bound(plan),
        )  # fmt: skip
    return lines


def tokens_per_second(problem: Problem, plan: Plan) -> float:
    """Return tokens (prompts and responses) per second and device."""
    return float(problem.lengths.tokens / plan.seconds / problem.cluster.size)


def bound(plan: Plan) -> str:
    """Name the slowest stage and the largest part of its time."""
    name, cost = max(plan.costs.items(), key=lambda pair: pair[1].seconds)
    return f"{name}: {cost.bound}"


def stages_table(plan: Plan) -> Table:
    """Return a table of each stage's seconds, split by cause."""
    lines = table("stages of plan 1", ("stage", "seconds", *Cost._fields), range(1, 2 + len(Cost._fields)))
    for name, cost in plan.costs.items():
        lines.add_row(name, f"{cost.seconds:,.3g}", *(f"{part:,.2g}" if part else "" for part in cost))
    return lines


def roles_table(plan: Plan) -> Table:
    """Return a table of each role's deployment."""
    lines = table("roles of plan 1", ("role", "devices", "layout", "micro-batch", "engine", "memory"), range(0))
    for one in plan.sets:
        for name, choice in one.roles.items():
            # If not everything fits at once, roles are offloaded while others work.
            memory = in_units(min(choice.peak, one.memory))
            where = f"{one.devices} x {one.group.kind}"
            lines.add_row(name, where, spelled(choice), micro_batch(choice), engine(choice), memory)
    return lines


def spelled(choice: Choice) -> str:
    """Describe a role's layouts."""
    training = layout_name(choice.use.layout)
    return training if choice.use.inference is None else f"{training}; infers in {layout_name(choice.use.inference)}"


def layout_name(layout: ParallelLayout) -> str:
    """Describe a layout by its axes larger than 1."""
    axes = " ".join(f"{axis} {getattr(layout, axis)}" for axis in AXES if (getattr(layout, axis) or 1) > 1) or "whole"
    return axes if layout.shard == "none" else f"{axes}, shard {layout.shard}"


def micro_batch(choice: Choice) -> str:
    """Describe a role's micro-batch."""
    if not choice.use.computes:
        return ""
    return f"{choice.use.tokens:,} tokens" + (", checkpointing" if choice.use.checkpointing else "")


def engine(choice: Choice) -> str:
    """Describe a role's engine."""
    used = choice.use.engine
    if used is None:
        return ""
    return f"{used.slots} slots" + (f", tensor {used.divisor}" if used.divisor > 1 else "")


def reason(plan: Plan, first: Plan) -> str:
    """Explain why a plan is slower than the first: slower stages and idle devices."""
    worse = [
        (cost.seconds - first.costs[name].seconds, name, cost.bound)
        for name, cost in plan.costs.items()
        if cost.seconds - first.costs[name].seconds > SHOWN * first.seconds
    ]
    reasons = [f"{name} takes {more:,.3g} s more ({what})" for more, name, what in sorted(worse, reverse=True)[:3]]
    idle = [(1 - one.busy / plan.seconds, one) for one in plan.sets]
    share, idlest = max(idle, key=lambda pair: pair[0])
    if len(plan.sets) > 1 and share > 0.1:
        reasons.append(f"{'+'.join(idlest.roles)} waits {share:.0%} of the time")
    return "; ".join(reasons) or "its calls overlap less"


def spans_of(plan: Plan) -> list[Span]:
    """Return a plan's predicted trace: the simulated run of a streaming plan, else one iteration."""
    if plan.simulation is not None:
        return [
            Span(one.worker, one.stage.partition(".")[0], one.stage, one.iteration, one.start, one.end, one.rows)
            for one in plan.simulation.spans
        ]
    workers = {stage: " ".join(one.roles) for one in plan.sets for stage in one.costs}
    default = " ".join(plan.sets[0].roles)
    return [
        Span(workers.get(stage, default), stage.partition(".")[0], stage, 1, start, end)
        for stage, (start, end) in plan.starts.items()
        if end > start
    ]


def timeline(plan: Plan, name: str) -> str:
    """Return a plan's predicted timeline as an HTML page."""
    return timeline_page(f"{name}: predicted", spans_of(plan))
