"""The base of engines that draw one token per row in every step, and `EngineReplica`, which adapts it to the engine
protocol.

SteppingEngine   add ──▶ waiting ──▶ step, step, step ... ──▶ Response
EngineReplica    submit ──▶ add ──▶ step, step, step ... ──▶ the future of each row that ended
                                     └── other tasks of the event loop run between two steps

An engine with a `group` is sharded over ranks: each holds a slice of one model, and together they decode the rows of
all ranks.

rank 0  its requests ╮              ╭─ step, step, step ... ─▶ its responses rank 1  its requests ┴─ all-gather ─┴─
step, step, step ... ─▶ its responses  each layer of a step runs collectives  Sampling is deterministic: ranks with the
same requests in the same order draw the same tokens, so no rank needs to lead.
"""

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from braidrl.cluster.event_loop import Runner
from braidrl.cluster.world import Ranks
from braidrl.config.layout import ParallelLayout
from braidrl.data.rows import Uid
from braidrl.engines.engine import EngineError, EngineMemory, Load, ServedEngine, Speculated, T, check_idle
from braidrl.engines.requests import Changes, EngineRow, Request, Response, row_of
from braidrl.errors import UserError
from braidrl.observe.stalls import WORK
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.publisher import WeightSource
from braidrl.weights.shards import Parts, WeightPart

TURNS = 10
"""Turns of the event loop between two steps, so that a caller notified of a row's end submits the next row in time."""
CHANGES_EVERY = 8
"""Steps between two looks for changes of ranks that decode together."""
IDLE_S = 0.005
"""Seconds between two looks for changes of an engine without rows."""
RowEnded = Callable[[Uid, Response | BaseException], None]
"""Called in the event loop at a row's end, with its response or error."""
OWN = "this process's engine"
"""The name of an engine in errors."""


