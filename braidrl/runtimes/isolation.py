"""Isolation of rows that end their processes, under `distributed` and `hybrid`; an engine of `streaming` gets leases.

rows ──passes──▶ those that are no suspects, together ─▶ suspect 1 alone ─▶ suspect 2 alone ──▶ rows in their order

A skipped row has no response, and its checks have failed.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from braidrl.cluster.row_deaths import RowDeaths
from braidrl.data.identity import Uid
from braidrl.flow import Kind, Scope, Stage
from braidrl.runtimes.generating.generation import UNDRAWN
from braidrl.runtimes.interfaces import TableT


def can_isolate(stage: Stage) -> bool:
    """Return True if the rows of a stage can run alone: they are generated, or a function processes each separately."""
    return stage.kind in (Kind.GENERATE, Kind.COMPUTE) and stage.scope is Scope.ROW


def run_isolated(
    run: Callable[[Stage, TableT], TableT], stage: Stage, table: TableT, uids: Sequence[Uid], deaths: RowDeaths
) -> TableT:
    """Run a stage on the rows of a table that are not suspects, then on each suspect alone; skipped rows are not
    generated.
    """
    if stage.kind is Kind.GENERATE:
        stage = replace(stage, params={**stage.params, UNDRAWN: deaths.left_out.intersection(uids)})
    passes = deaths.passes(uids)
    done = [run(stage, table.take(rows)) for rows in passes]
    order = [row for rows in passes for row in rows]
    joined: TableT = done[0].cat(done)
    return joined.take(sorted(range(len(order)), key=order.__getitem__))
