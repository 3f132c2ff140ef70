"""The loop of a generation worker: rows join the engine as slots become free, and leave it one by one.

take ──lease per row──▶ engine ──step──▶ finished rows ──▶ columns, acknowledged at once
                           ▲
                           └── new weights, all at once, when a batch's generation is over

Episodes of several turns are played to their ends, those that were taken together at the same time.
"""

import time
from collections.abc import Collection, Sequence
from contextlib import suppress

from braidrl.data.rows import Rows
from braidrl.flow.readiness import Uid
from braidrl.models.roles.make import torch_worker
from braidrl.observe.trace import BusySpan
from braidrl.rollout.embedded.stepping import SteppingEngine
from braidrl.rollout.requests import Response
from braidrl.runtimes.generating.generation import requests_of
from braidrl.runtimes.streaming.weights import WeightReceiver
from braidrl.runtimes.streaming.worker import WorkerContext
from braidrl.transfer.queue.client import Client, WorkItem
from braidrl.transfer.queue.storage import Evicted
from braidrl.transfer.queue.table import Block

ASK_EVERY_S = 0.02
"""How often a worker with free slots that is decoding asks for more rows."""
LOOK_EVERY_S = 0.1
"""How often a worker that is decoding asks whether there are new weights to receive."""
LOAD = "load weights"


