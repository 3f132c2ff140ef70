"""The pool of verifier processes, concurrent with generation. A verifier that raises, hangs or dies fails only this
check.

submit ──▶ event loop in a thread
    ──▶ sandbox: a host for each verifier, a copy of it for each call, `processes` calls at a time
   │                 ├───────────────▶ no sandbox, or Braid's own: `processes` hosts, one call at a time each
   │                 └───────────────▶ the same, `async`: awaited on this loop, many calls at a time
   └──▶ no processes: called in this process, for a debugger
"""

import asyncio
import contextlib
import importlib.util
import inspect
import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from braidrl.cluster.process import END_LIMIT_S
from braidrl.config import RewardConfig
from braidrl.errors import UserError, printable
from braidrl.importing import source_of
from braidrl.rewards.verifier import Completion, Verifier, call
from braidrl.rewards.verifiers import VERIFIERS
from braidrl.sandbox.answers import DETAIL_LENGTH, NAME, Message
from braidrl.sandbox.hosts import CodeHost, HostedCode, HostSession, check_walls

ENTRY = "braidrl.rewards.verifier:checks"
MOST_IN_FLIGHT = 64
"""Concurrent calls of one async verifier."""
REASONS = ("timeout", "exception", "died", "result")
MOST_METRICS = 64
ABANDONED = "the reward pool was closed before this check ended"


@dataclass(frozen=True)
class CallOutcome:
    """One verifier's result for one completion.

    `score` or `correct` is None if the verifier did not return it.
    """

    score: float | None = None
    correct: bool | None = None
    failure: str | None = None
    """timeout, exception, died, or result (the verifier returned an invalid value); there is then no score."""
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @staticmethod
    def of(message: Message, max_abs: float) -> "CallOutcome":
        """Validate an untrusted answer; a score with an absolute value above `max_abs` is a failure."""
        max_abs = min(max_abs, sys.float_info.max)  # JSON has integers beyond any float
        score, correct, failure = (message.get(name) for name in ("score", "correct", "failure"))
        metrics = message.get("metrics", {})
        if failure is not None:
            reason = failure if failure in REASONS else "result"
            return CallOutcome(failure=reason, detail=printable(str(message.get("detail"))[:DETAIL_LENGTH]))
        if correct not in (None, True, False) or isinstance(score, bool) or not isinstance(score, int | float | None):
            fault = "its process gave an answer that is none"
        elif score is not None and not abs(score) <= max_abs:
            fault = f"returned {str(score)[:20]}, and reward.max_abs is {max_abs:g}"
        elif (
            not isinstance(metrics, dict)
            or len(metrics) > MOST_METRICS
            or not all(
                NAME.fullmatch(n) and isinstance(v, int | float) and abs(v) <= max_abs for n, v in metrics.items()
            )
        ):
            limits = f"at most {MOST_METRICS} numbers up to {max_abs:g}"
            fault = f"its metrics are not {limits}, by names of letters, digits and ._-/"
        else:
            return CallOutcome(score, correct, metrics={name: float(value) for name, value in metrics.items()})
        return CallOutcome(failure="result", detail=fault)


