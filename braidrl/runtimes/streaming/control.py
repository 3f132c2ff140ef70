"""The control plane: answers workers' requests from the schedule, and hands them weights and orders.

take  ─▶ rows (leases, index columns, where the payload lies) │ step │ give weights │ receive, load │ order │ stop │ wait
done, stepped, given, weights, loaded, ordered, renew ─▶ noted, then: close the batch? publish? let engines load?

Every method may be called by the server's thread and by the main program: one lock guards all of it.
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
    """A worker, or the leader of a group of them."""

    group: str = ""
    orders: deque[Answer] = field(default_factory=deque)


class ControlPlane(QueueController):
    """All streams of a run: the training flow, and an evaluation's while there is one."""

    def __init__(
        self, stream: Stream, data: DataPlane, lease_s: float, exported: Collection[str] = (),
        loading: LoadingSchedule | None = None, episodes: int | None = None,
    ) -> None:  # fmt: skip
        """Begin with one stream.

        Args:
            stream: the training flow's.
            data: where this process writes and reads payload.
            lease_s: seconds without a sign of life after which a worker's rows are given to another.
            exported: the trained roles that also generate, whose weights must have come before engines load a version.
            loading: when engines load them; by default when a batch's generation is over.
            episodes: the most episodes in environments that are played at once, by whatever engines.
        """
        super().__init__(lease_s)
        self.data, self.episodes = data, episodes
        self.training, self.loading = stream, loading or LoadingSchedule("end")
        self.held = stream.table.held
        """What needs the blocks of all streams."""
        self.exported = frozenset(exported)
        self.streams = [stream]
        self.holders: dict[str, WorkerHolder] = {}
        self.weights, self.copies, self.activity = Versions(exported), Copies(), Activity()
        self.forgotten: list[Place] = []
        """Weights that do not count any more, but may be read until every engine has loaded others."""
        self.outdated: list[int] = []
        """Numbers of versions that trainers may free with their next step."""
        self.weights_sent = 0
        """Bytes of weights that engines on other machines have received."""
        self.allowed = 0
        """The last iteration whose optimizer steps may be made."""
        self.stepping: set[str] = set()
        """Train stages whose step is under way."""
        self.unloaded: frozenset[str] = frozenset()
        """Groups that get no rows before they have loaded a checkpoint."""
        self.refused: UserError | None = None
        """Why the run cannot go on, where that is the user's to change: selection kept nothing for a whole epoch."""
        self.finished: deque[IterationRecord] = deque()
        self.results: dict[int, tuple[dict[str, Any], StoredRows | None]] = {}
        self.orders_given = 0
        self.notify: Callable[[], object] = lambda: None
        """Has the server ask waiting workers again."""

    @property
    def queues(self) -> list[Tasks]:
        """Return the tasks of all streams."""
        return [stream.schedule.tasks for stream in self.streams]

    # Requests

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Answer one request, or let its sender wait. What is the user's mistake, and no worker's, ends the run."""
        if request["request"] in OF_LEADERS and request["holder"] not in self.holders:
            return {}, ()  # the last words of a trainer that was replaced
        try:
            return super().handle(request, frames)
        except UserError as error:
            with self.changed:
                self.refused, self.stopping = error, True
                super().advance()
            raise

    def on_hello(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note a worker that is there; an engine begins with the model's own weights."""
        name = request["holder"]
        # Its number and how often it was started come after the group's name.
        self.holders[name] = WorkerHolder(name, request["address"], self.clock(), name.rsplit(".", 2)[0])
        if request["generates"]:
            self.loading.join(name)
        return {}, ()

    def on_take(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Return the next thing for a worker to do, or let it wait for any change."""
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
                # An evaluation speaks of one version alone.
                if name in stream.stages and not (lags and stream.during is not None):
                    answer = self._work(stream, stream.flow[name], request, version)
                    if answer is not None:
                        self._note_activity()
                        return {**answer[0], "lost": lost}, answer[1]
        return ({"kind": "lost", "lost": lost}, ()) if lost else Wait()

    def on_done(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note leases that are done; what was written comes along as index columns, with the payload's whereabouts."""
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
            lost, freed = stream.set_aside(request["leases"], parts, now)
            self.data.free(freed)
            return {"lost": lost}, ()
        lost = stream.acknowledge(request["leases"], parts, now, request["totals"])
        self.data.free([part.block for part in parts if part.block is not None and not part.rows])
        return {"lost": lost}, ()

    def on_stepped(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note an optimizer step."""
        schedule, name = self.training.schedule, request["stage"]
        iteration = schedule.published + 1
        schedule.stepped(name)
        self.stepping.discard(name)
        self._free(self.copies.taken(name))
        self.training.record_of(iteration).reports.append(request["report"])
        return {}, ()

    def on_given(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note where the weights lie that an update of another role moves towards."""
        self._free(self.copies.give(request["stage"], request["holder"], request["place"]))
        return {}, ()

    def on_weights(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note where a version of a role's weights lies."""
        role = request["role"]
        self.weights.add(role, request["version"], request["place"])
        self.activity.updates.add(f"weights/{role}/write_seconds", request["seconds"])
        return {}, ()

    def on_loaded(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note the version that an engine holds."""
        self.loading.loaded(request["holder"], request["version"])
        self.activity.weight_bytes += request["bytes"]
        self.weights_sent += request["sent"]
        if update := request.get("update"):
            self.activity.updates.add(f"weights/{update['role']}/update_seconds", update["seconds"])
        # A restarted engine may need the version that engines should have; what is older, only those who are loading it.
        self._free(self.weights.outdated(self.loading.wanted))
        if self.forgotten and not self.loading.is_forgotten:
            self._free(self.forgotten)
            self.forgotten = []
        return {}, ()

    def on_ordered(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note that an order is carried out."""
        result, rows = request["result"], None
        if "payload" in result:
            # Held at once: what a worker has written is freed when it is gone, but for what is known here.
            rows = self.held.hold_for(StoredRows(decode([bytes(frame) for frame in frames]), result["payload"]))
        self.results[request["order"]] = result, rows
        return {}, ()

    # The main program

    def change(self, change: Callable[[], object]) -> None:
        """Change something, decide what follows from it, and have waiting workers asked again."""
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
        """Have a worker do something between two pieces of work; return the number under which its result will be.

        Raises KeyError for a worker that is not there.
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
        """Free what a worker that is gone has held, and unlink what it wrote without telling."""
        with self.changed:
            gone = self.holders.pop(holder, None)
            self.loading.leave(holder)
            self.copies.lost(holder)
            for stream in self.streams:
                stream.schedule.fail_holder(holder)
            # Who has not said hello has written nothing.
            if gone is not None:
                self.data.abandon(gone.address, holder, self._known_segments(gone.address))

    def train_again(self, version: int) -> bool:
        """Have what is trained towards the version after this one trained again, with all rows as they are.

        Returns False, with nothing changed, where this is not the last version of which there are weights, or not all of them have come.
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
        """Forget all rows and weights; engines wait for the weights of the checkpoint that is about to be loaded."""
        with self.changed:
            # What workers say of rows that they have yet must name no lease of the new stream.
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
        """Decide everything that can be decided now: the end of selection, publications, and that engines may load."""
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
        """Return what there is to do for a stage, for an engine that holds `version` of the weights; None while there is nothing."""
        if (wanted := self._copy_from(stage)) is not None:
            self.copies.ask(wanted, request["holder"])
            return {"kind": "give", "stage": wanted}, ()
        if stage.kind is Kind.TRAIN and stage.name in stream.schedule.due_steps():
            return self._step(stream, stage)
        # What a trainer has accumulated cannot be taken back: it keeps its rows until it is known to be dead.
        seconds = math.inf if stage.kind is Kind.TRAIN else self.lease_s
        request = {**request, "most": self._most(stage, request)}
        return stream.take(stage, request, self.clock(), seconds, version if stream is self.training else None)

    def _most(self, stage: Stage, request: dict[str, Any]) -> int:
        """Return how many rows at most are given: as many as an engine has slots that are free now, not when it asked."""
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
        """Return whether this step is the role's last one of the iteration, after which its weights are to be had."""
        schedule = self.training.schedule
        others = [one.name for one in self._updates_of(str(stage.role), iteration) if one.name != stage.name]
        left = schedule.batches[iteration].updates[stage.name]
        return stage.role in self.exported and len(left) <= 1 and all(schedule.trained[n] >= iteration for n in others)

    def _copy_from(self, stage: Stage) -> str | None:
        """Return the update that is due and waits for the weights that whoever does this stage has."""
        schedule, flow = self.training.schedule, self.training.flow
        if stage.kind not in (Kind.INFER, Kind.TRAIN) or schedule.published + 1 > self.allowed:
            return None
        due = [flow[name] for name in schedule.due_steps() if name not in self.copies]
        return next((copy.name for copy in due if copy.params.get("source", "") == stage.role), None)

    def rows_held(self, holder: str) -> int:
        """Return how many leases a worker has."""
        return sum(tasks.leases.count(holder) for tasks in self.queues)

    def seen_now(self) -> dict[str, float]:
        """Return what a user wants to know of this moment: rows that engines have, and the oldest version of theirs."""
        engines = self.loading.engines
        return {
            "streaming/in_flight": float(sum(self.rows_held(name) for name in engines)),
            "streaming/oldest_version": float(min((held.version for held in engines.values()), default=0)),
        }

    def _note_activity(self) -> None:
        workers = ((name, holder.group) for name, holder in self.holders.items() if holder.group != ROWS)
        self.activity.note(self.clock(), [(group, self.rows_held(name) > 0) for name, group in workers])

    def _weights_for(self, holder: str) -> dict[str, Any] | None:
        """Return what an engine is to load now; None where there is nothing."""
        rows = self.rows_held(holder)
        held, newest = self.loading.version_of(holder), self.weights.newest
        if self.loading.receive(holder, newest):
            # It lies where engines load it from.
            self.loading.received(holder, newest)
        if (load := self.loading.load(holder, rows)) is not None:
            return {"kind": "load", **load._asdict(), "weights": self.weights.between(held or 0, load.version)}
        return None

    def _free(self, places: Collection[Place]) -> None:
        """Free weights: files of this machine now, and what trainers keep of them with their next step."""
        free(places)
        self.outdated += [place["number"] for place in places]

    def _updates_of(self, role: str, iteration: int) -> list[Stage]:
        stages = self.training.flow.stages
        return [s for s in stages if s.kind is Kind.TRAIN and s.role == role and s.when.includes(iteration)]

    @property
    def _loadable(self) -> int:
        """Return the version up to which all weights have come; ranks write those of the newest ones beside their next step."""
        newer = range(max(self.loading.target, 0) + 1, self.training.schedule.published + 1)
        return max(takewhile(self._has_weights, newer), default=self.loading.target)

    def _has_weights(self, version: int) -> bool:
        return all(self.weights.has(role, version) or not self._updates_of(role, version) for role in self.exported)

    def _known_segments(self, address: str) -> set[str]:
        blocks = self.held
        return {block.name for block in blocks if block.address == address}
