"""Verifiers in processes of their own, beside generation. One that raises, hangs or dies costs its own check and no other.

submit ──> one queue ────────────────────> `processes` lanes: a thread and a process each, one call at a time
   ├─────> a queue per async verifier ───> one lane: a thread and a process, many calls at a time
   └─────> with no processes ────────────> called here and now, for a debugger
"""

import itertools
import queue
import threading
from concurrent.futures import Future
from contextlib import AbstractContextManager

from braidrl.cluster.process import END_LIMIT_S
from braidrl.config import RewardConfig
from braidrl.rewards.lanes import Call, CallOutcome, Calls, Concurrent, Lane, OneByOne
from braidrl.rewards.requirements import check_requirements
from braidrl.rewards.verifier import Completion, Verifier
from braidrl.rewards.worker import call_here, encode


class RewardPool(AbstractContextManager["RewardPool"]):
    """Calls verifiers in as many processes as the settings say, and one more for each async verifier.

    Processes start when first needed. Closing, or leaving the `with` block in any way, leaves none behind.
    """

    def __init__(self, settings: RewardConfig) -> None:
        self.settings = settings
        self._alone: Calls = queue.SimpleQueue()
        self._lanes: list[Lane] = [OneByOne(self._alone, settings) for _ in range(settings.processes)]
        self._concurrent: dict[str, Concurrent] = {}
        self._checked = set[str]()
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()

    def submit(self, completion: Completion, verifier: Verifier) -> Future[CallOutcome]:
        """Queue a check and return its future, which never raises for what the verifier does, only when the pool is closed first.

        Raises TypeError when the completion is not JSON, RuntimeError after `close`, UserError as
        `check_requirements`.
        """
        with self._lock:
            if verifier.key not in self._checked:
                check_requirements(verifier.name, verifier.settings, self.settings)
                self._checked.add(verifier.key)
            if self._closed:
                raise RuntimeError("the reward pool is closed")
            number = next(self._numbers)
            message = {
                "call": number,
                "key": verifier.key,
                "completion": vars(completion),
                "limit_s": self.settings.timeout_s,
            }
            call = Call(number, verifier, encode(message), self.settings.max_abs)
            call.future.set_running_or_notify_cancel()
            if self.settings.processes or verifier.asynchronous:
                self._queue_of(verifier).put(call)
                return call.future
        call.answer(call_here(verifier, message))
        return call.future

    def _queue_of(self, verifier: Verifier) -> Calls:
        if not verifier.asynchronous:
            return self._alone
        if verifier.key not in self._concurrent:
            # A service is on the network, which bubblewrap takes away; Braid's own runs no code of others.
            open_to = self.settings.model_copy(update={"sandbox": "process"}) if verifier.trusted else self.settings
            lane = Concurrent(verifier, self._alone, open_to)
            self._concurrent[verifier.key] = lane
            self._lanes.append(lane)
        return self._concurrent[verifier.key].calls

    def close(self) -> None:
        """End all processes and wait until they are gone; checks that have not ended raise CancelledError."""
        with self._lock:
            self._closed = True
        for lane in self._lanes:
            lane.stop()
        for lane in self._lanes:
            lane.thread.join(END_LIMIT_S)
        for lane in self._lanes:
            lane.abandon_queued()

    def __exit__(self, *_: object) -> None:
        self.close()
