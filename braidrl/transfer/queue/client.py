"""A worker's side of the queue: take what is ready, read it as views, write columns, acknowledge.

for work in StreamLoader(client, ["actor.log_probs", "actor.update"], most=64):
    rows = work.rows()
    client.done(work, {"old_log_probs": ...})
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidrl.data.codec import decode, encode
from braidrl.data.frames import Frame
from braidrl.data.rows import Column, Rows
from braidrl.flow.readiness import Uid
from braidrl.transfer.queue.data_plane import Block, DataPlane
from braidrl.transfer.queue.messages import Answer, Connection
from braidrl.transfer.queue.table import in_order


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
        return str(self.message["stage"])

    @property
    def iteration(self) -> int:
        return int(self.message["iteration"])

    @property
    def leases(self) -> list[tuple[int, int]]:
        """Number and rows of each lease, in the order of the rows."""
        return [(number, rows) for number, rows in self.message["leases"]]

    def rows(self, places: Sequence[int] | None = None) -> Rows:
        """The leased rows with all columns that the stage reads, or those at some places."""
        return assembled(self.data, self.index, self.message["payload"], places)


@dataclass
class Written:
    """What one process wrote for some leased rows: index columns as frames, payload in a block."""

    uids: list[Uid]
    block: Block | None
    columns: list[str]
    frames: Sequence[Frame] = field(default_factory=list)


class Client:
    """One worker's connection. For one thread."""

    def __init__(
        self, address: str, holder: str, data: DataPlane, limit_s: float = 60.0, generates: bool = False
    ) -> None:
        """Says hello. Raises QueueTimeout where no queue is at the address."""
        self.holder, self.data = holder, data
        self.held: set[int] = set()
        self._connection = Connection(address, limit_s)
        self._renewed = time.monotonic()
        self.ask("hello", generates=generates, address=data.address)

    def ask(self, request: str, frames: Sequence[Frame] = (), wait_s: float = 0.0, **fields: Any) -> Answer:
        """One request of this worker, and its answer."""
        message = {"request": request, "holder": self.holder, "wait_s": wait_s, **fields}
        return self._connection.ask(message, frames, wait_s)

    def take(
        self, stages: Sequence[str], most: int, wait_s: float, single: bool = False, whole: Collection[str] = ()
    ) -> WorkItem:
        """The next thing to do for one of the stages; of kind `stop` at the run's end, and `wait` if nothing came.

        With `single` each row is a lease of its own; train stages in `whole` are given all rows of an update at once.
        """
        answer, frames = self.ask(
            "take",
            wait_s=wait_s,
            stages=list(stages),
            most=most,
            single=single,
            whole=list(whole),
            held=sorted(self.held),
        )
        lost = tuple(answer.get("lost", ()))
        self.held.difference_update(lost)
        kind = "wait" if answer.get("waited") else answer["kind"]
        if kind == "rows":
            self.held.update(number for number, _ in answer["leases"])
        return WorkItem(kind, self.data, answer, decode(frames) if frames else Rows({}), lost)

    def write(self, uids: Sequence[Uid], columns: Mapping[str, Column]) -> Written:
        """Puts the payload of new columns where others can read it."""
        return write_columns(self.data, uids, columns)

    def done(
        self,
        stage: str,
        leases: Sequence[int],
        written: Sequence[Written],
        report: Mapping[str, Any],
        totals: Mapping[str, float] | None = None,
    ) -> list[int]:
        """The leases' rows are done, and have these columns; the numbers of those that were lost.

        `totals` are the sums over the rows that the stage's state follows.
        """
        frames: list[Frame] = []
        parts = []
        for part in written:
            parts.append(
                {
                    "uids": part.uids,
                    "block": part.block,
                    "columns": part.columns,
                    "frames": [len(frames), len(part.frames)],
                }
            )
            frames += part.frames
        return self._done(stage, leases, {"parts": parts, "totals": dict(totals or {})}, report, frames)

    def selected(
        self, stage: str, lease: int, reasons: Mapping[int, str | None], report: Mapping[str, Any]
    ) -> list[int]:
        """A select stage's verdicts by group; None keeps."""
        return self._done(stage, [lease], {"reasons": list(reasons.items()), "parts": []}, report, ())

    def renew(self, every_s: float = 0.0) -> list[int]:
        """Says that this worker is alive, if it has not for `every_s` seconds; the leases that were lost nevertheless."""
        if time.monotonic() - self._renewed < every_s:
            return []
        self._renewed = time.monotonic()
        lost = list(self.ask("renew", held=sorted(self.held))[0]["lost"])
        self.held.difference_update(lost)
        return lost

    def close(self) -> None:
        self._connection.close()
        self.data.close()

    def _done(
        self,
        stage: str,
        leases: Sequence[int],
        content: Mapping[str, Any],
        report: Mapping[str, Any],
        frames: Sequence[Frame],
    ) -> list[int]:
        answer, _ = self.ask("done", frames, stage=stage, leases=list(leases), report=dict(report), **content)
        self.held.difference_update(leases)
        return list(answer["lost"])


class StreamLoader:
    """Iterates over what there is to do for some stages, until the run ends."""

    def __init__(
        self, client: Client, stages: Sequence[str], most: int, wait_s: float = 5.0, whole: Collection[str] = ()
    ) -> None:
        self.client, self.stages, self.most, self.wait_s, self.whole = client, stages, most, wait_s, whole

    def __iter__(self) -> Iterator[WorkItem]:
        while True:
            work = self.client.take(self.stages, self.most, self.wait_s, whole=self.whole)
            if work.kind == "stop":
                return
            yield work


def write_columns(data: DataPlane, uids: Sequence[Uid], columns: Mapping[str, Column]) -> Written:
    """Puts the payload of new columns of these rows where others can read it."""
    rows = Rows(columns)
    return Written(list(uids), data.write_rows(rows), list(rows.payload), encode(rows.index))


def assembled(
    data: DataPlane,
    index: Rows,
    payload: Sequence[Mapping[str, Any]],
    places: Sequence[int] | None = None,
) -> Rows:
    """Index columns with payload from its blocks; all rows, or those at some places in the order given. Raises Evicted."""
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
