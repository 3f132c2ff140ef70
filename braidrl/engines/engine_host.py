"""The process of an engine, which executes the calls of an `EngineProcess` until the run is gone; it waits while it has no work."""

import asyncio
import os
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from braidrl.cluster.local import LocalProcess
from braidrl.cluster.watchdog import named
from braidrl.data.messages import unpack_message
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.embedded.followers import LeadingEngine, fork_followers
from braidrl.engines.engine import ENGINES, EngineError, EngineSpec, ServedEngine
from braidrl.engines.engine_process import EngineCall, EngineReply, framed, receive
from braidrl.engines.requests import Request, Response
from braidrl.engines.stepping import EngineReplica, SteppingEngine
from braidrl.errors import UserError
from braidrl.native.malloc import keep_freed_memory
from braidrl.training.loading import load_decoder, load_tokenizer
from braidrl.weights.collective import Incoming, TransferNotice
from braidrl.weights.file import WeightFile

BEAT_S = 0.02
"""Seconds between heartbeats of a process with rows."""


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
    return VllmEngine(spec, load_tokenizer(spec.model))


def main(handle: int) -> None:
    """Serve the engine described by the first call. Its other processes are forked before this one loads anything."""
    named("engine")
    try:
        with Connection(os.dup(handle)) as first:
            start = unpack_message(first.recv_bytes(), EngineCall)
    except EOFError:
        return
    spec, followers = start.spec, list[LocalProcess]()
    # vLLM starts its ranks itself.
    if spec.kind == "embedded" and spec.tensor * spec.pipeline > 1:
        # The processes wait for one another less long than the run waits for this one, which names the missing one.
        spec = replace(spec, limit_s=spec.limit_s / 2)
        followers = fork_followers(spec, handle)
    try:
        asyncio.run(serve(socket.socket(fileno=handle), start.id, spec, followers))
    finally:
        for follower in followers:
            follower.kill()


async def serve(connection: socket.socket, start: int, spec: EngineSpec, followers: Sequence[LocalProcess]) -> None:
    """Make the engine, answer the call that started it, and execute the run's calls until the run is gone."""
    reader, writer = await asyncio.open_connection(sock=connection)
    keep_freed_memory()
    try:
        if spec.part is not None and spec.part.node > 0:
            # Only ranks, which the first node's scheduler calls.
            from braidrl.engines.vllm.vllm_engine import ranks_of_node

            with ranks_of_node(spec):
                writer.write(framed(EngineReply(start)))
                await reader.read()
            return
        made: SteppingEngine | ServedEngine = (
            LeadingEngine(spec, followers) if followers else ENGINES.find(spec.kind)(spec)
        )
        engine: ServedEngine = EngineReplica(made) if isinstance(made, SteppingEngine) else made
        await engine.start()
    except (UserError, EngineError) as error:
        writer.write(framed(EngineReply.of(start, error)))
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

    say(EngineReply(start))
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
    match call:
        case EngineCall("submit", request=Request() as request):
            if call.followed:
                drew = lambda number, token: say(EngineReply(call.id, token=(number, token)))  # noqa: E731
                request = replace(request, on_token=drew)
            return await engine.submit(request)
        case EngineCall("abort", uid=tuple() as uid):
            await engine.abort(uid)
        case EngineCall("update_weights", version=version, path=str() as path):
            weights = WeightFile(path)
            weights.verify()
            await engine.update_weights(version, weights)
        case EngineCall("update_weights", version=version, notice=TransferNotice() as notice):
            device = torch.device("cuda", torch.cuda.current_device()) if notice.cuda else torch.device("cpu")
            await engine.update_weights(version, Incoming(notice, 0, device))
        case EngineCall("update_weights", version=version):
            await engine.update_weights(version)
        case EngineCall("recover"):
            return await engine.recover()
        case EngineCall("sleep"):
            await engine.sleep()
        case EngineCall("wake"):
            await engine.wake()
    return None
