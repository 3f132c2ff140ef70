"""The protocols between a run, its controller and its backend, and the interrupts that they share.

run ─iterate, position, restore──▶ Controller: SerialController, StreamingController
run ─read, run, record, save──▶ Backend: all four
                                SerialController ──generate, train, publish──▶ SerialBackend: eager, hybrid, distributed

T is the backend's table: a rank's shard of the rows, or handles to their locations.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from types import FrameType
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from braidrl.cluster.row_deaths import RowDeaths
from braidrl.data.loader import Admissions
from braidrl.data.rows import Rows, RowTable
from braidrl.flow import Stage
from braidrl.flow.compute import State
from braidrl.flow.selecting import Selection
from braidrl.observe.metrics import Sums
from braidrl.observe.trace import TraceWriter
from braidrl.runtimes.generating.verification import Segment
from braidrl.runtimes.row_store import Origin, RowText
from braidrl.training.optimizer import CONFIGURED, StepOverrides
from braidrl.training.roles.checkpoint import Write

T = TypeVar("T")
TableT = TypeVar("TableT", bound=RowTable)


class Backend(Protocol[T]):
    """The part of a backend outside iterations: evaluation, records, checkpoints."""

    def read(self, origin: Origin) -> T:
        """Return a table of rows: a row per sample of admitted prompts, a held-out set, a recording or surplus."""

    def run(self, stage: Stage, table: T, iteration: int, sums: Sums) -> T:
        """Return the table with the columns that a generate, infer or compute stage writes."""

    def index(self, table: T) -> Rows:
        """Return the table's index columns, in the order of its rows."""

    def record(self, path: Path, table: T, final: T) -> None:
        """Write `table` to a parquet file, with the additional columns of `final`, which holds the same rows."""

    def save_rows(self, path: Path, table: T) -> None:
        """Write rows with all their columns into a checkpoint."""

    def save(self, folder: Path, copy: bool = False) -> list[Write]:
        """Write every changing role into its folder; with `copy` return functions that write copies meanwhile."""

    def load(self, folder: Path, version: int) -> None:
        """Load a folder written by `save`; its weights are those of `version`."""

    def close(self) -> None:
        """End all started processes. It may be called after a failure."""


