"""Who answers requests about rows: by methods `on_<request>`, under one lock, knowing who takes rows and which leases it has.

request ──▶ handle ──▶ on_take, on_done, on_renew, ... ──▶ answer, or Wait        after what changes something: advance
"""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.data.frames import Frame
from braidrl.transfer.queue.parking import Wait
from braidrl.transfer.queue.tasks import Tasks
from braidrl.transfer.queue.transport import Answer


@dataclass
class Holder:
    """A process that takes rows."""

    name: str
    address: str
    """Of its node's server."""
    heard: float
    """When it last asked for anything."""


class QueueController(ABC):
    """Answers requests. May be called by several threads: one lock guards all of it."""

    holders: Mapping[str, Any]

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin without holders; a lease lasts `lease_s` seconds of the clock without a sign of life."""
        self.lease_s, self.clock = lease_s, clock
        self.stopping = False
        self.changes = 0
        """Counts what may interest whoever waits in this process."""
        self.changed = threading.Condition(threading.RLock())

    @property
    @abstractmethod
    def queues(self) -> Collection[Tasks]:
        """Return the tasks of everything that this controller hands out."""

    def advance(self) -> None:
        """Decide what can be decided now; called after every request that changes something."""
        self.changes += 1
        self.changed.notify_all()

    def handle(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer | Wait:
        """Answer one request, or let its sender wait. Raises ValueError for a request that there is none of."""
        handler = handler_of(self, request)
        with self.changed:
            if request.get("holder") in self.holders and not request.get("parked"):
                self.holders[request["holder"]].heard = self.clock()
            answer = handler(request, frames)
            if request["request"] != "take":
                self.advance()
        return answer

    def on_renew(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Note that a holder is alive and slow: what it holds stays its own, but for what has run out already."""
        now = self.clock()
        self.tick()
        for tasks in self.queues:
            for lease in tasks.leases.of(request["holder"]):
                tasks.leases.renew(lease.number, now, max(self.lease_s, lease.deadline - now))
        return {"lost": self.lost(request["held"])}, ()

    def lost(self, held: Sequence[int]) -> list[int]:
        """Return those of the leases that are not held any more."""
        return [number for number in held if not any(number in tasks.leases.held for tasks in self.queues)]

    def silent(self, seconds: float) -> list[str]:
        """Return holders that have said nothing for so long: they hang, for one that works or waits speaks up now and then."""
        now = self.clock()
        with self.changed:
            return [name for name, holder in self.holders.items() if now - holder.heard > seconds]

    def tick(self) -> None:
        """Free what has been held for too long."""
        now = self.clock()
        with self.changed:
            for tasks in self.queues:
                tasks.give_up(tasks.leases.expired(now))

    def wait(self, seen: int, seconds: float) -> int:
        """Wait until there are more changes than `seen`, or for so long; return how many there are."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes != seen, seconds)
            return self.changes


def handler_of(answering: object, request: Mapping[str, Any]) -> Callable[..., Answer | Wait]:
    """Return the method `on_<request>` of an object. Raises ValueError where there is none."""
    handler: Callable[..., Answer | Wait] | None = getattr(answering, f"on_{request['request']}", None)
    if handler is None:
        raise ValueError(f"there is no request {request['request']!r}")
    return handler
