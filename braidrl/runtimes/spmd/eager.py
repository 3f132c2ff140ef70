"""The eager runtime: stages run in order in this process, on the rows themselves. Breakpoints work anywhere.

loader ──▶ Rows ──▶ stage ──▶ Rows + columns ──▶ stage ──▶ ... ──▶ optimizer steps
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from braidrl.config import Config
from braidrl.data.loader import PromptLoader
from braidrl.data.rows import Rows, tokens_of
from braidrl.flow import Stage
from braidrl.flow.compute import dropped, summed
from braidrl.observe.metrics import Sums
from braidrl.observe.trace import Span, TraceWriter, traced
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.early_stop import EarlyStop, Needless, Segment
from braidrl.runtimes.row_store import Admission, Origin, RowStore, RowText, with_added
from braidrl.training.objective import UpdateCounts
from braidrl.training.roles.checkpoint import Write


class InProcessBackend:
    """The part of a backend whose process holds every role, alone or as one of several ranks: weights, checkpoints, and the end."""

    def __init__(self, executor: StageExecutor, trace: TraceWriter | None, first: bool = True) -> None:
        """Store the parts; the `first` rank writes what all ranks hold."""
        self.executor, self.trace, self.first, self.version = executor, trace, first, 0

    def publish(self, version: int) -> None:
        self.version = version
        self.executor.publish(version)

    def begin_again(self) -> bool:
        """Return False: there is one process, or all ranks work together."""
        return False

    def save(self, folder: Path) -> None:
        self.executor.save(folder, self.first)

    def copy_for_saving(self, folder: Path) -> list[Write]:
        return self.executor.copy_for_saving(folder, self.first)

    def load(self, folder: Path, version: int) -> None:
        self.executor.load(folder)
        self.publish(version)

    def close(self) -> None:
        self.executor.close()
        if self.trace is not None:
            self.trace.close()


class EagerBackend(InProcessBackend):
    """One executor that holds every role; the table is the rows."""

    def __init__(
        self, config: Config, loader: PromptLoader | None, executor: StageExecutor, store: RowStore,
        trace: TraceWriter | None = None,
    ) -> None:  # fmt: skip
        super().__init__(executor, trace)
        self.config, self.loader, self.store = config, loader, store

    def admit(self, groups: int) -> Rows:
        assert self.loader is not None, "this backend only evaluates"
        return self.store.make(Admission(tuple(self.loader.advance(groups))))

    def run(self, stage: Stage, table: Rows, iteration: int, sums: Sums, stop: EarlyStop | None = None) -> Rows:
        with self._traced(stage, iteration, len(table)) as done:
            table = table.with_columns(self.executor.run(stage, table, sums, stop))
            done.tokens = tokens_of(table)
        return table

    def generate_needed(self, segment: Segment, table: Rows, iteration: int, sums: Sums, needless: Needless) -> Rows:
        stop = EarlyStop(segment, needless, self.executor.flow, table.uids())
        return self.run(segment.generate, table, iteration, sums, stop)

    def _traced(self, stage: Stage, iteration: int, rows: int) -> AbstractContextManager[Span]:
        role = stage.role or "compute"
        return traced(self.trace, role, stage.name, iteration, rows=rows, version=self.version)

    def totals(self, stage: Stage, table: Rows) -> dict[str, float]:
        return {name: float(total) for name, total in summed(stage, table).items()}

    def select(self, stage: Stage, table: Rows) -> dict[int, str]:
        return dropped(stage, table.index)

    def train(self, stage: Stage, table: Rows, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        parts = (self._update(stage, table.take(update), iteration) for update in updates)
        self.executor.train(stage, parts, iteration, sums, sum(map(len, updates)))

    @contextmanager
    def _update(self, stage: Stage, rows: Rows, iteration: int) -> Iterator[tuple[UpdateCounts, Rows]]:
        with self._traced(stage, iteration, len(rows)) as done:
            done.tokens = int(rows["length"].sum())
            yield self.executor.update(stage, rows.index, rows)

    def read(self, origin: Origin) -> Rows:
        return self.store.make(origin)

    def index(self, table: Rows) -> Rows:
        return table.index

    def columns(self, table: Rows) -> Collection[str]:
        return list(table)

    def texts(self, table: Rows) -> list[RowText]:
        return self.store.row_texts(table)

    def record(self, path: Path, table: Rows, final: Rows) -> None:
        self.store.record(path, with_added(table, final))

    def save_rows(self, path: Path, table: Rows) -> None:
        self.store.save(path, table)