class SerialBackend(Backend[TableT], Protocol[TableT]):
    """The further methods that `SerialController` calls, stage by stage in the flow's order."""

    trace: TraceWriter | None
    deaths: RowDeaths
    """The rows that have killed processes of the run: they are isolated or skipped."""

    @property
    def loader(self) -> Admissions | None:
        """Return the prompt loader; None if the backend only evaluates."""

    def run(self, stage: Stage, table: TableT, iteration: int, sums: Sums, segment: Segment | None = None) -> TableT:
        """Run a stage; when it generates a sampling `segment`, rows of groups that are no longer needed end early."""

    def totals(self, stage: Stage, table: TableT) -> dict[str, float]:
        """Return the totals over all rows that the stage's state depends on."""

    def train(self, stage: Stage, table: TableT, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        """Make one optimizer step for each list of row positions, or copy a role's weights if the stage has no loss."""

    def forward_backward(self, stage: Stage, table: TableT, iteration: int, sums: Sums) -> None:
        """Accumulate the gradients of an update's objective over a table for the role's next `optim_step`.

        Different objectives are divided by the counts of their own rows; a repeated objective by those of all its rows
        together.
        """

    def optim_step(self, role: str, iteration: int, sums: Sums, overrides: StepOverrides = CONFIGURED) -> None:
        """Make one optimizer step of the accumulated objectives; its settings replace the configured ones."""

    def texts(self, table: TableT) -> list[RowText]:
        """Return the prompt and response of each row, in order; under distributed only for the rank's rows."""

    def publish(self, version: int) -> None:
        """Wait for all training and load the trained weights into the engines."""

    def is_awaited(self) -> bool:
        """Return True if `begin_again` would admit processes in place of lost ones."""

    def begin_again(self) -> bool:
        """Restart lost processes and forget all rows; return False if all processes must restart."""


@dataclass
class IterationResult(Generic[T]):
    """The result of an iteration: index columns of generated rows and batch, metric sums, seconds, dropped groups by
    reason.

    `table` is the batch at the point where it is recorded, `final` the same rows with every column.
    """

    generated: Rows
    batch: Rows
    table: T
    final: T
    sums: Sums = field(default_factory=Sums)
    seconds: dict[str, float] = field(default_factory=dict)
    dropped: dict[str, int] = field(default_factory=dict)


def needed(generated: Rows, outcome: Selection, surplus: str) -> Rows:
    """Return the rows that metrics describe: groups up to the batch's last.

    The progress of later groups depends on timing.
    """
    if surplus == "keep":
        return generated
    counted = generated["group"] <= outcome.groups[-1]
    return generated if counted.all() else generated.take(counted)


class Position(NamedTuple):
    """The content of a checkpoint except the weights: loader, selection, surplus rows, states of stages.

    `started` are the next batches, started on an older policy version. A controller that ignores them starts them
    again.
    """

    loader: dict[str, Any]
    sampling: dict[str, Any]
    surplus: list[Any]
    stages: dict[str, State]
    started: Sequence["StartedBatch"] = ()


@dataclass(frozen=True)
class StartedBatch:
    """A batch whose rows were started before its weights existed.

    `table` is the batch at its recording point, and `left_out` the index columns of its dropped rows: each a table, or
    its file in a checkpoint. `after` is the run's position between this batch and the next one.
    """

    iteration: int
    table: Any
    left_out: Any
    outcome: Selection
    reports: list[dict[str, Any]]
    after: Position


class Restart(Enum):
    """The extent of a restart after a lost process."""

    WITH_ROWS = auto()
    """Lost processes restart; the others continue, and all rows stay."""
    FROM_CHECKPOINT = auto()
    """Lost processes restart, and rows are forgotten."""
    OF_ALL = auto()
    """All processes restart."""


class Controller(Protocol[T]):
    """Drives an iteration from its prompts to published weights."""

    @property
    def backend(self) -> Backend[T]:
        """Return the backend that does the work."""

    def iterate(
        self,
        iteration: int,
        version: int,
        recorded: T | None = None,
        train: bool = True,
        before_training: Callable[[], object] = lambda: None,
    ) -> IterationResult[T]:
        """Run every due stage of an iteration on one batch; afterwards trained roles have version `version` + 1.

        `recorded` rows replace generated ones. After the first call of `before_training` the iteration cannot be
        undone.
        """

    def position(self) -> Position:
        """Return the resume position after the last finished iteration."""

    def started_ahead(self) -> list[StartedBatch]:
        """Finish in-flight batches that were started on older versions and return them; a checkpoint does not store
        older weights.
        """

    def is_awaited(self) -> bool:
        """Return True if lost processes have restarted, and wait for a checkpoint of this step to join the others."""

    def begin_again(self, version: int) -> "Restart":
        """Replace lost training processes, and admit waiting ones, for a checkpoint of this version; the backend loads
        its weights afterwards.
        """

    def restore(self, position: Position) -> None:
        """Resume from a checkpoint's position; the backend loads its weights afterwards."""


REPEATED_S = 1.0
"""A second signal within this many seconds is a duplicate: the terminal and the launcher of ranks both send one."""


class Interrupts:
    """Turns SIGINT and SIGTERM into KeyboardInterrupt; inside `hold()` only when the hold ends.

    Ranks that must stop together are not `alone`: a signal takes effect when they agree, and immediately only in local
    work.
    """

    def __init__(self, alone: bool = True) -> None:
        self.alone = alone
        self._holds = 0
        self._first: float | None = None
        self._local = False
        self.stop_requested = False
        """True from a stop request until the stop."""
        self.torn = False
        """True after a second signal broke a hold: weights may be inconsistent and must not be saved."""

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Delay an interrupt until the outermost hold ends, or until several ranks agree after it; a second Ctrl-C is
        not delayed.
        """
        self._holds += 1
        try:
            yield
        finally:
            self._holds -= 1
        if self.alone:
            self.agree(self.stop_requested)

    @contextmanager
    def local(self) -> Iterator[None]:
        """Mark work in which no other rank participates. Inside a hold this has no effect."""
        self._local = not self._holds
        try:
            yield
        finally:
            self._local = False

    def agree(self, is_asked: bool) -> None:
        """Raise KeyboardInterrupt on every calling rank if one received a signal and no hold is active."""
        if is_asked and not self._holds:
            self.stop_requested = False
            raise KeyboardInterrupt

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal, as the handler that `interrupts_handled` sets."""
        now = time.monotonic()
        if self.alone:
            if not self._holds or self.stop_requested:
                self.torn = self._holds > 0
                raise KeyboardInterrupt
            self.stop_requested = True
        elif self._first is None:
            self._first, self.stop_requested = now, True
            if self._local:
                raise KeyboardInterrupt
        elif now - self._first > REPEATED_S:
            # Ranks that leave one by one stop at different points, and their joint state cannot be resumed.
            self.torn = True
            raise KeyboardInterrupt
