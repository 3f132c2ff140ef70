"""The streaming runtime's schedule in virtual time.

Workload: durations and verdicts ──▶ Streaming ──▶ Simulation: a timeline

workers of each consumer ─ take ─▶ schedule ── rows ──▶ seconds pass ──▶ done
engines                  ── load ──▶ which weights, and when ──▶ seconds pass while their rows are paused
"""

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from braidrl.data.packing import balanced_partition
from braidrl.data.rows import Uid
from braidrl.flow.batches import Sizes, TrainingBatch, UpdatesInProgress
from braidrl.flow.flow import Flow, is_optimized
from braidrl.flow.stage import Kind, Stage
from braidrl.observe.trace import Span
from braidrl.queue.table import Lease
from braidrl.runtimes.streaming.consumers import Consumer
from braidrl.runtimes.streaming.schedule import StreamSchedule
from braidrl.weights.versions import LoadingSchedule, Way

Runtime = Literal["eager", "hybrid", "distributed", "streaming"]


@dataclass(frozen=True)
class Workload:
    """A flow with its sizes, and functions that give durations and outcomes.

    `seconds(stage, uid)` is the time of one row on one worker; `verdict(group)` is None to keep a group, else the
    reason to drop it.
    """

    flow: Flow
    sizes: Sizes
    seconds: Callable[[str, Uid], float]
    workers: Mapping[str, int] = field(default_factory=dict)
    """Workers of a stage; default 1."""
    dispatch_rows: int = 4
    """Maximum rows of a lease; engines lease one row at a time."""
    slots: int = 1
    """Concurrent rows of an engine."""
    step_seconds: float = 0.0
    """Seconds of an engine's decode step. Rows start at a step boundary; an engine requests a new row while the next
    step runs. 0: rows start immediately.
    """
    loading: Way = "rolling"
    load_seconds: float = 0.0
    """Seconds that an engine pauses to load weights from its host's memory."""
    receive_seconds: float = 0.0
    """Seconds to receive weights, in the same pause; under `delayed` before it, while the engine generates."""
    verdict: Callable[[int], str | None] = lambda group: None

    def uids(self, groups: Sequence[int]) -> list[Uid]:
        return [(0, group, sample) for group in groups for sample in range(self.sizes.samples_per_prompt)]


@dataclass
class Simulation:
    """The result: a timeline, and the ends of iterations."""

    spans: list[Span] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)

    def seconds_per_iteration(self, skip: int = 2) -> float:
        """Return the mean over the iterations after the first `skip` (pipeline fill); needs more than `skip`
        iterations.
        """
        return (self.ends[-1] - self.ends[skip - 1]) / (len(self.ends) - skip)


class Deadlock(RuntimeError):
    """No event is pending and the run is not over."""


@dataclass
class Clock:
    """An event queue: actions run at their times, and in the order of their requests at equal times."""

    now: float = 0.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    scheduled: int = 0

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule `action` in `seconds` from now."""
        heapq.heappush(self.events, (self.now + seconds, self.scheduled, action))
        self.scheduled += 1

    def step(self) -> bool:
        """Run the next action; return False if there is none."""
        if not self.events:
            return False
        self.now, _, action = heapq.heappop(self.events)
        action()
        return True


@dataclass
class SimulatedLease:
    """An active lease: its expected end, and for an engine's row the version that it started with."""

    lease: Lease
    end: float
    version: int | None
    turn: int = 0
    """The number of times that its end was postponed."""


@dataclass
class SimulatedWorker:
    """A worker of one consumer. A trainer has several ranks; an engine has several slots."""

    name: str
    consumer: Consumer
    ranks: int = 1
    slots: int = 1
    work: dict[int, SimulatedLease] = field(default_factory=dict)
    loads: bool = False
    receives_until: float | None = None
    """The time at which an engine has, or will have, received its next weights ahead of the load."""
    steps_since: float = 0.0
    """The time at which an engine's current series of decode steps started."""
    training: "SimulatedTraining | None" = None


