"""One thread that owns a ROUTER socket: receives requests, answers each once, parks readers that have nothing to do yet.

           ┌───────────── request ────────────▶ handle ──▶ answer at once
worker ────┤                                      └── None ──▶ parked ──▶ asked again after every change ──▶ answer
           └◀──── {"waited": true} once it has waited as long as it said
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import zmq

from braidrl.data.frames import Frame
from braidrl.transfer.queue.messages import Answer, pack, unpack

Handler = Callable[[dict[str, Any], list[Frame]], Answer | None]
"""Answers a request, or says by None that its sender has to wait."""
TICK_S = 0.1
"""How late an expired lease or a reader's limit may be noticed."""


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
        """`tick` is called several times a second. Raises zmq.ZMQError where the address cannot be bound."""
        self._handle, self._tick = handle, tick
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(address)
        self.address: str = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._inside = self._context.socket(zmq.PULL)
        self._inside.bind("inproc://changed")
        self._outside = self._context.socket(zmq.PUSH)
        self._outside.connect("inproc://changed")
        self._outside_lock = threading.Lock()
        self._parked: list[Parked] = []
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="queue-server", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Has parked readers asked again; for changes that came by other ways than a request."""
        with self._outside_lock:
            self._outside.send(b"")

    def close(self) -> None:
        """Ends the thread and frees the port."""
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
        sender, first, *frames = self._router.recv_multipart(copy=False)
        try:
            request = unpack(first.buffer)
        except ValueError:
            return  # Not from one of ours: it has no number to answer to.
        answered = self._attempt(bytes(sender.buffer), request, [frame.buffer for frame in frames])
        if not answered:
            until = time.monotonic() + float(request.get("wait_s", 0.0))
            self._parked.append(Parked(bytes(sender.buffer), {**request, "parked": True}, until))

    def _ask_parked(self) -> None:
        waiting, self._parked = self._parked, []
        for parked in waiting:
            if self._attempt(parked.sender, parked.request, []):
                continue
            if time.monotonic() >= parked.until:
                self._answer(parked.sender, parked.request, ({"waited": True}, ()))
            else:
                self._parked.append(parked)

    def _attempt(self, sender: bytes, request: dict[str, Any], frames: list[Frame]) -> bool:
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
