"""What travels between queue and workers: a msgpack map, then raw frames. Nothing is unpickled; every request gets one answer."""

from __future__ import annotations

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

    def close(self) -> None:
        self._socket.close()
        self._context.term()
