"""The loop of a generation worker, for every engine: rows go to the engine as slots become free, and leave as they end.

take ──a lease of rows──▶ engine ──▶ finished rows, episodes ──▶ checks, computations ──▶ columns, reported in a thread
                             ▲
                             └── new weights, all at once: between rows, or between two tokens of running rows

One request to the queue is always pending, so that rows and weights arrive as soon as they are available. The loop shares the
engine's event loop: an engine of this process steps in it, others answer in it.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from braidrl.agents.trajectory import Trajectory, response_columns
from braidrl.data.rows import FinishReason, Rows, Uid, tokens_of
from braidrl.engines.engine import ServedEngine
from braidrl.engines.requests import Request, Response
from braidrl.engines.routing.router import ResumingEngine
from braidrl.flow import Stage
from braidrl.flow.compute import of_namespace
from braidrl.observe.metrics import Sums
from braidrl.observe.stalls import WORK, PieceOfWork
from braidrl.observe.trace import BusySpan
from braidrl.queue.client import Client, WorkItem, write_columns
from braidrl.runtimes.generating.generation import TO_THE_END, limits_of, requests_of
from braidrl.runtimes.streaming.weights import source_of
from braidrl.runtimes.streaming.worker import WorkerContext
from braidrl.runtimes.usage import Drawn
from braidrl.training.parallel.layouts import DataParallel
from braidrl.weights.collective import OfferedWeights
from braidrl.weights.file import WeightFile

LOAD = "load weights"
Key = tuple[int, int]
"""A running row: the number of its lease, and its position in it."""


Ended = Response | Trajectory | tuple[Response, Drawn]
"""The result of a row when its engine has finished with it; of a resumed row, also the tokens drawn under this lease."""


class GenerateLoop:
    """One engine, or several behind one router, and their rows."""

    def __init__(self, context: WorkerContext, client: Client) -> None:
        self.context, self.client = context, client
        self.role = str(context.group.role)
        self.generation = context.executor.generation
        self.engine = self.generation.engines[self.role]
        # The queue limits the number of episodes.
        self.limits = limits_of(context.executor.config, self.engine.max_sequence_tokens, DataParallel())
        self.has_budget = context.executor.config.rollout.tokens_per_iteration is not None
        """True if rows are suspended after a number of tokens (partial rollout)."""
        self.version = 0
        self.flight: dict[Key, asyncio.Task[Ended]] = {}
        """The task that draws each running row."""
        self.leases: dict[int, WorkItem] = {}
        """The leases with running rows."""
        self.left: dict[int, int] = {}
        """Number of running rows by lease."""
        self.last: dict[Uid, Key] = {}
        """The latest running key of each row: an engine draws one response of a row at a time."""
        self.ended: list[Key] = []
        self.reporting: dict[asyncio.Task[None], list[Key]] = {}
        """Tasks that check and write finished rows, with these. The rows stay in `flight` until their task has ended."""
        self.spans: dict[str, BusySpan] = {}
        """The span in which the engine has rows of a stage, by stage."""
        self.pieces: dict[str, PieceOfWork] = {}
        """The same for stall detection."""
        self.crowd = 0
        """The largest number of rows at once since the engine was idle."""

    async def serve(self, own: ServedEngine) -> None:
        """Generate until the run ends, in the engine's event loop."""
        engine = ResumingEngine(own)
        self.news = asyncio.Event()
        try:
            while (work := await self._next(own.load().slots)).kind != "stop":
                await self._end(self._gone(work.lost, work.dropped))
                if work.kind == "rows":
                    self._begin(engine, work)
                elif work.kind == "load":
                    await self._load(engine, work)
        finally:
            await asyncio.gather(*self.reporting, return_exceptions=True)
            await self._end(list(self.flight))

    async def _next(self, slots: int) -> WorkItem:
        """Return the worker's next work from the queue; rows that end meanwhile are checked, written and reported."""
        settings, consumers = self.context.settings, self.context.group.consumers
        slots += sum(map(len, self.reporting.values()))
        take = partial(self.client.take, consumers, settings.dispatch_rows, settings.wait_s, slots=slots)
        asked = asyncio.ensure_future(asyncio.to_thread(take))
        asked.add_done_callback(lambda _: self.news.set())
        while not asked.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), settings.lease_s / 3)
            self.news.clear()
            self._deliver()
            await self._end(self._gone(*self.client.renew(settings.lease_s / 3)))
        return await asked

    def _gone(self, lost: Collection[int], dropped: Iterable[tuple[int, Sequence[int]]]) -> list[Key]:
        """Return the running rows that this worker has lost, by lease, or by lease and position.

        A row that is being reported is left alone: the queue refuses its report.
        """
        reported = {key for keys in self.reporting.values() for key in keys}
        gone = [key for key in self.flight if key[0] in lost] if lost else []
        gone += [(lease, place) for lease, places in dropped for place in places if (lease, place) in self.flight]
        return [key for key in gone if key not in reported]

    # Rows

    def _begin(self, engine: ResumingEngine, work: WorkItem) -> None:
        """Give the rows of a lease to the engine."""
        rows = work.read_existing()
        if not work.own:
            self.client.held.discard(work.lease)
            return
        stage, config = self.context.consumers[work.consumer].stages[0], self.context.executor.config
        requests, uids = requests_of(stage, rows, config), rows.uids()
        # An episode has no budget.
        ends = set() if "environment" in stage.params else set(work.message.get("to_the_end", ()))
        self.leases[work.lease], self.left[work.lease] = work, len(work.own)
        loop = asyncio.get_running_loop()
        for number, place in enumerate(work.own):
            key, uid = (work.lease, place), uids[number]
            own = replace(stage, params={**stage.params, TO_THE_END: True}) if place in ends else stage
            before = self.flight.get(self.last[uid]) if uid in self.last else None
            self.last[uid] = key
            self.flight[key] = loop.create_task(self._draw(engine, own, rows, number, requests[number], key, before))
        if stage.name not in self.spans:
            self.spans[stage.name] = self.context.trace.begin(stage.name, work.iteration, self.version)
            self.pieces[stage.name] = WORK.begin(stage.name)
        self.crowd = max(self.crowd, len(self.flight))

    async def _draw(
        self, engine: ResumingEngine, stage: Stage, rows: Rows, number: int, request: Request, key: Key,
        before: asyncio.Task[Ended] | None,
    ) -> Ended:  # fmt: skip
        """Draw one of these rows once the engine is done with an earlier request for it, and note its end."""
        try:
            if before is not None:
                await asyncio.wait([before])
            if "environment" in stage.params:
                (played,) = await self.generation.played(engine, stage, rows.take([number]), self.limits)
                return played
            if not self.has_budget:
                return await engine.submit(request)
            # The row may have tokens: it resumes within its budget, and stays as it is if it has ended.
            partial = self.generation.partial(stage, rows.take([number]), self.version)
            assert partial is not None
            if complete := partial.complete:
                return next(iter(complete.values())), Drawn(0, 0)
            (rest,) = partial.rest([request])
            response = await engine.submit(rest)
            whole = partial.joined(response, self.engine.max_sequence_tokens)
            return whole, Drawn.of(rest.prompt, response)
        finally:
            if self.last.get(request.uid) == key:
                del self.last[request.uid]
            # When another task of the loop reads this, the row's task has ended.
            self.ended.append(key)
            self.news.set()

    def _deliver(self) -> None:
        """Begin to check, write and report finished rows, while the engine continues; rows of lost leases are another worker's."""
        for task in [task for task in self.reporting if task.done()]:
            del self.reporting[task]
            # Raises the error of a check.
            task.result()
        ended, self.ended = [key for key in self.ended if key in self.flight], []
        alike: dict[tuple[str, bool], list[Key]] = {}
        for key in ended:
            # Raises the error of a row's generation.
            result = self.flight[key].result()
            response = result[0] if isinstance(result, tuple) else result
            is_suspended = isinstance(response, Response) and response.finish_reason is FinishReason.ABORT
            alike.setdefault((self.leases[key[0]].consumer, is_suspended), []).append(key)
        for (_, unfinished), keys in alike.items():
            WORK.advanced()
            task = asyncio.create_task(self._report(keys, unfinished))
            task.add_done_callback(lambda _: self.news.set())
            self.reporting[task] = keys

    async def _report(self, keys: Sequence[Key], unfinished: bool) -> None:
        places: dict[int, list[int]] = {}
        for lease, place in keys:
            places.setdefault(lease, []).append(place)
        rows = Rows.cat([self.leases[lease].share(own) for lease, own in places.items()])
        ended = [self.flight[lease, place].result() for lease, own in places.items() for place in own]
        work = self.leases[keys[0][0]]
        await asyncio.to_thread(self._write, work, rows, list(places.items()), ended, unfinished)
        self._forget(keys)

    def _write(
        self, work: WorkItem, rows: Rows, done: list[tuple[int, list[int]]], ended: Sequence[Ended], unfinished: bool
    ) -> None:
        consumer = self.context.consumers[work.consumer]
        stage, sums, usage = consumer.stages[0], Sums(), self.generation.usage
        results = [one[0] if isinstance(one, tuple) else one for one in ended]
        drawn = [
            one[1] if isinstance(one, tuple) else Drawn.of(prompt, one)
            for prompt, one in zip(rows["prompt"].unbind(), ended, strict=True)
        ]
        if "environment" in stage.params:
            played = [result for result in results if isinstance(result, Trajectory)]
            columns = dict(self.generation.trajectory_columns(stage, played, self.limits, sums))
        else:
            responses = [result for result in results if isinstance(result, Response)]
            columns = dict(self.generation.named(stage, response_columns(rows, responses)))
        # A suspended row counts when it has ended.
        tokens = 0 if unfinished else tokens_of(of_namespace(Rows(columns), stage.params.get("into")))
        report = self.context.trace.count(self.spans[stage.name], stage.name, len(rows), tokens)
        usage.decoded(stage, drawn, self.engine.slots, report["seconds"], sums, self.crowd)
        usage.note_memory(stage, sums)
        reports = [{**report, "sums": sums.pairs()}]
        whole = rows.with_columns(columns)
        for other in consumer.due(work.iteration) if not unfinished else ():
            if other is not stage:
                with self.context.trace.busy(other.name, work.iteration, whole.uids()) as span:
                    found = self.context.executor.run(other, whole, span.sums)
                whole, columns = whole.with_columns(found), {**columns, **found}
                reports.append(span.report())
        part = write_columns(self.context.data, columns)
        self.client.done(consumer.name, done, [(part, done)], reports, unfinished=unfinished, keeps=True)

    async def _end(self, keys: Collection[Key]) -> None:
        """End rows that this worker has lost: selection dropped them, or another worker generates them."""
        if not keys:
            return
        for key in keys:
            self.flight[key].cancel()
        await asyncio.gather(*(self.flight[key] for key in keys), return_exceptions=True)
        self._forget(keys)

    def _forget(self, keys: Iterable[Key]) -> None:
        for lease, rows in Counter(key[0] for key in keys if self.flight.pop(key, None) is not None).items():
            self.left[lease] -= rows
            if not self.left[lease]:
                del self.left[lease], self.leases[lease]
                self.client.held.discard(lease)
        if self.flight and len(self.spans) == 1:
            return
        left = {work.consumer for work in self.leases.values()}
        for stage in self.spans.keys() - left:
            self.context.trace.end(self.spans.pop(stage))
            WORK.end(self.pieces.pop(stage))
        self.crowd = self.crowd if self.flight else 0

    # Weights

    async def _load(self, engine: ResumingEngine, work: WorkItem) -> None:
        """Load a whole version. If rows do not continue with it, running ones were dropped before."""
        if not work.message["keeps_rows"]:
            await self._end([key for key, task in self.flight.items() if not task.done()])
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
            sent = source.received if isinstance(source, OfferedWeights) else 0
            loaded |= {"bytes": place["bytes"] if isinstance(source, WeightFile) else sent, "sent": sent}
            loaded["update"] = {"role": self.role, "seconds": time.perf_counter() - start}
        self.client.ask("loaded", **loaded)
