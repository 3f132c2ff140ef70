"""Lanes: a thread and a worker process each, that take calls from a queue and make sure that every call gets its answer.

OneByOne      one call at a time; a process that does not answer in time is killed, and the next call gets another
Concurrent    many calls of one async verifier at a time; if its process hangs or dies, nobody can tell through which call,
              so all that were in flight are called again one by one
"""

import queue
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from braidrl.config import RewardConfig
from braidrl.rewards.process import WorkerProcess
from braidrl.rewards.verifier import Verifier
from braidrl.rewards.worker import Message, receive

MOST_IN_FLIGHT = 64
"""Calls of one async verifier at a time; for fewer it may hold an asyncio.Semaphore, since they share an event loop."""
STUCK_AFTER_S = 1.0
"""How much later than its limit an async call may answer before its event loop counts as blocked."""
REASONS = ("timeout", "exception", "died", "result")
"""Why a check may have failed."""
KILLED = tuple(f"killed by signal {number:d}" for number in (signal.SIGKILL, signal.SIGTERM))
"""How a process ends that somebody else has ended; the call that it was at is made once more."""
SUPERVISION_S = 2.0
"""How much longer than its limits a call may take in the sandbox until its worker counts as stuck."""
TICK_S = 0.02
"""How long a concurrent lane waits for answers before it looks for new calls."""


@dataclass(frozen=True)
class CallOutcome:
    """One verifier's result for one completion. `score` or `correct` is None where it left that open."""

    score: float | None = None
    correct: bool | None = None
    failure: str | None = None
    """timeout, exception, died, or result when it returned something else; there is no score then."""
    detail: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers of the verifier's own for the run's metrics."""

    @staticmethod
    def of(message: Message, max_abs: float) -> "CallOutcome":
        """Return a worker's answer, in which nothing is believed; a score further from 0 than `max_abs` is a failure."""
        score, correct, failure = (message.get(name) for name in ("score", "correct", "failure"))
        if failure is not None:
            return CallOutcome(
                failure=failure if failure in REASONS else "result", detail=str(message.get("detail"))[:600]
            )
        if correct not in (None, True, False) or isinstance(score, bool) or not isinstance(score, int | float | None):
            return CallOutcome(failure="result", detail="its process gave an answer that is none")
        if score is not None and not abs(score) <= max_abs:
            return CallOutcome(
                failure="result", detail=f"returned {str(score)[:20]}, and reward.max_abs is {max_abs:g}"
            )
        metrics = message.get("metrics", {})
        if not isinstance(metrics, dict) or not all(isinstance(value, int | float) for value in metrics.values()):
            return CallOutcome(failure="result", detail="its metrics are no numbers by name")
        return CallOutcome(score, correct, metrics=metrics)


@dataclass(eq=False)
class Call:
    """A check that was submitted."""

    number: int
    verifier: Verifier
    message: bytes
    """The request to the worker."""
    max_abs: float
    """A score further from 0 is a failure."""
    future: Future[CallOutcome] = field(default_factory=Future)

    def answer(self, message: Message) -> None:
        """Resolve the future with the worker's answer."""
        self.future.set_result(CallOutcome.of(message, self.max_abs))

    def abandon(self) -> None:
        self.future.set_exception(CancelledError("the reward pool was closed before this check ended"))


Calls = queue.SimpleQueue[Call | None]


class Lane(ABC):
    """A thread that owns at most one worker process."""

    def __init__(self, calls: Calls, settings: RewardConfig) -> None:
        self.calls, self.settings = calls, settings
        self.timeout_s = settings.timeout_s
        self.closing = threading.Event()
        self._process: WorkerProcess | None = None
        self._lock = threading.Lock()
        # A daemon, so that a run which forgets to close can end; its workers then end with the pipe.
        self.thread = threading.Thread(target=self._run, name="rewards", daemon=True)
        self.thread.start()

    @abstractmethod
    def _serve(self) -> None:
        """Take and answer calls until `closing` is set."""

    def _run(self) -> None:
        try:
            self._serve()
        finally:
            self._drop_process()

    def stop(self) -> None:
        """Tell the thread to end, without waiting; the current call of its process is cut short."""
        with self._lock:
            self.closing.set()
            if self._process is not None:
                self._process.signal()
        self.calls.put(None)

    def abandon_queued(self) -> None:
        """Cancel the calls that the thread never took, after it has ended."""
        while not self.calls.empty():
            call = self.calls.get()
            if call is not None:
                call.abandon()

    def _ready_process(self) -> WorkerProcess:
        with self._lock:
            if self.closing.is_set():
                raise EOFError("the reward pool is closing")
            if self._process is None:
                self._process = WorkerProcess(self.settings)
            return self._process

    def _drop_process(self) -> str:
        """End the process, if there is one, and say how it ended."""
        with self._lock:
            if self._process is None:
                return "no process could be started"
            status = self._process.kill()
            self._process = None
        return f"killed by signal {-status}" if status < 0 else f"exit status {status}"


