"""The control plane: answers workers' requests from the schedule, and hands them weights and orders.

take  ─▶ rows (a lease, payload locations) │ step │ give weights │ load │ order │ stop │ wait
done, stepped, given, weights, loaded, ordered, renew
    ─▶ recorded, then: verdicts? close the batch? publish? let engines load?

The server's thread and the main process call these methods: one lock guards everything.
"""

import math
import traceback
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import assert_never

from braidrl.cluster.row_deaths import RowDeaths
from braidrl.data.codec import decode
from braidrl.data.messages import Frame
from braidrl.errors import UserError, WorkerError
from braidrl.flow import Kind
from braidrl.queue.calls import NOTHING, Answer, Done, GiveBack, Hello, Lost, QueueRequest, Renew, Stop
from braidrl.queue.client import DataPlane
from braidrl.queue.table import StoredRows
from braidrl.queue.tasks import Tasks
from braidrl.queue.transport import Holder, QueueController
from braidrl.runtimes.streaming.groups import ROWS, Activity
from braidrl.runtimes.streaming.steps import StepPermits
from braidrl.runtimes.streaming.stream import IterationRecord, Stream
from braidrl.runtimes.streaming.weights import Versions, free
from braidrl.runtimes.streaming.work import (
    Ended,
    GoBack,
    LeasedRows,
    Loaded,
    LoadWeights,
    NewWeights,
    OrderDone,
    Receive,
    Stepped,
    TakeWork,
    Task,
    WeightLocation,
    WeightsGiven,
    WorkerRequest,
)
from braidrl.runtimes.streaming.worker_orders import WorkerOrders, group_of
from braidrl.weights.versions import UNKNOWN, LoadingSchedule

OF_LEADERS = Stepped | WeightsGiven | NewWeights | OrderDone


@dataclass
class WorkerHolder(Holder):
    """A worker, or the leader of a group of workers."""

    group: str = ""
    dropped: list[tuple[int, list[int]]] = field(default_factory=list)
    """Rows, by lease and positions, that selection has dropped and of which the worker has not been notified."""