class SteppingEngine(ABC):
    """An engine of this process, used by whole batches: `generate`; by coroutines: `run`; by steps: `add`, `step`."""

    slots: int = 0
    """Rows that can be decoded together."""
    group: dist.ProcessGroup | None = None
    """All ranks that decode together, which make the same calls at the same time; None for a single rank."""
    speculated: Speculated | None = None
    """Counts of an engine that guesses next tokens."""
    phases: GenerationWeights | None = None
    """Set if generation and training weights take turns on the device."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, end_ids: tuple[int, ...], max_sequence_tokens: int, seed: int
    ) -> None:
        """Make an engine without rows; `end_ids` end a response, and `seed` is the run's, which fixes all draws."""
        self.seed, self.version = seed, 0
        self.tokens_generated = 0
        self._tokenizer, self._end_ids = tokenizer, end_ids
        self.max_sequence_tokens = max_sequence_tokens
        self.vocabulary: int | None = None
        """Size of the model's embedding, if smaller than the tokenizer's vocabulary."""
        self._under_way: set[Uid] = set()
        self._waiting: deque[EngineRow] = deque()

    @property
    def is_collective(self) -> bool:
        """Return True if ranks decode together: ranks without rows call `generate` and `run` too."""
        return self.group is not None

    @property
    @abstractmethod
    def in_flight(self) -> int:
        """Return how many rows are being decoded."""

    @property
    def waiting(self) -> int:
        """Return the number of rows without a slot."""
        return len(self._waiting)

    def has(self, uid: Uid | None = None) -> bool:
        """Return True if a row, or without a name any row, has been added and has not ended."""
        return bool(self._under_way) if uid is None else uid in self._under_way

    def waiting_rows(self) -> list[Uid]:
        """Return the rows without a slot, in their order."""
        return [row.request.uid for row in self._waiting]

    @property
    def memory(self) -> EngineMemory | None:
        """Return the memory that can be freed while other roles need the device; None if unknown here."""
        return None

    def parts(self) -> Mapping[str, WeightPart]:
        """Return the parts of the weights that a trainer in this process fills; by default none."""
        return {}

    def take_turns(self, trained: Parts, training: ParallelLayout, ranks: Ranks, layout: GenerationLayout) -> None:
        """Let generation and training weights take turns on the device; all ranks call this at the same time."""
        self.phases = GenerationWeights(trained, training, ranks, self.parts, layout)

    @abstractmethod
    def step(self) -> list[Response]:
        """Draw one token for every row that has a slot, and return the responses that ended."""

    @abstractmethod
    def abort(self, uid: Uid) -> Response:
        """End a row immediately with its tokens so far. Raises KeyError if it is not in flight."""

    @abstractmethod
    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Generate with the weights of `source` from the next row on; no row is in flight.

        None means that the engine's tensors already have this version. Raises ValueError if the source lacks a tensor;
        the weights are then unchanged.
        """

    @abstractmethod
    def clear(self, release: bool = True) -> None:
        """Drop every row and free the keys and values; without `release` an engine may keep memory for reuse."""

    def sleep(self) -> None:
        """Free the memory that only generation needs; weights may still be published.

        Raises RuntimeError while rows are in flight.
        """
        check_idle(OWN, self._under_way, "sleeps")
        self.clear()

    def wake(self) -> None:  # noqa: B027
        """Prepare to generate again; memory freed by `sleep` is allocated when needed."""

    def close(self) -> None:  # noqa: B027
        """Stop everything that the engine started; by default nothing."""

    def recover(self) -> int:
        """Make a failed engine ready, and return the version of its weights. Raises EngineError if that fails."""
        return self.version

    def generate(
        self,
        requests: Iterable[Request],
        on_finished: Callable[[Response], None] | None = None,
        changes: Callable[[], Changes] | None = None,
    ) -> list[Response]:
        """Return all responses, in the order of `requests`; with a `group` each rank brings its requests.

        `on_finished` is called with each response that ends without being stopped, including rows that were added.
        `changes` is called after each step or every few milliseconds; the rows that it ends may already have ended.
        Raises UserError for a prompt that leaves no room for a response, and RuntimeError while rows are in flight.
        """
        if self._under_way:
            raise RuntimeError(f"{len(self._under_way)} rows are under way; step until they end, or clear them")
        local, ranks = list(requests), Ranks(self.group)
        uids = [request.uid for request in local]
        of_all = ranks.all_gather("requests", (changes is not None, local), tuple[bool, list[Request]])
        # Ranks that decode together exchange changes only if some rank has any, and not after each step.
        more = may_change = any(asks for asks, _ in of_all)
        every, steps = 1 if ranks.size == 1 else CHANGES_EVERY, 0
        reported = set(uids) if on_finished else set()
        finished: dict[Uid, Response] = {}
        try:
            for request in (request for _, requests_of_rank in of_all for request in requests_of_rank):
                self.add(request)
            with self._decoding():
                while self._under_way or more:
                    if self._under_way:
                        for row in self.step():
                            finished[row.uid] = row
                            if on_finished and row.uid in reported:
                                on_finished(row)
                        steps += 1
                        if not may_change or (self._under_way and steps % every):
                            continue
                    else:
                        with WORK.waiting():
                            time.sleep(IDLE_S)
                    local_changes = changes() if changes else Changes()
                    of_ranks = ranks.all_gather("changes", local_changes, Changes)
                    for uid in (uid for part in of_ranks for uid in part.ended):
                        if uid in self._under_way:
                            finished[uid] = self.abort(uid)
                    for request in (request for part in of_ranks for request in part.added):
                        self.add(request)
                    reported.update(request.uid for request in local_changes.added)
                    more = any(part.more for part in of_ranks)
        finally:
            self.clear(release=False)
        return [finished[uid] for uid in uids]

    def run(self, work: Callable[[ServedEngine], Coroutine[Any, Any, T]]) -> T:
        """Run `work` with exclusive use of the engine, and return its result."""
        replica = EngineReplica(self)
        try:
            with Runner() as runner:
                return runner.run(in_step([replica], work(replica)) if self.is_collective else work(replica))
        finally:
            self.clear()

    def add(self, request: Request) -> None:
        """Queue a request. Raises UserError for a prompt that leaves no room for a response."""
        if request.uid in self._under_way:
            raise ValueError(f"row {request.uid} is under way already")
        if self.vocabulary is not None and len(request.prompt) and int(request.prompt.max()) >= self.vocabulary:
            raise UserError(
                f"row {request.uid}: token {int(request.prompt.max())} of its prompt is beyond the model's embedding "
                f"of {self.vocabulary} tokens; resize the embedding, or use the model's own tokenizer"
            )
        row = row_of(request, self._tokenizer, self._end_ids, self.max_sequence_tokens)
        row.version = self.version
        self._accept(row)
        self._under_way.add(request.uid)

    def _accept(self, row: EngineRow) -> None:
        """Queue a checked row."""
        self._waiting.append(row)

    def _done(self, finished: list[Response]) -> list[Response]:
        self._under_way.difference_update(row.uid for row in finished)
        return finished

    def _decoding(self) -> AbstractContextManager[None]:
        """Return a context for all steps of a batch."""
        return nullcontext()


def answering(answer: asyncio.Future[Response]) -> RowEnded:
    """Return a callback that sets a row's result on a future, unless its caller was cancelled."""

    def ended(uid: Uid, result: Response | BaseException) -> None:
        if answer.done():
            return
        if isinstance(result, Response):
            answer.set_result(result)
        else:
            answer.set_exception(result)

    return ended


