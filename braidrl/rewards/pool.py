"""The pool of verifier processes, beside generation. A verifier that raises, hangs or dies fails only its own check.

submit ──▶ event loop in a thread ──▶ sandbox: a host for each verifier, a process for each call, `processes` calls at a time
                     ├───────────────▶ no sandbox, or Braid's own: `processes` hosts, one call at a time each
                     ├───────────────▶ the same, `async`: one host for each verifier, many calls at a time
                     └───────────────▶ no processes: called in this process, for a debugger
"""

import asyncio
import contextlib
import importlib.util
import json
import os
import signal
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import CancelledError, Future
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from braidrl.cluster.process import END_LIMIT_S
from braidrl.config import RewardConfig
from braidrl.errors import UserError, WorkerError
from braidrl.rewards.verifier import Completion, Verifier
from braidrl.rewards.worker import call_here
from braidrl.sandbox.answers import bounded_numbers, shown
from braidrl.sandbox.hosts import CodeHost, Talk, check_walls
from braidrl.sandbox.sandbox import LOAD_LIMIT_S, NO_ANSWER, Message

ENTRY = "braidrl.rewards.worker:checks"
MOST_IN_FLIGHT = 64
"""Concurrent calls of one async verifier."""
STUCK_AFTER_S = 1.0
"""Seconds after a call's limit until its event loop counts as blocked."""
SUPERVISION_S = 2.0
"""Seconds after a sandboxed call's limits until its host counts as stuck."""
REASONS = ("timeout", "exception", "died", "result")
"""Reasons for failed checks."""
MOST_METRICS = 64
KILLED = tuple(
    f"{how}" for number in (signal.SIGKILL, signal.SIGTERM)
    for how in (f"killed by signal {number:d}", f"exit status {128 + number:d}")
)  # fmt: skip
"""Descriptions of a process killed from outside, the second under bubblewrap; its call is repeated once."""
SETTLE_S = 1.0
"""Seconds that a process may take to end after its socket closed."""
ABANDONED = "the reward pool was closed before this check ended"


@dataclass(frozen=True)
class CallOutcome:
    """One verifier's result for one completion. `score` or `correct` is None if the verifier did not give it."""

    score: float | None = None
    correct: bool | None = None
    failure: str | None = None
    """timeout, exception, died, or result (the verifier returned an invalid value); there is then no score."""
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """The verifier's own numbers for the run's metrics."""

    @staticmethod
    def of(message: Message, max_abs: float) -> "CallOutcome":
        """Validate an untrusted answer; a score with an absolute value above `max_abs` is a failure."""
        score, correct, failure = (message.get(name) for name in ("score", "correct", "failure"))
        if failure is not None:
            reason = failure if failure in REASONS else "result"
            return CallOutcome(failure=reason, detail=shown(str(message.get("detail"))[:600]))
        if correct not in (None, True, False) or isinstance(score, bool) or not isinstance(score, int | float | None):
            return CallOutcome(failure="result", detail="its process gave an answer that is none")
        if score is not None and not abs(score) <= max_abs:
            return CallOutcome(
                failure="result", detail=f"returned {str(score)[:20]}, and reward.max_abs is {max_abs:g}"
            )
        metrics = bounded_numbers(message.get("metrics", {}), MOST_METRICS)
        if metrics is None or not all(abs(number) <= max_abs for number in metrics.values()):
            return CallOutcome(
                failure="result",
                detail=f"its metrics are not at most {MOST_METRICS} numbers up to {max_abs:g}, by names of letters, digits and ._-/",
            )
        return CallOutcome(score, correct, metrics=metrics)


@dataclass(frozen=True)
class Check:
    """A submitted check."""

    verifier: Verifier
    request: bytes
    future: Future[CallOutcome] = field(default_factory=Future)


