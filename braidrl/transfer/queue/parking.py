"""Requests that are answered, that wait, and that come again: what a server does with them, without sockets and without a clock.

receive ──▶ handle ──▶ answer                 the last answer to each sender is kept, for a request that comes again
              └── Wait(key) ──▶ parked[key] ──wake(key)──▶ handle again, the oldest first, until one must go on waiting
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from braidrl.data.frames import Frame
from braidrl.transfer.queue.transport import Answer

REMEMBERED = 4096
"""Senders whose last answer is kept."""
LOOK_EVERY_S = 0.1
"""How late it may be noticed that a request has waited long enough."""


class Wait(NamedTuple):
    """What a handler says to park a request: until `wake` is called with this key; None is any change."""

    key: Hashable = None
    limited: bool = True
    """Whether it waits as long as its sender said, or as long as it takes."""


Handler = Callable[[dict[str, Any], Sequence[Frame]], Answer | Wait]
Send = Callable[[bytes, int, Answer], None]
"""Gives a sender the answer to its request of this number."""


class Parked(NamedTuple):
    """A request that waits, and until when."""

    number: int
    request: dict[str, Any]
    until: float


class Parking:
    """The requests of all senders, each of which waits for one answer at a time."""

    def __init__(self, handle: Handler, send: Send, remembers: bool = True) -> None:
        """Begin without any; `remembers` is whether answers are kept, which they need not be where handling twice does no harm."""
        self._handle, self._send, self._remembers = handle, send, remembers
        self._parked: dict[Hashable, dict[bytes, Parked]] = {None: {}}
        self._key_of: dict[bytes, Hashable] = {}
        self._woken: dict[Hashable, None] = {}
        self._answered: OrderedDict[bytes, tuple[int, Answer]] = OrderedDict()
        self._look_at = 0.0

    @property
    def is_woken(self) -> bool:
        """Return whether some that wait must be asked again."""
        return bool(self._woken)

    def wake(self, key: Hashable) -> None:
        """Have requests asked again that wait for a key."""
        self._woken[key] = None

    def receive(self, sender: bytes, number: int, request: dict[str, Any], frames: Sequence[Frame], now: float) -> None:
        """Answer a request or park it. One that comes again is given the answer that it was given, or goes on waiting."""
        last = self._answered.get(sender)
        if last is not None and last[0] == number:
            self._send(sender, number, last[1])
            return
        known = self._parked.get(self._key_of.get(sender), {}).get(sender)
        if known is None or known.number != number:
            self._forget(sender)
            self._attempt(sender, Parked(number, request, now + float(request.get("wait_s", 0.0))), frames, now)

    def ask_parked(self, now: float) -> None:
        """Ask again who was woken, or waits for any change; tell those that have waited long enough."""
        woken, self._woken = self._woken, {}
        for key in dict.fromkeys([*woken, None]):
            for sender, parked in list(self._parked.get(key, {}).items()):
                self._attempt(sender, parked, (), now)
                # Who waits longer for the same would not be answered either.
                if key is not None and self._key_of.get(sender) == key:
                    break
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            late = [(s, p.number) for many in self._parked.values() for s, p in many.items() if p.until <= now]
            for sender, number in late:
                self._answer(sender, number, ({"waited": True}, ()))

    def _attempt(self, sender: bytes, parked: Parked, frames: Sequence[Frame], now: float) -> None:
        """Ask the handler, and park the request where it says so."""
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
        """Let a request go that was parked."""
        if sender in self._key_of:
            key = self._key_of.pop(sender)
            del self._parked[key][sender]
            if not self._parked[key] and key is not None:
                del self._parked[key]
