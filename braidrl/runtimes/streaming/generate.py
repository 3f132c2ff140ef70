"""The loop of a generation worker, for every engine: rows go to the engine as slots become free, and leave one by one.

take ──lease per row──▶ engine ──▶ finished rows, episodes ──▶ columns, acknowledged at once
                           ▲
                           └── new weights, all at once: between rows, or between two tokens of running rows

One request to the queue is always pending, so that rows and weights arrive as soon as they are available. The loop shares the
engine's event loop: an engine of this process steps in it, others answer in it.
"""

import asyncio
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from braidrl.agents.player import Episode
from braidrl.data.rows import Column, FinishReason, Rows, tokens_of
from braidrl.engines.engine import Engine
from braidrl.engines.requests import Response
from braidrl.engines.resuming import ResumingEngine
from braidrl.flow import Stage
from braidrl.flow.compute import of_namespace
from braidrl.flow.readiness import Uid
from braidrl.observe.metrics import Sums
from braidrl.observe.stalls import WORK, PieceOfWork
from braidrl.observe.trace import BusySpan
from braidrl.queue.client import Client, WorkItem
from braidrl.queue.storage import Evicted
from braidrl.runtimes.generating.generation import limits_of, requests_of
from braidrl.runtimes.generating.partial import to_the_end
from braidrl.runtimes.streaming.weights import source_of
from braidrl.runtimes.streaming.worker import WorkerContext
from braidrl.runtimes.usage import Drawn
from braidrl.training.parallel.replicated import DataParallel
from braidrl.weights.file import WeightFile

LOAD = "load weights"


class Ended(NamedTuple):
    """The result of a row when its engine has finished with it, and the tokens drawn under this lease."""

    result: Response | Episode
    drawn: Drawn

    @property
    def is_suspended(self) -> bool:
        """Return True if the row is suspended."""
        return isinstance(self.result, Response) and self.result.finish_reason is FinishReason.ABORT


@dataclass(frozen=True)
class Flight:
    """A running row: its work, its data, and its task."""

    work: WorkItem
    row: Rows
    task: asyncio.Task[Ended]

    @property
    def uid(self) -> Uid:
        """Return its uid."""
        (uid,) = self.row.uids()
        return uid


