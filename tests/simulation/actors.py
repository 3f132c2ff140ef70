"""The workers of a simulated run. Each holds conversations with the control plane over the simulated network.

conversation ──Take, Done, Renew ...──▶ network ──▶ control plane      rows are columns in the memory of the simulation
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from braidrl.data.codec import decode
from braidrl.data.messages import Frame, pack_message, unpack_message
from braidrl.data.rows import Rows, Uid
from braidrl.queue.calls import Done, GiveBack, Hello, Lost, QueueRequest, RefusedRequest, Renew, Stop, Waited
from braidrl.queue.client import WorkItem, write_columns
from braidrl.queue.transport import REPEAT_S
from braidrl.runtimes.streaming.work import (
    GoBack,
    LeasedRows,
    Loaded,
    LoadWeights,
    NewWeights,
    Order,
    OrderDone,
    Step,
    Stepped,
    TakeWork,
    WeightLocation,
)
from tests.queue.made_up import made_from
from tests.simulation.memory import MemoryPlane

if TYPE_CHECKING:
    from tests.simulation.run import SimulatedRun

LEASE_S = 6.0
WAIT_S = 2.0
FULL_AGAIN_S = 0.5
"""Seconds before a worker whose store was full writes again."""
SLOTS = 3
POISON_S, UNDRAWN_S = 0.2, 0.05
"""Seconds after which a row kills its engine, and after which a row that is left out is reported."""
Key = tuple[int, int]
"""A row: the number of its lease, and its position in it."""


class Conversation:
    """Requests that wait for their answers one after another, as over one connection."""

    def __init__(self, worker: Worker, name: str) -> None:
        self.worker, self.name, self.number = worker, name, 0
        self.request: QueueRequest | None = None

    def ask(
        self, request: QueueRequest, frames: Sequence[Frame], wait_s: float, then: Callable[[Any, Any], None]
    ) -> None:
        """Send a request, and repeat it until it is answered."""
        self.number += 1
        request.holder = self.worker.holder
        self.request, self.wait_s, self.then = request, wait_s, then
        self.frames = [bytes(frame) for frame in frames]
        self._send(self.number)

    def _send(self, number: int) -> None:
        if self.request is None or number != self.number:
            return
        packed = pack_message(self.request)
        self.worker.run.to_queue(self.worker, (self.name, number, self.wait_s, packed, self.frames))
        self.worker.after(REPEAT_S, partial(self._send, number))

    def hear(self, number: int, packed: bytes, frames: Sequence[Frame]) -> None:
        """Receive an answer, unless it belongs to an earlier request."""
        if self.request is None or number != self.number:
            return
        answer = unpack_message(packed, self.request.answer | Waited | RefusedRequest)
        assert not isinstance(answer, RefusedRequest), (
            f"{type(self.request).__name__} of {self.worker.holder}: {answer.error}"
        )
        self.request = None
        self.worker.idle.append(self)
        self.then(answer, frames)


class Worker:
    """A process of a group, from its start to its end."""

    consumers: Sequence[str] = ()

    def __init__(self, run: SimulatedRun, group: str, number: int, starts: int) -> None:
        self.run, self.group, self.number, self.starts = run, group, number, starts
        self.holder = f"{group}.{number}.{starts}"
        self.data = MemoryPlane(run.memory, self.holder)
        self.idle: list[Conversation] = []
        self.conversations: dict[str, Conversation] = {}
        self.held: set[int] = set()
        self.alive, self.frozen_until, self.full_until = True, 0.0, 0.0
        self.ask(Hello(self.data.address, isinstance(self, Engine)), lambda answer, frames: self.start())

    def start(self) -> None:
        """Ask for work, and send heartbeats."""
        self.after(LEASE_S / 3, self._renew)
        self.next()

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Act later, unless this process has ended by then; a frozen one acts when it continues."""

        def act() -> None:
            if not self.alive:
                return
            if self.run.clock.now < self.frozen_until:
                self.run.clock.after(self.frozen_until - self.run.clock.now, act)
                return
            action()

        self.run.clock.after(seconds, act)

    def ask(
        self,
        request: QueueRequest,
        then: Callable[[Any, Any], None] = lambda answer, frames: None,
        frames: Sequence[Frame] = (),
        wait_s: float = 0.0,
    ) -> None:
        """Send a request over an idle connection or a new one; `then` gets the answer."""
        if not self.idle:
            name = f"{self.holder}/{len(self.conversations)}"
            self.idle.append(self.conversations.setdefault(name, Conversation(self, name)))
        self.idle.pop().ask(request, frames, wait_s, then)

    def next(self) -> None:
        """Ask for the next piece of work."""
        self.ask(self.request(), self._received, wait_s=WAIT_S)

    def request(self) -> TakeWork:
        return TakeWork(self.consumers, 2, held=sorted(self.held))

    def _received(self, answer: Any, frames: Sequence[Frame]) -> None:
        if isinstance(answer, Stop):
            self.end()
            return
        if isinstance(answer, Lost):
            self.lose(answer)
        if isinstance(answer, LeasedRows):
            self.held.add(answer.lease)
            inline = decode([bytes(frame) for frame in frames]) if frames else Rows({})
            self.work(WorkItem(self.data, answer, inline), answer)
        elif isinstance(answer, Step):
            self.step(answer)
        elif isinstance(answer, LoadWeights):
            self.load(answer)
        elif isinstance(answer, Order):
            self.obey(answer)
        else:
            self.next()

    def end(self) -> None:
        """Do nothing more."""

    def _renew(self) -> None:
        self.ask(Renew(sorted(self.held)), lambda answer, frames: self.lose(answer))
        self.after(LEASE_S / 3, self._renew)

    def lose(self, answer: Lost) -> None:
        self.held.difference_update(answer.lost)

    def work(self, work: WorkItem, leased: LeasedRows) -> None:
        raise NotImplementedError

    def step(self, step: Step) -> None:
        raise NotImplementedError

    def load(self, load: LoadWeights) -> None:
        raise NotImplementedError

    def obey(self, order: Order) -> None:
        raise NotImplementedError

    def report(
        self,
        consumer: str,
        columns: dict[str, Any],
        leases: Sequence[tuple[int, Sequence[int]]],
        then: Callable[[Any], None],
        unfinished: bool = False,
    ) -> None:
        """Write columns of rows and report these as done; if the store is full, try again later."""
        try:
            part = write_columns(self.data, columns) if columns else None
        except OSError:
            again = partial(self.report, consumer, columns, leases, then, unfinished)
            self.after(FULL_AGAIN_S, again)
            return
        frames: list[Frame] = []
        parts = [(part.message(frames), leases)] if part is not None else []
        done = Done(consumer, leases, parts, unfinished=unfinished)
        self.ask(done, lambda answer, frames: then(answer), frames)


