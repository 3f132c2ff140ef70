"""The control plane: answers workers' requests from the schedule, and hands them weights and orders.

take  ─▶ rows (leases, index columns, payload locations) │ step │ give weights │ receive, load │ order │ stop │ wait
done, stepped, given, weights, loaded, ordered, renew ─▶ recorded, then: close the batch? publish? let engines load?

The server's thread and the main process call these methods: one lock guards everything.
"""

import math
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

from braidrl.data.codec import decode, encode
from braidrl.data.frames import Frame
from braidrl.errors import UserError
from braidrl.flow import Kind, Stage
from braidrl.flow.flow import is_optimized
from braidrl.queue.requests import Answer, Holder, QueueController, Wait
from braidrl.queue.storage import DataPlane
from braidrl.queue.table import StoredPart, StoredRows
from braidrl.queue.tasks import Tasks
from braidrl.runtimes.streaming.activity import Activity
from braidrl.runtimes.streaming.groups import ROWS
from braidrl.runtimes.streaming.stream import IterationRecord, Stream
from braidrl.runtimes.streaming.weights import Copies, Place, Versions, free
from braidrl.weights.versions import LoadingSchedule

OF_LEADERS = {"stepped", "given", "weights", "ordered"}


@dataclass
class WorkerHolder(Holder):
    """A worker, or the leader of a group of workers."""

    group: str = ""
    orders: deque[Answer] = field(default_factory=deque)


