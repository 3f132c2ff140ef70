"""The answering end of the queue's sockets: one thread, which takes requests in, parks those that wait, and may ask other servers.

router ──request──▶ handle ──▶ answer                    the last answer to each sender is kept, for a request that comes again
                      ├── Wait(key) ──▶ parked[key] ──wake(key)──▶ handle, the oldest first, until one must go on waiting
                      └── calls.ask ──▶ another server ──▶ then(answer)

Nothing is unpickled. What is no request costs its sender the right to be read.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import zmq

from braidrl.data.frames import Frame
from braidrl.transfer.queue.transport import FRAME_BYTES, REPEAT_S, Answer, asking_socket, key_pair, pack, unpack


class Wait(NamedTuple):
    """What a handler says to park a request: until `wake` is called with this key; None is any change."""

    key: Hashable = None
    limited: bool = True
    """Whether it waits as long as its sender said, or as long as it takes."""


Handler = Callable[[dict[str, Any], Sequence[Frame]], Answer | Wait]
TICK_S = 0.1
"""How late an expired lease or a reader's limit may be noticed."""
REMEMBERED = 4096
"""Senders whose last answer is kept, and senders of malformed messages."""
FRAMES = 4096
"""A message of more frames is malformed."""
AT_ONCE = 100
"""How many requests are taken in before those that wait are looked at again."""


class Parked(NamedTuple):
    """A request that waits, and until when."""

    number: int
    request: dict[str, Any]
    until: float


class QueueServer:
    """Serves `handle` on an address of this machine until it is closed."""

    def __init__(
        self, handle: Handler, tick: Callable[[], None] | None = None, address: str = "tcp://127.0.0.1:*",
        secret: str | None = None, remembers: bool = True, begin: Callable[[QueueServer], None] | None = None,
    ) -> None:  # fmt: skip
        """Serve from a thread.

        Args:
            handle: answers a request, or says what it waits for.
            tick: called several times a second.
            address: where to listen.
            secret: what everybody must know who connects; None is nothing.
            remembers: keep answers for requests that are repeated; not where every request may be handled twice.
            begin: called by the thread before it serves.

        Raises:
            zmq.ZMQError: the address cannot be bound.
        """
        self._handle, self._tick, self._remembers, self._begin = handle, tick, remembers, begin
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        self._router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if secret is not None:
            self._router.curve_server, self._router.curve_secretkey = True, key_pair(secret)[1]
        self._router.bind(address)
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self.calls = Calls(self._context, secret)
        self._inside = self._context.socket(zmq.PULL)
        self._inside.bind("inproc://changed")
        self._outside = self._context.socket(zmq.PUSH)
        self._outside.connect("inproc://changed")
        self._outside_lock = threading.Lock()
        self._parked: dict[Hashable, dict[bytes, Parked]] = {None: {}}
        self._key_of: dict[bytes, Hashable] = {}
        self._woken: dict[Hashable, None] = {}
        self._answered: OrderedDict[bytes, tuple[int, list[Frame]]] = OrderedDict()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        self._looked = 0.0
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="queue-server", daemon=True)
        self._thread.start()

    def wake(self, key: Hashable) -> None:
        """Have requests asked again that wait for a key; from the server's own thread."""
        self._woken[key] = None

    def changed(self) -> None:
        """Have those asked again that wait for any change; for changes that came by other ways than a request."""
        # Not waited for: the thread may have ended, or has more to read already than it needs to wake up.
        with self._outside_lock, contextlib.suppress(zmq.Again):
            self._outside.send(b"", zmq.NOBLOCK)

    def join(self) -> None:
        """Wait until the thread ends. Raises RuntimeError with its traceback where it has failed."""
        self._thread.join()
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def close(self) -> None:
        """End the thread and free the port."""
        self._closing = True
        self.changed()
        self._thread.join()
        self._outside.close()
        self._context.term()

    def _run(self) -> None:
        poller = self.calls.poller
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._inside, zmq.POLLIN)
        try:
            if self._begin is not None:
                self._begin(self)
            while not self._closing:
                # What was woken by what was woken is looked at before anything else is waited for.
                ready = dict(poller.poll(0 if self._woken else round(TICK_S * 1000)))
                while self._inside in ready and self._inside.poll(0):
                    self._inside.recv()
                if self._router in ready:
                    self._take_in()
                self.calls.receive(ready)
                if self._tick is not None:
                    self._tick()
                self._ask_parked()
        except Exception:
            self.failure = traceback.format_exc()
        finally:
            self._router.close()
            self._inside.close()
            self.calls.close()

    def _take_in(self) -> None:
        """Read what has come before those that wait are asked again, which may be many."""
        with contextlib.suppress(zmq.Again):
            for _ in range(AT_ONCE):
                self._receive(self._router.recv_multipart(zmq.NOBLOCK, copy=False))

    def _receive(self, message: Sequence[zmq.Frame]) -> None:
        sender = message[0].bytes
        if sender in self._refused:
            return
        frames = [frame.buffer for frame in message[1:]]
        try:
            request = unpack(frames[0])
            until = time.monotonic() + float(request.get("wait_s", 0.0))
            number = int(request["number"])
            if len(frames) > FRAMES or not isinstance(request.get("request"), str):
                raise ValueError("no request")
        except (ValueError, TypeError, LookupError, RecursionError):
            # Not from one of ours: it has no number to answer to, and nothing that it sends is read any more.
            keep(self._refused, sender, None)
            return
        last, answer = self._answered.get(sender, (0, []))
        if last == number:
            self._router.send_multipart([sender, *answer], copy=False)
            return
        known = self._parked.get(self._key_of.get(sender), {}).get(sender)
        if known is None or known.number != number:
            self._forget(sender)
            self._attempt(sender, Parked(number, request, until), frames[1:])

    def _ask_parked(self) -> None:
        woken, self._woken = self._woken, {}
        for key in (*woken, None) if None not in woken else woken:
            for sender, parked in list(self._parked.get(key, {}).items()):
                # Who waits longer for the same would not be answered either.
                if not self._attempt(sender, parked, ()) and key is not None:
                    break
        if time.monotonic() - self._looked > TICK_S:
            self._looked = time.monotonic()
            late = [(s, p) for many in self._parked.values() for s, p in many.items() if p.until <= self._looked]
            for sender, parked in late:
                self._answer(sender, parked.number, ({"waited": True}, ()))

    def _attempt(self, sender: bytes, parked: Parked, frames: Sequence[Frame]) -> bool:
        """Ask the handler, and park the request where it says so; return whether the request is answered."""
        try:
            answer = self._handle(parked.request, frames)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}, ()
        if isinstance(answer, Wait):
            self._park(sender, parked, answer)
            return False
        self._answer(sender, parked.number, answer)
        return True

    def _park(self, sender: bytes, parked: Parked, wait: Wait) -> None:
        parked.request["parked"] = True
        if sender not in self._key_of or self._key_of[sender] != wait.key:
            self._forget(sender)
            self._key_of[sender] = wait.key
            until = parked.until if wait.limited else math.inf
            self._parked.setdefault(wait.key, {})[sender] = parked._replace(until=until)
            if until <= time.monotonic():
                self._looked = 0.0

    def _answer(self, sender: bytes, number: int, answer: Answer) -> None:
        self._forget(sender)
        message = [pack({**answer[0], "number": number}), *answer[1]]
        if self._remembers:
            keep(self._answered, sender, (number, message))
        self._router.send_multipart([sender, *message], copy=False)

    def _forget(self, sender: bytes) -> None:
        """Let a request go that was parked."""
        if sender in self._key_of:
            key = self._key_of.pop(sender)
            del self._parked[key][sender]
            if not self._parked[key] and key is not None:
                del self._parked[key]


