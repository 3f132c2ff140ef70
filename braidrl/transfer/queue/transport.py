"""Both ends of the queue's sockets: a msgpack map, then raw frames. Nothing is unpickled; every request gets one answer.

           ┌───────────── request ────────────▶ handle ──▶ answer at once
client ────┤                                      └── None ──▶ parked ──▶ asked again after every change ──▶ answer
           └◀──── {"waited": true} once it has waited as long as it said
"""

from __future__ import annotations

import contextlib
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import zmq

from braidrl.data.frames import Frame

Answer = tuple[dict[str, Any], Sequence[Frame]]
Handler = Callable[[dict[str, Any], Sequence[Frame]], Answer | None]
"""Answers a request, or says by None that its sender has to wait."""
TICK_S = 0.1
"""How late an expired lease or a reader's limit may be noticed."""
FRAME_BYTES = 1 << 31
"""A sender of a larger frame loses its connection."""
REFUSED = 1024
"""How many senders of malformed messages are remembered."""


class QueueError(RuntimeError):
    """The queue refused a request; the text is the queue's."""


class QueueTimeout(TimeoutError):
    """The queue did not answer."""


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as one frame."""
    packed: bytes = msgpack.packb(dict(message))
    return packed


def unpack(frame: Frame) -> dict[str, Any]:
    """Return the message in a frame. Raises ValueError for bytes that are no map."""
    message = msgpack.unpackb(frame, strict_map_key=False)
    if not isinstance(message, dict):
        raise ValueError(f"a message is a map, not {type(message).__name__}")
    return message


class Connection:
    """One side of a conversation in which each request waits for its answer. For one thread at a time."""

    def __init__(self, address: str, limit_s: float) -> None:
        self.address, self.limit_s = address, limit_s
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        # What is told to a server that is gone must not block whoever tells it.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.connect(address)
        self._number = 0

    def ask(self, request: Mapping[str, Any], frames: Sequence[Frame] = (), wait_s: float = 0.0) -> Answer:
        """Send a request and return its answer.

        Args:
            request: a map of plain values.
            frames: raw bytes that go with it.
            wait_s: how long the server may park it, in seconds, beyond the connection's own limit.

        Raises:
            QueueError: the request was refused.
            QueueTimeout: nothing came within the limits.
        """
        self._number += 1
        self._socket.send_multipart([pack({**request, "number": self._number}), *frames], copy=False)
        limit = self.limit_s + wait_s
        while self._socket.poll(round(limit * 1000)):
            first, *rest = self._socket.recv_multipart(copy=False)
            answer = unpack(first.buffer)
            # An answer to a request that was given up on is not this one's.
            if answer.pop("number") == self._number:
                if "error" in answer:
                    raise QueueError(answer["error"])
                return answer, [frame.buffer for frame in rest]
        raise QueueTimeout(f"{self.address} did not answer {request['request']!r} within {limit:g} s")

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request whose answer nobody waits for."""
        while self._socket.poll(0):
            self._socket.recv_multipart(copy=False)
        self._number += 1
        self._socket.send_multipart([pack({**request, "number": self._number})])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()


class Peers:
    """Connections to several servers, each made when it is needed first. For several threads, which take turns."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def ask(self, address: str, request: Mapping[str, Any]) -> Answer:
        """Ask as `Connection.ask` does."""
        with self._lock:
            return self._to(address).ask(request)

    def tell(self, address: str, request: Mapping[str, Any]) -> None:
        """Tell as `Connection.tell` does."""
        with self._lock:
            self._to(address).tell(request)

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            while self._connections:
                self._connections.popitem()[1].close()

    def _to(self, address: str) -> Connection:
        if address not in self._connections:
            self._connections[address] = Connection(address, self.limit_s)
        return self._connections[address]


class Parked(NamedTuple):
    """A reader that waits, and until when."""

    sender: bytes
    request: dict[str, Any]
    until: float


class QueueServer:
    """Serves `handle` on an address of this machine until it is closed."""

    def __init__(
        self, handle: Handler, tick: Callable[[], None] | None = None, address: str = "tcp://127.0.0.1:*"
    ) -> None:
        """Serve from a thread; `tick` is called several times a second. Raises zmq.ZMQError where the address cannot be bound."""
        self._handle, self._tick = handle, tick
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
        self._router.bind(address)
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._inside = self._context.socket(zmq.PULL)
        self._inside.bind("inproc://changed")
        self._outside = self._context.socket(zmq.PUSH)
        self._outside.connect("inproc://changed")
        self._outside_lock = threading.Lock()
        self._parked: list[Parked] = []
        self._refused: dict[bytes, None] = {}
        """Senders of malformed messages, the last ones."""
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="queue-server", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Have parked readers asked again; for changes that came by other ways than a request."""
        # Not waited for: the thread may have ended, or has more to read already than it needs to wake up.
        with self._outside_lock, contextlib.suppress(zmq.Again):
            self._outside.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """End the thread and free the port."""
        self._closing = True
        self.changed()
        self._thread.join()
        self._outside.close()
        self._context.term()

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._inside, zmq.POLLIN)
        try:
            while not self._closing:
                ready = dict(poller.poll(round(TICK_S * 1000)))
                while self._inside in ready and self._inside.poll(0):
                    self._inside.recv()
                # All that has come is taken in before readers are asked again, which may be many.
                for _ in range(100):
                    if not self._router.poll(0):
                        break
                    self._receive()
                if self._tick is not None:
                    self._tick()
                self._ask_parked()
        except Exception:
            self.failure = traceback.format_exc()
        finally:
            self._router.close()
            self._inside.close()

    def _receive(self) -> None:
        sender, *frames = (frame.buffer for frame in self._router.recv_multipart(copy=False))
        name = bytes(sender)
        if name in self._refused:
            return
        try:
            request = unpack(frames[0])
            until = time.monotonic() + float(request.get("wait_s", 0.0))
            number = int(request["number"])
        except (ValueError, TypeError, LookupError):
            # Not from one of ours: it has no number to answer to, and nothing that it sends is read any more.
            self._refused[name] = None
            while len(self._refused) > REFUSED:
                self._refused.pop(next(iter(self._refused)))
            return
        if not self._attempt(name, {**request, "number": number}, frames[1:]):
            self._parked.append(Parked(name, {**request, "parked": True}, until))

    def _ask_parked(self) -> None:
        waiting, self._parked = self._parked, []
        for parked in waiting:
            if self._attempt(parked.sender, parked.request, []):
                continue
            if time.monotonic() >= parked.until:
                self._answer(parked.sender, parked.request, ({"waited": True}, ()))
            else:
                self._parked.append(parked)

    def _attempt(self, sender: bytes, request: dict[str, Any], frames: Sequence[Frame]) -> bool:
        try:
            answer = self._handle(request, frames)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}, ()
        if answer is not None:
            self._answer(sender, request, answer)
        return answer is not None

    def _answer(self, sender: bytes, request: dict[str, Any], answer: Answer) -> None:
        message, frames = answer
        self._router.send_multipart([sender, pack({**message, "number": request.get("number")}), *frames], copy=False)
