"""What travels between queue and workers: a msgpack map, then raw frames. Nothing is unpickled; every request gets one answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import msgpack
import zmq

from braidrl.data.frames import Frame

Answer = tuple[dict[str, Any], Sequence[Frame]]


class QueueError(RuntimeError):
    """The queue refused a request; the text is the queue's."""


class QueueTimeout(TimeoutError):
    """The queue did not answer."""


def pack(message: Mapping[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(dict(message))
    return packed


def unpack(frame: Frame) -> dict[str, Any]:
    """Raises ValueError for bytes that are no map."""
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
        """The answer. Raises QueueError for a refusal, and QueueTimeout after the limit (and `wait_s`, which a reader parks)."""
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
        """Sends a request whose answer nobody waits for."""
        while self._socket.poll(0):
            self._socket.recv_multipart(copy=False)
        self._number += 1
        self._socket.send_multipart([pack({**request, "number": self._number})])

    def close(self) -> None:
        self._socket.close()
        self._context.term()


class Peers:
    """Connections to several servers, each made when it is needed first. For several threads, which take turns."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._connections: dict[str, Connection] = {}
        self._lock = threading.Lock()

    def ask(self, address: str, request: Mapping[str, Any]) -> Answer:
        """As `Connection.ask`."""
        with self._lock:
            return self._to(address).ask(request)

    def tell(self, address: str, request: Mapping[str, Any]) -> None:
        """As `Connection.tell`."""
        with self._lock:
            self._to(address).tell(request)

    def close(self) -> None:
        with self._lock:
            while self._connections:
                self._connections.popitem()[1].close()

    def _to(self, address: str) -> Connection:
        if address not in self._connections:
            self._connections[address] = Connection(address, self.limit_s)
        return self._connections[address]
