"""The eager runtime: stages run in order in this process, on the rows themselves. Breakpoints work anywhere.

loader ──▶ Rows ──▶ stage ──▶ Rows + columns ──▶ stage ──▶ ... ──▶ optimizer steps
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.data.loader import PromptLoader
from braidrl.data.rows import Rows, tokens_of
from braidrl.flow import Stage
from braidrl.flow.compute import summed
from braidrl.observe.metrics import Sums
from braidrl.observe.trace import TraceWriter, traced
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.early_stop import EarlyStop, Needless, Segment
from braidrl.runtimes.row_store import Origin, RowStore, RowText, with_added
from braidrl.training.objective import UpdateCounts
from braidrl.training.roles.checkpoint import Write


class InProcessBackend:
    """The part of a backend whose process holds every role, alone or as one of several ranks: weights, checkpoints, and the end."""

    def __init__(
        self, config: Config, loader: PromptLoader | None, executor: StageExecutor, store: RowStore, world: World,
        trace: TraceWriter | None = None,
    ) -> None:  # fmt: skip
        """Store the parts; the first rank of the world writes what all ranks hold. Without a loader the backend only evaluates."""
        self.config, self.loader, self.executor, self.store = config, loader, executor, store
        self.world, self.trace, self.version = world, trace, 0

    def publish(self, version: int) -> None:
        self.version = version
        self.executor.publish(version)

    def begin_again(self) -> bool:
        """Return False: there is one process, or all ranks work together."""
        return False

    def index(self, table: Any) -> Rows:
        index: Rows = table.index
        return index

    def save(self, folder: Path, copy: bool = False) -> list[Write]:
        if copy:
            self.world.at(f"copying for {folder.name}")
        return self.executor.save(folder, self.world.first, copy)

    def load(self, folder: Path, version: int) -> None:
        self.executor.load(folder)
        self.publish(version)

    def close(self) -> None:
        self.executor.close()
        if self.trace is not None:
            self.trace.close()


class EagerBackend(InProcessBackend):
    """One executor that holds every role; the table is the rows."""

    def read(self, origin: Origin) -> Rows:
        return self.store.make(origin)

    def run(self, stage: Stage, table: Rows, iteration: int, sums: Sums, stop: EarlyStop | None = None) -> Rows:
        about = {"rows": len(table), "version": self.version}
        with traced(self.trace, stage.role or "compute", stage.name, iteration, **about) as done:
            table = table.with_columns(self.executor.run(stage, table, sums, stop))
            done.tokens = tokens_of(table)
        return table

    def generate_needed(self, segment: Segment, table: Rows, iteration: int, sums: Sums, needless: Needless) -> Rows:
        stop = EarlyStop(segment, needless, self.executor.flow, table.uids())
        return self.run(segment.generate, table, iteration, sums, stop)

    def totals(self, stage: Stage, table: Rows) -> dict[str, float]:
        return {name: float(total) for name, total in summed(stage, table).items()}

    def train(self, stage: Stage, table: Rows, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        @contextmanager
        def traced_update(rows: Rows) -> Iterator[tuple[UpdateCounts, Rows]]:
            about = {"rows": len(rows), "version": self.version}
            with traced(self.trace, stage.role or "compute", stage.name, iteration, **about) as done:
                done.tokens = int(rows["length"].sum())
                yield self.executor.update(stage, rows.index, rows)

        parts = (traced_update(table.take(update)) for update in updates)
        self.executor.train(stage, parts, iteration, sums, sum(map(len, updates)))

    def columns(self, table: Rows) -> Collection[str]:
        return list(table)

    def texts(self, table: Rows) -> list[RowText]:
        return self.store.row_texts(table)

    def record(self, path: Path, table: Rows, final: Rows) -> None:
        self.store.record(path, with_added(table, final))

    def save_rows(self, path: Path, table: Rows) -> None:
        self.store.save(path, table)
