"""Requests to the queue and their answers: structs in tagged unions, dispatched by type.

client ──QueueRequest: `Take`, `Put`, `Done` ...──▶ the controller's union of requests ──▶ `match`
       ◀──Answer: the request's `answer`, `Waited` or `RefusedRequest`──┘

A class of requests names the type of its answer. A controller may derive further requests and answers.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

from braidrl.data.messages import Frame, Message
from braidrl.queue.storage import Place
from braidrl.queue.table import Block, Positions, RowName, StoredMessage, TablePiece


class Receipt(Message):
    """The answer to a request without a result."""


class Waited(Message):
    """The answer to a parked request after its time limit."""


class RefusedRequest(Message):
    """The answer to a request that failed."""

    error: str


class QueueRequest(Message, kw_only=True):
    """A request of a process, called `holder` at the queue."""

    answer: ClassVar[Any] = Receipt
    holder: str = ""


Answer = tuple[Message, Sequence[Frame]]
"""An answer, and the raw bytes that come with it."""
NOTHING: Answer = (Receipt(), ())


# Clients and holders


class Hello(QueueRequest):
    """Register a process; engines also declare that they generate."""

    address: str
    """Address of its node's server."""
    generates: bool = False


class Lost(Message, kw_only=True):
    """The leases and rows that a holder has lost since its last request."""

    lost: Sequence[int] = ()
    """Leases whose rows now belong to other holders."""
    dropped: Sequence[tuple[int, list[int]]] = ()
    """Rows that selection has dropped, by lease and positions in it."""


class Stop(Lost):
    """There is no more work: the run or the queue ends."""


class Leased(Lost, kw_only=True):
    """Rows of a consumer under a lease; index columns of all of them may be in the answer's frames."""

    consumer: str
    lease: int
    size: int
    """Number of rows of the lease."""
    payload: list[TablePiece]
    """The locations of the columns that the consumer reads."""


class Take(QueueRequest):
    """Lease ready rows of one of the consumers, the most urgent first."""

    consumers: Sequence[str]
    most: int
    """Limit of rows."""
    ranks: int = 1
    """Processes that share the rows."""
    held: Sequence[int] = ()
    """Numbers of the holder's leases."""


class Done(QueueRequest):
    """Record rows as completed, with the columns written for them."""

    answer = Lost
    consumer: str
    done: Positions
    parts: Sequence[tuple[StoredMessage, Positions]] = ()
    reports: Sequence[dict[str, Any]] = ()
    """Metrics of an iteration, which the queue forwards."""
    totals: dict[str, dict[str, float]] | None = None
    """For each stage with a state, sums over its batch."""
    unfinished: bool = False
    """True if the rows are suspended: they have tokens and are not complete."""


class Renew(QueueRequest):
    """Extend the leases of a slow holder."""

    answer = Lost
    held: list[int]


class GiveBack(QueueRequest):
    """Release leases whose holder cannot use them."""

    leases: list[int]


# A node's storage


class ReadRows(QueueRequest):
    """Request columns of a block, of all rows or of some positions."""

    name: str
    columns: list[str]
    positions: list[int] | None = None


class Free(QueueRequest):
    """Free segments."""

    names: list[str]


class Abandon(QueueRequest):
    """Free the segments of a dead process, except those still referenced."""

    writer: str
    known: list[str]


class ServedBytes(Message):
    """The bytes that a node has sent to other nodes."""

    bytes: int


class Served(QueueRequest):
    """Request the number of these bytes."""

    answer = ServedBytes


class MissingBlock(Message):
    """The answer to `ReadRows` if the block is missing because its rows were dropped."""


ReadRows.answer = Receipt | MissingBlock
NodeRequest = ReadRows | Free | Abandon | Served


# The transfer queue as a library


class Directory(Message):
    """The addresses and names that a new client needs."""

    place: Place
    tasks: list[str]
    has_budget: bool


class AskDirectory(QueueRequest):
    """Request the addresses and names that a new client needs."""

    answer = Directory


class Reserve(QueueRequest):
    """Reserve bytes for a put that follows."""

    bytes: int


class Put(QueueRequest):
    """Record columns of rows; the first column of a row admits it."""

    part: StoredMessage
    rows: list[RowName]
    table: RowName = 0
    groups: list[RowName] | None = None
    lengths: list[int] | None = None


class LeasedColumns(Leased, kw_only=True):
    """Leased rows with their names."""

    rows: list[RowName]


class TakeColumns(Take):
    """Lease rows of a task, from one table or the first; by default with the columns that the task waits for."""

    answer = LeasedColumns | Stop | Lost
    columns: list[str] | None = None
    table: RowName | None = None


class Finish(QueueRequest):
    """Declare that no more rows will come."""


class Clear(QueueRequest):
    """Remove rows, completed or not: the named ones, those of a table, or all."""

    rows: list[RowName] | None = None
    table: RowName | None = None


class Missing(QueueRequest):
    """Report blocks that a reader could not find."""

    blocks: list[Block]


class QueueUsage(Message):
    """Bytes and rows in the queue, and its tasks."""

    bytes: int
    rows: int
    lost: list[tuple[RowName, list[str]]]
    """The columns with lost payload, by row."""
    undone: dict[str, int]
    """Number of rows to do, by task."""
    held: list[tuple[str, str, int]]
    """Task, holder, and its number of rows."""


class Usage(QueueRequest):
    """Request the usage of the queue."""

    answer = QueueUsage


ColumnRequest = (
    AskDirectory | Hello | Reserve | Put | TakeColumns | Done | Renew | GiveBack | Finish | Clear | Missing | Usage
)
