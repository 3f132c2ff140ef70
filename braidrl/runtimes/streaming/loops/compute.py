"""The loop of a compute worker: verifiers, registered functions, selection."""

from __future__ import annotations

from contextlib import suppress

from braidrl.flow import Kind, Scope
from braidrl.flow.stage_state import with_state
from braidrl.runtimes.streaming.context import WorkerContext
from braidrl.transfer.queue.client import Client, StreamLoader, WorkItem
from braidrl.transfer.queue.data_plane import Evicted


def compute(context: WorkerContext, client: Client) -> None:
    """Does what is ready until the run ends."""
    settings = context.settings
    context.progress.on_advance = lambda: client.renew(settings.lease_s / 3)
    for work in StreamLoader(client, context.group.stages, settings.dispatch_rows, settings.wait_s):
        if work.kind == "rows":
            # Rows of a group that selection has dropped meanwhile are gone, and the lease with them.
            with suppress(Evicted):
                compute_rows(context, client, work)


def compute_rows(context: WorkerContext, client: Client, work: WorkItem) -> None:
    """One lease: columns for its rows, or verdicts on its groups."""
    stage = with_state(context.stage(work.stage), work.message["state"])
    leases = [number for number, _ in work.leases]
    if stage.kind is Kind.SELECT:
        with context.busy(stage.name, work.iteration, work.index.uids()) as report:
            dropped = context.executor.select(stage, work.index)
            reasons = {group: dropped.get(group) for group in dict.fromkeys(work.index["group"].tolist())}
        client.selected(stage.name, leases[0], reasons, report.plain())
        return
    with context.busy(stage.name, work.iteration, work.index.uids()) as report:
        rows = work.rows()
        if stage.scope is Scope.BATCH:
            columns = context.executor.apply(stage, rows, context.executor.sums(stage, rows))
        else:
            columns = context.executor.execute(stage, rows, report.sums)
        written = client.write(rows.uids(), columns)
        followed = context.executor.sums(stage, rows) if stage.state else {}
    totals = {name: float(total) for name, total in followed.items()}
    client.done(stage.name, leases, [written], report.plain(), totals)
