"""The control plane: answers workers' requests from the schedule, and hands them weights and orders.

take  ─▶ rows (leases, index columns, where the payload lies) │ step │ load │ order │ stop │ wait
done, stepped, weights, loaded, ordered, renew ─▶ noted, then: close the batch? publish? let engines load?

Every method may be called by the server's thread and by the main program: one lock guards all of it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from braidrl.data.codec import decode
from braidrl.data.frames import Frame
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.flow import Kind, Stage
from braidrl.transfer.queue.assignments import Assignments
from braidrl.transfer.queue.data_plane import REQUESTS, Block, DataPlane
from braidrl.transfer.queue.messages import Answer
from braidrl.transfer.queue.stream import FinishedIteration, Stream
from braidrl.transfer.queue.table import StoredPart
from braidrl.transfer.queue.versions import Copies, Versions


@dataclass
class Holder:
    """A worker, or the leader of a group of them. `version` is what its engine has loaded; None where it has none."""

    name: str
    address: str
    """Of its node's server."""
    version: int | None = None
    loading: int | None = None
    """What it was told to load and has not yet."""
    orders: deque[dict[str, Any]] = field(default_factory=deque)
    heard: float = field(default_factory=time.monotonic)
    """When it last asked for anything."""


class ControlPlane:
    """All streams of a run: the training flow, and an evaluation's while there is one."""

    def __init__(
        self, stream: Stream, data: DataPlane, lease_s: float, exported: Collection[str] = (), together: bool = False
    ) -> None:
        """`exported` are the trained roles that also generate: their weights must have come before a version is published.

        An engine loads the newest version when it has no rows left; with `together` all do, when a batch's generation is over.
        """
        self.training, self.data, self.lease_s, self.together = stream, data, lease_s, together
        self.exported = frozenset(exported)
        self.streams = [stream]
        self.holders: dict[str, Holder] = {}
        self.weights, self.copies = Versions(exported), Copies()
        self.assignments = Assignments(stream, self.copies, lease_s)
        self.engine_version = 0
        """What engines hold or are about to load; prompts are admitted for rows of this version."""
        self.pinned = False
        """While True engines keep their version: an evaluation runs."""
        self.stopping = False
        self.refused: UserError | None = None
        """Why the run cannot go on, where that is the user's to change: selection kept nothing for a whole epoch."""
        self.finished: deque[FinishedIteration] = deque()
        self.results: dict[int, dict[str, Any]] = {}
        self.orders_given = 0
        self.changes = 0
        """Counts what may interest the main program."""
        self.changed = threading.Condition(threading.RLock())

    # Requests

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | None:
        """Answers one request; None lets its sender wait. Raises KeyError for a request that there is none of."""
        if request["request"] in REQUESTS:
            return self.data.answer(request)
        handler = getattr(self, f"on_{request['request']}")
        with self.changed:
            if request.get("holder") in self.holders and not request.get("parked"):
                self.holders[request["holder"]].heard = time.monotonic()
            try:
                answer: Answer | None = handler(request, frames)
                if request["request"] != "take":
                    self.advance()
            except UserError as error:
                # Not the worker's mistake, and not for it to report.
                self.refused, self.stopping = error, True
                self.changes += 1
                self.changed.notify_all()
                raise
        return answer

    def on_hello(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """A worker is there; an engine begins with the model's own weights."""
        name, version = request["holder"], 0 if request["generates"] else None
        self.holders[name] = Holder(name, request["address"], version)
        return {}, ()

    def on_take(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | None:
        """The next thing for a worker to do, or None."""
        holder = self.holders.get(request["holder"])
        if holder is None or self.stopping:
            return {"kind": "stop"}, ()
        lost = self._lost(request["held"])
        if holder.orders:
            return {**holder.orders.popleft(), "kind": "order", "lost": lost}, ()
        lags = holder.version is not None and holder.version != self.engine_version
        if lags and set(request["held"]) <= set(lost):
            return {"kind": "load", "lost": lost, **self._load(holder)}, ()
        for name in request["stages"]:
            for stream in self.streams:
                # An evaluation speaks of one version alone.
                if any(stage.name == name for stage in stream.flow.stages) and not (lags and stream.during is not None):
                    answer = self.assignments.next(stream, stream.flow[name], request, holder.version)
                    if answer is not None:
                        return {**answer[0], "lost": lost}, answer[1]
        return ({"kind": "lost", "lost": lost}, ()) if lost else None

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Leases are done; what was written comes along as index columns, with the payload's whereabouts."""
        stream = self._stream_of(request["stage"])
        if stream is None:
            self.data.free([Block(*part["block"]) for part in request["parts"] if part["block"]])
            return {"lost": request["leases"]}, ()
        for number in request["leases"]:
            if number in stream.schedule.leases.held:
                stream.report(stream.schedule.leases.held[number], request["report"])
                break
        now = time.monotonic()
        if stream.flow[request["stage"]].kind is Kind.SELECT:
            return {"lost": stream.select(request["leases"][0], dict(request["reasons"]), now)}, ()
        parts = [self._part(request["stage"], part, frames) for part in request["parts"]]
        lost = stream.acknowledge(request["leases"], parts, now, request["totals"])
        self.data.free([part.block for part in parts if part.block is not None and not part.rows])
        return {"lost": lost}, ()

    def on_stepped(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """An optimizer step is made; after a role's last one of the iteration its weights are asked for."""
        schedule, name = self.training.schedule, request["stage"]
        iteration = schedule.published + 1
        schedule.stepped(name)
        self.assignments.stepped(name)
        self.data.free(self.copies.taken(name))
        self.training.accounts[iteration].reports.append(request["report"])
        role = self.training.flow[name].role
        through = all(schedule.trained[s.name] >= iteration for s in self._updates_of(str(role), iteration))
        return {"export": iteration if through and role in self.exported else None}, ()

    def on_given(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """The weights lie in these blocks that an update of another role moves towards."""
        self.data.free(self.copies.give(request["stage"], request["holder"], request["blocks"]))
        return {}, ()

    def on_weights(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """A version of a role's weights lies in these blocks."""
        self.weights.add(request["role"], request["version"], request["blocks"])
        return {}, ()

    def on_loaded(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """An engine holds a version."""
        if request["holder"] in self.holders:
            holder = self.holders[request["holder"]]
            holder.version, holder.loading = request["version"], None
        # A restarted engine may need the version that engines should have; what is older, only those who are loading it.
        wanted = {self.engine_version, *(h.loading for h in self.holders.values() if h.loading is not None)}
        self.data.free(self.weights.outdated(wanted))
        return {}, ()

    def on_newest(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """The newest weights of the exported roles, loaded or not: to be received while generation goes on."""
        return {"weights": self.weights.newest()}, ()

    def on_ordered(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """An order is carried out."""
        self.results[request["order"]] = request["result"]
        return {}, ()

    def on_renew(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """A worker is alive and slow: what it holds stays its own, but for what has run out already."""
        now = time.monotonic()
        for stream in self.streams:
            stream.schedule.expire(now)
            leases = stream.schedule.leases
            for lease in [lease for lease in leases.held.values() if lease.holder == request["holder"]]:
                leases.renew(lease.number, now, max(self.lease_s, lease.deadline - now))
        return {"lost": self._lost(request["held"])}, ()

    def on_admit(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Rows are born; a batch is opened where one may be. Refused with ValueError for groups that are known."""
        block = Block(*request["block"]) if request["block"] else None
        self.training.schedule.groups_wanted(self.engine_version)
        self.training.admit(decode(list(frames)), block, tuple(request["columns"]))
        return {}, ()

    # The main program

    def admit(self, stream: Stream, rows: Rows) -> None:
        """Puts the payload into shared memory and lets the rows be born."""
        block = self.data.write_rows(rows)
        with self.changed:
            stream.admit(rows.index, block, tuple(rows.payload))
            self.advance()

    def release(self, finished: FinishedIteration) -> None:
        """A finished iteration's payload has been read."""
        with self.changed:
            self.data.free(self.training.table.drop(finished.places))

    def wait(self, seen: int, seconds: float) -> int:
        """Waits until there are more changes than `seen`, or for so long; how many there are."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes != seen, seconds)
            return self.changes

    def give_order(self, holder: str, order: dict[str, Any]) -> int:
        """Has a worker do something between two pieces of work; the number under which its result will be."""
        with self.changed:
            self.orders_given += 1
            self.holders[holder].orders.append({**order, "order": self.orders_given})
            return self.orders_given

    def end_stream(self, stream: Stream) -> None:
        """Forgets a stream with all of its rows."""
        with self.changed:
            self.streams.remove(stream)
            self.data.free(stream.table.evict(stream.schedule.progress.uids))

    def fail(self, holder: str) -> None:
        """A worker is gone: what it held is free again, and what it wrote without telling is unlinked."""
        with self.changed:
            gone = self.holders.pop(holder, None)
            self.copies.lost(holder)
            for stream in self.streams:
                stream.schedule.fail_holder(holder)
            # Who has not said hello has written nothing.
            if gone is not None:
                self.data.abandon(gone.address, holder, self._known_segments(gone.address))

    def silent(self, seconds: float) -> list[str]:
        """Workers that have said nothing for so long: they hang, for one that works or waits speaks up now and then."""
        now = time.monotonic()
        with self.changed:
            return [holder.name for holder in self.holders.values() if now - holder.heard > seconds]

    def tick(self) -> None:
        """What has been held for too long is free again."""
        now = time.monotonic()
        with self.changed:
            for stream in self.streams:
                stream.schedule.expire(now)

    def advance(self) -> None:
        """Everything that can be decided now: the end of selection, publications, and that engines may load."""
        for stream in self.streams:
            while (freed := stream.close()) is not None:
                self.data.free(freed)
        schedule = self.training.schedule
        while (version := schedule.due_publication()) is not None and self._has_weights(version):
            self.finished.append(self.training.publish())
        may_load = not self.pinned and (not self.together or schedule.is_generation_over())
        if may_load and self.engine_version < schedule.published:
            self.engine_version = schedule.published
        self.changes += 1
        self.changed.notify_all()

    # Inside

    def _part(self, stage: str, part: dict[str, Any], frames: Sequence[Frame]) -> StoredPart:
        first, count = part["frames"]
        index = decode(list(frames[first : first + count]))
        rows = {tuple(uid): place for place, uid in enumerate(part["uids"])}
        block = Block(*part["block"]) if part["block"] else None
        return StoredPart(stage, index, block, tuple(part["columns"]), len(rows), rows)

    def _stream_of(self, stage: str) -> Stream | None:
        return next((s for s in self.streams if any(known.name == stage for known in s.flow.stages)), None)

    def _lost(self, held: Sequence[int]) -> list[int]:
        current = {number for stream in self.streams for number in stream.schedule.leases.held}
        return [number for number in held if number not in current]

    def _load(self, holder: Holder) -> dict[str, Any]:
        """The weights that take an engine from what it holds to the version that it should have."""
        holder.loading = self.engine_version
        return {"version": holder.loading, "weights": self.weights.between(holder.version or 0, holder.loading)}

    def _updates_of(self, role: str, iteration: int) -> list[Stage]:
        stages = self.training.flow.stages
        return [s for s in stages if s.kind is Kind.TRAIN and s.role == role and s.when.includes(iteration)]

    def _has_weights(self, version: int) -> bool:
        return all(self.weights.has(role, version) or not self._updates_of(role, version) for role in self.exported)

    def _known_segments(self, address: str) -> set[str]:
        blocks = [block for stream in self.streams for block in stream.table.blocks()]
        blocks += [*self.weights.blocks(), *self.copies.blocks()]
        return {block.name for block in blocks if block.address == address}
