"""An engine in a separate process: first the run's side of the socket, `EngineProcess`, then the process's side, from
`main`.

EngineProcess ──EngineCall──▶ main, serve ──▶ engine
              ◀──EngineReply: a result, an error, a token or a heartbeat, each with the engine's load──

Each message has its length before it. If the process ends, or sends nothing for too long, pending calls raise
EngineError. The process waits while it has no work, and ends with the run.
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
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch

from braidrl.cluster.local import LocalProcess, Spawned, from_server
from braidrl.cluster.process import ProcessSpec
from braidrl.cluster.watchdog import named
from braidrl.config import ImagesConfig
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import Uid
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.engine import ENGINES, NOTHING_YET, EngineError, EngineSpec, Load, ServedEngine
from braidrl.engines.requests import Request, Response
from braidrl.engines.spanning import LOOK_S, SpanningEngine
from braidrl.engines.stepping import EngineReplica, SteppingEngine
from braidrl.errors import UserError
from braidrl.native.malloc import keep_freed_memory
from braidrl.observe.stalls import WORK
from braidrl.training.decoders.images import ModelImages, images_of
from braidrl.training.loading import load_decoder
from braidrl.training.pretrained import load_tokenizer
from braidrl.training.processors import load_vision
from braidrl.weights.collective import Incoming, OfferedWeights, TransferNotice, current_device
from braidrl.weights.file import WeightFile, stored_weights
from braidrl.weights.publisher import PolicyWeights, WeightSource

BEAT_S = 0.02
"""Seconds between heartbeats of a process with rows."""
LENGTH = struct.Struct("!i")
"""The message length before each message, in the format of multiprocessing's pipes."""
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (UserError, EngineError, KeyError, ValueError, RuntimeError)
}
"""Exceptions of the engine protocol; any other exception is a failure of the engine."""


class EngineCall(msgspec.Struct, omit_defaults=True):
    """A call of an engine's method; the first call is `start`. `EngineReply.id` is its `id`."""

    method: Literal["start", "submit", "abort", "update_weights", "sleep", "wake", "recover"]
    id: int = 0
    spec: EngineSpec | None = None
    request: Request | None = None
    followed: bool = False
    """Send each token of the request as soon as it is known, in place of its `on_token`."""
    uid: Uid | None = None
    version: int = 0
    policy: str | None = None
    """The policy whose adapters the weights are."""
    path: str | None = None
    notice: TransferNotice | None = None
    """The transfer of the weights over a process group with the trainer; without a file or notice they stay."""


class EngineReply(msgspec.Struct, omit_defaults=True):
    """The result or error of a call, or a token of a followed row; without `id` a heartbeat during generation."""

    id: int | None = None
    result: Response | int | None = None
    error: tuple[str, str] | None = None
    """Name and text of an exception in `ERRORS`."""
    token: tuple[int, int] | None = None
    """A token's index in the response, and its id."""
    load: Load | None = None
    """The engine's load; None while there is no engine."""

    @staticmethod
    def of(id: int, error: Exception) -> "EngineReply":
        """Encode an exception; one outside the engine protocol is sent as an EngineError."""
        name, text = type(error).__name__, str(error.args[0]) if error.args else ""
        return EngineReply(id, error=(name, text) if name in ERRORS else ("EngineError", f"{name}: {text}"))


