"""A worker's side of the queue: take what is ready, read it as views, write columns, acknowledge.

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
    """Something to do: `rows` of a stage, an optimizer `step`, weights to `load`, or an `order`."""

    kind: str
    data: DataPlane
    message: Mapping[str, Any]
    index: Rows
    """Index columns of the leased rows; of all rows of the update in a `step`."""
    lost: tuple[int, ...] = ()
    """Leases that this worker held and has lost."""

    @property
    def stage(self) -> str:
        """Return the stage that is to be done."""
        return str(self.message["stage"])

    @property
    def iteration(self) -> int:
        """Return the iteration that the work belongs to."""
        return int(self.message["iteration"])

    @property
    def leases(self) -> list[tuple[int, int]]:
        """Return number and rows of each lease, in the order of the rows."""
        return [(number, rows) for number, rows in self.message["leases"]]

    def rows(self, places: Sequence[int] | None = None) -> Rows:
        """Return the leased rows with all columns that the stage reads, or those at some places. Raises Evicted."""
        return assembled(self.data, self.index, self.message["payload"], places)


class Client:
    """One process at a controller. For several threads, each of which has a connection for itself while it asks."""

    def __init__(self, address: str, holder: str, data: DataPlane, generates: bool = False) -> None:
        """Say hello, over the connections of `data`. Raises QueueTimeout where no queue is at the address."""
        self.address, self.holder, self.data, self.generates = address, holder, data, generates
        self.held: dict[int, Sequence[Row]] = {}
        """Leases, each with its rows where the controller asks for them when it is started again."""
        self._renewed = time.monotonic()
        self._hello()

    def ask(self, request: str, frames: Sequence[Frame] = (), wait_s: float = 0.0, **fields: Any) -> Answer:
        """Send one request of this process and return its answer; `wait_s` is how long the queue may park it."""
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
        """Return the next thing to do for one of the stages: of kind `stop` at the run's end, and `wait` if nothing came.

        Args:
            stages: those that this worker does, the most urgent first.
            most: rows at most.
            wait_s: seconds to wait where there is nothing to do.
            single: make each row a lease of its own.
            whole: train stages that are given all rows of an update at once.
            ranks: the processes that share the rows.
            fields: what else the queue is told.
        """
        answer, frames = self.ask(
            "take", wait_s=wait_s, stages=list(stages), most=most, single=single, whole=list(whole), ranks=ranks,
            held=sorted(self.held), **fields,
        )  # fmt: skip
        lost = tuple(answer.get("lost", ()))
        self.let_go(lost)
        kind = "wait" if answer.get("waited") else answer["kind"]
        if kind == "rows":
            self.held.update((number, answer.get("rows", ())) for number, _ in answer["leases"])
        return WorkItem(kind, self.data, answer, decode(frames) if frames else Rows({}), lost)

    def write(self, uids: Sequence[Row], columns: Mapping[str, Column]) -> StoredPart:
        """Put the payload of new columns of these rows where others can read it; `done` tells the queue of it."""
        return write_columns(self.data, uids, columns)

    def done(
        self, stage: str, leases: Sequence[int], written: Sequence[StoredPart], report: Mapping[str, Any],
        totals: Mapping[str, float] | None = None, **fields: Any,
    ) -> list[int]:  # fmt: skip
        """Say that the leases' rows are done.

        Args:
            stage: what was done.
            leases: their numbers.
            written: the columns that these rows have now.
            report: what goes into the iteration's metrics.
            totals: the sums over the rows that the stage's state follows.
            fields: what else the queue is told.

        Returns:
            The numbers of leases that were lost, whose rows are somebody else's by now.
        """
        frames: list[Frame] = []
        parts = [part.message(frames) for part in written]
        return self._done(stage, leases, {"parts": parts, "totals": dict(totals or {}), **fields}, report, frames)

    def selected(
        self, stage: str, lease: int, reasons: Mapping[int, str | None], report: Mapping[str, Any]
    ) -> list[int]:
        """Give a select stage's verdicts by group; None keeps."""
        return self._done(stage, [lease], {"reasons": list(reasons.items()), "parts": []}, report, ())

    def renew(self, every_s: float = 0.0) -> list[int]:
        """Say that this worker is alive, if it has not for `every_s` seconds; return the leases that were lost nevertheless."""
        if time.monotonic() - self._renewed < every_s:
            return []
        self._renewed = time.monotonic()
        lost = list(self.ask("renew", held=sorted(self.held))[0]["lost"])
        self.let_go(lost)
        return lost

    def close(self) -> None:
        """Close all connections."""
        self.data.close()

    def let_go(self, leases: Iterable[int]) -> None:
        """Forget leases that are done or lost."""
        for number in leases:
            self.held.pop(number, None)

    def _done(
        self, stage: str, leases: Sequence[int], content: Mapping[str, Any], report: Mapping[str, Any],
        frames: Sequence[Frame],
    ) -> list[int]:  # fmt: skip
        answer, _ = self.ask("done", frames, stage=stage, leases=list(leases), report=dict(report), **content)
        self.let_go(leases)
        return list(answer["lost"])


class StreamLoader:
    """Iterates over what there is to do for some stages, until the run ends."""

    def __init__(
        self, client: Client, stages: Sequence[str], most: int, wait_s: float = 5.0, whole: Collection[str] = (),
        ranks: int = 1,
    ) -> None:  # fmt: skip
        """Ask as `Client.take` does."""
        self.client, self.stages, self.most, self.wait_s = client, stages, most, wait_s
        self.whole, self.ranks = whole, ranks

    def __iter__(self) -> Iterator[WorkItem]:
        while True:
            work = self.client.take(self.stages, self.most, self.wait_s, whole=self.whole, ranks=self.ranks)
            if work.kind == "stop":
                return
            yield work


def write_columns(data: DataPlane, uids: Sequence[Row], columns: Mapping[str, Column]) -> StoredPart:
    """Put the payload of new columns of these rows where others can read it."""
    rows = Rows(columns)
    places = {uid: place for place, uid in enumerate(uids)}
    return StoredPart("", rows.index, data.write_rows(rows), tuple(rows.payload), len(places), places)


def assembled(
    data: DataPlane, index: Rows, payload: Sequence[Mapping[str, Any]], places: Sequence[int] | None = None
) -> Rows:
    """Return index columns with payload from its blocks.

    Args:
        data: where blocks are read.
        index: the index columns.
        payload: pieces of blocks, as `Table.payload` names them.
        places: the rows that are wanted, in this order; None is all.

    Raises:
        Evicted: a block is gone.
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
