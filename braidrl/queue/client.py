"""A worker's side of the queue: take ready rows, read them as views, write columns, acknowledge.

for work in StreamLoader(client, ["actor.log_probs"], most=64):
    rows = work.rows()
    written = client.write(rows.uids(), {"old_log_probs": ...})
    client.done(work.stage, [number for number, _ in work.leases], [written], report={})
"""

import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.data.codec import decode
from braidrl.data.frames import Frame
from braidrl.data.rows import Column, Rows
from braidrl.queue.requests import Answer
from braidrl.queue.storage import DataPlane
from braidrl.queue.table import Block, Row, StoredPart, in_order


@dataclass(frozen=True)
class WorkItem:
    """A piece of work: `rows` of a stage, an optimizer `step`, weights to `load`, or an `order`."""

    kind: str
    data: DataPlane
    message: Mapping[str, Any]
    index: Rows
    """Index columns of the leased rows; for a `step` those of all rows of the update."""
    lost: tuple[int, ...] = ()
    """Leases that this worker has lost."""

    @property
    def stage(self) -> str:
        """Return its stage."""
        return str(self.message["stage"])

    @property
    def iteration(self) -> int:
        """Return its iteration."""
        return int(self.message["iteration"])

    @property
    def leases(self) -> list[tuple[int, int]]:
        """Return number and rows of each lease, in the order of the rows."""
        return [(number, rows) for number, rows in self.message["leases"]]

    def rows(self, places: Sequence[int] | None = None) -> Rows:
        """Return the leased rows, or those at some positions, with all columns that the stage reads. Raises Evicted."""
        return assembled(self.data, self.index, self.message["payload"], places)


class Client:
    """One process as a client of a controller. Thread-safe: each request has its own connection."""

    def __init__(self, address: str, holder: str, data: DataPlane, generates: bool = False) -> None:
        """Register, over the connections of `data`. Raises QueueTimeout if no queue answers at the address."""
        self.address, self.holder, self.data, self.generates = address, holder, data, generates
        self.held: dict[int, Sequence[Row]] = {}
        """Leases, with their rows if a restarted controller will ask for them."""
        self._renewed = time.monotonic()
        self._hello()

    def ask(self, request: str, frames: Sequence[Frame] = (), wait_s: float = 0.0, **fields: Any) -> Answer:
        """Send one request of this process and return its answer; the queue may hold it back for `wait_s` seconds."""
        message = {"request": request, "holder": self.holder, "wait_s": wait_s, **fields}
        while True:
            answer = self.data.connections.ask(self.address, message, frames, wait_s)
            if not answer[0].get("unknown"):
                return answer
            self._hello()

    def _hello(self) -> None:
        self.ask("hello", generates=self.generates, address=self.data.address, held=list(self.held.items()))

    def take(
        self, stages: Sequence[str], most: int, wait_s: float, single: bool = False, whole: Collection[str] = (),
        ranks: int = 1, **fields: Any,
    ) -> WorkItem:  # fmt: skip
        """Return the next work for one of the stages: of kind `stop` at the run's end, and `wait` after the time limit.

        Args:
            stages: Stages of this worker, the most urgent first.
            most: Limit of rows.
            wait_s: Seconds to wait for work.
            single: Make a lease for each row.
            whole: Train stages that need all rows of an update at once.
            ranks: Processes that share the rows.
            fields: Further fields of the request.
        """
        answer, frames = self.ask(
            "take", wait_s=wait_s, stages=list(stages), most=most, single=single, whole=list(whole), ranks=ranks,
            held=sorted(self.held), **fields,
        )  # fmt: skip
        lost = tuple(answer.get("lost", ()))
        self.forget_leases(lost)
        kind = "wait" if answer.get("waited") else answer["kind"]
        if kind == "rows":
            self.held.update((number, answer.get("rows", ())) for number, _ in answer["leases"])
        return WorkItem(kind, self.data, answer, decode(frames) if frames else Rows({}), lost)

    def write(self, uids: Sequence[Row], columns: Mapping[str, Column]) -> StoredPart:
        """Put the payload of new columns into storage; `done` reports it to the queue."""
        return write_columns(self.data, uids, columns)

    def done(
        self, stage: str, leases: Sequence[int], written: Sequence[StoredPart], report: Mapping[str, Any],
        totals: Mapping[str, float] | None = None, **fields: Any,
    ) -> list[int]:  # fmt: skip
        """Report that the leases' rows are done.

        Args:
            stage: Name of the stage.
            leases: Lease numbers.
            written: The new columns of these rows.
            report: Content for the iteration's metrics.
            totals: Sums over the rows for the stage's state.
            fields: Further fields of the request.

        Returns:
            The numbers of lost leases, whose rows now belong to other workers.
        """
        frames: list[Frame] = []
        parts = [part.message(frames) for part in written]
        return self._done(stage, leases, {"parts": parts, "totals": dict(totals or {}), **fields}, report, frames)

    def selected(
        self, stage: str, lease: int, reasons: Mapping[int, str | None], report: Mapping[str, Any]
    ) -> list[int]:
        """Report a select stage's verdicts by group; None keeps."""
        return self._done(stage, [lease], {"reasons": list(reasons.items()), "parts": []}, report, ())

    def renew(self, every_s: float = 0.0) -> list[int]:
        """Send a heartbeat if the last request is `every_s` seconds old; return the leases that were lost nevertheless."""
        if time.monotonic() - self._renewed < every_s:
            return []
        self._renewed = time.monotonic()
        lost = list(self.ask("renew", held=sorted(self.held))[0]["lost"])
        self.forget_leases(lost)
        return lost

    def close(self) -> None:
        """Close all connections."""
        self.data.close()

    def forget_leases(self, leases: Iterable[int]) -> None:
        """Forget completed or lost leases."""
        for number in leases:
            self.held.pop(number, None)

    def _done(
        self, stage: str, leases: Sequence[int], content: Mapping[str, Any], report: Mapping[str, Any],
        frames: Sequence[Frame],
    ) -> list[int]:  # fmt: skip
        answer, _ = self.ask("done", frames, stage=stage, leases=list(leases), report=dict(report), **content)
        self.forget_leases(leases)
        return list(answer["lost"])