class GenerateLoop:
    """One engine and the rows that it has."""

    def __init__(self, context: WorkerContext, client: Client) -> None:
        self.context, self.client = context, client
        self.role = str(context.group.role)
        engine = context.executor.engines[self.role]
        assert isinstance(engine, SteppingEngine), "own_engine makes no other for this runtime"
        self.engine = engine
        self.slots = context.executor.config.rollout.slots
        self.source = WeightReceiver(context.data)
        self.played = {s for s in context.group.stages if "environment" in context.stage(s).params}
        """Stages whose rows are episodes in an environment."""
        self.flight: dict[Uid, tuple[int, WorkItem, Rows]] = {}
        """Of each row in the engine its lease, where it came from, and the row."""
        self.postponed: list[tuple[int, WorkItem, Rows]] = []
        """Rows of which the engine has another response under way."""
        self.asked = self.looked = 0.0
        self.found = False
        """Whether the last request brought rows: then there may be more."""
        self.span: BusySpan | None = None
        """The stretch of time in which the engine has had rows."""

    def run(self) -> None:
        """Generate until the run ends."""
        self.context.keep_leases(self.client)
        while True:
            if self._wants_rows():
                work = self._take()
                if work.kind == "stop":
                    return
                self._act(work)
            if self.flight:
                self._decode()

    def _wants_rows(self) -> bool:
        if not self.flight:
            return True
        return len(self.flight) < self.slots and (self.found or time.monotonic() - self.asked > ASK_EVERY_S)

    def _take(self) -> WorkItem:
        room = max(1, min(self.slots - len(self.flight), self.context.settings.dispatch_rows))
        wait_s = 0.0 if self.flight else self.context.settings.wait_s
        # Episodes have the engine for themselves.
        stages = [name for name in self.context.group.stages if not (self.flight and name in self.played)]
        work = self.client.take(stages, room, wait_s, single=True)
        self.asked, self.found = time.monotonic(), work.kind == "rows"
        return work

    def _act(self, work: WorkItem) -> None:
        self._drop(work.lost)
        if work.kind == "rows":
            given = leased_rows(work)
            if work.stage in self.played:
                self._play(work, given)
            else:
                for lease, row in given:
                    self._begin(lease, work, row)
        elif work.kind == "load":
            self._load(work)

    def _play(self, work: WorkItem, given: Sequence[tuple[int, Rows]]) -> None:
        """Play the rows' episodes to their ends, write and acknowledge them."""
        if not given:
            return
        stage, rows = self.context.stage(work.stage), Rows.cat([row for _, row in given])
        with self.context.trace.busy(stage.name, work.iteration, rows.uids(), self.engine.version) as span:
            columns = self.context.executor.run(stage, rows, span.sums)
            written = self.client.write(rows.uids(), columns)
        self.client.done(stage.name, [lease for lease, _ in given], [written], span.report())

    def _begin(self, lease: int, work: WorkItem, row: Rows) -> None:
        (uid,) = row.uids()
        if uid in self.flight:
            self.postponed.append((lease, work, row))
            return
        (request,) = requests_of(self.context.stage(work.stage), row, self.context.executor.config)
        self.engine.add(request)
        if self.span is None:
            self.span = self.context.trace.begin(work.stage, work.iteration, self.engine.version)
        self.flight[uid] = (lease, work, row)

    def _decode(self) -> None:
        """Step until rows end, or until it is time to look after the queue."""
        finished: list[Response] = []
        until = time.monotonic() + ASK_EVERY_S
        while not finished and time.monotonic() < until:
            finished = self.engine.step()
            self._prefetch()
        by_stage: dict[str, list[Response]] = {}
        for row in finished:
            by_stage.setdefault(self.flight[row.uid][1].stage, []).append(row)
        for stage, rows in by_stage.items():
            self._deliver(stage, rows)
        self._settle()
        self._drop(self.client.renew(self.context.settings.lease_s / 3))

    def _deliver(self, name: str, finished: list[Response]) -> None:
        """Write and acknowledge rows of one stage; those whose lease was lost are somebody else's by now."""
        leases, rows = [], []
        for row in finished:
            lease, _, given = self.flight.pop(row.uid)
            leases.append(lease)
            rows.append(given)
        assert self.span is not None, "the engine has had rows"
        stage, together = self.context.stage(name), Rows.cat(rows)
        report = self.context.trace.count(self.span, name, len(rows))
        columns = self.context.executor.generation.columns(stage, together, finished)
        self.client.done(name, leases, [self.client.write(together.uids(), columns)], report)
        self._resume_postponed()

    def _resume_postponed(self) -> None:
        waiting, self.postponed = self.postponed, []
        for lease, work, row in waiting:
            self._begin(lease, work, row)

    def _drop(self, lost: Collection[int]) -> None:
        """End rows whose lease was lost: they were dropped by selection, or are generated elsewhere."""
        self.postponed = [item for item in self.postponed if item[0] not in lost]
        gone = [uid for uid, (lease, _, _) in self.flight.items() if lease in lost]
        for uid in gone:
            self.engine.abort(uid)
            del self.flight[uid]
        self._resume_postponed()
        self._settle()

    def _settle(self) -> None:
        """End the stretch of time when the last row has left."""
        if self.span is not None and not self.flight:
            self.context.trace.end(self.span)
            self.span = None

    def _load(self, work: WorkItem) -> None:
        """Take a version whole. What is still under way belongs to dropped rows."""
        self._drop([lease for lease, _, _ in [*self.flight.values(), *self.postponed]])
        version = int(work.message["version"])
        with self.context.trace.busy(LOAD, version, version=version):
            for role, made, blocks in work.message["weights"]:
                if role == self.role:
                    model = torch_worker(self.context.executor.workers[self.role]).model
                    self.source.load(model, made, [Block(*block) for block in blocks])
            self.context.executor.generation.publish(version)
        self.client.ask("loaded", version=version)

    def _prefetch(self) -> None:
        """Receive, with `delayed` weights, one bucket of the newest version between two decode steps."""
        if self.context.settings.weights != "delayed":
            return
        try:
            if self.source.receive():
                return
        except Evicted:
            # A newer version has come, and all engines hold one that is no older than this.
            self.source.forget()
        if time.monotonic() - self.looked < LOOK_EVERY_S:
            return
        self.looked = time.monotonic()
        for role, version, blocks in self.client.ask("newest")[0]["weights"]:
            if role == self.role and version > max(self.engine.version, self.source.version):
                self.source.begin(version, [Block(*block) for block in blocks])


def leased_rows(work: WorkItem) -> list[tuple[int, Rows]]:
    """Return each lease with its row. A row that selection has dropped meanwhile is gone, and its lease with it."""
    numbers = [number for number, _ in work.leases]
    with suppress(Evicted):
        rows = work.rows()
        return [(number, rows.take([place])) for place, number in enumerate(numbers)]
    found: list[tuple[int, Rows]] = []
    for place, number in enumerate(numbers):
        with suppress(Evicted):
            found.append((number, work.rows([place])))
    return found
