"""Requests of a streaming run's workers to the control plane, and the work that they get: structs, dispatched by type.

worker ──Take──▶ control plane ──▶ LeasedRows │ Step │ Give │ Receive │ LoadWeights │ Order │ Stop │ Lost
       ──Done, Ended, Stepped, WeightsGiven, NewWeights, Loaded, OrderDone, Renew──▶ recorded

A leader broadcasts the same work to the other ranks of its group.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.data.codec import encode
from braidrl.data.messages import Frame, Message
from braidrl.data.rows import Rows
from braidrl.flow.compute import State
from braidrl.queue.calls import Done, GiveBack, Hello, Leased, Lost, QueueRequest, Renew, Stop, Take, Waited
from braidrl.queue.table import Positions, StoredMessage, TablePiece
from braidrl.runtimes.row_store import Admission, HeldOut, Surplus
from braidrl.weights.collective import OfferedWeights


class WeightLocation(Message):
    """The location of a version of a role's weights."""

    number: int
    """Identifies the version at the ranks that hold it."""
    bytes: int
    path: str = ""
    machines: Sequence[str] = ()
    """The machines that can read the path; empty means all."""
    offer: OfferedWeights | None = None


Weights = tuple[str, int, WeightLocation]
"""A role, its version, and the location."""


# Work


class BatchPlan(Message):
    """The part of leased rows in their batch, for a trainer."""

    updates: Sequence[Sequence[int]]
    """The updates of each row."""
    update_rows: int
    steps: int
    batch_rows: int


class LeasedRows(Leased, kw_only=True):
    """Rows of a consumer, in an iteration."""

    iteration: int
    states: dict[str, State]
    """The values of the consumer's stages with a state."""
    to_the_end: Sequence[int] = ()
    """Positions of the rows that may not be suspended."""
    left_out: Sequence[int] = ()
    """Positions of rows that stay without a response, because too many engines have died with them."""
    batch: BatchPlan | None = None


class Step(Lost, kw_only=True):
    """Make the step of a train stage."""

    stage: str
    iteration: int
    export: int | None = None
    """The version to publish after it."""
    is_last: bool = False
    """True for the role's last step of the iteration."""
    outdated: Sequence[int] = ()
    """Numbers of versions that are not needed any more."""
    weights: WeightLocation | None = None
    """The weights of another role, for an update without a loss."""


class Give(Lost, kw_only=True):
    """Give the role's weights for another role's update."""

    stage: str


class Receive(Lost, kw_only=True):
    """Receive a version into host memory ahead of its load."""

    version: int
    weights: Sequence[Weights]


class LoadWeights(Lost, kw_only=True):
    """Load a version; with `keeps_rows` running rows are preempted and resumed."""

    version: int
    keeps_rows: bool
    weights: Sequence[Weights]


class MakeRows(Message):
    """Make the rows of an origin, and put them into storage."""

    origin: Admission | HeldOut | Surplus


class WriteRows(Message):
    """Write rows to a file: into a checkpoint, or as `recorded` for people and replays."""

    path: Path
    payload: Sequence[TablePiece]
    recorded: bool


class Save(Message):
    """Write the role into a checkpoint; with `copy` only copy it now, and write it while later rows are processed."""

    folder: Path
    copy: bool = False


class LoadCheckpoint(Message):
    """Load the role from a checkpoint, and publish its weights as a version if engines use them."""

    folder: Path
    version: int | None = None


class GoBack(Message):
    """Return to the state of a version, and send it to ranks that lack it; publish the weights if `export`."""

    version: int
    export: bool


class ReportWrite(Message):
    """Report when the copy is written."""


Task = MakeRows | WriteRows | Save | LoadCheckpoint | GoBack | ReportWrite


class Order(Lost, kw_only=True):
    """A task between two pieces of work; `OrderDone` reports the result by its number."""

    number: int
    task: Task


class Written(Message):
    """Run a collective in which all ranks report their writes; the leader sends this to the other ranks."""


class WrittenColumns(Message):
    """The columns that ranks have written: index columns of all their rows, and the location of each rank's payload."""

    index: dict[str, Tensor]
    parts: list[tuple[list[TablePiece], int, Positions]]
    """For each rank with rows: the location, the number of rows, and the rows in the form of `Done`."""

    def of_both(self, other: "WrittenColumns") -> "WrittenColumns":
        """Return the columns of two sets of ranks."""
        columns = [written.index for written in (self, other) if written.parts]
        index = {name: torch.cat([of_ranks[name] for of_ranks in columns]) for name in columns[0]} if columns else {}
        return WrittenColumns(index, self.parts + other.parts)

    def in_message(self) -> tuple[list[tuple[StoredMessage, Positions]], list[Frame]]:
        """Return the parts of a report, which share their frames, and these frames."""
        frames = encode(Rows(self.index)) if self.index else []
        messages, start = list[tuple[StoredMessage, Positions]](), 0
        for payload, size, rows in self.parts:
            messages.append((StoredMessage(payload, 0, len(frames), start, size), rows))
            start += size
        return messages, frames


Work = LeasedRows | Step | Give | Receive | LoadWeights | Order | Stop | Lost


# Requests


class TakeWork(Take):
    """Request the next piece of work."""

    answer = Work
    role: str | None = None
    """The role that a trainer trains."""
    ready: Sequence[str] = ()
    """Its train stages whose next step can be made."""
    slots: int | None = None
    """Rows that an engine generates at once."""
    ended: Sequence[tuple[int, int]] = ()
    """The same as in `Ended`."""


class Ended(QueueRequest):
    """Report, by lease, the number of rows that have freed their slots in an engine; their results follow later."""

    ended: Sequence[tuple[int, int]]


class Stepped(QueueRequest):
    """Report a step of a train stage."""

    stage: str
    report: dict[str, Any]


class WeightsGiven(QueueRequest):
    """Report the location of weights for another role's update."""

    stage: str
    location: WeightLocation


class NewWeights(QueueRequest):
    """Report the location of a version of a role's weights, and the seconds of writing it."""

    role: str
    version: int
    location: WeightLocation
    seconds: float


class Loaded(QueueRequest):
    """Report the version that an engine holds now."""

    version: int
    bytes: int = 0
    """Bytes read."""
    sent: int = 0
    """Bytes among them from other machines or devices."""
    updates: Sequence[tuple[str, float]] = ()
    """The roles whose weights changed, and for how many seconds each paused the engine."""


class OrderDone(QueueRequest):
    """Report the result of an order; index columns of made rows are in the frames."""

    number: int
    payload: Sequence[TablePiece] | None = None
    """The locations of made rows."""
    trouble: str = ""
    """The error if a file could not be written, or a state not restored."""


WorkerRequest = (
    Hello | TakeWork | Done | Renew | GiveBack | Ended | Stepped | WeightsGiven | NewWeights | Loaded | OrderDone
)
Broadcast = Work | Waited | Written
"""What a leader sends to the other ranks of its group."""