class Engine(Worker):
    """Generates rows, several at once."""

    consumers = ("generate",)

    def __init__(self, run: SimulatedRun, group: str, number: int, starts: int) -> None:
        self.version = 0
        self.flight: dict[Key, tuple[Uid, int]] = {}
        """Each running row, and its oldest version."""
        self.loading = False
        super().__init__(run, group, number, starts)

    def request(self) -> TakeWork:
        return TakeWork(self.consumers, 4, held=sorted(self.held), slots=SLOTS)

    def lose(self, answer: Lost) -> None:
        super().lose(answer)
        gone = {(lease, position) for lease, positions in answer.dropped for position in positions}
        self._forget([key for key in self.flight if key[0] in answer.lost or key in gone])

    def _forget(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self.flight.pop(key, None)
        self.held &= {lease for lease, _ in self.flight}

    def work(self, work: WorkItem, leased: LeasedRows) -> None:
        rows = work.read_existing()
        if not work.positions:
            self.held.discard(leased.lease)
            self.next()
            return
        for number, (position, uid) in enumerate(zip(work.positions, rows.uids(), strict=True)):
            key, row, version = (leased.lease, position), rows.take([number]), self.version
            if "length" in rows and int(rows["length"][number]):
                # A suspended row is as old as its first token.
                version = min(version, int(rows["version"][number]))
            self.flight[key] = uid, version
            self.run.started(self, uid)
            left = self.run.seconds(uid) - self.run.generated.get(uid, 0.0)
            budget = self.run.scenario.budget
            suspends = budget is not None and left > budget and position not in leased.to_the_end
            seconds = budget if suspends and budget is not None else left
            if position in leased.left_out:
                seconds, suspends = UNDRAWN_S, False
            elif uid in self.run.poison:
                self.after(POISON_S, partial(self._poisoned, key))
            self.after(seconds, partial(self._end, key, row, seconds, suspends))
        self.held &= {lease for lease, _ in self.flight}
        self.next()

    def _poisoned(self, key: Key) -> None:
        if key in self.flight:
            self.run.die(self, by_a_row=True)

    def _end(self, key: Key, row: Rows, seconds: float, suspends: bool) -> None:
        if key not in self.flight:
            return
        if self.loading:
            self.after(0.1, partial(self._end, key, row, seconds, suspends))
            return
        uid, version = self.flight[key]
        self.run.reported(uid, version, None if suspends else seconds)

        def then(answer: Lost) -> None:
            if key[0] not in answer.lost and suspends:
                self.run.generated[uid] = self.run.generated.get(uid, 0.0) + seconds
            self._forget([key])

        self.report("generate", made_from("generate", row, version), [(key[0], [key[1]])], then, unfinished=suspends)

    def load(self, load: LoadWeights) -> None:
        self.run.check(load.version != self.version, f"{self.holder} loads version {load.version} twice")
        self.run.check(load.version > self.version, f"{self.holder} goes back from version {self.version}")
        if not load.keeps_rows:
            self._forget(list(self.flight))
        self.loading = True

        def loaded() -> None:
            self.version, self.loading = load.version, False
            self.ask(Loaded(load.version), lambda answer, frames: self.next())

        self.after(0.3, loaded)

    def leave(self) -> None:
        """Return all rows and end, as after a cluster's notice."""
        self.ask(GiveBack(sorted(self.held)), lambda answer, frames: self.run.remove(self))


class Scorer(Worker):
    """A frozen model of its own."""

    consumers = ("check",)

    def work(self, work: WorkItem, leased: LeasedRows) -> None:
        rows = work.read_existing()
        if len(work.positions) < work.size:
            self.held.discard(leased.lease)
            self.ask(GiveBack([leased.lease]), lambda answer, frames: self.next())
            return

        def report() -> None:
            columns = made_from("check", rows)
            self.report("check", columns, [(leased.lease, work.positions)], lambda answer: self._reported(leased.lease))

        self.after(0.2 * work.size, report)

    def _reported(self, lease: int) -> None:
        self.held.discard(lease)
        self.next()


class Trainer(Worker):
    """The first of some ranks that train together. It keeps the rows of its batch until it has made all steps.

    It is one of these only as long as they are the same; then the run makes another one.
    """

    consumers = ("train.actor",)

    def __init__(self, run: SimulatedRun, group: str, number: int, starts: int) -> None:
        self.kept: list[tuple[LeasedRows, Rows]] = []
        self.made = 0
        self.exports = 0
        """Versions that are being written: no step may change the weights meanwhile."""
        super().__init__(run, group, number, starts)

    def request(self) -> TakeWork:
        rows, ready = sum(leased.size for leased, _ in self.kept), list[str]()
        if self.kept:
            batch = self.kept[0][0].batch
            assert batch is not None
            ready = ["update"] if rows == batch.batch_rows and self.made < batch.steps else []
        return TakeWork(self.consumers, 4, held=sorted(self.held), role="actor", ready=ready)

    def work(self, work: WorkItem, leased: LeasedRows) -> None:
        self.kept.append((leased, work.read()))
        self.after(0.1 * work.size, self.next)

    def step(self, step: Step) -> None:
        if self.exports:
            self.after(0.1, partial(self.step, step))
            return

        def stepped() -> None:
            self.made += 1
            self.run.stepped(self, step.iteration, [uid for _, rows in self.kept for uid in rows.uids()])
            self.ask(Stepped("update", {"stage": "update", "seconds": 0.0, "sums": {}}), partial(self._stepped, step))

        self.after(0.3, stepped)

    def _stepped(self, step: Step, answer: Any, frames: Any) -> None:
        if step.export is not None:
            self.publish(step.export)
        batch = self.kept[0][0].batch
        assert batch is not None
        if self.made < batch.steps:
            self.next()
            return
        rows = Rows.cat([rows for _, rows in self.kept])
        leases = [(leased.lease, list(range(leased.size))) for leased, _ in self.kept]
        columns = made_from("normalise", rows)
        self.report("train.actor", columns, leases, lambda answer: self._trained())

    def publish(self, version: int) -> None:
        """Write new weights, beside other work."""
        self.exports += 1
        location = WeightLocation(version, 8, f"/nowhere/{version}")
        self.after(0.5, lambda: self.ask(NewWeights("actor", version, location, 0.5), self._exported))

    def _exported(self, answer: Any, frames: Any) -> None:
        self.exports -= 1

    def obey(self, order: Order) -> None:
        task = order.task
        assert isinstance(task, GoBack)
        self.run.check(not self.kept, f"{self.holder} goes back with rows")
        if task.export:
            self.publish(task.version)

        def gone_back() -> None:
            self.run.went_back(self, task.version)
            self.ask(OrderDone(order.number), lambda answer, frames: self.next())

        self.after(0.2, gone_back)

    def end(self) -> None:
        # The ranks have changed; this process goes on under another name.
        self.run.ended(self)

    def _trained(self) -> None:
        self.kept, self.made = [], 0
        self.held.clear()
        self.next()