class ControlPlane(QueueController):
    """All streams of a run: the training flow's stream and, during an evaluation, the evaluation's."""

    def __init__(
        self,
        stream: Stream,
        data: DataPlane,
        lease_s: float,
        exported: Collection[str] = (),
        loading: LoadingSchedule | None = None,
        episodes: int | None = None,
    ) -> None:
        """Start with the training flow's stream.

        The weights of `exported` roles, which train and generate, must arrive before engines load a version. `episodes`
        limits the episodes in environments at a time, over all engines.
        """
        super().__init__(lease_s)
        self.data, self.episodes = data, episodes
        self.training, self.loading = stream, loading or LoadingSchedule("end")
        self.held = stream.table.held
        """Reference counts of the blocks of all streams."""
        self.streams = [stream]
        self.holders: dict[str, WorkerHolder] = {}
        self.departed: set[str] = set()
        """Workers that died or left: late messages do not register them again."""
        self.deaths = RowDeaths()
        """The rows of each consumer with which workers have ended; an engine gets suspects alone."""
        self.weights, self.activity = Versions(exported), Activity()
        self.steps, self.orders = StepPermits(exported), WorkerOrders()
        self.weights_sent = 0
        """Bytes of weights received by engines on other machines."""
        self.refused: UserError | WorkerError | None = None
        """The user's error that ends the run: selection kept nothing for a whole epoch."""
        self.finished: deque[IterationRecord] = deque()
        self.noticed: list[object] = []
        """The values that threads of this process wait for, at their last wake-up."""
        self.notify: Callable[[], object] = lambda: None
        """Makes the server retry waiting workers."""

    @property
    def queues(self) -> list[Tasks]:
        """Return the task controllers of all streams."""
        return [stream.tasks for stream in self.streams]

    # Requests

    def handle(self, request: QueueRequest, frames: Sequence[Frame], again: bool = False) -> Answer | None:
        """Answer one request, or defer the answer.

        An error of the user, rather than of a worker, ends the run.
        """
        if isinstance(request, OF_LEADERS) and request.holder not in self.holders:
            # Late messages of a replaced trainer.
            if isinstance(request, NewWeights | WeightsGiven):
                free([request.location])
            return NOTHING
        try:
            return super().handle(request, frames, again)
        except UserError as error:
            with self.changed:
                self.refused, self.stopping = error, True
                super().advance()
            raise

    def respond(self, request: WorkerRequest, frames: Sequence[Frame]) -> Answer | None:
        """Answer one request, or defer the answer."""
        match request:
            case TakeWork():
                return self._take(request)
            case Done():
                return self._done(request, frames), ()
            case Renew():
                return self.renew(request), ()
            case GiveBack():
                return self.give_back(request)
            case Hello():
                self._register(request)
            case Ended():
                self._note_ended(request.holder, request.ended)
            case Stepped():
                self._stepped(request)
            case WeightsGiven():
                self._free(self.steps.weights_given(request))
            case NewWeights():
                self.weights.add(request.role, request.version, request.location)
                self.activity.updates.add(f"weights/{request.role}/write_seconds", request.seconds)
            case Loaded():
                self._loaded(request)
            case OrderDone():
                self._ordered(request, frames)
            case _:
                assert_never(request)
        return NOTHING

    def _register(self, request: Hello) -> None:
        """Register a worker; an engine starts with the model's original weights."""
        name = request.holder
        if name in self.departed:
            return
        self.holders[name] = WorkerHolder(name, request.address, self.clock(), group_of(name))
        self._note_activity([name])
        if request.generates:
            self.loading.join(name)
        self.orders.join(name)

    def _note_ended(self, holder: str, ended: Sequence[tuple[int, int]]) -> None:
        for number, rows in ended:
            for tasks in self.queues:
                if (lease := tasks.leases.held.get(number)) is not None and lease.holder == holder:
                    lease.ended = max(lease.ended, rows)

    def _take(self, request: TakeWork) -> Answer | None:
        """Return a worker's next piece of work, or defer the answer until a change."""
        holder = self.holders.get(request.holder)
        if holder is None or self.stopping:
            return Stop(), ()
        self._note_ended(request.holder, request.ended)
        lost = Lost(lost=self.lost(request.held), dropped=holder.dropped)
        holder.dropped = []
        work, frames = self._next_work(holder, request) or (lost, ())
        work.lost, work.dropped = lost.lost, lost.dropped
        return None if work is lost and not lost.lost and not lost.dropped else (work, frames)

    def _next_work(self, holder: WorkerHolder, request: TakeWork) -> tuple[Lost, Sequence[Frame]] | None:
        """Return an order, weights to receive or load, a step, or rows; None if there is no work now."""
        if self.orders.lost_state and holder.group in self.orders.unloaded:
            return None  # it has no state that it could save
        if (order := self.orders.next(holder.name)) is not None:
            return order
        version = self.loading.version_of(holder.name)
        # No batch starts on the last version; only an evaluation at the end loads it.
        useful = min(self._loadable, self.training.schedule.sizes.iterations - 1)
        if (following := self.loading.receive_ahead(holder.name, useful)) is not None:
            return Receive(version=following, weights=self.weights.between(version or 0, following)), ()
        if (load := self.loading.load(holder.name, self.rows_held(holder.name))) is not None:
            weights = self.weights.between(version or 0, load.version)
            return LoadWeights(version=load.version, keeps_rows=load.keeps_rows, weights=weights), ()
        was_due = self.steps.is_due
        if (step := self.steps.next_for(request, self.training)) is not None:
            return step, ()
        if self.steps.is_due and not was_due:
            self.changes += 1
            self.changed.notify_all()
        lags = version not in (None, self.loading.target)
        takes_rows = self.loading.takes_rows(holder.name) and holder.group not in self.orders.unloaded
        for name in request.consumers if takes_rows else ():
            for stream in self.streams:
                # An evaluation uses a single version.
                if name in stream.before and not (lags and stream.during is not None):
                    leased = self._lease(stream, name, request, version)
                    if leased is not None:
                        self._note_activity()
                        return leased
        return None

    def _done(self, request: Done, frames: Sequence[Frame]) -> Lost:
        """Record completed rows; the message has index columns, and the locations of the payload."""
        name, done = request.consumer, request.done
        received = StoredRows.received([part for part, _ in request.parts], frames, name)
        parts = [(part, rows) for part, (_, rows) in zip(received, request.parts, strict=True)]
        stream = next((stream for stream in self.streams if name in stream.before), None)
        if stream is None:
            self.data.free(block for part, _ in parts for block in part.blocks)
            return Lost(lost=[number for number, _ in done])
        lease_held = next(
            (lease for number, _ in done if (lease := stream.tasks.leases.held.get(number)) is not None), None
        )
        if lease_held is not None:
            iteration = stream.schedule.admission.iteration_of[next(iter(stream.tasks.left(lease_held)))[1]]
            stream.report(name, iteration, request.reports, request.totals or {})
        lost, freed = stream.done(name, done, parts, self.clock(), request.unfinished)
        self.data.free(freed)
        return Lost(lost=lost)

    def renew(self, request: Renew) -> Lost:
        """Extend the leases of a worker that sends heartbeats, and name rows that selection has dropped."""
        answer, holder = super().renew(request), self.holders.get(request.holder)
        if holder is not None:
            answer.dropped, holder.dropped = holder.dropped, []
        return answer

    def _stepped(self, request: Stepped) -> None:
        """Record an optimizer step."""
        schedule, name = self.training.schedule, request.stage
        iteration = schedule.progress.published + 1
        schedule.progress.stepped(name)
        self._free(self.steps.stepped(name))
        self.training.record_of(iteration).training.append(request.report)

    def _loaded(self, request: Loaded) -> None:
        """Record the version that an engine holds."""
        self.loading.loaded(request.holder, request.version)
        self.activity.weight_bytes += request.bytes
        self.weights_sent += request.sent
        for role, seconds in request.updates:
            self.activity.updates.add(f"weights/{role}/update_seconds", seconds)
        # A restarted engine may need the target version; older ones are needed only by engines that are loading them.
        self._free(self.weights.outdated(self.loading.needed_versions))
        if all(engine.version != UNKNOWN for engine in self.loading.engines.values()):
            self._free(self.weights.take_replaced())

    def _ordered(self, request: OrderDone, frames: Sequence[Frame]) -> None:
        """Record the result of an order."""
        rows = None
        if request.payload is not None:
            # Reference the blocks now: when a worker dies, its unreferenced blocks are freed.
            stored = StoredRows(decode([bytes(frame) for frame in frames]), list(request.payload))
            rows = self.held.hold_for(stored)
        self.orders.done(request, rows)

    # The main program

    def change(self, change: Callable[[], object]) -> None:
        """Apply a change, decide its consequences, and retry waiting workers."""
        with self.changed:
            change()
            self.advance()
        self.notify()

    def add_stream(self, stream: Stream) -> None:
        """Serve another stream; lease numbers are unique over all streams."""
        stream.tasks.leases.numbers = self.training.tasks.leases.numbers
        self.streams.append(stream)

    def remove_stream(self, stream: Stream) -> None:
        """Forget the rows of a stream."""
        self.streams.remove(stream)
        self.data.free(stream.table.evict(stream.tasks.rows))
        self._note_activity(self.holders)

    def admit(self, stream: Stream, rows: StoredRows) -> None:
        """Admit rows whose payload is in the queue, unless their batch has been closed meanwhile."""
        with self.changed:
            if stream.schedule.admission.is_open:
                stream.admit(rows)
                self.advance()

    def give_order(self, holder: str, task: Task, content: Sequence[Frame] = ()) -> int:
        """Give a worker an order to execute between two pieces of work; return the number of its result.

        Raises KeyError for an unknown worker.
        """
        with self.changed:
            return self.orders.give(holder, task, content)

    def fail(self, holder: str, died: bool = True) -> None:
        """Release the leases of a worker that `died` or leaves, and free blocks that it wrote and never reported."""
        with self.changed:
            self.departed.add(holder)
            departing = self.holders.pop(holder, None)
            self._note_activity([holder])
            self.orders.leave(holder)
            self.loading.leave(holder)
            self.steps.leave(holder)
            for stream in self.streams:
                for lease in stream.tasks.leases.of(holder) if died else ():
                    rows, draws = stream.tasks.left(lease), lease.task in stream.consumers.generating
                    self.activity.left_out += len(self.deaths.record(lease.task, rows, isolates=draws))
                stream.tasks.give_up(stream.tasks.leases.of(holder))
            # A worker that never registered has no blocks.
            if departing is not None:
                referenced = {block.name for block in self.held.counts if block.address == departing.address}
                self.data.abandon(departing.address, holder, referenced)

    def train_again(self, version: int) -> bool:
        """Repeat the training towards the version after this one, with the same rows.

        Returns False, with nothing changed, if this is not the newest published version, or if weights that engines may
        still load were lost with the trainers.
        """
        with self.changed:
            self.orders.lost_state = ""
            if self.training.schedule.progress.published != version or not self.weights.outlive_trainers:
                return False
            self.training.train_again()
            self._free(self.weights.withdrawn(version))
            self._free(self.steps.restart())
            return True

    def continue_from_memory(self, leaders: Mapping[str, str]) -> None:
        """Let regrouped trainers return to the published version before any other work.

        `leaders` are the names under which they will register, by role. Their groups get no rows until then.
        """
        with self.changed:
            version = self.training.schedule.progress.published
            self.train_again(version)
            self.orders.give_first(
                {holder: GoBack(version, self.lacks_weights(role)) for role, holder in leaders.items()}
            )
            self.advance()

    def lacks_weights(self, role: str) -> bool:
        """Return True if engines cannot load the role's part of the published version.

        Its trainers were lost before it was written, or it is only in their memory.
        """
        version = self.training.schedule.progress.published
        if role not in self.weights.by_role:
            return False
        if (location := self.weights.by_role[role].get(version)) is not None:
            return location.offer is not None
        return version > self.loading.target and bool(self.training.updates_of(role, version))

    def begin_again(self, stream: Stream) -> None:
        """Forget all rows and weights; engines wait for the checkpoint's weights."""
        with self.changed:
            # Late messages of workers must not name a lease of the new stream.
            stream.tasks.leases.numbers = self.training.tasks.leases.numbers
            for earlier in self.streams:
                self.data.free(earlier.table.evict(list(earlier.tasks.rows)))
            self.weights.replace_all()
            self.weights.replaced += self.steps.restart()
            self.steps.allow(0)
            self.training, self.streams = stream, [stream]
            self.loading.forget()
            self.finished = deque()
            self.orders.withdraw()
            self._note_activity(self.holders)

    def advance(self) -> None:
        """Make all decisions that are due: verdicts, the end of selection, publications, and loading by engines.

        An exception in a user's function ends the run.
        """
        for stream in self.streams:
            try:
                stream.decide()
            except UserError:
                raise
            except Exception:
                failed = f"a stage of the selection failed in the main process:\n{traceback.format_exc()}"
                self.refused, self.stopping = WorkerError(failed), True
                continue
            # Close batches that are complete; workers learn which of their rows were dropped with them.
            while (freed := stream.close()) is not None:
                self.data.free(freed)
                for lease, rows in stream.schedule.admission.dropped.items():
                    if lease.holder in self.holders:
                        position_of = {row: position for position, row in enumerate(lease.rows)}
                        self.holders[lease.holder].dropped.append((lease.number, [position_of[row] for row in rows]))
        schedule = self.training.schedule
        while schedule.progress.due_publication() is not None:
            record, freed = self.training.publish()
            self.finished.append(record)
            self.data.free(freed)
        self.data.free(self.held.freed())
        if self.loading.is_behind(newest := self._loadable):
            self.loading.advance(newest, schedule.admission.is_generation_over(self.loading.target))
        self._note_activity()
        # Wake this process's threads only for the changes that they wait for, not for each report of rows.
        noticed: list[object] = [
            len(self.finished),
            self.steps.is_due,
            self.stopping,
            self.loading.target,
            len(self.orders.results),
            len(self.holders),
        ]
        for schedule in (stream.schedule for stream in self.streams):
            admission = schedule.admission
            noticed += [
                admission.opened,
                admission.is_open,
                schedule.progress.published,
                len(admission.sampling.pending),
            ]
        if noticed != self.noticed:
            self.noticed = noticed
            super().advance()

    # Inside

    def _lease(
        self, stream: Stream, name: str, request: TakeWork, version: int | None
    ) -> tuple[LeasedRows, Sequence[Frame]] | None:
        """Lease rows to a consumer, for an engine that holds `version` of the weights; None if there are none."""
        consumer, most = stream.consumers.by_name[name], request.most
        # Accumulated gradients cannot be undone: a trainer keeps its rows until it is known to be dead.
        seconds = math.inf if consumer.kind is Kind.TRAIN else self.lease_s
        if request.slots is not None:
            # An engine's free slots now, not at the time of the request.
            running = sum(tasks.leases.running(request.holder) for tasks in self.queues)
            most = min(most, request.slots - running)
        if self.episodes is not None and "environment" in consumer.stages[0].params:
            leases = (
                (source.consumers.by_name[lease.task], lease)
                for source in self.streams
                for lease in source.tasks.leases.held.values()
            )
            playing = sum(lease.left for generating, lease in leases if "environment" in generating.stages[0].params)
            most = min(most, self.episodes - playing)
        version = version if stream is self.training else None
        return stream.take(name, request, most, self.clock(), seconds, version, self.deaths)

    def rows_held(self, holder: str) -> int:
        """Return the number of rows that a worker has."""
        return sum(tasks.leases.rows_of[holder] for tasks in self.queues)

    def current_metrics(self) -> dict[str, float]:
        """Return metrics: the rows on engines, the oldest version among them, and the workers of each group."""
        engines = self.loading.engines
        groups = Counter(holder.group for holder in self.holders.values() if holder.group != ROWS)
        return {
            **{f"streaming/workers/{group}": float(count) for group, count in sorted(groups.items())},
            "streaming/in_flight": float(sum(self.rows_held(name) for name in engines)),
            "streaming/oldest_version": float(min((engine.version for engine in engines.values()), default=0)),
        }

    def _note_activity(self, workers: Collection[str] = ()) -> None:
        """Note whether these workers, and those whose leases have changed, have rows."""
        now, names = self.clock(), set(workers)
        for tasks in self.queues:
            names |= tasks.leases.changed
            tasks.leases.changed.clear()
        for name in names:
            holder = self.holders.get(name)
            group = holder.group if holder is not None and holder.group != ROWS else None
            self.activity.note(now, name, group, self.rows_held(name) > 0)
        self.activity.advance(now)

    def _free(self, locations: Collection[WeightLocation]) -> None:
        """Free weights: local files now, and copies on trainers with their next step."""
        free(locations)
        self.steps.outdated += [location.number for location in locations]

    @property
    def _loadable(self) -> int:
        """Return the newest version up to which all weights have arrived; ranks write them beside their next step."""
        published = self.training.schedule.progress.published
        return self.weights.newest_complete(self.loading.target, published, self.training.updates_of)
