"""The process of one engine, which serves a run over a socket.

run ──Order──▶ Host ──▶ engine
    ◀──Reply──┘                 the process waits while it has no work, and ends when the run is gone
"""

import asyncio
import os
import socket
import sys
from dataclasses import astuple, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from braidrl.cluster.watchdog import named
from braidrl.data.messages import unpack_message
from braidrl.engines.divided.followers import ForkedFollowers, lead
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.engine import ENGINES, Engine, EngineError, ServedEngine
from braidrl.engines.requests import Response
from braidrl.engines.stepping import EngineReplica, SteppingEngine
from braidrl.engines.wire import (
    AbortRow,
    CallDone,
    CallFailed,
    EngineBeat,
    EngineCall,
    EngineReply,
    EngineSpec,
    Order,
    Submit,
    TokenDrawn,
    UpdateWeights,
    framed,
    receive,
)
from braidrl.errors import UserError
from braidrl.native.malloc import keep_freed_memory
from braidrl.training.loading import load_decoder, load_tokenizer
from braidrl.weights.collective import Incoming, TransferNotice
from braidrl.weights.file import WeightFile

BEAT_S = 0.02
"""Seconds between heartbeats of a process with rows."""
READY = -1
"""The id of the answer to the first message, which holds the engine's settings."""


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
        {**spec.options, "tensor_parallel_size": spec.tensor, "pipeline_parallel_size": spec.pipeline},
        spec.reproducible,
    )  # fmt: skip


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