@dataclass
class SimulatedTraining:
    """A trainer's work on one batch: the leases that it keeps, and the updates of its train stages, one stage after the
    other.
    """

    batch: TrainingBatch
    stages: list[Stage]
    updates: UpdatesInProgress
    rows_left: int
    pieces: list[tuple[Lease, list[list[int]]]] = field(default_factory=list)
    """The leases, with the updates of each row."""
    busy: bool = False


class Streaming:
    """A simulated streaming run."""

    lease_seconds = math.inf

    def __init__(self, work: Workload) -> None:
        self.work = work
        self.result = Simulation()
        self.clock = Clock()
        self.schedule = StreamSchedule(work.flow, work.sizes)
        self.workers: list[SimulatedWorker] = []
        for consumer in self.schedule.consumers:
            if consumer.kind is Kind.TRAIN:
                ranks = max(work.workers.get(stage.name, 1) for stage in consumer.updates)
                self.workers.append(SimulatedWorker(f"{consumer.stages[-1].name}/0", consumer, ranks=ranks))
                continue
            # A consumer has no worker if one of its stages has none.
            lacking = any(work.workers.get(stage.name) == 0 for stage in consumer.stages)
            slots = work.slots if consumer.kind is Kind.GENERATE else 1
            for number in range(0 if lacking else work.workers.get(consumer.name, 1)):
                self.workers.append(SimulatedWorker(f"{consumer.name}/{number}", consumer, slots=slots))
        self.engines = [worker for worker in self.workers if worker.consumer.kind is Kind.GENERATE]
        self.trainers = [worker for worker in self.workers if worker.consumer.kind is Kind.TRAIN]
        self.loading = LoadingSchedule(work.loading, max(1, len(self.engines) // 2))
        for engine in self.engines:
            self.loading.join(engine.name)

    def simulate(self) -> Simulation:
        """Run to the last publication. Raises Deadlock if the run stalls before."""
        while True:
            # Start everything that can start now.
            while self._admit() or self._judge() or self._train() or self._publish() or self._load():
                pass
            idle: set[tuple[str, int | None]] = set()
            for worker in self.workers:
                # If one worker of a stage finds no rows, other workers of the same version find none either.
                kind = worker.consumer.name, self.loading.version_of(worker.name)
                if kind in idle or worker.loads or not self.loading.takes_rows(worker.name):
                    continue
                while len(worker.work) < worker.slots:
                    if not self._begin(worker):
                        idle.add(kind)
                        break
            if self.schedule.progress.published >= self.work.sizes.iterations:
                break
            if not self.clock.step():
                waiting = len(self.schedule.tasks.rows)
                raise Deadlock(f"{waiting} rows wait forever behind version {self.schedule.progress.published}")
        return self.result

    def _admit(self) -> bool:
        count = self.schedule.admission.groups_wanted(self.loading.target)
        if count:
            first = self.schedule.admission.sampling.admitted + 1
            self.schedule.admission.admit(self.work.uids(range(first, first + count)))
        return self.schedule.admission.close() is not None or count > 0

    def _judge(self) -> bool:
        """Run the verdict stages on complete groups; the last select decides, those before it keep everything."""
        judged = False
        for name in self.schedule.consumers.verdicts:
            if rows := self.schedule.groups_to_judge(name):
                decides = name == self.schedule.consumers.selects[-1]
                verdicts = {group: self.work.verdict(group) if decides else None for group in {uid[1] for uid in rows}}
                self.schedule.judged(name, rows, {group: why for group, why in verdicts.items() if why is not None})
                judged = True
        return judged

    def _publish(self) -> bool:
        if self.schedule.progress.due_publication() is None:
            return False
        self.schedule.publish()
        self.result.ends.append(self.clock.now)
        return True

    def _begin(self, worker: SimulatedWorker) -> bool:
        """Give a worker ready rows; return False if there are none."""
        trains, version = worker.consumer.kind is Kind.TRAIN, self.loading.version_of(worker.name)
        if worker.training is not None and worker.training.busy:
            return False
        most = self.work.dispatch_rows if version is None else 1
        seconds = math.inf if trains else self.lease_seconds
        lease = self.schedule.take(worker.consumer.name, worker.name, self.clock.now, seconds, most, version)
        if lease is None:
            return False
        if trains:
            self._take_in(worker, lease)
        else:
            self._start(worker, lease, self._shares(worker, lease.rows), version)
        return True

    def _start(self, worker: SimulatedWorker, lease: Lease, shares: Sequence[float], version: int | None) -> None:
        """Let a worker work on a lease for the seconds of its `shares`."""
        if not worker.work:
            worker.steps_since = self.clock.now
        seconds, steps = max(shares), self.work.step_seconds
        if steps and worker.consumer.kind is Kind.GENERATE and worker.steps_since != self.clock.now:
            # The row misses the decode step that runs when it is requested.
            seconds += self._until_step(worker) or steps
        work = worker.work[lease.number] = SimulatedLease(lease, self.clock.now + seconds, version)
        self.clock.after(work.end - self.clock.now, partial(self._end, worker, work, work.turn))
        self._note(worker, lease.rows, shares)

    def _end(self, worker: SimulatedWorker, work: SimulatedLease, turn: int) -> None:
        """End a lease, unless its end was postponed since this was scheduled, in its `turn`."""
        if turn != work.turn or worker.work.pop(work.lease.number, None) is None:
            return
        # Without the rows that selection has dropped.
        rows = self.schedule.tasks.complete(work.lease)
        versions = dict.fromkeys(rows, work.version or 0) if worker.consumer.kind is Kind.GENERATE else None
        self.schedule.done(worker.consumer.name, rows, versions)

    def _take_in(self, worker: SimulatedWorker, lease: Lease) -> None:
        """Run a trainer's stages before its updates on new rows, which it keeps."""
        batch = self.schedule.progress.coming
        assert batch is not None
        if worker.training is None:
            due = [stage for stage in worker.consumer.updates if stage.when.includes(batch.iteration)]
            updates = UpdatesInProgress(batch.steps, batch.size)
            worker.training = SimulatedTraining(batch, due, updates, len(batch.plan))
        training, numbers = worker.training, batch.updates_of(lease.rows)
        training.pieces.append((lease, numbers))
        training.rows_left -= len(lease.rows)
        training.updates.add(lease, numbers)
        self._occupy(training, self._shares(worker, lease.rows))

    def _train(self) -> bool:
        """Let trainers accumulate, make due steps, and end their batches."""
        changed, coming = False, self.schedule.progress.coming
        for worker in self.trainers if coming is not None else ():
            training = worker.training
            if not worker.consumer.takes_rows:
                due = [stage for stage in worker.consumer.updates if self.schedule.progress.may_step(stage)]
                for stage in due:
                    self.schedule.progress.stepped(stage.name)
                changed |= bool(due)
            elif training is not None and not training.busy and training.stages:
                changed |= self._update(worker, training)
            elif training is not None and not training.busy and not training.rows_left:
                # All of its rows have arrived and all updates are made.
                for lease, _ in training.pieces:
                    self.schedule.done(worker.consumer.name, self.schedule.tasks.complete(lease))
                worker.training, changed = None, True
        return changed

    def _update(self, worker: SimulatedWorker, training: SimulatedTraining) -> bool:
        """Accumulate the rows of a trainer's next update that have arrived, or make its step; return False if neither
        is possible.
        """
        stage, batch = training.stages[0], training.batch
        if pieces := training.updates.take():
            rows = [lease.rows[position] for lease, positions in pieces for position in positions]
            shares = self._shares(worker, rows, stage)
            self._occupy(training, shares)
            self._note(worker, rows, shares, stage)
            return True
        infers = any(sibling.kind is Kind.INFER for sibling in worker.consumer.stages)
        due = not training.rows_left
        if is_optimized(stage):
            due = training.updates.is_complete and not (infers and training.rows_left)
        if not due or not self.schedule.progress.may_step(stage):
            return False
        self.schedule.progress.stepped(stage.name)
        training.updates.steps_made += is_optimized(stage)
        if not is_optimized(stage) or training.updates.steps_made == batch.steps:
            training.stages.pop(0)
            training.updates = UpdatesInProgress(batch.steps, batch.size)
            for lease, numbers in training.pieces:
                training.updates.add(lease, numbers)
        return True

    def _occupy(self, training: SimulatedTraining, shares: Sequence[float]) -> None:
        training.busy = True
        self.clock.after(max(shares), partial(setattr, training, "busy", False))

    def _load(self) -> bool:
        """Let engines receive and load weights if the policy allows it now."""
        published, started = self.schedule.progress.published, False
        self.loading.advance(published, self.schedule.admission.is_generation_over(self.loading.target))
        for engine in self.engines:
            if engine.loads:
                continue
            if self.loading.receive_ahead(engine.name, published) is not None:
                engine.receives_until = self.clock.now + self.work.receive_seconds
            load = self.loading.load(engine.name, len(engine.work))
            if load is None:
                continue
            started = engine.loads = True
            # After the current decode step the engine preempts its rows, so that their ends are postponed.
            until = engine.receives_until or self.clock.now + self.work.receive_seconds
            seconds, engine.receives_until = self.work.load_seconds + max(0.0, until - self.clock.now), None
            step = self._until_step(engine)
            for work in engine.work.values():
                # Rows that end with this step are not preempted; 1e-9 covers rounding of the sums.
                if work.end > self.clock.now + step + 1e-9:
                    work.end, work.turn = work.end + seconds, work.turn + 1
                    self.clock.after(work.end - self.clock.now, partial(self._end, engine, work, work.turn))
            engine.steps_since += seconds
            self.clock.after(step + seconds, partial(self._loaded, engine, load.version))
        return started

    def _loaded(self, engine: SimulatedWorker, version: int) -> None:
        engine.loads = False
        self.loading.loaded(engine.name, version)

    def _shares(self, worker: SimulatedWorker, rows: Sequence[Uid], stage: Stage | None = None) -> list[float]:
        """Return the seconds of each rank for rows of one stage; by default of all of the consumer's stages that do not
        train.
        """
        stages = (
            [stage]
            if stage is not None
            else [costed for costed in worker.consumer.stages if costed.kind is not Kind.TRAIN]
        )
        costs = [sum(self.work.seconds(costed.name, row) for costed in stages) for row in rows]
        return [sum(costs[i] for i in part) for part in balanced_partition(costs, worker.ranks)]

    def _until_step(self, engine: SimulatedWorker) -> float:
        """Return the seconds until an engine's decode step ends; 0 between steps and without rows."""
        seconds = self.work.step_seconds
        if not engine.work or not seconds:
            return 0.0
        # Rounded: sums of seconds at a step boundary differ in the last digits.
        done = round((self.clock.now - engine.steps_since) / seconds, 6)
        return (math.ceil(done) - done) * seconds

    def _note(
        self, worker: SimulatedWorker, rows: Sequence[Uid], shares: Sequence[float], stage: Stage | None = None
    ) -> None:
        """Add a span of each rank to the timeline, by default with the name of the consumer's first stage."""
        shown = stage or (worker.consumer.updates or worker.consumer.stages)[0]
        now, iteration = self.clock.now, self.schedule.admission.iteration_of[rows[0][1]]
        for rank, share in enumerate(shares):
            name = worker.name if worker.ranks == 1 else f"{worker.name}/{rank}"
            role = shown.name.partition(".")[0]
            self.result.spans.append(Span(name, role, shown.name, iteration, now, now + share, len(rows)))
