"""Requests between a queue's own processes, sent without waiting from the threads that serve them.

server ──calls.ask──▶ another server ──▶ then(answer)      repeated until answered, one at a time on each line
"""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import zmq

from braidrl.data.frames import Frame
from braidrl.data.messages import pack_message
from braidrl.queue.requests import Handler
from braidrl.queue.transport import QueueServer, asking_socket, send, unpack

CALL_AGAIN_S = 0.2
"""Seconds before an unanswered request between servers is repeated; short, so that a restarted server is found soon."""


class Server(Protocol):
    """The parts of a server that its handlers use."""

    @property
    def calls(self) -> "Calling":
        """Return the requests to other servers."""

    def wake(self, key: Hashable) -> None:
        """Retry requests that wait for a key."""


class Calling(Protocol):
    """Requests to other servers."""

    def ask(
        self, line: Hashable, address: str, request: dict[str, Any], frames: Sequence[Frame],
        then: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """Send a request; `then` receives its answer."""


class Calls:
    """Requests of a server's thread to other servers, without waiting. One at a time on each line, repeated until answered."""

    def __init__(self, poller: zmq.Poller, secret: str | None) -> None:
        self._poller, self._secret = poller, secret
        self._context = zmq.Context()
        self._lines: dict[Hashable, zmq.Socket[Any]] = {}
        self._open: dict[Hashable, tuple[int, list[Frame], Callable[[dict[str, Any]], None], float]] = {}
        self._numbers = 0

    def ask(
        self, line: Hashable, address: str, request: dict[str, Any], frames: Sequence[Frame],
        then: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        """Send a request; the server's thread calls `then` with its answer.

        Args:
            line: Name of the conversation; its previous request must have been answered.
            address: Address of the other server.
            request: A map of plain values.
            frames: Raw bytes of the request.
            then: Handler of the answer.
        """
        assert line not in self._open, f"{line} is still waiting for an answer"
        if line not in self._lines:
            self._lines[line] = asking_socket(self._context, address, self._secret)
            self._poller.register(self._lines[line], zmq.POLLIN)
        self._numbers += 1
        message = [pack_message({**request, "number": self._numbers}), *frames]
        self._open[line] = (self._numbers, message, then, time.monotonic())
        send(self._lines[line], message)

    def receive(self, ready: dict[Any, int]) -> None:
        """Read answers, and repeat overdue requests."""
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
        self._context.term()


class CallingServer(QueueServer):
    """A server whose thread also sends requests to others."""

    def __init__(
        self, handle: Handler, tick: Callable[[], None] | None, address: str, secret: str | None,
        begin: Callable[[Server], None],
    ) -> None:  # fmt: skip
        """Serve as `QueueServer` does; the thread calls `begin` first."""
        self._begin, self._secret = begin, secret
        super().__init__(handle, tick, address, secret)

    def begin(self) -> None:
        """Pass the server to its handlers."""
        self.calls = Calls(self.poller, self._secret)
        self._begin(self)

    def receive(self, ready: dict[Any, int]) -> None:
        """Read answers."""
        self.calls.receive(ready)

    def end(self) -> None:
        """Close all lines."""
        self.calls.close()
