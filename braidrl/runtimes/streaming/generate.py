"""The loop of a generation worker, for every engine: rows go to the engine as slots become free, and leave as they end.

take ──a lease of rows──▶ engine ──▶ finished rows, episodes ──▶ checks, computations ──▶ columns, reported in a thread
                             ▲
                             └── new weights, all at once: between rows, or between two tokens of running rows

One request to the queue is always pending, so that rows and weights arrive as soon as they are available. The loop
shares the engine's event loop: an engine of this process steps in it, others answer in it.
"""

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from braidrl.agents.trajectory import Trajectory, response_columns
from braidrl.data.rows import FinishReason, Rows, Uid, tokens_of
from braidrl.engines.engine import ServedEngine
from braidrl.engines.requests import Response
from braidrl.engines.routing.resuming import ResumingEngine
from braidrl.engines.routing.router import PolicyEngines
from braidrl.flow.compute import of_namespace
from braidrl.flow.signatures import columns_of
from braidrl.observe.metrics import Sums
from braidrl.observe.stalls import WORK, PieceOfWork
from braidrl.observe.trace import BusySpan
from braidrl.queue.calls import Lost, Stop
from braidrl.queue.client import Client, WorkItem, write_columns
from braidrl.runtimes.generating.episodes import limits_of
from braidrl.runtimes.generating.generation import images_seen, requests_of
from braidrl.runtimes.generating.partial import TO_THE_END, PartialResponses
from braidrl.runtimes.streaming.weights import source_of
from braidrl.runtimes.streaming.work import Ended, LeasedRows, Loaded, LoadWeights, Receive, TakeWork, Weights
from braidrl.runtimes.streaming.worker import WorkerContext
from braidrl.runtimes.usage import Drawn
from braidrl.training.parallel.layouts import DataParallel
from braidrl.weights.collective import OfferedWeights
from braidrl.weights.file import WeightFile, stored_weights
from braidrl.weights.publisher import PolicyWeights, WeightSource

LOAD, RECEIVE = "load weights", "receive weights"
Key = tuple[int, int]
"""A row: the number of its lease, and its position in it."""
RowResult = Response | Trajectory | tuple[Response, Drawn]
"""The result of a row when its engine has finished with it; of a resumed row, also the tokens drawn under this lease.
"""


