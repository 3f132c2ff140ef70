"""Request handling: immediate answers, parked and repeated requests, and the holders of leases.

receive ──▶ handle ──▶ on_take, on_done, on_renew, ... ──▶ answer      the last answer to each sender is kept, for repetitions
              └── Wait(key) ──▶ parked[key] ──wake(key)──▶ handle again, the oldest first, until one must stay parked

`Parking` has neither sockets nor a clock; `QueueController` is the common base of streaming's control plane and a task's controller.
"""

import math
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from braidrl.data.frames import Frame
from braidrl.queue.tasks import Tasks

Answer = tuple[dict[str, Any], Sequence[Frame]]
REMEMBERED = 4096
"""Number of senders whose last answer is kept."""
ASLEEP_S = 2.0
"""A process that has not read the clock for this many seconds was stopped, or its machine was."""
LOOK_EVERY_S = 0.1
"""Tolerance in seconds for the time limits of parked requests."""


class Wait(NamedTuple):
    """The result of a handler that parks a request until `wake` is called with this key; None is any change."""

    key: Hashable = None
    limited: bool = True
    """True if the sender's time limit applies, False without a limit."""


Handler = Callable[[dict[str, Any], Sequence[Frame]], Answer | Wait]
Send = Callable[[bytes, int, Answer], None]
"""Sends the answer to a sender's request, by its number."""


class Parked(NamedTuple):
    """A parked request, and its deadline."""

    number: int
    request: dict[str, Any]
    until: float


class Parking:
    """The requests of all senders, each of which waits for one answer at a time."""

    def __init__(self, handle: Handler, send: Send, remembers: bool = True) -> None:
        """Start empty; `remembers` keeps answers for repetitions, which is not needed if handling twice does no harm."""
        self._handle, self._send, self._remembers = handle, send, remembers
        self._parked: dict[Hashable, dict[bytes, Parked]] = {None: {}}
        self._key_of: dict[bytes, Hashable] = {}
        self._woken: dict[Hashable, None] = {}
        self._answered: OrderedDict[bytes, tuple[int, Answer]] = OrderedDict()
        self._look_at = 0.0

    @property
    def is_woken(self) -> bool:
        """Return True if some parked requests must be retried."""
        return bool(self._woken)

    def wake(self, key: Hashable) -> None:
        """Retry requests that wait for a key."""
        self._woken[key] = None

    def receive(self, sender: bytes, number: int, request: dict[str, Any], frames: Sequence[Frame], now: float) -> None:
        """Answer a request or park it. A repetition gets the same answer, or stays parked."""
        last = self._answered.get(sender)
        if last is not None and last[0] == number:
            self._send(sender, number, last[1])
            return
        known = self._parked.get(self._key_of.get(sender), {}).get(sender)
        if known is None or known.number != number:
            self._forget(sender)
            self._attempt(sender, Parked(number, request, now + float(request.get("wait_s", 0.0))), frames, now)

    def ask_parked(self, now: float) -> None:
        """Retry woken requests and those that wait for any change; answer those whose time limit is over."""
        woken, self._woken = self._woken, {}
        for key in dict.fromkeys([*woken, None]):
            for sender, parked in list(self._parked.get(key, {}).items()):
                self._attempt(sender, parked, (), now)
                # Later requests for the same key would not be answered either.
                if key is not None and self._key_of.get(sender) == key:
                    break
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            late = [(s, p.number) for many in self._parked.values() for s, p in many.items() if p.until <= now]
            for sender, number in late:
                self._answer(sender, number, ({"waited": True}, ()))

    def _attempt(self, sender: bytes, parked: Parked, frames: Sequence[Frame], now: float) -> None:
        """Call the handler, and park the request if the handler says so."""
        try:
            answer = self._handle(parked.request, frames)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}, ()
        if isinstance(answer, Wait):
            self._park(sender, parked, answer, now)
        else:
            self._answer(sender, parked.number, answer)

    def _park(self, sender: bytes, parked: Parked, wait: Wait, now: float) -> None:
        parked.request["parked"] = True
        if sender not in self._key_of or self._key_of[sender] != wait.key:
            self._forget(sender)
            self._key_of[sender] = wait.key
            until = parked.until if wait.limited else math.inf
            self._parked.setdefault(wait.key, {})[sender] = parked._replace(until=until)
            if until <= now:
                self._look_at = now

    def _answer(self, sender: bytes, number: int, answer: Answer) -> None:
        self._forget(sender)
        if self._remembers:
            self._answered[sender] = (number, answer)
            self._answered.move_to_end(sender)
            if len(self._answered) > REMEMBERED:
                self._answered.popitem(last=False)
        self._send(sender, number, answer)

    def _forget(self, sender: bytes) -> None:
        """Drop a parked request."""
        if sender in self._key_of:
            key = self._key_of.pop(sender)
            del self._parked[key][sender]
            if not self._parked[key] and key is not None:
                del self._parked[key]


