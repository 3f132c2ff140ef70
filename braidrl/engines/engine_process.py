"""An engine in a process of its own: the run's side of the socket, and the process's side. `engine_messages` has their messages.

EngineProcess ──EngineSpec, then Submit, AbortRow, UpdateWeights, EngineCall──▶ Host ──▶ engine
              ◀──CallDone, CallFailed, TokenDrawn, EngineBeat, each with the engine's load──

If the process ends, or sends nothing for too long, pending calls raise EngineError. It waits while it has no work, and ends when the run
is gone.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from braidrl.cluster.local import Forked, LocalProcess, Spawned, from_server
from braidrl.cluster.process import ProcessSpec
from braidrl.cluster.watchdog import named
from braidrl.data.messages import unpack_message
from braidrl.data.rows import Uid
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.embedded.followers import LeadingEngine, fork_followers
from braidrl.engines.engine import ENGINES, NOTHING_YET, Engine, EngineError, EngineSpec, Load, ServedEngine
from braidrl.engines.engine_messages import (
    ERRORS,
    READY,
    AbortRow,
    CallDone,
    CallFailed,
    EngineBeat,
    EngineCall,
    EngineReply,
    Order,
    Submit,
    TokenDrawn,
    UpdateWeights,
    framed,
    receive,
)
from braidrl.engines.requests import Request, Response
from braidrl.engines.spanning import LOOK_S, SpanningEngine
from braidrl.engines.stepping import EngineReplica, SteppingEngine
from braidrl.errors import UserError
from braidrl.native.malloc import keep_freed_memory
from braidrl.observe.stalls import WORK
from braidrl.training.loading import load_decoder, load_tokenizer
from braidrl.weights.collective import Incoming, OfferedWeights, TransferNotice
from braidrl.weights.file import WeightFile, stored_in_memory
from braidrl.weights.publisher import WeightSource

BEAT_S = 0.02
"""Seconds between heartbeats of a process with rows."""
WAITED_FOR = {
    EngineSpec: "loading the model", Submit: "submit", AbortRow: "abort", UpdateWeights: "update_weights",
}  # fmt: skip
"""What a message's answer brings, for errors."""


