"""A process with one engine in it, which a run talks to over a socket.

run ──id, method, arguments──▶ Host ──▶ engine
    ◀──id, result or error, load──┘         without work for it the process waits; when the run is gone it ends
"""

import asyncio
import socket
import sys
from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from braidrl.cluster.cores import follow_load
from braidrl.cluster.watchdog import named
from braidrl.engines.divided.followers import ForkedFollowers, lead
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.embedded.stepping import SteppingEngine
from braidrl.engines.engine import ENGINES, Engine, EngineError, ServedEngine
from braidrl.engines.replica import EngineReplica
from braidrl.engines.wire import (
    EngineSpec,
    Message,
    packed,
    plain_error,
    plain_response,
    receive,
    receive_at_once,
    request_of,
)
from braidrl.errors import UserError
from braidrl.native.malloc import keep_freed_memory
from braidrl.training.loading import load_decoder, load_tokenizer
from braidrl.weights.handles import MappedWeights
from braidrl.weights.shared_file import WeightFile

BEAT_S = 0.02
"""Seconds between messages about the load of a process with rows."""
READY = -1
"""The number of the answer to the first message, which says what engine to make."""


def embedded_engine(spec: EngineSpec) -> SteppingEngine:
    """Load the model into an embedded engine. Raises UserError for one that cannot be used."""
    tokenizer = load_tokenizer(spec.model)
    model = load_decoder(Path(spec.model), getattr(torch, spec.dtype), spec.device).requires_grad_(False).eval()
    return EmbeddedEngine(model, tokenizer, spec.slots, spec.max_sequence_tokens, spec.seed, **spec.options)


def vllm_engine(spec: EngineSpec) -> SteppingEngine:
    """Load the model into vLLM. Raises UserError where it is not installed, or does not take the model."""
    # Imported here: vLLM need not be installed.
    try:
        from braidrl.engines.vllm.vllm_engine import VllmEngine
    except ImportError as error:
        raise UserError(
            f"rollout.engine=vllm: {sys.executable} cannot import it ({error}); see docs/rollout.md"
        ) from error
    return VllmEngine(
        Path(spec.model), load_tokenizer(spec.model), spec.slots, spec.max_sequence_tokens, spec.seed, spec.dtype,
        spec.options,
    )  # fmt: skip


def served(engine: SteppingEngine | ServedEngine) -> ServedEngine:
    """Return the engine behind the engine protocol, which one that steps is put behind."""
    return EngineReplica(engine) if isinstance(engine, SteppingEngine) else engine


class Host:
    """Executes messages on the engine and sends the results."""

    def __init__(self, engine: Engine, writer: asyncio.StreamWriter) -> None:
        self.engine, self.writer = engine, writer
        self.tasks: set[asyncio.Task[None]] = set()

    def begin(self, message: Message) -> None:
        """Start a message's task. Messages start in the order in which they come, and are answered when they are done."""
        task = asyncio.create_task(self._act(message))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def say(self, message: Message) -> None:
        self.writer.write(packed({**message, "load": astuple(self.engine.load())}))

    async def beat(self) -> None:
        """Show that a process without other messages is alive."""
        while True:
            await asyncio.sleep(BEAT_S)
            if self.tasks:
                self.say({})

    async def _act(self, message: Message) -> None:
        try:
            result = await self._result(message)
        except Exception as error:
            self.say({"id": message["id"], **plain_error(error)})
        else:
            self.say({"id": message["id"], "result": result})

    async def _result(self, message: Message) -> Any:
        method = message["method"]
        if method == "submit":
            request = request_of(message["request"])
            if message["request"]["followed"]:
                request = replace(request, on_token=partial(self._drew, message["id"]))
            return plain_response(await self.engine.submit(request))
        if method == "abort":
            source, group, sample = message["uid"]
            return await self.engine.abort((source, group, sample))
        if method == "update_weights":
            return await self._update_weights(message)
        assert method in ("pause", "resume", "sleep", "wake", "recover"), method
        return await getattr(self.engine, method)()

    def _drew(self, submitted: int, number: int, token: int) -> None:
        self.say({"of": submitted, "drawn": (number, token)})

    async def _update_weights(self, message: Message) -> None:
        if "path" in message:
            weights = WeightFile(message["path"])
            weights.verify()
            return await self.engine.update_weights(message["version"], weights)
        mapped = MappedWeights(message["handles"])
        try:
            return await self.engine.update_weights(message["version"], mapped)
        finally:
            mapped.finish()


async def serve(connection: socket.socket, spec: EngineSpec, followers: ForkedFollowers | None) -> None:
    """Make the engine, and execute messages until the run is gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    follow_load()
    keep_freed_memory()
    try:
        engine = served(lead(spec, followers) if followers else ENGINES.find(spec.kind)(spec))
        await engine.start()
    except (UserError, EngineError) as error:
        writer.write(packed({"id": READY, **plain_error(error)}))
        await writer.drain()
        return
    host = Host(engine, writer)
    host.say({"id": READY})
    beats = asyncio.create_task(host.beat())
    while (message := await receive(reader)) is not None:
        host.begin(message)
    beats.cancel()
    await engine.close()


def main(handle: int) -> None:
    """Serve the engine that the first message asks for. Its other processes are forked before this one has loaded anything."""
    named("engine")
    connection = socket.socket(fileno=handle)
    message = receive_at_once(connection)
    if message is None:
        return
    spec = EngineSpec(**message)
    followers = ForkedFollowers(spec, handle) if spec.tensor > 1 else None
    try:
        asyncio.run(serve(connection, spec, followers))
    finally:
        if followers is not None:
            followers.close()
