"""The protocols between a run, whoever drives its iterations, and whoever does the work.

run ──iterate, position, restore──▶ Controller: SerialController, StreamingProgram
run ──read, run, record, save──▶ Backend: all four
                                 SerialController ──admit, generate, select, train, publish──▶ SerialBackend: eager, hybrid, distributed

T is the backend's table: the rows themselves, a rank's shard of them, or handles to where they are.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from braidrl.data.loader import Admissions
from braidrl.data.rows import Rows
from braidrl.flow import Stage
from braidrl.flow.compute import State
from braidrl.flow.selecting import Selection
from braidrl.observe.metrics import Sums
from braidrl.runtimes.generating.early_stop import Needless, Segment
from braidrl.runtimes.row_store import Origin, RowText
from braidrl.training.roles.checkpoint import Write

T = TypeVar("T")


class Backend(Protocol[T]):
    """What a run asks of a backend beside its iterations: evaluation, records, checkpoints."""

    def read(self, origin: Origin) -> T:
        """Return a table of rows that exist elsewhere: a held-out set, a recording, the surplus of a checkpoint."""

    def run(self, stage: Stage, table: T, iteration: int, sums: Sums) -> T:
        """Return the table with the columns that a generate, infer or compute stage writes."""

    def index(self, table: T) -> Rows:
        """Return the table's index columns, in the order of its rows."""

    def record(self, path: Path, table: T, final: T) -> None:
        """Write a parquet file of `table`, with the columns that only `final`, the same rows, has."""

    def save_rows(self, path: Path, table: T) -> None:
        """Write rows with all their columns into a checkpoint."""

    def save(self, folder: Path) -> None:
        """Write every role that changes into a folder of its own."""

    def copy_for_saving(self, folder: Path) -> list[Write]:
        """Copy what `save` would write, and return the calls that write the copies; training may go on meanwhile."""

    def load(self, folder: Path, version: int) -> None:
        """Load what `save` has written; the loaded weights are those of `version`."""

    def close(self) -> None:
        """End what was started. May be called after a failure."""


class SerialBackend(Backend[T], Protocol[T]):
    """What `SerialController` asks in addition, stage by stage in the flow's order."""

    @property
    def loader(self) -> Admissions | None:
        """Return which prompts come next; None where the backend only evaluates."""

    def admit(self, groups: int) -> T:
        """Return the next prompts as rows, one per sample."""

    def generate_needed(self, segment: Segment, table: T, iteration: int, sums: Sums, needless: Needless) -> T:
        """Do as `run`; rows of groups that are not needed end with what they have."""

    def totals(self, stage: Stage, table: T) -> dict[str, float]:
        """Return what the stage's state follows, summed over all rows."""

    def select(self, stage: Stage, table: T) -> dict[int, str]:
        """Return the groups that a select stage drops, with its reason."""

    def train(self, stage: Stage, table: T, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        """Make one optimizer step for each list of row positions, or copy a role's weights where the stage has no loss."""

    def columns(self, table: T) -> Collection[str] | None:
        """Return the names of the columns that the rows have; None for a rank that has no row to tell by."""

    def texts(self, table: T) -> list[RowText]:
        """Return the prompt and response of each row, in the order of rows; a rank's own rows where each rank has its own."""

    def take(self, table: T, positions: Sequence[int]) -> T:
        """Return the named rows, in the order given."""

    def cat(self, tables: Sequence[T]) -> T:
        """Return the rows of all tables."""

    def publish(self, version: int) -> None:
        """Generate with the trained weights from now on. All training is done when this returns."""

    def begin_again(self) -> bool:
        """Start processes again that were lost, and forget all rows; return False where all processes have to start again."""


@dataclass
class IterationResult(Generic[T]):
    """What happened: index columns of the rows that metrics speak of and of the batch, metric sums, seconds, groups dropped by reason.

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
    """Return the rows that metrics speak of: of groups up to the batch's last. How far later ones came is a matter of time."""
    if surplus == "keep":
        return generated
    return generated.take((generated["group"] <= outcome.groups[-1]).nonzero().flatten().tolist())


class Position(NamedTuple):
    """What a checkpoint holds beside the weights: the states of loader and selection, tables of surplus rows, states of stages.

    `begun` are the batches that come next and were begun by older weights; who does not know of them begins them again.
    """

    loader: dict[str, Any]
    sampling: dict[str, Any]
    surplus: list[Any]
    stages: dict[str, State]
    begun: Sequence["BegunBatch"] = ()


@dataclass(frozen=True)
class BegunBatch:
    """The batch of an iteration whose rows are drawn before the weights are there that it is trained on.

    `table` is the batch where it is recorded, and `left_out` the index columns of rows that were generated for it and dropped: each a
    table, or the file that holds it in a checkpoint. `after` is where the run stands between this batch and the next one.
    """

    iteration: int
    table: Any
    left_out: Any
    outcome: Selection
    reports: list[dict[str, Any]]
    after: Position


class Restart(Enum):
    """How a run that has lost a process starts again."""

    WITH_ROWS = auto()
    """Only what trains: the others go on, with all rows in work."""
    FROM_CHECKPOINT = auto()
    """Only those that were lost and work together with them: the others keep their models, and rows are forgotten."""
    OF_ALL = auto()
    """All processes together."""


class Controller(Protocol[T]):
    """Whoever drives an iteration from its prompts to published weights."""

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
        """Run every stage that is due in this iteration on one batch; the weights of trained roles become `version` + 1.

        Args:
            iteration: Number of the batch, from 1.
            version: Version of the weights that the batch is trained on.
            recorded: Rows in place of those that would be generated.
            train: Whether weights change; without, they stay as they are.
            before_training: Called before train stages: from the first call on, the iteration cannot be taken back.
        """

    def position(self) -> Position:
        """Return where a run resumes from after the last finished iteration."""

    def begun_ahead(self) -> list[BegunBatch]:
        """Wait until rows are drawn that older weights have begun, and return their batches; a checkpoint keeps no older weights."""

    def begin_again(self, version: int) -> "Restart":
        """Replace the lost processes that train, for a checkpoint of this version, whose weights are loaded by the backend afterwards."""

    def restore(self, position: Position) -> None:
        """Go on from a checkpoint's position; its weights are loaded by the backend afterwards."""
