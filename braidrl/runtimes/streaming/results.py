"""A finished iteration as every runtime reports it: what the queue and its workers noted, made metrics. No queue, no process."""

from __future__ import annotations

from collections.abc import Sequence

from braidrl.data.rows import Rows
from braidrl.flow import Flow
from braidrl.observe.metrics import Sums
from braidrl.runtimes.controller import IterationResult, needed
from braidrl.runtimes.streaming.groups import Group
from braidrl.transfer.queue.stream import FinishedIteration, Report


def iteration_result(
    flow: Flow, groups: Sequence[Group], surplus: str, finished: FinishedIteration, table: Rows, final: Rows
) -> IterationResult[Rows]:
    """`table` are the rows as they are recorded, `final` the same with every column; `surplus` is what becomes of groups that are over."""
    # As in serial order: scores as selection saw them, or where nothing is selected as they were in the end.
    parts = [*finished.generated, finished.index] if flow.sampling_segment else [finished.final]
    common = [name for name in parts[-1] if all(name in part for part in parts)]
    sums = Sums.merged(Sums(report["sums"]) for report in finished.reports)
    for stage, state in finished.states.items():
        for name, value in state.items():
            sums.add(f"{stage}/{name}", value)
    generated = Rows.cat([part.only(common) for part in parts])
    return IterationResult(
        needed(generated, finished.outcome, surplus), finished.final, table, final, sums,
        stage_seconds(flow, groups, finished.reports), finished.outcome.dropped,
    )  # fmt: skip


def stage_seconds(flow: Flow, groups: Sequence[Group], reports: Sequence[Report]) -> dict[str, float]:
    """Of each stage the time that its workers were busy with it, on average."""
    seconds = dict.fromkeys((stage.name for stage in flow.stages), 0.0)
    workers = {name: group.processes // group.ranks for group in groups for name in group.stages}
    for report in reports:
        seconds[report["stage"]] += report["seconds"] / workers[report["stage"]]
    return seconds