class EngineProcess:
    """An engine process, in the event loop in which it is started. Calls fail after `limit_s` seconds without a message from it."""

    def __init__(
        self, spec: EngineSpec, name: str = "engine", python: Path | None = None, limit_s: float = 600.0,
        spanning: SpanningEngine | None = None,
    ) -> None:  # fmt: skip
        """Describe the process; `python` is an interpreter with the engine's packages, by default this process's.

        With `spanning` the process is this node's part of an engine.
        """
        self.spec, self.name, self.limit_s, self.spanning = spec, name, limit_s, spanning
        self.max_sequence_tokens = spec.max_sequence_tokens
        self.pid: int | None = None
        """The id of the process that was started last."""
        self._python = str(python or sys.executable)
        self._process: LocalProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        """The tasks that read messages and watch other nodes."""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._rows: dict[Uid, int] = {}
        self._followed: dict[int, Callable[[int, int], None]] = {}
        """The callback for a row's tokens, by the id of its message."""
        self._held: OfferedWeights | None = None
        """The weights that the process holds, if it received them over a process group."""
        self._recovering = asyncio.Lock()
        self._numbers = itertools.count()
        self._load = Load(spec.slots, 0, 0)
        self._heard = 0.0
        self._end = "has not been started"

    async def start(self) -> None:
        """Start the process, and wait until the model is loaded. Raises UserError if it cannot be used, EngineError as `submit`."""
        if shutil.which(self._python) is None:
            raise UserError(f"rollout.python: {self._python} is no interpreter that can be run")
        leads = self.spanning is not None and self.spanning.node == 0
        if self.spanning is not None and leads:
            self.spec = replace(self.spec, part=self.spanning.begin())
        spec, self._held = self.spec, None
        # vLLM and users' engines may need an interpreter of their own, and a process must know its device before importing torch.
        copied = spec.kind == "embedded" and spec.device == "cpu" and self._python == sys.executable
        self._process = (from_server if copied else Spawned)(
            ProcessSpec(
                self.name, "braidrl.engines.engine_process:main", python=self._python, threads=spec.threads,
                devices=spec.devices, environment=spec.environment,
            )
        )  # fmt: skip
        self.pid = self._process.pid
        line = socket.socket(fileno=os.dup(self._process.connection.fileno()))
        self._process.connection.close()
        reader, self._writer = await asyncio.open_connection(sock=line)
        self._tasks = [asyncio.create_task(self._listen(reader, self._writer))]
        if self.spanning is not None and leads:
            self._tasks.append(asyncio.create_task(self._watch_nodes(self.spanning, self._writer)))
        await self._ask(spec)

    async def submit(self, request: Request) -> Response:
        number = next(self._numbers)
        self._rows[request.uid] = number
        if request.on_token is not None:
            self._followed[number] = request.on_token
        try:
            with WORK.waiting():
                order = Submit(number, replace(request, on_token=None), request.on_token is not None)
                response: Response = await self._ask(order)
                return response
        except asyncio.CancelledError:
            if self._writer is not None:
                self._writer.write(framed(AbortRow(next(self._numbers), request.uid)))
            raise
        finally:
            self._rows.pop(request.uid, None)
            self._followed.pop(number, None)

    async def abort(self, uid: Uid) -> None:
        if uid not in self._rows:
            raise KeyError(f"row {uid} is not under way")
        await self._ask(AbortRow(next(self._numbers), uid))

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        held, self._held = self._held, None
        order = UpdateWeights(next(self._numbers), version)
        if source is None:
            await self._ask(order)
            self._held = held
        elif isinstance(source, OfferedWeights):
            with source.asked(self.spec.tensor * self.spec.pipeline, held) as notice:
                order.notice = notice
                await self._ask(order)
            self._held = source
        else:
            with contextlib.ExitStack() as stored:
                if not isinstance(source, WeightFile):
                    source = stored.enter_context(contextlib.closing(stored_in_memory(source.tensors())))
                order.path = str(source.path)
                await self._ask(order)

    async def sleep(self) -> None:
        await self._ask(EngineCall(next(self._numbers), "sleep"))

    async def wake(self) -> None:
        await self._ask(EngineCall(next(self._numbers), "wake"))

    async def recover(self) -> int:
        """Replace a process that ended or cannot continue; the new one has the weights of the model's directory."""
        # Several callers may recover it at once.
        async with self._recovering:
            if self._writer is not None:
                try:
                    return int(await self._ask(EngineCall(next(self._numbers), "recover")))
                except EngineError:
                    self._die("could not recover")
            try:
                await self.start()
            except UserError as error:
                raise EngineError(f"{self.name}: {error}") from error
            return NOTHING_YET

    def load(self) -> Load:
        running = min(self._load.running, len(self._rows))
        return Load(self._load.slots, running, len(self._rows) - running)

    async def close(self) -> None:
        """End the process and wait until it is gone."""
        if self.spanning is not None and self.spanning.node == 0:
            self.spanning.end()
        self._die("was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def follow(self) -> None:
        """Add this node's part to each start of an engine that another node starts, until its end. Raises UserError as `start`."""
        spanning = self.spanning
        assert spanning is not None and spanning.node > 0
        while (part := await spanning.next_start()) is not None:
            self.spec = replace(self.spec, part=part)
            starting = asyncio.create_task(self.start())
            while not spanning.is_over() and not (starting.done() and self._writer is None):
                await asyncio.sleep(LOOK_S)
            self._die("is not needed any more")
            # The first node is told, and starts the engine again.
            with contextlib.suppress(EngineError):
                await starting
            spanning.lose()

    async def _watch_nodes(self, spanning: SpanningEngine, writer: asyncio.StreamWriter) -> None:
        """End the engine when another node has lost its part; a rank that waits for it might not notice."""
        while self._writer is writer:
            if (node := spanning.lost()) is not None:
                self._die(f"lost its part on node {node}")
            await asyncio.sleep(LOOK_S)

    async def _ask(self, order: Order | EngineSpec) -> Any:
        """Send a message and return its result. Raises EngineError if the process ends, or after `limit_s` seconds without a message."""
        if self._writer is None:
            raise EngineError(f"{self.name} {self._end}")
        loop, number = asyncio.get_running_loop(), READY if isinstance(order, EngineSpec) else order.id
        answer = self._answers[number] = loop.create_future()
        self._writer.write(framed(order))
        begun = loop.time()
        try:
            while not answer.done():
                left = max(begun, self._heard) + self.limit_s - loop.time()
                if left <= 0:
                    what = order.method if isinstance(order, EngineCall) else WAITED_FOR[type(order)]
                    self._die(f"said nothing for {self.limit_s:g} s, and {what} was waited for")
                else:
                    await asyncio.wait([answer], timeout=left)
            return answer.result()
        finally:
            answer.cancel()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Give each message to the call or row that it is for, until the process ends."""
        while (message := await receive(reader, EngineReply)) is not None:
            self._heard = asyncio.get_running_loop().time()
            if message.load is not None:
                self._load = Load(*message.load)
            if isinstance(message, TokenDrawn) and message.id in self._followed:
                self._followed[message.id](message.number, message.token)
            if not isinstance(message, CallDone | CallFailed):
                continue
            answer = self._answers.pop(message.id, None)
            if answer is None or answer.done():
                continue
            if isinstance(message, CallDone):
                answer.set_result(message.result)
            elif message.error == "EngineError":
                answer.set_exception(EngineError(f"{self.name}: {message.text}"))
            else:
                answer.set_exception(ERRORS[message.error](message.text))
        if self._writer is writer:
            self._die("ended")

    def _die(self, why: str) -> None:
        """Kill the process, and fail all pending calls."""
        if self._writer is None or self._process is None:
            return
        self._writer.close()
        self._writer = None
        self._process.kill()
        self._end = f"(process {self._process.pid}) {why}; its exit status is {self._process.status}"
        answers, self._answers = self._answers, {}
        for answer in answers.values():
            if not answer.done():
                answer.set_exception(EngineError(f"{self.name} {self._end}"))


def embedded_engine(spec: EngineSpec) -> SteppingEngine:
    """Load the model into an embedded engine. Raises UserError for one that cannot be used."""
    tokenizer = load_tokenizer(spec.model)
    model = load_decoder(Path(spec.model), getattr(torch, spec.dtype), spec.device).requires_grad_(False).eval()
    return EmbeddedEngine(model, tokenizer, spec.slots, spec.max_sequence_tokens, spec.seed, **spec.options)


def vllm_engine(spec: EngineSpec) -> SteppingEngine:
    """Load the model into vLLM. Raises UserError if vLLM is not installed or does not support the model."""
    # Imported here: vLLM is optional.
    try:
        from braidrl.engines.vllm.vllm_engine import VllmEngine
    except ImportError as error:
        raise UserError(
            f"rollout.engine=vllm: {sys.executable} cannot import it ({error}); see docs/engines.md"
        ) from error
    return VllmEngine(
        Path(spec.model), load_tokenizer(spec.model), spec.slots, spec.max_sequence_tokens, spec.seed, spec.dtype,
        vllm_options(spec), spec.reproducible, spec.adapts_rows,
    )  # fmt: skip


def vllm_options(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments of vLLM's engine that the configuration sets: the user's, and the engine's shape."""
    own = {**spec.options, "tensor_parallel_size": spec.tensor, "pipeline_parallel_size": spec.pipeline}
    if (part := spec.part) is not None:
        own |= {
            "distributed_executor_backend": "mp", "nnodes": part.nodes, "node_rank": part.node, "master_addr": part.host,
            "master_port": part.port,
        }  # fmt: skip
    return own


@dataclass
class Host:
    """The executor of a run's orders on the engine, which sends back the results."""

    engine: Engine
    writer: asyncio.StreamWriter
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """The orders that are being executed."""

    def say(self, reply: EngineReply) -> None:
        """Send a reply with the engine's load."""
        reply.load = astuple(self.engine.load())
        self.writer.write(framed(reply))

    async def beat(self) -> None:
        """Send heartbeats while the process sends no other messages."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self.tasks:
                self.say(EngineBeat())

    async def act(self, order: Order) -> None:
        """Execute an order and answer it."""
        result: Response | int | None = None
        try:
            match order:
                case Submit():
                    request = order.request
                    if order.followed:
                        drew = lambda number, token: self.say(TokenDrawn(order.id, number, token))  # noqa: E731
                        request = replace(request, on_token=drew)
                    result = await self.engine.submit(request)
                case AbortRow():
                    await self.engine.abort(order.uid)
                case UpdateWeights(path=str() as path):
                    weights = WeightFile(path)
                    weights.verify()
                    await self.engine.update_weights(order.version, weights)
                case UpdateWeights(notice=TransferNotice() as notice):
                    device = torch.device("cuda", torch.cuda.current_device()) if notice.cuda else torch.device("cpu")
                    await self.engine.update_weights(order.version, Incoming(notice, 0, device))
                case UpdateWeights():
                    await self.engine.update_weights(order.version)
                case EngineCall():
                    result = await getattr(self.engine, order.method)()
        except Exception as error:
            self.say(CallFailed.of(order.id, error))
        else:
            self.say(CallDone(order.id, result))


async def serve(connection: socket.socket, spec: EngineSpec, followers: Sequence[Forked]) -> None:
    """Make the engine, and execute the run's messages until the run is gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    keep_freed_memory()
    try:
        if spec.part is not None and spec.part.node > 0:
            # Only ranks, which the first node's scheduler calls.
            from braidrl.engines.vllm.vllm_engine import ranks_of_node

            with ranks_of_node(spec, vllm_options(spec)):
                writer.write(framed(CallDone(READY)))
                await reader.read()
            return
        made: SteppingEngine | ServedEngine = (
            LeadingEngine(spec, followers) if followers else ENGINES.find(spec.kind)(spec)
        )
        engine = EngineReplica(made) if isinstance(made, SteppingEngine) else made
        await engine.start()
    except (UserError, EngineError) as error:
        writer.write(framed(CallFailed.of(READY, error)))
        await writer.drain()
        return
    host = Host(engine, writer)
    host.say(CallDone(READY))
    beats = asyncio.create_task(host.beat())
    while (order := await receive(reader, Order)) is not None:
        # Orders start in the order of arrival, and are answered when done.
        task = asyncio.create_task(host.act(order))
        host.tasks.add(task)
        task.add_done_callback(host.tasks.discard)
    beats.cancel()
    await engine.close()


def main(handle: int) -> None:
    """Serve the engine described by the first message. Its other processes are forked before this one loads anything."""
    named("engine")
    try:
        with Connection(os.dup(handle)) as first:
            spec = unpack_message(first.recv_bytes(), EngineSpec)
    except EOFError:
        return
    connection = socket.socket(fileno=handle)
    followers: Sequence[Forked] = ()
    # vLLM starts its ranks itself.
    if spec.kind == "embedded" and spec.tensor * spec.pipeline > 1:
        # The processes wait for one another less long than the run waits for this one, which names the missing one.
        spec = replace(spec, limit_s=spec.limit_s / 2)
        followers = fork_followers(spec, handle)
    try:
        asyncio.run(serve(connection, spec, followers))
    finally:
        for follower in followers:
            follower.kill()
