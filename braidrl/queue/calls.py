"""Requests that a queue's own processes make to one another, without waiting, from the threads that serve them.

server ──calls.ask──▶ another server ──▶ then(answer)      repeated until answered, one at a time on each line
"""

import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import zmq

from braidrl.data.frames import Frame
from braidrl.queue.requests import Handler
from braidrl.queue.transport import QueueServer, asking_socket, pack, send, unpack

CALL_AGAIN_S = 0.2
"""How long one server waits for another before it repeats what it asked: it is soon known who was started again."""


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


class Calls:
    """Requests that a server's thread makes to other servers without waiting. One at a time on each line, repeated until answered."""

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
            self._poller.register(self._lines[line], zmq.POLLIN)
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
        self._context.term()


class CallingServer(QueueServer):
    """A server whose thread also asks others."""

    def __init__(
        self, handle: Handler, tick: Callable[[], None] | None, address: str, secret: str | None,
        begin: Callable[[Server], None],
    ) -> None:  # fmt: skip
        """Serve as `QueueServer` does; the thread calls `begin` first."""
        self._begin, self._secret = begin, secret
        super().__init__(handle, tick, address, secret)

    def begin(self) -> None:
        """Let those that answer know their server."""
        self.calls = Calls(self.poller, self._secret)
        self._begin(self)

    def receive(self, ready: dict[Any, int]) -> None:
        """Take in answers."""
        self.calls.receive(ready)

    def end(self) -> None:
        """Close all lines."""
        self.calls.close()