class ControlPlane(QueueController):
    """All streams of a run: the training flow's, and an evaluation's while it runs."""

    def __init__(
        self, stream: Stream, data: DataPlane, lease_s: float, exported: Collection[str] = (),
        loading: LoadingSchedule | None = None, episodes: int | None = None,
    ) -> None:  # fmt: skip
        """Start with one stream.

        Args:
            stream: The training flow's.
            data: Reads and writes payload in this process.
            lease_s: Seconds without a heartbeat after which a worker's rows go to another.
            exported: Trained roles that also generate; their weights must arrive before engines load a version.
            loading: The weight-update policy; by default `end`.
            episodes: Limit of episodes in environments at a time, over all engines.
        """
        super().__init__(lease_s)
        self.data, self.episodes = data, episodes
        self.training, self.loading = stream, loading or LoadingSchedule("end")
        self.held = stream.table.held
        """Reference counts of the blocks of all streams."""
        self.exported = frozenset(exported)
        self.streams = [stream]
        self.holders: dict[str, WorkerHolder] = {}
        self.weights, self.copies, self.activity = Versions(exported), Copies(), Activity()
        self.forgotten: list[Place] = []
        """Outdated weights that may be read until every engine has loaded others."""
        self.outdated: list[int] = []
        """Versions that trainers may free with their next step."""
        self.weights_sent = 0
        """Bytes of weights received by engines on other machines."""
        self.allowed = 0
        """The last iteration whose optimizer steps are allowed."""
        self.stepping: set[str] = set()
        """Train stages with a step in progress."""
        self.unloaded: frozenset[str] = frozenset()
        """Groups that get no rows until they have loaded a checkpoint."""
        self.refused: UserError | None = None
        """The user's error that ends the run: selection kept nothing for a whole epoch."""
        self.finished: deque[IterationRecord] = deque()
        self.results: dict[int, tuple[dict[str, Any], StoredRows | None]] = {}
        self.orders_given = 0
        self.notify: Callable[[], object] = lambda: None
        """Makes the server retry waiting workers."""

    @property
    def queues(self) -> list[Tasks]:
        """Return the task controllers of all streams."""
        return [stream.schedule.tasks for stream in self.streams]

    # Requests

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Answer one request, or keep its sender waiting. An error of the user, rather than of a worker, ends the run."""
        if request["request"] in OF_LEADERS and request["holder"] not in self.holders:
            return {}, ()  # the last messages of a replaced trainer
        try:
            return super().handle(request, frames)
        except UserError as error:
            with self.changed:
                self.refused, self.stopping = error, True
                super().advance()
            raise

    def on_hello(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Register a worker; an engine begins with the model's own weights."""
        name = request["holder"]
        # After the group's name come its number and its start count.
        self.holders[name] = WorkerHolder(name, request["address"], self.clock(), name.rsplit(".", 2)[0])
        if request["generates"]:
            self.loading.join(name)
        return {}, ()

    def on_take(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Return a worker's next piece of work, or keep it waiting for a change."""
        holder = self.holders.get(request["holder"])
        if holder is None or self.stopping:
            return {"kind": "stop"}, ()
        lost = self.lost(request["held"])
        if holder.orders:
            order, content = holder.orders.popleft()
            return {**order, "kind": "order", "lost": lost}, content
        if (weights := self._weights_for(holder.name)) is not None:
            return {**weights, "lost": lost}, ()
        version, lags = self.loading.version_of(holder.name), self.loading.lags(holder.name)
        takes_rows = self.loading.takes_rows(holder.name) and holder.group not in self.unloaded
        for name in request["stages"] if takes_rows else ():
            for stream in self.streams:
                # An evaluation uses a single version.
                if name in stream.stages and not (lags and stream.during is not None):
                    answer = self._work(stream, stream.flow[name], request, version)
                    if answer is not None:
                        self._note_activity()
                        return {**answer[0], "lost": lost}, answer[1]
        return ({"kind": "lost", "lost": lost}, ()) if lost else Wait()

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record completed leases; the message has index columns, and the locations of the payload."""
        parts = [StoredPart.received(request["stage"], part, frames) for part in request["parts"]]
        stream = next((stream for stream in self.streams if request["stage"] in stream.stages), None)
        if stream is None:
            self.data.free([part.block for part in parts if part.block])
            return {"lost": request["leases"]}, ()
        held = stream.schedule.tasks.leases.held
        known = next((held[number] for number in request["leases"] if number in held), None)
        if known is not None:
            stream.report(known, request["report"])
        now = self.clock()
        if stream.flow[request["stage"]].kind is Kind.SELECT:
            return {"lost": stream.select(request["leases"][0], dict(request["reasons"]), now)}, ()
        if request.get("unfinished"):
            lost, freed = stream.suspend(request["leases"], parts, now)
            self.data.free(freed)
            return {"lost": lost}, ()
        lost = stream.acknowledge(request["leases"], parts, now, request["totals"])
        self.data.free([part.block for part in parts if part.block is not None and not part.rows])
        return {"lost": lost}, ()

    def on_stepped(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record an optimizer step."""
        schedule, name = self.training.schedule, request["stage"]
        iteration = schedule.published + 1
        schedule.stepped(name)
        self.stepping.discard(name)
        self._free(self.copies.taken(name))
        self.training.record_of(iteration).reports.append(request["report"])
        return {}, ()

    def on_given(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record the location of weights for the update of another role."""
        self._free(self.copies.give(request["stage"], request["holder"], request["place"]))
        return {}, ()

    def on_weights(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record the location of a version of a role's weights."""
        role = request["role"]
        self.weights.add(role, request["version"], request["place"])
        self.activity.updates.add(f"weights/{role}/write_seconds", request["seconds"])
        return {}, ()

    def on_loaded(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record the version that an engine holds."""
        self.loading.loaded(request["holder"], request["version"])
        self.activity.weight_bytes += request["bytes"]
        self.weights_sent += request["sent"]
        if update := request.get("update"):
            self.activity.updates.add(f"weights/{update['role']}/update_seconds", update["seconds"])
        # A restarted engine may need the target version; older ones are needed only by engines that are loading them.
        self._free(self.weights.outdated(self.loading.wanted))
        if self.forgotten and not self.loading.is_forgotten:
            self._free(self.forgotten)
            self.forgotten = []
        return {}, ()

    def on_ordered(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Record the result of an order."""
        result, rows = request["result"], None
        if "payload" in result:
            # Referenced at once: a dead worker's blocks are freed unless they are referenced here.
            rows = self.held.hold_for(StoredRows(decode([bytes(frame) for frame in frames]), result["payload"]))
        self.results[request["order"]] = result, rows
        return {}, ()

    # The main program

    def change(self, change: Callable[[], object]) -> None:
        """Apply a change, decide its consequences, and retry waiting workers."""
        with self.changed:
            change()
            self.advance()
        self.notify()

    def admit(self, stream: Stream, rows: StoredRows) -> None:
        """Admit rows whose payload is in the queue, unless their batch has been closed meanwhile."""
        with self.changed:
            if stream.schedule.is_open:
                stream.admit(rows)
                self.advance()

    def give_order(self, holder: str, order: dict[str, Any], content: Sequence[Frame] = ()) -> int:
        """Give a worker an order to execute between two pieces of work; return the number of its result.

        Raises KeyError for an unknown worker.
        """
        with self.changed:
            self.orders_given += 1
            self.holders[holder].orders.append(({**order, "order": self.orders_given}, content))
            return self.orders_given

    def end_stream(self, stream: Stream) -> None:
        """Forget a stream with all of its rows."""
        with self.changed:
            self.streams.remove(stream)
            self.data.free(stream.table.evict(stream.schedule.tasks.rows))

    def fail(self, holder: str) -> None:
        """Release the leases of a dead worker, and free blocks that it wrote without a message."""
        with self.changed:
            gone = self.holders.pop(holder, None)
            self.loading.leave(holder)
            self.copies.lost(holder)
            for stream in self.streams:
                stream.schedule.fail_holder(holder)
            # A worker that never registered has written nothing.
            if gone is not None:
                self.data.abandon(gone.address, holder, self._known_segments(gone.address))

    def train_again(self, version: int) -> bool:
        """Repeat the training towards the version after this one, with all rows as they are.

        Returns False, with nothing changed, if this is not the newest version with weights, or if some of them are missing.
        """
        with self.changed:
            last = self.training.schedule.published == version == self._loadable >= self.weights.newest
            if not last or not self.weights.outlive_trainers:
                return False
            self.training.train_again()
            self._free(list(self.copies.places()))
            self.copies, self.allowed = Copies(), version
            self.stepping.clear()
            return True

    def begin_again(self, stream: Stream) -> None:
        """Forget all rows and weights; engines wait for the weights of the checkpoint to be loaded."""
        with self.changed:
            # Late messages of workers must not name a lease of the new stream.
            stream.schedule.tasks.leases.numbers = self.training.schedule.tasks.leases.numbers
            for known in self.streams:
                self.data.free(known.table.evict(list(known.schedule.tasks.rows)))
            self.forgotten += [*self.weights.places(), *self.copies.places()]
            self.training, self.streams = stream, [stream]
            self.weights, self.copies = Versions(self.exported), Copies()
            self.loading.forget()
            self.allowed, self.finished = 0, deque()
            self.stepping.clear()
            for holder in self.holders.values():
                holder.orders.clear()

    def advance(self) -> None:
        """Make all decisions possible now: the end of selection, publications, and loading by engines."""
        for stream in self.streams:
            while (freed := stream.close()) is not None:
                self.data.free(freed)
        schedule = self.training.schedule
        while schedule.due_publication() is not None:
            record, freed = self.training.publish()
            self.finished.append(record)
            self.data.free(freed)
        self.data.free(self.held.freed())
        self.loading.advance(self._loadable, schedule.is_generation_over(self.loading.target))
        self._note_activity()
        super().advance()

    # Inside

    def _work(self, stream: Stream, stage: Stage, request: dict[str, Any], version: int | None) -> Answer | None:
        """Return work of a stage, for an engine that holds `version` of the weights; None if there is none."""
        if (wanted := self._copy_from(stage)) is not None:
            self.copies.ask(wanted, request["holder"])
            return {"kind": "give", "stage": wanted}, ()
        if stage.kind is Kind.TRAIN and stage.name in stream.schedule.due_steps():
            return self._step(stream, stage)
        # Accumulated gradients cannot be undone: a trainer keeps its rows until it is known to be dead.
        seconds = math.inf if stage.kind is Kind.TRAIN else self.lease_s
        request = {**request, "most": self._most(stage, request)}
        return stream.take(stage, request, self.clock(), seconds, version if stream is self.training else None)

    def _most(self, stage: Stage, request: dict[str, Any]) -> int:
        """Return the limit of rows to give: for an engine its free slots now, not at the time of the request."""
        most = int(request["most"])
        if "slots" in request:
            most = min(most, request["slots"] - self.rows_held(request["holder"]))
        if self.episodes is not None and "environment" in stage.params:
            most = min(most, self.episodes - self._episodes_under_way())
        return most

    def _episodes_under_way(self) -> int:
        leases = ((stream.flow[lease.task.stage], lease) for stream in self.streams for lease in stream.leases())
        return sum(len(lease.rows) for stage, lease in leases if "environment" in stage.params)

    def _step(self, stream: Stream, stage: Stage) -> Answer | None:
        schedule = stream.schedule
        iteration = schedule.published + 1
        if iteration > self.allowed or stage.name in self.stepping:
            return None
        exported = iteration if self._is_last_step(stage, iteration) else None
        outdated, self.outdated = self.outdated, []
        answer = {
            "kind": "step", "stage": stage.name, "iteration": iteration, "export": exported, "outdated": outdated,
        }  # fmt: skip
        if not is_optimized(stage):
            if (weights := self.copies.given(stage.name)) is None:
                return None
            self.stepping.add(stage.name)
            return {**answer, "weights": weights}, ()
        self.stepping.add(stage.name)
        index, _ = stream.read(stage.name, schedule.batches[iteration].updates[stage.name][0].rows)
        return answer, encode(index)

    def _is_last_step(self, stage: Stage, iteration: int) -> bool:
        """Return True if this step is the role's last one of the iteration, after which its weights are published."""
        schedule = self.training.schedule
        others = [one.name for one in self._updates_of(str(stage.role), iteration) if one.name != stage.name]
        left = schedule.batches[iteration].updates[stage.name]
        return stage.role in self.exported and len(left) <= 1 and all(schedule.trained[n] >= iteration for n in others)

    def _copy_from(self, stage: Stage) -> str | None:
        """Return the due update that waits for the weights of this stage's worker."""
        schedule, flow = self.training.schedule, self.training.flow
        if stage.kind not in (Kind.INFER, Kind.TRAIN) or schedule.published + 1 > self.allowed:
            return None
        due = [flow[name] for name in schedule.due_steps() if name not in self.copies]
        return next((copy.name for copy in due if copy.params.get("source", "") == stage.role), None)

    def rows_held(self, holder: str) -> int:
        """Return the number of a worker's leases."""
        return sum(tasks.leases.count(holder) for tasks in self.queues)

    def seen_now(self) -> dict[str, float]:
        """Return the rows on engines, and the oldest version among them."""
        engines = self.loading.engines
        return {
            "streaming/in_flight": float(sum(self.rows_held(name) for name in engines)),
            "streaming/oldest_version": float(min((held.version for held in engines.values()), default=0)),
        }

    def _note_activity(self) -> None:
        workers = ((name, holder.group) for name, holder in self.holders.items() if holder.group != ROWS)
        self.activity.note(self.clock(), [(group, self.rows_held(name) > 0) for name, group in workers])

    def _weights_for(self, holder: str) -> dict[str, Any] | None:
        """Return the weights that an engine is to load now; None if there are none."""
        rows = self.rows_held(holder)
        held, newest = self.loading.version_of(holder), self.weights.newest
        if self.loading.receive(holder, newest):
            # They lie where engines load them from.
            self.loading.received(holder, newest)
        if (load := self.loading.load(holder, rows)) is not None:
            return {"kind": "load", **load._asdict(), "weights": self.weights.between(held or 0, load.version)}
        return None

    def _free(self, places: Collection[Place]) -> None:
        """Free weights: local files now, and copies on trainers with their next step."""
        free(places)
        self.outdated += [place["number"] for place in places]

    def _updates_of(self, role: str, iteration: int) -> list[Stage]:
        stages = self.training.flow.stages
        return [s for s in stages if s.kind is Kind.TRAIN and s.role == role and s.when.includes(iteration)]

    @property
    def _loadable(self) -> int:
        """Return the newest version up to which all weights have arrived; ranks write the newest ones beside their next step."""
        newer = range(max(self.loading.target, 0) + 1, self.training.schedule.published + 1)
        return max(takewhile(self._has_weights, newer), default=self.loading.target)

    def _has_weights(self, version: int) -> bool:
        return all(self.weights.has(role, version) or not self._updates_of(role, version) for role in self.exported)

    def _known_segments(self, address: str) -> set[str]:
        blocks = self.held
        return {block.name for block in blocks if block.address == address}
