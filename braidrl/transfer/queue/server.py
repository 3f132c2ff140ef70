"""The answering end of the queue's sockets: one thread, which takes requests in, and may ask other servers.

router ──request──▶ parking: handle, wait, wake ──▶ answer
                      └── calls.ask ──▶ another server ──▶ then(answer)

Nothing is unpickled. What is no request costs its sender the right to be read.
"""

import contextlib
import threading
import time
import traceback
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import zmq

from braidrl.data.frames import Frame
from braidrl.transfer.queue.parking import Handler, Parking
from braidrl.transfer.queue.transport import Answer, asking_socket, key_pair, pack, send, unpack

TICK_S = 0.1
"""How late an expired lease or a reader's limit may be noticed."""
REQUEST_BYTES = 1 << 28
"""Whoever sends a larger frame loses the connection: requests name rows and say where payload lies, and hold none."""
REFUSED = 1024
"""How many senders of malformed messages are remembered."""
FRAMES = 4096
"""A message of more frames is malformed."""
CALL_AGAIN_S = 0.2
"""How long one server waits for another before it repeats what it asked: it is soon known who was started again."""
AT_ONCE = 100
"""How many requests are taken in before those that wait are looked at again."""


class Server(Protocol):
    """What those that answer may ask of their server."""

    @property
    def calls(self) -> "Calling":
        """Return what asks other servers."""

    def wake(self, key: Hashable) -> None:
        """Have requests asked again that wait for a key."""


class Calling(Protocol):
    """Requests to other servers."""

    def ask(
        self, line: Hashable, address: str, request: dict[str, Any], frames: Sequence[Frame],
        then: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """Send a request; `then` is given its answer."""


class QueueServer:
    """Serves `handle` on an address of this machine until it is closed."""

    def __init__(
        self, handle: Handler, tick: Callable[[], None] | None = None, address: str = "tcp://127.0.0.1:*",
        secret: str | None = None, remembers: bool = True, begin: Callable[[Server], None] | None = None,
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
        self._tick, self._begin = tick, begin
        self._parking = Parking(handle, self._send, remembers)
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, REQUEST_BYTES)
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
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        """Senders of malformed messages, the last ones."""
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="queue-server", daemon=True)
        self._thread.start()

    def wake(self, key: Hashable) -> None:
        """Have requests asked again that wait for a key; from the server's own thread."""
        self._parking.wake(key)

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
                ready = dict(poller.poll(0 if self._parking.is_woken else round(TICK_S * 1000)))
                while self._inside in ready and self._inside.poll(0):
                    self._inside.recv()
                if self._router in ready:
                    self._take_in()
                self.calls.receive(ready)
                if self._tick is not None:
                    self._tick()
                self._parking.ask_parked(time.monotonic())
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
            number, _ = int(request["number"]), float(request.get("wait_s", 0.0))
            if len(frames) > FRAMES or not isinstance(request["request"], str):
                raise ValueError("no request")
        except (ValueError, TypeError, LookupError, RecursionError):
            # Not from one of ours: it has no number to answer to, and nothing that it sends is read any more.
            self._refused[sender] = None
            if len(self._refused) > REFUSED:
                self._refused.popitem(last=False)
            return
        self._parking.receive(sender, number, request, frames[1:], time.monotonic())

    def _send(self, sender: bytes, number: int, answer: Answer) -> None:
        self._router.send_multipart([sender, pack({**answer[0], "number": number}), *answer[1]], copy=False)


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
        send(self._lines[line], message)

    def receive(self, ready: dict[Any, int]) -> None:
        """Take in answers, and repeat what has waited too long for one."""
        for line, socket in list(self._lines.items()):
            while socket in ready and socket.poll(0):
                answer = unpack(socket.recv_multipart(copy=False)[0].buffer)
                if line in self._open and answer.pop("number") == self._open[line][0]:
                    self._open.pop(line)[2](answer)
        now = time.monotonic()
        for line, (number, message, then, sent) in list(self._open.items()):
            if now - sent > CALL_AGAIN_S:
                self._open[line] = (number, message, then, now)
                send(self._lines[line], message)

    def close(self) -> None:
        """Close all lines."""
        for socket in self._lines.values():
            socket.close()