def keep(known: OrderedDict[bytes, Any], sender: bytes, value: Any) -> None:
    """Remember something of a sender, and forget who was heard the longest time ago where that is too many."""
    known[sender] = value
    known.move_to_end(sender)
    if len(known) > REMEMBERED:
        known.popitem(last=False)


class Calls:
    """Requests that a server's thread makes to other servers without waiting. One at a time on each line, repeated until answered."""

    def __init__(self, context: zmq.Context[Any], secret: str | None) -> None:
        self.poller = zmq.Poller()
        self._context, self._secret = context, secret
        self._lines: dict[Hashable, zmq.Socket[Any]] = {}
        self._open: dict[Hashable, tuple[int, list[Frame], Callable[[dict[str, Any]], None], float]] = {}
        self._numbers = 0

    def ask(
        self, line: Hashable, address: str, request: dict[str, Any], frames: Sequence[Frame],
        then: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """Send a request; `then` is given its answer by the server's thread.

        Args:
            line: names the conversation; the last request on it must have been answered.
            address: the other server's.
            request: a map of plain values.
            frames: raw bytes that go with it.
            then: what to do with the answer.
        """
        assert line not in self._open, f"{line} is still waiting for an answer"
        if line not in self._lines:
            self._lines[line] = asking_socket(self._context, address, self._secret)
            self.poller.register(self._lines[line], zmq.POLLIN)
        self._numbers += 1
        message = [pack({**request, "number": self._numbers}), *frames]
        self._open[line] = (self._numbers, message, then, time.monotonic())
        self._lines[line].send_multipart(message, copy=False)

    def receive(self, ready: dict[Any, int]) -> None:
        """Take in answers, and repeat what has waited too long for one."""
        for line, socket in list(self._lines.items()):
            while socket in ready and socket.poll(0):
                answer = unpack(socket.recv_multipart(copy=False)[0].buffer)
                if line in self._open and answer.pop("number") == self._open[line][0]:
                    self._open.pop(line)[2](answer)
        now = time.monotonic()
        for line, (number, message, then, sent) in list(self._open.items()):
            if now - sent > REPEAT_S:
                self._open[line] = (number, message, then, now)
                self._lines[line].send_multipart(message, copy=False)

    def close(self) -> None:
        """Close all lines."""
        for socket in self._lines.values():
            socket.close()