class EngineReplica:
    """A `SteppingEngine` behind the engine protocol, in one event loop.

    Steps run in the loop, so a breakpoint stops there.
    """

    def __init__(self, engine: SteppingEngine) -> None:
        self.engine, self.max_sequence_tokens = engine, engine.max_sequence_tokens
        self._ended: dict[Uid, RowEnded] = {}
        """By running row the call that its end makes."""
        self._awake = asyncio.Event()
        self._awake.set()
        self._driver: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._new_requests: list[tuple[Request, RowEnded]] = []
        self._leaving: list[Uid] = []
        """Rows that begin and end with the next step of ranks that decode together."""

    async def start(self) -> None:
        """Do nothing: the engine is ready."""

    async def close(self) -> None:
        self.engine.close()

    async def submit(self, request: Request) -> Response:
        if not self._awake.is_set():
            await self._awake.wait()
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self.start_rows([request], answering(answer))
        try:
            return await answer
        except asyncio.CancelledError:
            self.withdraw(request.uid)
            raise

    def start_rows(self, requests: Iterable[Request], ended: RowEnded) -> None:
        """Start many rows, without a task and a future for each. The engine must be awake."""
        if self.engine.is_collective:
            # `step_together` adds them on all ranks.
            self._new_requests += ((request, ended) for request in requests)
            return
        for request in requests:
            try:
                if self._failure is not None:
                    raise self._failure
                self.engine.add(request)
            except Exception as error:
                ended(request.uid, error)
            else:
                self._ended[request.uid] = ended
        if self._ended and (self._driver is None or self._driver.done()):
            self._driver = asyncio.create_task(self._drive())

    def withdraw(self, uid: Uid) -> None:
        """Remove a row, if it has not ended, without an answer."""
        self._new_requests = [(request, ended) for request, ended in self._new_requests if request.uid != uid]
        if self._ended.pop(uid, None) is not None:
            if self.engine.is_collective:
                self._leaving.append(uid)
            else:
                self.engine.abort(uid)

    async def abort(self, uid: Uid) -> None:
        if self.engine.is_collective:
            self._leaving.append(uid)
            return
        if uid not in self._ended:
            raise KeyError(f"row {uid} is not under way")
        self._answer(self.engine.abort(uid))

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        check_idle(OWN, self._ended, "gets weights")
        self.engine.publish(version, source)

    async def sleep(self) -> None:
        check_idle(OWN, self._ended, "sleeps")
        self._awake.clear()
        self.engine.sleep()

    async def wake(self) -> None:
        self.engine.wake()
        self._awake.set()

    async def recover(self) -> int:
        version = self.engine.recover()
        self._failure = None
        return version

    def load(self) -> Load:
        engine = self.engine
        return Load(engine.slots, engine.in_flight, engine.waiting, engine.speculated)

    def step_together(self, is_done: bool) -> tuple[bool, bool]:
        """Add and remove the rows of all ranks that decode together, and make a step if the engine has rows.

        All these ranks call this repeatedly. Returns whether all ranks are done, and whether a step was made.
        """
        engine, waiting, leaving = self.engine, self._new_requests, self._leaving
        self._new_requests, self._leaving = [], []
        # Callbacks for each token stay on this rank.
        sent = [replace(request, on_token=None) for request, _ in waiting]
        ranks = Ranks(engine.group)
        of_ranks = ranks.all_gather("rows", (is_done, sent, leaving), tuple[bool, list[Request], list[Uid]])
        for rank, (_, requests, _) in enumerate(of_ranks):
            for number, request in enumerate(requests):
                local = waiting[number] if rank == ranks.rank else None
                try:
                    engine.add(request if local is None else local[0])
                except UserError as error:
                    # All ranks refuse the row in the same way.
                    if local is not None:
                        local[1](request.uid, error)
                else:
                    if local is not None:
                        self._ended[request.uid] = local[1]
        for uid in (uid for _, _, uids in of_ranks for uid in uids if engine.has(uid)):
            self._answer_own(engine.abort(uid))
        steps = engine.has()
        for finished in engine.step() if steps else ():
            self._answer_own(finished)
        WORK.advanced()
        return all(done for done, *_ in of_ranks), steps

    def _answer_own(self, finished: Response) -> None:
        if finished.uid in self._ended:
            self._answer(finished)

    async def _drive(self) -> None:
        while self._ended:
            # All ready tasks submit first, so that their rows begin in the same step.
            for _ in range(TURNS):
                await asyncio.sleep(0)
            try:
                for finished in self.engine.step():
                    self._answer(finished)
                WORK.advanced()
            except Exception as error:
                failure: Exception = error
                if not isinstance(error, UserError | EngineError):
                    failure = EngineError(f"{OWN}: {type(error).__name__}: {error}")
                    failure.__cause__ = error
                if isinstance(failure, EngineError):
                    self._failure = failure
                ended, self._ended = self._ended, {}
                self.engine.clear()
                for uid, call in ended.items():
                    call(uid, failure)

    def _answer(self, finished: Response) -> None:
        self._ended.pop(finished.uid)(finished.uid, finished)


async def in_step(replicas: Sequence[EngineReplica], work: Coroutine[Any, Any, T]) -> T:
    """Run `work` while these engines step together with those of other ranks; return its result.

    All ranks of an engine call this with the same engines in the same order; a rank whose work is done continues until
    all are done.
    """
    task = asyncio.ensure_future(work)
    try:
        while True:
            # All ready tasks submit first, so that their rows begin in the same step.
            for _ in range(TURNS):
                await asyncio.sleep(0)
            is_done = task.done()
            results = [replica.step_together(is_done) for replica in replicas]
            if all(done for done, _ in results):
                return await task
            if not any(stepped for _, stepped in results):
                await asyncio.sleep(IDLE_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