class RewardPool(AbstractContextManager["RewardPool"]):
    """A pool of verifier processes. Closing it, or leaving the `with` block in any way, leaves no process behind."""

    def __init__(self, settings: RewardConfig) -> None:
        self.settings = settings
        places = settings.processes or 1
        self._one_by_one = [
            CodeHost(
                "verifier",
                ENTRY,
                {},
                "reward",
                settings,
                settings.environment,
                seconds=settings.timeout_s,
                trusted=True,
            )
            for _ in range(places)
        ]
        self._idle = list(self._one_by_one)
        self._places = asyncio.Semaphore(places)
        self._hosts: dict[str, CodeHost] = {}
        self._together: dict[str, asyncio.Semaphore] = {}
        self._talks: dict[CodeHost, Talk] = {}
        self._loading: dict[CodeHost, asyncio.Lock] = {}
        self._checked = set[str]()
        self._under_way: dict[asyncio.Task[None], Check] = {}
        self._closed = False
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        # A daemon thread, so that a run that does not close the pool can end; its processes then end with their sockets.
        self._thread = threading.Thread(target=self._loop.run_forever, name="rewards", daemon=True)
        self._thread.start()

    def submit(self, completion: Completion, verifier: Verifier) -> Future[CallOutcome]:
        """Queue a check and return its future, which raises only if the pool is closed first, never for a verifier's failure.

        Raises TypeError if the completion is not JSON, RuntimeError after `close`, and UserError as `check_requirements`.
        """
        with self._lock:
            if verifier.key not in self._checked:
                check_requirements(verifier.name, verifier.settings, self.settings)
                self._prepare(verifier)
                self._checked.add(verifier.key)
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            argument = {"key": verifier.key, "completion": vars(completion), "limit_s": self.settings.timeout_s}
            check = Check(verifier, json.dumps({"check": argument}).encode() + b"\n")
            check.future.set_running_or_notify_cancel()
            if self.settings.processes or verifier.asynchronous:
                self._loop.call_soon_threadsafe(self._begin, check)
                return check.future
        check.future.set_result(CallOutcome.of(call_here(verifier, argument), self.settings.max_abs))
        return check.future

    def _prepare(self, verifier: Verifier) -> None:
        """Make the verifier's own host, if it needs one, with the code as it is now."""
        if self._walled(verifier) or verifier.asynchronous:
            self._hosts[verifier.key] = CodeHost(
                "verifier", ENTRY, {}, "reward", self.settings, self.settings.environment, seconds=self.settings.timeout_s,
                file=verifier.file, trusted=not self._walled(verifier), together=True,
            )  # fmt: skip
            self._together[verifier.key] = asyncio.Semaphore(MOST_IN_FLIGHT)

    def _walled(self, verifier: Verifier) -> bool:
        return self.settings.sandbox != "none" and not verifier.trusted

    def _begin(self, check: Check) -> None:
        task = self._loop.create_task(self._serve(check))
        self._under_way[task] = check
        task.add_done_callback(lambda ended: self._under_way.pop(ended, None))

    async def _serve(self, check: Check) -> None:
        verifier = check.verifier
        try:
            if self._walled(verifier):
                found = await self._in_walls(check)
            else:
                together = await self._with_others(check) if verifier.asynchronous else None
                found = together or await self._alone(check)
        except asyncio.CancelledError:
            check.future.set_exception(CancelledError(ABANDONED))
        except Exception as error:  # an error of the pool, not of the verifier: the caller gets it
            check.future.set_exception(error)
        else:
            check.future.set_result(CallOutcome.of(found, self.settings.max_abs))

    async def _in_walls(self, check: Check) -> Message:
        """Make a call in processes of its own, and once more if they were killed from outside."""
        host = self._hosts[check.verifier.key]
        place = self._together[check.verifier.key] if check.verifier.asynchronous else self._places
        found: Message = {}
        async with place:
            for _ in range(2):
                # The supervisor limits the call's time: a longer silence means that the host is stuck.
                found = await self._asked(host, check, 2 * self.settings.timeout_s + SUPERVISION_S)
                if not found.get("again"):
                    break
        return found

    async def _alone(self, check: Check) -> Message:
        """Make a call in a process without other calls, which is killed if it does not answer in time."""
        async with self._places:
            host = self._idle.pop()
            try:
                for _ in range(2):
                    found = await self._asked(host, check, self.settings.timeout_s)
                    if not found.get("again") or found["failure"] == "timeout":
                        break
                return found
            finally:
                self._idle.append(host)

    async def _with_others(self, check: Check) -> Message | None:
        """Make a call beside others in one process; return None if any of its calls blocks or ends the process."""
        host = self._hosts[check.verifier.key]
        async with self._together[check.verifier.key]:
            found = await self._asked(host, check, self.settings.timeout_s + STUCK_AFTER_S)
        return None if "again" in found else found

    async def _asked(self, host: CodeHost, check: Check, limit_s: float) -> Message:
        """Return a host's answer, and kill the host if there is none; `again` then says whether it was ended from outside."""
        failed = await self._load(host, check.verifier.key)
        if failed:
            return failed
        process = host.process
        # Successive calls in one process use the same talk.
        talk = self._talks.pop(host, None) or host.talk()
        try:
            async with asyncio.timeout(limit_s):
                found = await talk.answer_to(check.request)
        except TimeoutError:
            await self._in_thread(partial(host.kill, process))
            return {"failure": "timeout", "detail": f"no answer within {limit_s:g} s", "again": True}
        finally:
            if host in self._one_by_one and talk.ready:
                self._talks[host] = talk
            else:
                talk.close()
        if found != NO_ANSWER or process is None:
            return found
        # The process, or only this call's supervisor, has ended.
        await self._in_thread(partial(process.wait, SETTLE_S))
        if process.alive:
            return found
        how = process.describe_end()
        return {"failure": "died", "detail": f"the verifier's process died: {how}", "again": how in KILLED}

    async def _load(self, host: CodeHost, key: str) -> Message:
        """Make a host import a verifier, once; return the failure, or an empty message."""
        if key in host.loaded and host.alive:
            return {}
        async with self._loading.setdefault(host, asyncio.Lock()):
            if key in host.loaded and host.alive:
                return {}
            if talk := self._talks.pop(host, None):
                talk.close()
            try:
                failed = await self._in_thread(partial(host.load, key))
            except TimeoutError:
                await self._in_thread(host.kill)
                failed = {"failure": "timeout", "detail": f"it was not imported within {LOAD_LIMIT_S:g} s"}
            except (WorkerError, OSError) as error:
                await self._in_thread(host.kill)  # the next attempt starts another
                failed = {"failure": "died", "detail": f"the verifier's process died: {error}", "again": True}
            if not failed:
                host.loaded.add(key)
            return failed

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        return await self._loop.run_in_executor(None, work)

    def close(self) -> None:
        """End all processes and wait until they are gone; pending checks raise CancelledError."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        ended = asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        with contextlib.suppress(TimeoutError):
            ended.result(END_LIMIT_S)
        for host in (*self._one_by_one, *self._hosts.values()):
            host.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(END_LIMIT_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def _end_all(self) -> None:
        for task in list(self._under_way):
            task.cancel()
        for host in (*self._one_by_one, *self._hosts.values()):
            await self._in_thread(host.kill)
        while self._under_way:
            await asyncio.wait(list(self._under_way))

    def __exit__(self, *_: object) -> None:
        self.close()


def check_requirements(name: str, params: Mapping[str, Any], settings: RewardConfig) -> None:
    """Raise UserError if a verifier of that name cannot be called. Nothing is imported.

    Args:
        name: The name in the configuration.
        params: The verifier's own settings.
        settings: The settings of all verifiers.
    """
    if name == "code" and not settings.run_programs_without_walls:
        if settings.sandbox != "bubblewrap" or not settings.processes:
            raise UserError(
                "reward.verify=code runs what a model wrote, and only in the strict sandbox; write reward.sandbox=bubblewrap "
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
    if key and key not in settings.environment:
        raise UserError(
            f"{setting}: its key is in {key}, which verifiers are not given; write reward.environment=[{key}]"
        )