class OneByOne(Lane):
    """Shares its queue with others of its kind."""

    def _serve(self) -> None:
        while (call := self.calls.get()) is not None and not self.closing.is_set():
            try:
                answer = self._answer(call)
            except Exception as error:  # no failure of the verifier's, but of ours: whoever waits gets it
                call.future.set_exception(error)
                continue
            if self.closing.is_set():
                call.abandon()
            else:
                call.answer(answer)
        if call is not None:
            call.abandon()

    def _answer(self, call: Call, tries: int = 2) -> Message:
        # In a sandbox the worker watches the call itself, and may make it twice: a longer silence is the worker's own.
        supervised = self.settings.sandbox != "none" and not call.verifier.trusted
        limit_s = 2 * self.timeout_s + SUPERVISION_S if supervised else self.timeout_s
        try:
            process = self._ready_process()
            failed = process.load(call.verifier)
            return failed or process.ask(call.message, limit_s)
        except TimeoutError as error:
            self._drop_process()
            if supervised and tries > 1:
                return self._answer(call, tries - 1)
            return {"failure": "timeout", "detail": str(error)}
        except (EOFError, OSError) as error:
            how = self._drop_process()
            if how in KILLED and tries > 1 and not self.closing.is_set():
                return self._answer(call, tries - 1)
            return {"failure": "died", "detail": f"the verifier's process died: {how} {error}".strip()}


class Concurrent(Lane):
    """Has a queue of its own, for one async verifier."""

    def __init__(self, verifier: Verifier, alone: Calls, settings: RewardConfig) -> None:
        self.verifier = verifier
        self.alone = alone
        self.in_flight: dict[int, tuple[Call, float]] = {}
        super().__init__(queue.SimpleQueue(), settings)

    def _serve(self) -> None:
        while not self.closing.is_set():
            try:
                self._admit()
                self._collect()
            except (EOFError, OSError):
                self._drop_process()
                while self.in_flight and not self.closing.is_set():
                    self.alone.put(self.in_flight.popitem()[1][0])
            except Exception as error:  # no failure of the verifier's, but of ours: whoever waits gets it
                self._drop_process()
                while self.in_flight:
                    self.in_flight.popitem()[1][0].future.set_exception(error)
        for call, _ in self.in_flight.values():
            call.abandon()

    def _admit(self) -> None:
        """Send what is queued, as far as there is room; wait if nothing is in flight."""
        while len(self.in_flight) < MOST_IN_FLIGHT:
            try:
                call = self.calls.get(block=not self.in_flight)
            except queue.Empty:
                return
            if call is None:
                return
            self.in_flight[call.number] = (call, float("inf"))
            process = self._ready_process()
            failed = process.load(self.verifier, concurrent=True)
            if failed:
                del self.in_flight[call.number]
                call.answer(failed)
                continue
            process.connection.send_bytes(call.message)
            self.in_flight[call.number] = (call, time.monotonic() + self.timeout_s + STUCK_AFTER_S)

    def _collect(self) -> None:
        """Resolve one answer. Raises TimeoutError when an answer is overdue."""
        if not self.in_flight:
            return
        connection = self._ready_process().connection
        if connection.poll(TICK_S):
            message = receive(connection)
            call, _ = self.in_flight.pop(message["call"])
            call.answer(message)
        elif any(time.monotonic() > deadline for _, deadline in self.in_flight.values()):
            raise TimeoutError
