"""An engine in a process of its own: the messages, the run's side of the socket, and the process's side.

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
import struct
import sys
from collections.abc import Callable
from dataclasses import astuple, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from braidrl.cluster.local import LocalProcess, Spawned, from_server
from braidrl.cluster.process import ProcessSpec
from braidrl.cluster.watchdog import named
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import Uid
from braidrl.engines.divided.followers import ForkedFollowers, lead
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.engine import ENGINES, NOTHING_YET, Engine, EngineError, EngineSpec, Load, ServedEngine
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
READY = -1
"""The id of the answer to the first message, which holds the engine's settings."""
LENGTH = struct.Struct("!i")
"""The message length before each message, in the format of multiprocessing's pipes."""
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (UserError, EngineError, KeyError, ValueError, RuntimeError)
}
"""Exceptions of the engine protocol; any other exception is a failure of the engine."""


class Submit(msgspec.Struct, tag=True):
    """Generate a response; `followed` asks for each token as soon as it is known, in place of the request's `on_token`."""

    id: int
    request: Request
    followed: bool


class AbortRow(msgspec.Struct, tag=True):
    """End a row with the tokens that it has."""

    id: int
    uid: Uid


class UpdateWeights(msgspec.Struct, tag=True):
    """Load a version of the weights from a file, or over a process group with the trainer; with neither the weights stay."""

    id: int
    version: int
    path: str | None = None
    notice: TransferNotice | None = None


class EngineCall(msgspec.Struct, tag=True):
    """Call a method that takes no arguments."""

    id: int
    method: Literal["sleep", "wake", "recover"]


Order = Submit | AbortRow | UpdateWeights | EngineCall
"""The run's messages; each is answered by `CallDone` or `CallFailed` with its `id`."""


class Reply(msgspec.Struct, tag=True, kw_only=True):
    """A message from an engine's process. `load` is the engine's (slots, running, waiting); None while there is no engine."""

    load: tuple[int, int, int] | None = None


class CallDone(Reply, tag=True):
    """The result of a call."""

    id: int
    result: Response | int | None = None


class CallFailed(Reply, tag=True):
    """The exception of a call; one outside the engine protocol is sent as an EngineError."""

    id: int
    error: str
    text: str

    @staticmethod
    def of(id: int, error: Exception, load: tuple[int, int, int] | None = None) -> "CallFailed":
        """Encode an exception."""
        name, text = type(error).__name__, str(error.args[0]) if error.args else ""
        if name not in ERRORS:
            name, text = "EngineError", f"{name}: {text}"
        return CallFailed(id=id, error=name, text=text, load=load)

    def exception(self) -> Exception:
        """Return the exception for the caller to raise."""
        return ERRORS[self.error](self.text)


class TokenDrawn(Reply, tag=True):
    """A token of a followed row; `id` is that of its `Submit`."""

    id: int
    number: int
    token: int


class EngineBeat(Reply, tag=True):
    """A heartbeat while rows are generated."""


EngineReply = CallDone | CallFailed | TokenDrawn | EngineBeat