class RewardPool(AbstractContextManager["RewardPool"]):
    """A pool of verifier processes.

    Closing it, or leaving the `with` block in any way, ends all processes.
    """

    def __init__(self, settings: RewardConfig) -> None:
        self.settings = settings
        slots = settings.processes or 1
        self._verifier = HostedCode(
            "verifier", ENTRY, "reward", settings, variables=settings.environment, seconds=settings.timeout_s
        )
        self._one_by_one = [CodeHost(replace(self._verifier, trusted=True)) for _ in range(slots)]
        self._idle = list(self._one_by_one)
        self._slots = asyncio.Semaphore(slots)
        self._hosts: dict[str, CodeHost] = {}
        self._calls: dict[str, asyncio.Semaphore] = {}
        """The places of the calls of each verifier."""
        self._sessions: dict[CodeHost, HostSession] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        # A daemon thread, so that a run that does not close the pool can end; its processes then end with their
        # sockets.
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, completion: Completion, verifier: Verifier) -> Future[CallOutcome]:
        """Queue a check and return its future, which raises only if the pool closes first.

        Raises TypeError if it cannot be JSON.
        """
        settings, key = self.settings, verifier.key
        with self._lock:
            if key not in self._calls:
                check_requirements(verifier.name, verifier.settings, settings)
                is_built_in = verifier.name in VERIFIERS
                # Of Braid's verifiers only `code` runs foreign code.
                isolated = settings.sandbox != "none" and (not is_built_in or verifier.name == "code")
                if isolated:  # it needs a separate host, with the current code
                    file = None if is_built_in else source_of(verifier.name)
                    self._hosts[key] = CodeHost(replace(self._verifier, file=file))
                self._calls[key] = asyncio.Semaphore(MOST_IN_FLIGHT) if verifier.asynchronous else self._slots
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            argument = {"key": key, "completion": vars(completion), "limit_s": settings.timeout_s}
            request = json.dumps({"check": argument}).encode() + b"\n"
            future: Future[CallOutcome] = Future()
            future.set_running_or_notify_cancel()
            has_process = (key in self._hosts) if verifier.asynchronous else settings.processes > 0
            if has_process or verifier.asynchronous:
                ask = partial(self._in_process, key, request) if has_process else partial(call, verifier, argument)
                asyncio.run_coroutine_threadsafe(self._serve(key, ask, future), self._loop)
                return future
        result = call(verifier, argument)
        if inspect.isawaitable(result):
            result = asyncio.run_coroutine_threadsafe(result, self._loop).result()
        future.set_result(CallOutcome.of(result, settings.max_abs))
        return future

    async def _serve(self, key: str, ask: Callable[[], Any], future: Future[CallOutcome]) -> None:
        """Make a call when there is a free slot, and set its future."""
        try:
            async with self._calls[key]:
                result = ask()
                result = await result if inspect.isawaitable(result) else result
        except asyncio.CancelledError:
            future.set_exception(CancelledError(ABANDONED))
        except Exception as error:  # an error of the pool, not of the verifier: raised to the caller
            future.set_exception(error)
        else:
            future.set_result(CallOutcome.of(result, self.settings.max_abs))

    async def _in_process(self, key: str, request: bytes) -> Message:
        """Return a process's answer. A call whose process was killed externally is repeated once."""
        loaded = self._hosts.get(key)
        for _ in range(2):
            host = loaded or self._idle.pop()
            try:
                answer = await self._answer_of(host, key, request)
            finally:
                self._idle += [] if loaded else [host]
            if not answer.get("again"):
                break
        return answer

    async def _answer_of(self, host: CodeHost, key: str, request: bytes) -> Message:
        """Return a host's answer, after it has imported the verifier."""
        if not host.has_loaded(key):
            if session := self._sessions.pop(host, None):
                session.close()
            if failed := await self._loop.run_in_executor(None, host.load, key):
                return failed
        # Successive calls in one process use the same session.
        session = self._sessions.pop(host, None) or HostSession(host)
        try:
            return await session.answer_to(request)
        finally:
            if host in self._one_by_one and session.ready:
                self._sessions[host] = session
            else:
                session.close()

    def close(self) -> None:
        """End all processes and wait for their end; pending checks raise CancelledError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True

        async def abandon_checks() -> None:
            pending = asyncio.all_tasks() - {asyncio.current_task()}
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

        with contextlib.suppress(TimeoutError):
            asyncio.run_coroutine_threadsafe(abandon_checks(), self._loop).result(END_LIMIT_S)
        hosts = (*self._one_by_one, *self._hosts.values())
        for act in (CodeHost.hang_up, CodeHost.close):
            for host in hosts:
                act(host)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_LIMIT_S)
        if not self._thread.is_alive():
            self._loop.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def check_requirements(name: str, params: Mapping[str, Any], settings: RewardConfig) -> None:
    """Raise UserError if a verifier with its `params`, and the `settings` of all, cannot be called. Nothing is
    imported.
    """
    if name == "code" and not settings.run_programs_without_walls:
        if settings.sandbox != "bubblewrap" or not settings.processes:
            raise UserError(
                "reward.verify=code runs what a model wrote, and only in the strict sandbox; write "
                "reward.sandbox=bubblewrap "
                "and at least reward.processes=1, or insist by reward.run_programs_without_walls=true"
            )
        check_walls("reward", settings)
    if name not in ("judge", "remote"):
        return
    setting, key = f"reward.verify={name}", params.get("key")
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError(f"{setting} needs aiohttp; install it with `pip install 'braidrl[endpoint]'`")
    if key and key not in os.environ:
        raise UserError(f"{setting}: its key is to be in the variable {key}, which is not set; write export {key}=...")