class GenerateLoop:
    """One engine, or several behind one router, and their rows."""

    def __init__(self, context: WorkerContext, client: Client) -> None:
        self.context, self.client = context, client
        self.generation = context.executor.generation
        self.engine = self.generation.engines[str(context.group.role)]
        # The queue limits the number of episodes.
        self.limits = limits_of(context.executor.config, self.engine.max_sequence_tokens, DataParallel())
        self.version = 0
        self.leases: dict[int, WorkItem] = {}
        """The leases with rows that are running or being reported."""
        self.flight: dict[Key, RowResult | BaseException | None] = {}
        """The rows that are running or being reported: None until the row has ended."""
        self.keys: dict[Uid, Key] = {}
        """The running rows that are one request to the engine."""
        self.episodes: dict[Key, asyncio.Task[list[Trajectory]]] = {}
        """The running rows that are episodes."""
        self.earlier: dict[int, PartialResponses] = {}
        """By lease, the earlier tokens of rows that may be suspended (partial rollout)."""
        self.ended: list[Key] = []
        self.reporting: dict[asyncio.Task[None], list[Key]] = {}
        """Tasks that check and write finished rows, with these.

        The rows stay in `flight` until their task has ended.
        """
        self.spans: dict[str, tuple[BusySpan, PieceOfWork]] = {}
        """By stage the span in which the engine has rows of it, and the same for stall detection."""
        self.peak_rows = 0
        """The largest number of rows at once since the engine was idle."""
        self.ahead: dict[str, tuple[OfferedWeights, asyncio.Future[WeightFile | None]]] = {}
        """By role the weights that are received into host memory ahead of their load, and their file."""
        self.loaded: dict[str, WeightFile] = {}
        """By role the file of the version that engines hold, received ahead; an engine that recovers reads it."""

    async def serve(self, engine: ServedEngine) -> None:
        """Generate until the run ends, in the engine's event loop."""
        self.served_engine, self.resuming_engine, self.news = engine, ResumingEngine(engine), asyncio.Event()
        shared = dict.fromkeys(self.generation.deployment.shared_base, engine)
        self.by_role = (
            engine.engines if isinstance(engine, PolicyEngines) else shared or {str(self.context.group.role): engine}
        )
        try:
            while not isinstance((work := await self._next()).answer, Stop):
                if isinstance(work.answer, Lost):
                    await self._end(self._lost_rows(work.answer))
                match work.answer:
                    case LeasedRows():
                        self._begin(work, work.answer)
                    case Receive():
                        await self._receive(work.answer)
                    case LoadWeights():
                        await self._load(work.answer)
        finally:
            await self._forget_ahead()
            await asyncio.gather(*self.reporting, return_exceptions=True)
            await self._end(list(self.flight))

    async def _next(self) -> WorkItem:
        """Return the worker's next work from the queue; rows that end meanwhile are checked and reported."""
        settings, consumers = self.context.settings, self.context.group.consumers
        request = TakeWork(
            consumers, settings.dispatch_rows, slots=self.served_engine.load().slots, ended=self._ended_by_lease()
        )
        answer = asyncio.ensure_future(asyncio.to_thread(self.client.take, request, settings.wait_s))
        answer.add_done_callback(lambda _: self.news.set())
        while not answer.done():
            with suppress(TimeoutError):
                await asyncio.wait_for(self.news.wait(), settings.lease_s / 3)
            self.news.clear()
            self._deliver()
            await self._end(self._lost_rows(self.client.renew(settings.lease_s / 3)))
        return await answer

    def _ended_by_lease(self) -> list[tuple[int, int]]:
        """Return, by lease, the rows that have freed their slots; the queue learns of others when they are reported."""
        return [(number, lease.ended) for number, lease in self.leases.items() if lease.ended]

    def _lost_rows(self, answer: Lost) -> list[Key]:
        """Return the running rows that this worker has lost.

        Rows in a pending report are excluded: the queue refuses their report.
        """
        reported = {key for keys in self.reporting.values() for key in keys}
        lost_keys = [key for key in self.flight if key[0] in answer.lost] if answer.lost else []
        dropped = ((lease, position) for lease, positions in answer.dropped for position in positions)
        lost_keys += [key for key in dropped if key in self.flight]
        return [key for key in lost_keys if key not in reported]

    # Rows

    def _begin(self, work: WorkItem, leased: LeasedRows) -> None:
        """Give the rows of a lease to the engine."""
        rows = work.read_existing()
        if not work.positions:
            self.client.held.discard(work.lease)
            return
        stage, config = self.context.consumers[work.consumer].stages[0], self.context.executor.config
        requests, keys = requests_of(stage, rows, config), [(work.lease, position) for position in work.positions]
        self.leases[work.lease] = work
        work.left, work.ended = len(keys), work.size - len(keys)
        self.flight.update(dict.fromkeys(keys))
        undrawn = {
            key: self.generation.undrawn(stage, rows.take([number]))
            for number, key in enumerate(keys)
            if key[1] in leased.left_out
        }
        if "environment" in stage.params:
            for number, key in enumerate(keys):
                if key in undrawn:
                    continue
                row = stage
                if key[1] in leased.to_the_end:
                    row = replace(stage, params={**stage.params, TO_THE_END: True})
                played = self.generation.episodes.played(
                    self.resuming_engine, row, rows.take([number]), self.limits, version=self.version
                )
                self.episodes[key] = asyncio.create_task(played)
                self.episodes[key].add_done_callback(partial(self._episode_ended, key))
        else:
            key_of = dict(zip((request.uid for request in requests), keys, strict=True))
            key_of = {uid: key for uid, key in key_of.items() if key not in undrawn}
            requests = [request for request in requests if request.uid in key_of]
            # Rows that may be suspended resume within their budgets; an evaluation's rows are drawn whole.
            if (earlier := self.generation.partial(stage, rows, self.version)) is not None:
                self.earlier[work.lease] = earlier
                to_the_end = {(work.lease, position) for position in leased.to_the_end}
                earlier.budgets |= {uid: None for uid, key in key_of.items() if key in to_the_end}
                requests = earlier.rest(requests)
                for uid, complete in earlier.complete.items():
                    self._note_end(key_of.pop(uid), (complete, Drawn.after([], [])))
            self.keys.update(key_of)
            self.resuming_engine.start_rows(requests, self._row_ended)
        for key, result in undrawn.items():
            if work.lease in self.earlier and isinstance(result, Response):
                self._note_end(key, (result, Drawn.after([], [])))
            else:
                self._note_end(key, result)
        if stage.name not in self.spans:
            span = self.context.trace.begin(stage.name, leased.iteration, self.version)
            self.spans[stage.name] = span, WORK.begin(stage.name)
        self.peak_rows = max(self.peak_rows, len(self.flight))

    def _row_ended(self, uid: Uid, result: Response | BaseException) -> None:
        key = self.keys.pop(uid)
        earlier = self.earlier.get(key[0])
        if earlier is None or isinstance(result, BaseException):
            self._note_end(key, result)
            return
        drawn = Drawn.after([len(earlier.requests[uid].prompt)], [result])
        self._note_end(key, (earlier.joined(result, self.engine.max_sequence_tokens), drawn))

    def _episode_ended(self, key: Key, task: asyncio.Task[list[Trajectory]]) -> None:
        del self.episodes[key]
        if not task.cancelled():
            self._note_end(key, task.exception() or task.result()[0])

    def _note_end(self, key: Key, result: RowResult | BaseException) -> None:
        self.flight[key] = result
        self.ended.append(key)
        self.news.set()

    def _deliver(self) -> None:
        """Start to check, write and report finished rows while the engine continues; rows of lost leases belong to
        another worker.
        """
        for task in [task for task in self.reporting if task.done()]:
            del self.reporting[task]
            # Raises the error of a check.
            task.result()
        ended, self.ended = [key for key in self.ended if key in self.flight], []
        if not ended:
            return
        alike: defaultdict[tuple[str, bool], list[Key]] = defaultdict(list)
        for key in ended:
            result, lease = self.flight[key], self.leases[key[0]]
            if isinstance(result, BaseException):
                raise result
            response = result[0] if isinstance(result, tuple) else result
            is_suspended = response is not None and response.finish_reason is FinishReason.ABORT
            alike[lease.consumer, is_suspended].append(key)
            lease.ended += 1
        if len(self.flight) >= self.served_engine.load().slots:
            # The pending request may be for slots that only now are free: it is answered before these rows are
            # reported.
            self.client.tell(Ended(self._ended_by_lease()))
        for (_, unfinished), keys in alike.items():
            WORK.advanced()
            task = asyncio.create_task(self._report(keys, unfinished))
            task.add_done_callback(lambda _: self.news.set())
            self.reporting[task] = keys

    async def _report(self, keys: Sequence[Key], unfinished: bool) -> None:
        positions_of: defaultdict[int, list[int]] = defaultdict(list)
        for lease, position in keys:
            positions_of[lease].append(position)
        rows = Rows.cat([self.leases[lease].share(positions) for lease, positions in positions_of.items()])
        ended = [self.flight[lease, position] for lease, positions in positions_of.items() for position in positions]
        work = self.leases[keys[0][0]]
        await asyncio.to_thread(self._write, work, rows, list(positions_of.items()), ended, unfinished)
        self._forget(keys)

    def _write(
        self, work: WorkItem, rows: Rows, done: list[tuple[int, list[int]]], ended: Sequence[Any], unfinished: bool
    ) -> None:
        consumer = self.context.consumers[work.consumer]
        stage, sums, usage, trace = consumer.stages[0], Sums(), self.generation.usage, self.context.trace
        if "environment" in stage.params:
            drawn = Drawn.played(ended)
            columns = dict(self.generation.trajectory_columns(stage, ended, self.limits, sums))
        else:
            if isinstance(ended[0], tuple):
                drawn, ended = Drawn.cat([new for _, new in ended]), [response for response, _ in ended]
            else:
                drawn = Drawn.after(rows["prompt"].lengths.tolist(), ended)
            generated = response_columns(rows, ended, columns_of(stage))
            columns = dict(self.generation.named(stage.params.get("into"), generated))
        # A suspended row counts when it has ended.
        tokens = 0 if unfinished else tokens_of(of_namespace(Rows(columns), stage.params.get("into")))
        report = trace.count(self.spans[stage.name][0], stage.name, len(rows), tokens)
        usage.decoded(stage, drawn, self.engine.slots, report["seconds"], sums, self.peak_rows)
        usage.speculated(stage, self.served_engine.load().speculated, sums)
        usage.encoded(stage.name, images_seen(self.engine), 0 if unfinished else len(rows), sums)
        usage.note_memory(stage.name, sums)
        reports = [{**report, "sums": sums.pairs()}]
        complete = rows.with_columns(columns)
        for due in consumer.due(work.answer.iteration) if not unfinished else ():
            if due is not stage:
                with trace.busy(due.name, work.answer.iteration, complete.uids()) as span:
                    computed = self.context.executor.run(due, complete, span.sums)
                complete, columns = complete.with_columns(computed), {**columns, **computed}
                reports.append(span.report())
        part = write_columns(self.context.data, columns)
        self.client.done(consumer.name, done, [(part, done)], reports, unfinished=unfinished, keeps=True)

    async def _end(self, keys: Collection[Key]) -> None:
        """End rows that this worker has lost: selection dropped them, or another worker generates them."""
        if not keys:
            return
        lost_keys = set(keys)
        for key in lost_keys:
            self.leases[key[0]].ended += self.flight[key] is None
        uids = [uid for uid, key in self.keys.items() if key in lost_keys]
        for uid in uids:
            del self.keys[uid]
        tasks = [self.episodes[key] for key in lost_keys if key in self.episodes]
        for task in tasks:
            task.cancel()
        # Not as a task: until that began, the engine could end one of the rows.
        await self.resuming_engine.withdraw(uids)
        await asyncio.gather(*tasks, return_exceptions=True)
        self._forget(lost_keys)

    def _forget(self, keys: Collection[Key]) -> None:
        for key in keys:
            self.flight.pop(key, None)
        for number, rows in Counter(number for number, _ in keys).items():
            lease = self.leases[number]
            lease.left -= rows
            if not lease.left:
                del self.leases[number]
                self.earlier.pop(number, None)
                self.client.held.discard(number)
        if self.flight and len(self.spans) == 1:
            return
        left = {self.context.consumers[lease.consumer].stages[0].name for lease in self.leases.values()}
        for stage in self.spans.keys() - left:
            span, piece = self.spans.pop(stage)
            self.context.trace.end(span)
            WORK.end(piece)
        self.peak_rows = self.peak_rows if self.flight else 0

    # Weights

    def _sources(self, weights: Sequence[Weights]) -> dict[str, tuple[WeightFile | OfferedWeights, int]]:
        """Return the sources of the changed weights of an order for engines of this process, by role, and their
        bytes.
        """
        engines = self.generation.engines
        return {role: (source_of(location), location.bytes) for role, _, location in weights if role in engines}

    async def _receive(self, work: Receive) -> None:
        """Start to receive a version into host memory while the engine generates; a local file needs no transfer."""
        await self._forget_ahead()
        rollout, version = self.context.executor.config.rollout, work.version

        def receive(source: OfferedWeights) -> WeightFile | None:
            with self.context.trace.busy(RECEIVE, version, version=version), suppress(RuntimeError):
                return stored_weights(source.tensors())
            # A sender was lost: the engine requests the weights again when it loads.
            return None

        for role, (source, _) in self._sources(work.weights).items():
            # Servers, and engines that span nodes, cannot read this machine's memory: they receive when they load.
            if isinstance(source, OfferedWeights) and rollout.engine != "http" and (rollout.nodes or 1) == 1:
                self.ahead[role] = source, asyncio.ensure_future(asyncio.to_thread(receive, source))

    async def _forget_ahead(self) -> None:
        for role in list(self.ahead):
            await self._received(role, None)

    async def _received(self, role: str, announced: WeightFile | OfferedWeights | None) -> WeightFile | None:
        """Return the file of a role's prefetched weights if they are those `announced`; otherwise close it."""
        if role not in self.ahead:
            return None
        offered, arriving = self.ahead.pop(role)
        file = await arriving
        # A repeated iteration gives a version other values, and its offer another number.
        if file is not None and isinstance(announced, OfferedWeights) and offered.is_same(announced):
            announced.received += offered.received
            return file
        if file is not None:
            file.close()
        return None

    async def _load(self, work: LoadWeights) -> None:
        """Load a weight version. Unless `keeps_rows`, running rows are dropped first."""
        if not work.keeps_rows:
            await self._end([key for key, result in self.flight.items() if result is None])
        version, sources, updates = work.version, self._sources(work.weights), list[tuple[str, float]]()
        files = {role: await self._received(role, source) for role, (source, _) in sources.items()}
        await self._forget_ahead()

        async def change() -> None:
            for role, engine in self.by_role.items():
                start, source = time.perf_counter(), sources[role][0] if role in sources else None
                taken: WeightSource | None = files.get(role) or source
                if taken is not None and role in self.generation.deployment.shared_base:
                    taken = PolicyWeights(role, taken)
                await engine.update_weights(version, taken)
                if source is not None:
                    updates.append((role, time.perf_counter() - start))

        await self.resuming_engine.preempt()
        with self.context.trace.busy(LOAD, version, version=version):
            await self.resuming_engine.while_preempted(change)
        self.version = version
        read = sent = 0
        for role, (source, size) in sources.items():
            if (before := self.loaded.pop(role, None)) is not None:
                before.close()
            if (file := files[role]) is not None:
                self.loaded[role] = file
            arrived = source.received if isinstance(source, OfferedWeights) else 0
            sent += arrived
            read += size if isinstance(source, WeightFile) else arrived
        self.client.ask(Loaded(version, read, sent, updates))