def framed(message: Any) -> bytes:
    """Encode a message with its length before it."""
    body = pack_message(message)
    return LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader, type: Any) -> Any:
    """Receive the next message, of this type; None when the other side is gone."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return unpack_message(await reader.readexactly(length), type)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


NAMES = {Submit: "submit", AbortRow: "abort", UpdateWeights: "update_weights"}
"""The engine method that an order calls."""


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
        self._python = str(python or sys.executable)
        self._process: LocalProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._rows: dict[Uid, int] = {}
        self._followed: dict[int, Callable[[int, int], None]] = {}
        """The callback for a row's tokens, by the id of its message."""
        self._held: OfferedWeights | None = None
        """The weights that the process holds, if it received them over a process group."""
        self._recovering = asyncio.Lock()
        self._watcher: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._load = Load(spec.slots, 0, 0)
        self._heard = 0.0
        self._end = "has not been started"

    @property
    def pid(self) -> int | None:
        """Return the process id, or None without a process."""
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Start the process, and wait until the model is loaded. Raises UserError if it cannot be used, EngineError as `submit`."""
        if shutil.which(self._python) is None:
            raise UserError(f"rollout.python: {self._python} is no interpreter that can be run")
        # vLLM and users' engines may need an interpreter of their own, and a process must know its device before importing torch.
        if self.spanning is not None and self.spanning.node == 0:
            self.spec = replace(self.spec, part=self.spanning.begin())
        copied = self.spec.kind == "embedded" and self.spec.device == "cpu" and self._python == sys.executable
        start = from_server if copied else Spawned
        self._held = None
        spec, entry = self.spec, "braidrl.engines.engine_process:main"
        self._process = start(
            ProcessSpec(
                self.name,
                entry,
                python=self._python,
                threads=spec.threads,
                devices=spec.devices,
                environment=spec.environment,
            )
        )
        line = socket.socket(fileno=os.dup(self._process.connection.fileno()))
        self._process.connection.close()
        reader, self._writer = await asyncio.open_connection(sock=line)
        ready = self._answers[READY] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen(reader, self._writer))
        if self.spanning is not None and self.spanning.node == 0:
            self._watcher = asyncio.create_task(self._watch_nodes(self.spanning, self._writer))
        self._writer.write(framed(self.spec))
        await self._wait(ready, "loading the model")

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
        if source is None:
            await self._ask(UpdateWeights(next(self._numbers), version))
            self._held = held
        elif isinstance(source, WeightFile):
            await self._ask(UpdateWeights(next(self._numbers), version, path=str(source.path)))
        elif isinstance(source, OfferedWeights):
            with source.asked(self.spec.ranks, held) as notice:
                await self._ask(UpdateWeights(next(self._numbers), version, notice=notice))
            self._held = source
        else:
            with contextlib.closing(stored_in_memory(source.tensors())) as file:
                await self._ask(UpdateWeights(next(self._numbers), version, path=str(file.path)))

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
        tasks = [task for task in (self._listener, self._watcher) if task is not None]
        await asyncio.gather(*tasks, return_exceptions=True)

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

    async def _ask(self, order: Order) -> Any:
        """Send an order and return its result."""
        if self._writer is None:
            raise EngineError(f"{self.name} {self._end}")
        answer = self._answers[order.id] = asyncio.get_running_loop().create_future()
        self._writer.write(framed(order))
        try:
            return await self._wait(answer, order.method if isinstance(order, EngineCall) else NAMES[type(order)])
        finally:
            answer.cancel()

    async def _wait(self, answer: asyncio.Future[Any], what: str) -> Any:
        """Wait for the answer. Raises EngineError if the process ends, or after `limit_s` seconds without any message."""
        now = asyncio.get_running_loop().time
        begun = now()
        while not answer.done():
            left = max(begun, self._heard) + self.limit_s - now()
            if left <= 0:
                self._die(f"said nothing for {self.limit_s:g} s, and {what} was waited for")
            else:
                await asyncio.wait([answer], timeout=left)
        return answer.result()

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
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
                continue
            error = message.exception()
            answer.set_exception(EngineError(f"{self.name}: {error}") if isinstance(error, EngineError) else error)
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


class Host:
    """The executor of a run's orders on the engine, which sends back the results."""

    def __init__(self, engine: Engine, writer: asyncio.StreamWriter) -> None:
        self.engine, self.writer = engine, writer
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, order: Order) -> None:
        """Start an order's task. Orders start in the order of arrival, and are answered when done."""
        task = asyncio.create_task(self._act(order))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

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

    async def _act(self, order: Order) -> None:
        try:
            result = await self._result(order)
        except Exception as error:
            self.say(CallFailed.of(order.id, error))
        else:
            self.say(CallDone(order.id, result))

    async def _result(self, order: Order) -> Response | int | None:
        match order:
            case Submit():
                request = order.request
                if order.followed:
                    drew = lambda number, token: self.say(TokenDrawn(order.id, number, token))  # noqa: E731
                    request = replace(request, on_token=drew)
                return await self.engine.submit(request)
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
                result: int | None = await getattr(self.engine, order.method)()
                return result
        return None


async def serve(connection: socket.socket, spec: EngineSpec, followers: ForkedFollowers | None) -> None:
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
        made: SteppingEngine | ServedEngine = lead(spec, followers) if followers else ENGINES.find(spec.kind)(spec)
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
        host.begin(order)
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
    # vLLM starts its ranks itself.
    followers = ForkedFollowers(spec, handle) if spec.kind == "embedded" and spec.ranks > 1 else None
    try:
        asyncio.run(serve(connection, spec, followers))
    finally:
        if followers is not None:
            followers.close()
