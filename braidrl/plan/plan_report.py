"""The report of a plan in 80 columns: plans, the best plan's stages and roles, the variations, and the reasons.

plans ──▶ tables, reasons ──▶ terminal      best plan ──spans──▶ the trace that `--trace` writes
"""

from collections.abc import Sequence
from functools import partial

from rich.console import Console
from rich.table import Table

from braidrl.config.layout import AXES, ParallelLayout
from braidrl.observe.trace import Span
from braidrl.plan.problem import Problem
from braidrl.plan.rates import Cost
from braidrl.plan.search import Plan
from braidrl.runtimes.memory.budget import in_units

SHOWN = 0.005
"""Differences below this share of an iteration are not listed as reasons."""


def show(problem: Problem, plans: Sequence[Plan], console: Console) -> None:
    """Print the plans, fastest first: the first plan in detail, and why it is fastest."""
    lengths, first, config = problem.lengths, plans[0], problem.config
    write = partial(console.print, highlight=False)
    write(
        f"flow {problem.flow.name} on {problem.cluster}, engine {config.rollout.engine}: {problem.rows:,} rows, "
        f"{lengths.tokens / len(lengths):,.0f} tokens on average, longest {lengths.longest:,}"
        + (f", {lengths.seen:,.0f} of images" if lengths.seen else "")
    )
    write(plans_table(problem, plans))
    stages = table("stages of plan 1", ("stage", "seconds", "made of"), (1,))
    for stage, cost in first.costs.items():
        parts = sorted(zip(cost, Cost._fields, strict=True), reverse=True)
        causes = ", ".join(
            f"{cause} {seconds_text(seconds, 2)}" for seconds, cause in parts if seconds > 0.01 * cost.seconds > 0
        )
        stages.add_row(stage, seconds_text(cost.seconds), causes)
    write(stages)
    write(roles_table(first))
    write(
        "varied: runtime, placement, devices of each role, layouts, tokens of a micro-batch, recomputation"
        + (", slots, ranks of an engine" if config.rollout.engine in ("embedded", "vllm") else "")
    )
    write(f"kept: engine {config.rollout.engine}, batch, lengths, dtypes, optimizer, adapters, weight-update policy")
    name, cost = max(first.costs.items(), key=lambda pair: pair[1].seconds)
    write(f"decided: {name} takes {cost.seconds / first.seconds:.0%} of plan 1, most of it {cost.bound}")
    for number, plan in enumerate(plans[1:], 2):
        more = plan.seconds - first.seconds
        slower = f"{seconds_text(more)} s slower: {reason(plan, first)}" if more > SHOWN * first.seconds else "as fast"
        write(f"  plan {number} is {slower}")


def seconds_text(seconds: float, figures: int = 3) -> str:
    """Return seconds in some figures, and those of minutes and hours without an exponent."""
    return f"{seconds:,.0f}" if abs(seconds) >= 99.5 else f"{seconds:.{figures}g}"


def table(title: str, columns: Sequence[str], right: Sequence[int]) -> Table:
    """Return an empty table without borders; the columns `right` are right-aligned, and the last one wraps."""
    empty_table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
    for i, column in enumerate(empty_table.columns):
        column.no_wrap = i < len(columns) - 1
        column.justify = "right" if i in right else "left"
        column.overflow = "fold"
    return empty_table


def plans_table(problem: Problem, plans: Sequence[Plan]) -> Table:
    """Return a table with a row for each plan."""
    columns = ("", "runtime", "seconds", "tokens/s/device", "memory", "placement")
    lines = table("plans", columns, (2, 3, 4))
    for number, plan in enumerate(plans, 1):
        runtime = plan.runtime + (f", staleness {plan.staleness}" if plan.staleness else "")
        rate = float(problem.lengths.tokens / plan.seconds / problem.cluster.size)
        memory = in_units(max(choice.memory for choice in plan.sets))
        lines.add_row(str(number), runtime, seconds_text(plan.seconds), f"{rate:,.1f}", memory, plan.name)
    return lines


def roles_table(plan: Plan) -> Table:
    """Return a table of each role's deployment: its layouts, micro-batch and engine."""
    lines = table("roles of plan 1", ("role", "devices", "memory", "deployment"), (2,))
    for set_choice in plan.sets:
        for name, choice in set_choice.roles.items():
            use, parts = choice.use, list[str]()
            if use.computes:
                parts.append(("trains in " if use.trained else "infers in ") + layout_name(use.layout))
                if use.inference is not None:
                    parts.append(f"infers in {layout_name(use.inference)}")
                parts.append(f"{use.tokens:,} tokens at once" + (", recomputed" if use.checkpointing else ""))
            if (engine := use.engine) is not None:
                parts.append(f"{engine.slots:,} slots" + (f", tensor {engine.divisor}" if engine.divisor > 1 else ""))
            # If not everything fits at once, roles are offloaded while others work.
            memory = in_units(min(choice.peak, set_choice.memory))
            lines.add_row(name, f"{set_choice.devices} x {set_choice.group.kind}", memory, "; ".join(parts))
    budgets = [set_choice.budget for set_choice in plan.sets if set_choice.budget is not None]
    if budgets:
        lines.caption = f"roles take turns within {in_units(min(budgets))} of resident bytes"
    return lines


def layout_name(layout: ParallelLayout) -> str:
    """Describe a layout by its axes larger than 1."""
    axes = (
        " ".join(f"{axis} {getattr(layout, axis)}" for axis in (*AXES, "expert") if (getattr(layout, axis) or 1) > 1)
        or "whole"
    )
    return axes if layout.shard == "none" else f"{axes}, shard {layout.shard}"


def reason(plan: Plan, first: Plan) -> str:
    """Explain why a plan is slower than the first: slower stages and idle devices."""
    # A plan with more staleness may have stages that the first does not have.
    slower = [
        (cost.seconds - first.costs.get(name, Cost()).seconds, name, cost.bound) for name, cost in plan.costs.items()
    ]
    worse = [candidate for candidate in slower if candidate[0] > SHOWN * first.seconds]
    reasons = [
        f"{name} takes {seconds_text(more)} s more ({what})" for more, name, what in sorted(worse, reverse=True)[:3]
    ]
    idle = [(1 - candidate.busy / plan.seconds, candidate) for candidate in plan.sets]
    share, idlest = max(idle, key=lambda pair: pair[0])
    if len(plan.sets) > 1 and share > 0.1:
        reasons.append(f"{'+'.join(idlest.roles)} waits {share:.0%} of the time")
    return "; ".join(reasons) or "its calls overlap less"


def spans_of(plan: Plan) -> list[Span]:
    """Return a plan's predicted trace: the simulated run of a streaming plan, else one iteration."""
    if plan.simulation is not None:
        return plan.simulation.spans
    workers = {stage: " ".join(choice.roles) for choice in plan.sets for stage in choice.costs}
    default = " ".join(plan.sets[0].roles)
    return [
        Span(workers.get(stage, default), stage.partition(".")[0], stage, 1, start, end)
        for stage, (start, end) in plan.starts.items()
        if end > start
    ]