class GenerateLoop:
    """One engine, or several behind one router, and their rows."""

    def __init__(self, context: WorkerContext, client: Client) -> None:
        self.context, self.client = context, client
        self.role = str(context.group.role)
        self.generation = context.executor.generation
        self.engine = self.generation.engines[self.role]
        # The queue limits the number of episodes.
        self.limits = limits_of(context.executor.config, self.engine.max_sequence_tokens, DataParallel())
        self.version = 0
        self.flight: dict[int, Flight] = {}
        """Running rows by lease number."""
        self.last: dict[Uid, asyncio.Task[Ended]] = {}
        """The latest generation task of each row: an engine draws one response of a row at a time."""
        self.ended: list[int] = []
        self.spans: dict[str, BusySpan] = {}
        """The span in which the engine has rows of a stage, by stage."""
        self.pieces: dict[str, PieceOfWork] = {}
        """The same for stall detection."""
        self.crowd = 0
        """The largest number of rows at once since the engine was idle."""

    def run(self) -> None:
        """Generate until the run ends."""
        self.engine.run(self._serve)

    async def _serve(self, own: Engine) -> None:
        engine = ResumingEngine(own)
        self.news = asyncio.Event()
        try:
            while (work := await self._next(engine.load().slots)).kind != "stop":
                await self._act(engine, work)
        finally:
            await self._end(list(self.flight))

    async def _next(self, slots: int) -> WorkItem:
        """Return the worker's next work from the queue; rows that end meanwhile are delivered."""
        settings, stages = self.context.settings, self.context.group.stages
        take = partial(self.client.take, stages, settings.dispatch_rows, settings.wait_s, single=True, slots=slots)
        asked = asyncio.ensure_future(asyncio.to_thread(take))
        asked.add_done_callback(lambda _: self.news.set())
        while not asked.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), settings.lease_s / 3)
            self.news.clear()
            await self._deliver()
            await self._end(self.client.renew(settings.lease_s / 3))
        return await asked

    async def _act(self, engine: ResumingEngine, work: WorkItem) -> None:
        await self._end(work.lost)
        if work.kind == "rows":
            for lease, row in leased_rows(work):
                self._begin(engine, lease, work, row)
        elif work.kind == "load":
            await self._load(engine, work)

    # Rows

    def _begin(self, engine: ResumingEngine, lease: int, work: WorkItem, row: Rows) -> None:
        stage = self.context.stage(work.stage)
        (uid,) = row.uids()
        if lease in work.message.get("to_the_end", ()):
            stage = to_the_end(stage)
        generate = self._play if "environment" in stage.params else self._respond
        task = asyncio.create_task(self._after(self.last.get(uid), generate(engine, stage, row)))
        task.add_done_callback(lambda _: self._note_end(lease))
        self.flight[lease], self.last[uid] = Flight(work, row, task), task
        if work.stage not in self.spans:
            self.spans[work.stage] = self.context.trace.begin(work.stage, work.iteration, self.version)
            self.pieces[work.stage] = WORK.begin(work.stage)
        self.crowd = max(self.crowd, len(self.flight))

    async def _after(self, before: asyncio.Task[Ended] | None, generate: Coroutine[Any, Any, Ended]) -> Ended:
        try:
            if before is not None:
                await asyncio.wait([before])
            return await generate
        finally:
            generate.close()

    async def _respond(self, engine: Engine, stage: Stage, row: Rows) -> Ended:
        requests = requests_of(stage, row, self.context.executor.config)
        partial = self.generation.partial(stage, row, self.version)
        (request,) = partial.rest(requests) if partial else requests
        response = await engine.submit(request)
        whole = partial.joined(response, self.engine.max_sequence_tokens) if partial else response
        return Ended(whole, Drawn.of(request.prompt, response))

    async def _play(self, engine: Engine, stage: Stage, row: Rows) -> Ended:
        (episode,) = await self.generation.played(engine, stage, row, self.limits)
        return Ended(episode, Drawn.of(row["prompt"][0], episode))

    def _note_end(self, lease: int) -> None:
        self.ended.append(lease)
        self.news.set()

    async def _deliver(self) -> None:
        """Write and acknowledge finished rows while the engine continues; rows of lost leases belong to another worker."""
        ended, self.ended = [lease for lease in self.ended if lease in self.flight], []
        alike: dict[tuple[str, bool], list[int]] = {}
        for lease in ended:
            # Raises the error of a row's generation.
            result = self.flight[lease].task.result()
            alike.setdefault((self.flight[lease].work.stage, result.is_suspended), []).append(lease)
        for (name, unfinished), leases in alike.items():
            flights = [self.flight[lease] for lease in leases]
            results = [flight.task.result() for flight in flights]
            WORK.advanced()
            rows = Rows.cat([flight.row for flight in flights])
            await asyncio.to_thread(self._write, self.context.stage(name), leases, rows, results, unfinished)
        self._forget(ended)

    def _write(self, stage: Stage, leases: Sequence[int], rows: Rows, ended: Sequence[Ended], unfinished: bool) -> None:
        sums, usage = Sums(), self.generation.usage
        columns = self._columns(stage, rows, [one.result for one in ended], sums)
        # A suspended row counts when it has ended.
        tokens = 0 if unfinished else tokens_of(of_namespace(Rows(columns), stage.params.get("into")))
        report = self.context.trace.count(self.spans[stage.name], stage.name, len(rows), tokens)
        drawn = [one.drawn for one in ended]
        usage.decoded(stage, drawn, self.engine.slots, report["seconds"], sums, self.crowd)
        usage.note_memory(stage, sums)
        report["sums"] = sums.pairs()
        self.client.done(stage.name, leases, [self.client.write(rows.uids(), columns)], report, unfinished=unfinished)

    def _columns(
        self, stage: Stage, rows: Rows, results: Sequence[Response | Episode], sums: Sums
    ) -> Mapping[str, Column]:
        if "environment" in stage.params:
            episodes = [result for result in results if isinstance(result, Episode)]
            return self.generation.episode_columns(stage, episodes, self.limits, sums)
        return self.generation.columns(stage, rows, [result for result in results if isinstance(result, Response)])

    async def _end(self, leases: Collection[int]) -> None:
        """End rows with a lost lease: selection dropped them, or another worker generates them."""
        gone = [lease for lease in leases if lease in self.flight]
        for lease in gone:
            self.flight[lease].task.cancel()
        await asyncio.gather(*(self.flight[lease].task for lease in gone), return_exceptions=True)
        self._forget(gone)

    def _forget(self, leases: Iterable[int]) -> None:
        for lease in leases:
            flight = self.flight.pop(lease)
            if self.last.get(flight.uid) is flight.task:
                del self.last[flight.uid]
        left = {flight.work.stage for flight in self.flight.values()}
        for stage in self.spans.keys() - left:
            self.context.trace.end(self.spans.pop(stage))
            WORK.end(self.pieces.pop(stage))
        self.crowd = self.crowd if self.flight else 0

    # Weights

    async def _load(self, engine: ResumingEngine, work: WorkItem) -> None:
        """Load a whole version. If rows do not continue with it, running ones were dropped before."""
        if not work.message["keeps_rows"]:
            await self._end(list(self.flight))
        version = int(work.message["version"])
        place = next((place for role, _, place in work.message["weights"] if role == self.role), None)
        source = source_of(place) if place else None
        await engine.preempt()
        start = time.perf_counter()
        with self.context.trace.busy(LOAD, version, version=version):
            await engine.update_weights(version, source)
        self.version = version
        loaded: dict[str, Any] = {"version": version, "bytes": 0, "sent": 0, "update": None}
        if place:
            loaded |= {"bytes": place["bytes"], "sent": 0 if isinstance(source, WeightFile) else place["bytes"]}
            loaded["update"] = {"role": self.role, "seconds": time.perf_counter() - start}
        self.client.ask("loaded", **loaded)


def leased_rows(work: WorkItem) -> list[tuple[int, Rows]]:
    """Return each lease with its row. A row that selection has dropped meanwhile is gone, and so is its lease."""
    numbers = [number for number, _ in work.leases]
    with suppress(Evicted):
        rows = work.rows()
        return [(number, rows.take([place])) for place, number in enumerate(numbers)]
    found: list[tuple[int, Rows]] = []
    for place, number in enumerate(numbers):
        with suppress(Evicted):
            found.append((number, work.rows([place])))
    return found
