"""An engine in a process of its own: the run's side of the socket to `process_server`.

submit, abort, ... ──message──▶ process
                   ◀──answer───    if the process ends, or sends nothing for too long, pending calls raise EngineError
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from braidrl.cluster.local import LocalProcess, from_server, spawn
from braidrl.cluster.process import ProcessSpec
from braidrl.data.rows import Uid
from braidrl.engines.engine import EngineError, Load
from braidrl.engines.process.process_server import READY
from braidrl.engines.requests import Request, Response
from braidrl.engines.vllm.vllm_environment import vllm_environment
from braidrl.engines.wire import (
    AbortRow,
    CallDone,
    CallFailed,
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
from braidrl.observe.stalls import WORK
from braidrl.weights.collective import OfferedWeights
from braidrl.weights.file import WeightFile, stored_in_memory
from braidrl.weights.publisher import WeightSource

NAMES = {Submit: "submit", AbortRow: "abort", UpdateWeights: "update_weights"}
"""The engine method that an order calls."""
NOTHING_YET = -1
"""Version of an engine whose process was restarted."""


class EngineProcess:
    """An engine process, in the event loop in which it is started. Calls fail after `limit_s` seconds without a message from it."""

    def __init__(
        self, spec: EngineSpec, name: str = "engine", python: Path | None = None, limit_s: float = 600.0
    ) -> None:
        """Describe the process; `python` is an interpreter with the engine's packages, by default this process's."""
        self.spec, self.name, self.limit_s = spec, name, limit_s
        self.max_sequence_tokens = spec.max_sequence_tokens
        self._python = str(python or sys.executable)
        self._process: LocalProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._rows: dict[Uid, int] = {}
        self._followed: dict[int, Callable[[int, int], None]] = {}
        """The callback for a row's tokens, by the id of its message."""
        self._recovering = asyncio.Lock()
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
        copied = self.spec.kind == "embedded" and self.spec.device == "cpu" and self._python == sys.executable
        start = from_server if copied else spawn
        spec, entry = self.spec, "braidrl.engines.process.process_server:main"
        own = vllm_environment(spec.device) if spec.kind == "vllm" else {}
        self._process = start(
            ProcessSpec(
                self.name, entry, python=self._python, threads=spec.threads, devices=spec.devices, environment=own
            )
        )
        line = socket.socket(fileno=os.dup(self._process.connection.fileno()))
        self._process.connection.close()
        reader, self._writer = await asyncio.open_connection(sock=line)
        ready = self._answers[READY] = asyncio.get_running_loop().create_future()
        self._listener = asyncio.create_task(self._listen(reader, self._writer))
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
        if source is None:
            await self._ask(UpdateWeights(next(self._numbers), version))
        elif isinstance(source, WeightFile):
            await self._ask(UpdateWeights(next(self._numbers), version, path=str(source.path)))
        elif isinstance(source, OfferedWeights):
            with source.asked(self.spec.ranks) as notice:
                await self._ask(UpdateWeights(next(self._numbers), version, notice=notice))
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
        self._die("was closed")
        if self._listener is not None:
            await asyncio.gather(self._listener, return_exceptions=True)

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
