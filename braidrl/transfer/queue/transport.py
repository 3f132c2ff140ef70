"""The asking end of the queue's sockets: a msgpack map, then raw frames; every request gets one answer, and is repeated until it has.

           ┌───────────── request ────────────▶ handle ──▶ answer at once
client ────┤    again after REPEAT_S, same number   └── Wait ──▶ parked until what it waits for has changed ──▶ answer
           └◀──── {"waited": true} once it has waited as long as it said                       (server.py is the other end)
"""

import contextlib
import secrets
import threading
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgpack
import zmq
from zmq.utils import z85

from braidrl.data.frames import Frame

Answer = tuple[dict[str, Any], Sequence[Frame]]
REPEAT_S = 1.0
"""How long a request may be unanswered before it is sent again: its server may have been replaced."""
FRAME_BYTES = 1 << 31
"""A server that answers with a larger frame loses the connection."""


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


def key_pair(secret: str) -> tuple[bytes, bytes]:
    """Return the public and the private CURVE key of everybody who knows a secret."""
    private = z85.encode(blake2b(secret.encode(), digest_size=32, person=b"braid queue").digest())
    return zmq.curve_public(private), private


def asking_socket(context: zmq.Context[Any], address: str, secret: str | None) -> zmq.Socket[Any]:
    """Return a socket that is connected to a server, encrypted where there is a secret."""
    socket = context.socket(zmq.DEALER)
    # By this name a server knows a repeated request, also when it came over another connection.
    socket.setsockopt(zmq.IDENTITY, b"c" + secrets.token_bytes(15))
    socket.setsockopt(zmq.LINGER, 0)
    # What is told to a server that is gone must not block whoever tells it.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
    if secret is not None:
        # The server's public key never travels in the clear: who has it has the secret.
        public, private = key_pair(secret)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = public, public, private
    socket.connect(address)
    return socket


def send(socket: zmq.Socket[Any], message: Sequence[Frame]) -> None:
    """Send a message without waiting. Where no server can be spoken to, as one with another secret, it is dropped: it will be repeated."""
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(message, zmq.NOBLOCK, copy=False)


class Connection:
    """One side of a conversation in which each request waits for its answer. For one thread at a time."""

    def __init__(self, address: str, limit_s: float, secret: str | None = None) -> None:
        self.address, self.limit_s = address, limit_s
        self._context = zmq.Context()
        self._socket = asking_socket(self._context, address, secret)
        self._number = 0

    def ask(self, request: Mapping[str, Any], frames: Sequence[Frame] = (), wait_s: float = 0.0) -> Answer:
        """Send a request, again when nothing comes, and return its answer.

        Args:
            request: a map of plain values.
            frames: raw bytes that go with it.
            wait_s: how long the server may park it, in seconds, beyond the connection's own limit.

        Raises:
            QueueError: the request was refused.
            QueueTimeout: nothing came within the limits.
        """
        self._number += 1
        message, limit = [pack({**request, "number": self._number}), *frames], self.limit_s + wait_s
        until = time.monotonic() + limit
        while (left := until - time.monotonic()) > 0:
            send(self._socket, message)
            if (answer := self._answer(min(left, REPEAT_S))) is not None:
                if "error" in answer[0]:
                    raise QueueError(answer[0]["error"])
                return answer
        raise QueueTimeout(f"{self.address} did not answer {request['request']!r} within {limit:g} s")

    def _answer(self, seconds: float) -> Answer | None:
        until = time.monotonic() + seconds
        while self._socket.poll(max(0, round((until - time.monotonic()) * 1000))):
            first, *rest = self._socket.recv_multipart(copy=False)
            answer = unpack(first.buffer)
            # An answer to a request that was given up on, or the second one to a repeated request, is not this one's.
            if answer.pop("number") == self._number:
                return answer, [frame.buffer for frame in rest]
        return None

    def tell(self, request: Mapping[str, Any]) -> None:
        """Send a request whose answer nobody waits for."""
        while self._socket.poll(0):
            self._socket.recv_multipart(copy=False)
        self._number += 1
        send(self._socket, [pack({**request, "number": self._number})])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()


class Connections:
    """Connections to several servers, made when they are needed. For several threads: each that asks has one for itself meanwhile."""

    def __init__(self, limit_s: float, secret: str | None = None) -> None:
        self.limit_s, self.secret = limit_s, secret
        self._idle: defaultdict[str, deque[Connection]] = defaultdict(deque)
        self._telling = threading.Lock()
        self._told: dict[str, Connection] = {}

    def ask(
        self, address: str, request: Mapping[str, Any], frames: Sequence[Frame] = (), wait_s: float = 0.0
    ) -> Answer:
        """Ask as `Connection.ask` does."""
        try:
            connection = self._idle[address].pop()
        except IndexError:
            connection = Connection(address, self.limit_s, self.secret)
        try:
            return connection.ask(request, frames, wait_s)
        finally:
            self._idle[address].append(connection)

    def tell(self, address: str, request: Mapping[str, Any]) -> None:
        """Tell as `Connection.tell` does, in the order in which it is told."""
        with self._telling:
            if address not in self._told:
                self._told[address] = Connection(address, self.limit_s, self.secret)
            self._told[address].tell(request)

    def close(self) -> None:
        """Close all connections; nobody may be asking."""
        while self._told:
            self._told.popitem()[1].close()
        for idle in self._idle.values():
            while idle:
                idle.pop().close()