def framed(message: EngineCall | EngineReply) -> bytes:
    """Encode a message with its length before it."""
    body = pack_message(message)
    return LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader, type: Any) -> Any:
    """Receive the next message of this type; None after the other side has closed."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return unpack_message(await reader.readexactly(length), type)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


class EngineProcess:
    """An engine process, in the event loop in which it is started.

    Calls fail after `limit_s` seconds without a message from it.
    """

    def __init__(
        self,
        spec: EngineSpec,
        name: str = "engine",
        python: Path | None = None,
        limit_s: float = 600.0,
        spanning: SpanningEngine | None = None,
    ) -> None:
        """Describe the process, with `spanning` this node's part of an engine; `python` has the engine's packages."""
        self.spec, self.name, self.limit_s, self.spanning = spec, name, limit_s, spanning
        self._led = spanning if spanning is not None and spanning.part.node == 0 else None
        """The engine over several nodes that this process schedules."""
        self.max_sequence_tokens = spec.max_sequence_tokens
        self.pid: int | None = None
        self._python = str(python or sys.executable)
        self._process: LocalProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._tasks: list[asyncio.Task[None]] = []
        """The tasks that read messages and watch other nodes."""
        self._answers: dict[int, tuple[asyncio.Future[Any], Callable[[int, int], None] | None]] = {}
        """By the id of a call its answer, and the callback for a row's tokens."""
        self._rows: set[Uid] = set()
        self._held_weights: OfferedWeights | None = None
        """The weights that the process holds, if it received them over a process group."""
        self._recovering = asyncio.Lock()
        self._numbers = itertools.count()
        self._load = Load(spec.slots, 0, 0)
        self._heard = 0.0
        self._end = "has not been started"

    async def start(self) -> None:
        """Start the process, and wait until the model is loaded.

        Raises UserError if it cannot be used, EngineError as `submit`.
        """
        if shutil.which(self._python) is None:
            raise UserError(f"rollout.python: {self._python} is no interpreter that can be run")
        if self._led is not None:
            self.spec = replace(self.spec, part=self._led.begin())
        spec, self._held_weights = self.spec, None
        # vLLM and users' engines may need a separate interpreter, and a process must know its device before importing
        # torch.
        copied = spec.kind == "embedded" and spec.device == "cpu" and self._python == sys.executable
        self._process = (from_server if copied else Spawned)(
            ProcessSpec(
                self.name,
                "braidrl.engines.engine_process:main",
                python=self._python,
                threads=spec.threads,
                devices=spec.devices,
                environment=spec.environment,
            )
        )
        self.pid = self._process.pid
        line = socket.socket(fileno=os.dup(self._process.connection.fileno()))
        self._process.connection.close()
        reader, self._writer = await asyncio.open_connection(sock=line)
        self._tasks = [asyncio.create_task(self._listen(reader, self._writer))]
        if self._led is not None:
            self._tasks.append(asyncio.create_task(self._watch_nodes(self._led, self._writer)))
        await self._ask(EngineCall("start", spec=spec))

    async def submit(self, request: Request) -> Response:
        call = EngineCall("submit", request=replace(request, on_token=None), followed=request.on_token is not None)
        self._rows.add(request.uid)
        try:
            with WORK.waiting():
                response: Response = await self._ask(call, request.on_token)
                return response
        except asyncio.CancelledError:
            if self._writer is not None:
                self._writer.write(framed(EngineCall("abort", next(self._numbers), uid=request.uid)))
            raise
        finally:
            self._rows.discard(request.uid)

    async def abort(self, uid: Uid) -> None:
        if uid not in self._rows:
            raise KeyError(f"row {uid} is not under way")
        await self._ask(EngineCall("abort", uid=uid))

    async def update_weights(self, version: int, source: WeightSource | None = None) -> None:
        earlier, self._held_weights = self._held_weights, None
        call = EngineCall("update_weights", version=version)
        if isinstance(source, PolicyWeights):
            call.policy, source = source.role, source.source
        if source is None:
            await self._ask(call)
            self._held_weights = earlier
        elif isinstance(source, OfferedWeights):
            with source.request(self.spec.tensor * self.spec.pipeline, earlier) as notice:
                call.notice = notice
                await self._ask(call)
            self._held_weights = source
        else:
            with contextlib.ExitStack() as stored:
                if not isinstance(source, WeightFile):
                    source = stored.enter_context(contextlib.closing(stored_weights(source.tensors())))
                call.path = str(source.path)
                await self._ask(call)

    async def sleep(self) -> None:
        await self._ask(EngineCall("sleep"))

    async def wake(self) -> None:
        await self._ask(EngineCall("wake"))

    async def recover(self) -> int:
        """Replace a process that ended or failed; the new process has the weights of the model's directory."""
        # Several callers may recover it concurrently.
        async with self._recovering:
            if self._writer is not None:
                try:
                    return int(await self._ask(EngineCall("recover")))
                except EngineError:
                    self._die("could not recover")
            try:
                await self.start()
            except UserError as error:
                raise EngineError(f"{self.name}: {error}") from error
            return NOTHING_YET

    def load(self) -> Load:
        running = min(self._load.running, len(self._rows))
        return replace(self._load, running=running, waiting=len(self._rows) - running)

    async def close(self) -> None:
        """End the process and wait for its end."""
        if self._led is not None:
            self._led.end()
        self._die("was closed")
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def follow(self) -> None:
        """Add this node's part to each start of an engine that another node starts, until its end.

        Raises UserError as `start`.
        """
        spanning = self.spanning
        assert spanning is not None and spanning.part.node > 0
        while (part := await spanning.next_start()) is not None:
            self.spec = replace(self.spec, part=part)
            starting = asyncio.create_task(self.start())
            while not spanning.is_over() and not (starting.done() and self._writer is None):
                await asyncio.sleep(LOOK_S)
            self._die("is not needed any more")
            # The first node is notified, and starts the engine again.
            with contextlib.suppress(EngineError):
                await starting
            spanning.lose()

    async def _watch_nodes(self, spanning: SpanningEngine, writer: asyncio.StreamWriter) -> None:
        """End the engine when another node loses its part: a rank that waits for that part may not detect it."""
        while self._writer is writer:
            if (node := spanning.lost()) is not None:
                self._die(f"lost its part on node {node}")
            await asyncio.sleep(LOOK_S)

    async def _ask(self, call: EngineCall, on_token: Callable[[int, int], None] | None = None) -> Any:
        """Send a call and return its result.

        Raises EngineError if the process ends, or after `limit_s` seconds without a message.
        """
        if self._writer is None:
            raise EngineError(f"{self.name} {self._end}")
        loop, call.id = asyncio.get_running_loop(), next(self._numbers)
        answer: asyncio.Future[Any] = loop.create_future()
        self._answers[call.id] = answer, on_token
        self._writer.write(framed(call))
        started = loop.time()
        try:
            while not answer.done():
                left = max(started, self._heard) + self.limit_s - loop.time()
                if left <= 0:
                    what = "loading the model" if call.method == "start" else call.method
                    self._die(f"sent nothing for {self.limit_s:g} s during {what}")
                else:
                    await asyncio.wait([answer], timeout=left)
            return answer.result()
        finally:
            answer.cancel()
            self._answers.pop(call.id, None)

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Dispatch each message to its call or row, until the process ends."""
        while (reply := await receive(reader, EngineReply)) is not None:
            self._heard = asyncio.get_running_loop().time()
            if reply.load is not None:
                self._load = reply.load
            # A cancelled call has no waiting caller.
            if reply.id not in self._answers:
                continue
            answer, on_token = self._answers[reply.id]
            if reply.token is not None:
                if on_token is not None:
                    on_token(*reply.token)
            elif not answer.done():
                if reply.error is None:
                    answer.set_result(reply.result)
                else:
                    name, text = reply.error
                    answer.set_exception(ERRORS[name](f"{self.name}: {text}" if name == "EngineError" else text))
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
        for answer, _ in self._answers.values():
            if not answer.done():
                answer.set_exception(EngineError(f"{self.name} {self._end}"))


def embedded_engine(spec: EngineSpec) -> SteppingEngine:
    """Load the model into an embedded engine. Raises UserError for one that cannot be used."""
    tokenizer = load_tokenizer(spec.model)
    model = load_decoder(Path(spec.model), getattr(torch, spec.dtype), spec.device).requires_grad_(False).eval()
    images = engine_images(model, spec)
    return EmbeddedEngine(
        model, tokenizer, Decoding(spec.slots, spec.max_sequence_tokens, spec.seed, **spec.options), images=images
    )


def engine_images(model: Any, spec: EngineSpec) -> ModelImages | None:
    """Return the images of an engine's model; None for a text-only model."""
    if spec.images is None:
        return None
    settings = ImagesConfig(**spec.images)
    vision = load_vision(Path(spec.model), settings)
    return None if vision is None else images_of(model, vision, settings.kept_mib, spec.train_vision)