class StreamLoader:
    """Iterates over the work of some stages until the run ends."""

    def __init__(
        self, client: Client, stages: Sequence[str], most: int, wait_s: float = 5.0, whole: Collection[str] = (),
        ranks: int = 1,
    ) -> None:  # fmt: skip
        """Request work as `Client.take` does."""
        self.client, self.stages, self.most, self.wait_s = client, stages, most, wait_s
        self.whole, self.ranks = whole, ranks

    def __iter__(self) -> Iterator[WorkItem]:
        while True:
            work = self.client.take(self.stages, self.most, self.wait_s, whole=self.whole, ranks=self.ranks)
            if work.kind == "stop":
                return
            yield work


def write_columns(data: DataPlane, uids: Sequence[Row], columns: Mapping[str, Column]) -> StoredPart:
    """Put the payload of new columns of these rows into storage."""
    rows = Rows(columns)
    places = {uid: place for place, uid in enumerate(uids)}
    return StoredPart("", rows.index, data.write_rows(rows), tuple(rows.payload), len(places), places)


def assembled(
    data: DataPlane, index: Rows, payload: Sequence[Mapping[str, Any]], places: Sequence[int] | None = None
) -> Rows:
    """Return index columns together with payload from its blocks.

    Args:
        data: Reads the blocks.
        index: The index columns.
        payload: Pieces of blocks, from `Table.payload`.
        places: Positions of the wanted rows, in this order; None is all.

    Raises:
        Evicted: A block is gone.
    """
    asked = range(len(index)) if places is None else places
    standing = {place: number for number, place in enumerate(asked)}
    found: defaultdict[tuple[str, ...], list[tuple[Rows, list[int]]]] = defaultdict(list)
    for piece in payload:
        pairs = [(p, standing[at]) for p, at in zip(piece["positions"], piece["places"], strict=True) if at in standing]
        if not pairs:
            continue
        positions = [position for position, _ in pairs]
        whole = positions == list(range(piece["rows"]))
        rows = data.read_rows(Block(*piece["block"]), piece["columns"], None if whole else positions)
        found[tuple(piece["columns"])].append((rows, [at for _, at in pairs]))
    columns = dict((index if places is None else index.take(places)).items())
    for parts in found.values():
        rows = Rows.cat([part for part, _ in parts]) if len(parts) > 1 else parts[0][0]
        columns.update(in_order(rows, [at for _, many in parts for at in many]).items())
    return Rows(columns)
