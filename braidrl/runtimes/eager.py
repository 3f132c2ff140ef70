"""The eager runtime: stages run in order in this process, on the rows themselves. A breakpoint stops where it stands.

loader ──▶ Rows ──▶ stage ──▶ Rows + columns ──▶ stage ──▶ ... ──▶ optimizer steps
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from braidrl.config import Config
from braidrl.data.admission import admit
from braidrl.data.loader import PromptLoader
from braidrl.data.rows import Rows
from braidrl.flow import Flow, Scope, Stage
from braidrl.models.objective import denominators
from braidrl.observe.metrics import Sums
from braidrl.runtimes.executor import StageExecutor, checked_beside
from braidrl.runtimes.iteration import group_tokens
from braidrl.runtimes.row_store import Origin, RowStore, with_added


class EagerCrew:
    """One executor that holds every role; the table is the rows."""

    def __init__(
        self, config: Config, flow: Flow, loader: PromptLoader | None, executor: StageExecutor, store: RowStore
    ) -> None:
        self.config, self.flow, self.loader, self.executor, self.store = config, flow, loader, executor, store

    def admit(self, groups: int) -> Rows:
        assert self.loader is not None, "this crew only evaluates"
        return admit(self.loader, groups, self.config.rollout.samples_per_prompt)

    def run(self, stage: Stage, table: Rows, iteration: int, sums: Sums) -> Rows:
        if stage.scope is Scope.BATCH:
            return table.with_columns(self.executor.apply(stage, table, self.executor.sums(stage, table)))
        beside = checked_beside(self.flow, stage) if stage.type == "generate" else ()
        return table.with_columns(self.executor.execute(stage, table, sums, beside))

    def select(self, stage: Stage, table: Rows) -> dict[int, str]:
        return self.executor.select(stage, table.index)

    def train(self, stage: Stage, table: Rows, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        with self.executor.progress.stage(stage.name, sum(len(update) for update in updates)) as bar:
            for update in updates:
                rows = table.take(update)
                rows = rows.with_columns({"group_tokens": group_tokens(rows)})
                losses = self.executor.accumulate(stage, rows, sums, bar)
                record_update(stage, losses, denominators(rows), sums)
                norm = self.executor.step(stage, denominators(rows), iteration)
                if norm is not None:
                    sums.add(f"{stage.role}/grad_norm", norm)

    def index(self, table: Rows) -> Rows:
        return table.index

    def take(self, table: Rows, positions: Sequence[int]) -> Rows:
        return table.take(positions)

    def cat(self, tables: Sequence[Rows]) -> Rows:
        return Rows.cat(tables)

    def bring(self, origin: Origin) -> Rows:
        return self.store.make(origin)

    def record(self, path: Path, table: Rows, final: Rows) -> None:
        self.store.record(path, with_added(table, final))

    def keep(self, path: Path, table: Rows) -> None:
        self.store.keep(path, table)

    def publish(self, version: int) -> None:
        self.executor.publish(version)

    def save(self, folder: Path) -> None:
        self.executor.save(folder)

    def load(self, folder: Path, version: int) -> None:
        self.executor.load(folder)
        self.executor.publish(version)

    def close(self) -> None:
        self.executor.close()


def record_update(stage: Stage, losses: dict[str, float], counts: dict[str, float], sums: Sums) -> None:
    """Adds one optimizer step's loss: sums over global counts."""
    if any(counts[name] > 0 for name in losses):
        sums.add(f"loss/{stage.role}", sum(loss / counts[name] for name, loss in losses.items() if counts[name] > 0))