def vllm_engine(spec: EngineSpec) -> SteppingEngine:
    """Load the model into vLLM. Raises UserError if vLLM is not installed or does not support the model."""
    # Imported here: vLLM is optional.
    try:
        from braidrl.engines.vllm.vllm_engine import VllmEngine
    except ImportError as error:
        raise UserError(
            f"rollout.engine=vllm: {sys.executable} cannot import it ({error}); see docs/engines.md"
        ) from error
    return VllmEngine(spec, load_tokenizer(spec.model))


def main(handle: int) -> None:
    """Serve an engine over the connection at a file descriptor, until the run ends."""
    named("engine")
    keep_freed_memory()
    asyncio.run(serve(socket.socket(fileno=handle)))


async def serve(connection: socket.socket) -> None:
    """Make the engine that the first call describes, answer that call, and execute later calls until the run ends."""
    reader, writer = await asyncio.open_connection(sock=connection)
    if (start := await receive(reader, EngineCall)) is None:
        return
    spec = start.spec
    try:
        if spec.part is not None and spec.part.node > 0:
            # Only ranks, which the first node's scheduler calls.
            from braidrl.engines.vllm.vllm_engine import ranks_of_node

            with ranks_of_node(spec):
                writer.write(framed(EngineReply(start.id)))
                await reader.read()
            return
        created: SteppingEngine | ServedEngine = ENGINES.make(spec.kind, spec)
        engine: ServedEngine = EngineReplica(created) if isinstance(created, SteppingEngine) else created
        await engine.start()
    except (UserError, EngineError) as error:
        writer.write(framed(EngineReply.of(start.id, error)))
        await writer.drain()
        return
    tasks = set[asyncio.Task[None]]()

    def say(reply: EngineReply) -> None:
        reply.load = engine.load()
        writer.write(framed(reply))

    async def beat() -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            if tasks:
                say(EngineReply())

    async def answer(call: EngineCall) -> None:
        try:
            say(EngineReply(call.id, await execute(engine, call, say)))
        except Exception as error:
            say(EngineReply.of(call.id, error))

    say(EngineReply(start.id))
    beats = asyncio.create_task(beat())
    while (call := await receive(reader, EngineCall)) is not None:
        # Calls start in the order of arrival, and are answered when done.
        task = asyncio.create_task(answer(call))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    beats.cancel()
    await engine.close()


async def execute(engine: ServedEngine, call: EngineCall, say: Callable[[EngineReply], None]) -> Response | int | None:
    """Execute a call on the engine, and return its result; `say` sends the tokens of a followed row."""
    arguments: list[object] = []
    if (request := call.request) is not None:
        if call.followed:
            drew = lambda number, token: say(EngineReply(call.id, token=(number, token)))  # noqa: E731
            request = replace(request, on_token=drew)
        arguments = [request]
    elif call.uid is not None:
        arguments = [call.uid]
    elif call.method == "update_weights":
        notice = call.notice
        source: WeightSource | None = None if notice is None else Incoming(notice, 0, current_device(notice.cuda))
        if call.path is not None:
            source = WeightFile(call.path)
        if call.policy is not None and source is not None:
            source = PolicyWeights(call.policy, source)
        arguments = [call.version, source]
    result: Response | int | None = await getattr(engine, call.method)(*arguments)
    return result