@dataclass
class Holder:
    """A process that takes rows."""

    name: str
    address: str
    """Address of its node's server."""
    heard: float
    """Time of its last request."""


class AwakeClock:
    """Seconds of a clock that skips times when this process was stopped and could not receive heartbeats.

    For a server's thread, which reads it several times a second.
    """

    def __init__(self, asked: Callable[[], float] = time.monotonic) -> None:
        self._asked, self._last, self._slept = asked, asked(), 0.0

    def __call__(self) -> float:
        now = self._asked()
        if now - self._last > ASLEEP_S:
            self._slept += now - self._last
        self._last = now
        return now - self._slept


class QueueController(ABC):
    """Answers requests. Thread-safe: one lock guards everything."""

    holders: Mapping[str, Any]

    def __init__(self, lease_s: float, clock: Callable[[], float] | None = None) -> None:
        """Start without holders; a lease lasts `lease_s` seconds of the clock without a heartbeat."""
        self.lease_s, self.clock = lease_s, clock or AwakeClock()
        self.stopping = False
        self.changes = 0
        """Number of changes, for threads of this process that wait for one."""
        self.changed = threading.Condition(threading.RLock())

    @property
    @abstractmethod
    def queues(self) -> Collection[Tasks]:
        """Return the task controllers of this controller."""

    def advance(self) -> None:
        """Make all decisions possible now; called after every request that changes something."""
        self.changes += 1
        self.changed.notify_all()

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Answer one request, or park it. Raises ValueError for an unknown request."""
        handler = handler_of(self, request)
        with self.changed:
            if request.get("holder") in self.holders and not request.get("parked"):
                self.holders[request["holder"]].heard = self.clock()
            answer = handler(request, frames)
            if request["request"] != "take":
                self.advance()
        return answer

    def on_renew(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Extend the leases of a slow holder that sends heartbeats, except expired ones."""
        now = self.clock()
        self.tick()
        for tasks in self.queues:
            for lease in tasks.leases.of(request["holder"]):
                tasks.leases.renew(lease.number, now, max(self.lease_s, lease.deadline - now))
        return {"lost": self.lost(request["held"])}, ()

    def on_give_back(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Release leases whose holder cannot use them."""
        for tasks in self.queues:
            held = tasks.leases.held
            tasks.give_up([held[number] for number in request["leases"] if number in held])
        return {}, ()

    def lost(self, held: Sequence[int]) -> list[int]:
        """Return those leases that are no longer held."""
        return [number for number in held if not any(number in tasks.leases.held for tasks in self.queues)]

    def silent(self, seconds: float) -> list[str]:
        """Return holders without any request for this many seconds: they hang, since working and waiting ones send heartbeats."""
        now = self.clock()
        with self.changed:
            return [name for name, holder in self.holders.items() if now - holder.heard > seconds]

    def tick(self) -> None:
        """Release expired leases."""
        now = self.clock()
        with self.changed:
            for tasks in self.queues:
                tasks.give_up(tasks.leases.expired(now))

    def wait(self, seen: int, seconds: float) -> int:
        """Wait until there are more changes than `seen`, or until the time limit; return their number."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes != seen, seconds)
            return self.changes


def handler_of(answering: object, request: Mapping[str, Any]) -> Callable[..., Answer | Wait]:
    """Return the method `on_<request>` of an object. Raises ValueError if it is missing."""
    handler: Callable[..., Answer | Wait] | None = getattr(answering, f"on_{request['request']}", None)
    if handler is None:
        raise ValueError(f"there is no request {request['request']!r}")
    return handler
