"""The queue's sockets and the base of its controllers: every request, a struct and raw frames, gets one answer, and is
repeated until then.

           ┌───────────── request ────────────▶ handle ──▶ answer
client ────┤    again after REPEAT_S, same number   └── None ──▶ parked, and tried again after each change ──▶ answer
           └◀──── `Waited` after its own time limit

The last answer to each sender is kept for repetitions. Nothing is unpickled. A sender of malformed requests is no
longer read. `QueueController` has what each controller needs: holders, their leases and heartbeats.
"""

import contextlib
import secrets
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple

import zmq
from zmq.utils import z85

from braidrl.data.messages import Frame, Packed, pack_message, unpack_message
from braidrl.queue.calls import NOTHING, Answer, GiveBack, Lost, QueueRequest, RefusedRequest, Renew, Take, Waited
from braidrl.queue.tasks import Tasks

Handler = Callable[[Any, Sequence[Frame], bool], Answer | None]
"""Answers a request, or returns None to park it; the last argument is True for one that was parked."""
Envelope = tuple[int, float, Packed]
"""A request in its first frame: its number, the seconds that the server may park it, and the request."""
Send = Callable[[bytes, int, Answer], None]
"""Sends the answer to a sender's request, by its number."""
REPEAT_S = 1.0
"""Seconds before an unanswered request is repeated: its server may have been replaced."""
FRAME_BYTES = 1 << 31
"""A server that answers with a larger frame loses the connection."""
TICK_S = 0.1
"""Tolerance in seconds for expired leases and readers' limits."""
REQUEST_BYTES = 1 << 28
"""The sender of a larger frame loses the connection: requests name rows and locations of payload, and hold none."""
REFUSED = 1024
"""Number of senders of malformed messages to remember."""
FRAMES = 4096
"""A message of more frames is malformed."""
END_LIMIT_S = 10.0
"""Seconds that a closing server may take for its current request."""
AT_ONCE = 100
"""Number of requests to read before parked ones are retried."""
REMEMBERED = 4096
"""Number of senders whose last answer is kept."""
ASLEEP_S = 2.0
"""A process that has not read the clock for this many seconds was stopped, or its machine was."""


class QueueError(RuntimeError):
    """A refused request; the text is the queue's."""


class QueueTimeout(TimeoutError):
    """Raised if the queue does not answer in time."""


def key_pair(secret: str) -> tuple[bytes, bytes]:
    """Return the public and the private CURVE key derived from a secret."""
    private = z85.encode(blake2b(secret.encode(), digest_size=32, person=b"braid queue").digest())
    return zmq.curve_public(private), private


def asking_socket(context: zmq.Context[Any], address: str, secret: str | None) -> zmq.Socket[Any]:
    """Return a socket that is connected to a server, encrypted with a secret."""
    socket = context.socket(zmq.DEALER)
    # By this name a server recognizes a repeated request, also over another connection.
    socket.setsockopt(zmq.IDENTITY, b"c" + secrets.token_bytes(15))
    socket.setsockopt(zmq.LINGER, 0)
    # Messages to a dead server must not block the sender.
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 20)
    socket.setsockopt(zmq.MAXMSGSIZE, FRAME_BYTES)
    if secret is not None:
        # The server's public key is never sent in the clear: knowing it proves knowledge of the secret.
        public, private = key_pair(secret)
        socket.curve_serverkey, socket.curve_publickey, socket.curve_secretkey = public, public, private
    socket.connect(address)
    return socket


def send(socket: zmq.Socket[Any], message: Sequence[Frame]) -> None:
    """Send a message without waiting.

    If the server is unreachable, or has another secret, the message is dropped; the client repeats it later.
    """
    with contextlib.suppress(zmq.Again):
        socket.send_multipart(message, zmq.NOBLOCK, copy=False)


class Connection:
    """The client side of a conversation in which each request waits for its answer.

    Not thread-safe.
    """

    def __init__(self, address: str, limit_s: float, secret: str | None = None) -> None:
        self.address, self.limit_s = address, limit_s
        self._context = zmq.Context()
        self._socket = asking_socket(self._context, address, secret)
        self._number = 0

    def ask(
        self, request: QueueRequest, frames: Sequence[Frame] = (), wait_s: float = 0.0
    ) -> tuple[Any, Sequence[Frame]]:
        """Send a request, repeat it if necessary, and return its answer: of the type that it names, or `Waited`.

        Args:
            request: The request.
            frames: Raw bytes of the request.
            wait_s: Seconds that the server may park it, beyond the connection's own limit.

        Raises:
            QueueError: The request was refused.
            QueueTimeout: No answer arrived within the limits.
        """
        self._number += 1
        message, limit = [pack_message((self._number, wait_s, request)), *frames], self.limit_s + wait_s
        until = time.monotonic() + limit
        while (now := time.monotonic()) < until:
            send(self._socket, message)
            repeat = min(until, now + REPEAT_S)
            while self._socket.poll(max(0, round((repeat - time.monotonic()) * 1000))):
                first, *rest = self._socket.recv_multipart(copy=False)
                number, packed = unpack_message(first.buffer, tuple[int, Packed])
                # The answer to an abandoned request, or the second one to a repeated request, belongs to an earlier
                # call.
                if number != self._number:
                    continue
                answer = unpack_message(packed, request.answer | Waited | RefusedRequest)
                if isinstance(answer, RefusedRequest):
                    raise QueueError(answer.error)
                return answer, [frame.buffer for frame in rest]
        raise QueueTimeout(f"{self.address} did not answer {type(request).__name__} within {limit:g} s")

    def tell(self, request: QueueRequest) -> None:
        """Send a request without waiting for its answer."""
        while self._socket.poll(0):
            self._socket.recv_multipart(copy=False)
        self._number += 1
        send(self._socket, [pack_message((self._number, 0.0, request))])

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        self._context.term()


class Connections:
    """Connections to several servers, made on first use. Thread-safe: each thread has its own during a request."""

    def __init__(self, limit_s: float, secret: str | None = None) -> None:
        self.limit_s, self.secret = limit_s, secret
        self._idle: defaultdict[str, deque[Connection]] = defaultdict(deque)

    def ask(
        self, address: str, request: QueueRequest, frames: Sequence[Frame] = (), wait_s: float = 0.0
    ) -> tuple[Any, Sequence[Frame]]:
        """Call `Connection.ask` on a connection to the server."""
        with self._taken(address) as connection:
            return connection.ask(request, frames, wait_s)

    def tell(self, address: str, request: QueueRequest) -> None:
        """Call `Connection.tell` on a connection to the server."""
        with self._taken(address) as connection:
            connection.tell(request)

    @contextlib.contextmanager
    def _taken(self, address: str) -> Iterator[Connection]:
        """Return a context with the most recently used idle connection, or a new one."""
        try:
            connection = self._idle[address].pop()
        except IndexError:
            connection = Connection(address, self.limit_s, self.secret)
        try:
            yield connection
        finally:
            self._idle[address].append(connection)

    def close(self) -> None:
        """Close all connections; no request may be pending."""
        for idle in self._idle.values():
            while idle:
                idle.pop().close()


class Parked(NamedTuple):
    """A parked request, and its deadline."""

    number: int
    request: Any
    until: float


class Parking:
    """The requests of all senders; each sender waits for one answer at a time.

    It has no socket and no clock.
    """

    def __init__(self, handle: Handler, send: Send, remembers: bool = True) -> None:
        """Start empty.

        `remembers` keeps answers for repeated requests; it is not needed if handling a request twice does no harm.
        """
        self._handle, self._send, self._remembers = handle, send, remembers
        self._parked: dict[bytes, Parked] = {}
        self._answered: OrderedDict[bytes, tuple[int, Answer]] = OrderedDict()

    def receive(
        self, sender: bytes, number: int, request: Any, frames: Sequence[Frame], now: float, wait_s: float = 0.0
    ) -> None:
        """Answer a request, or park it for `wait_s` seconds. A repetition gets the same answer, or stays parked."""
        last = self._answered.get(sender)
        if last is not None and last[0] == number:
            self._send(sender, number, last[1])
            return
        parked = self._parked.pop(sender, None)
        if parked is not None and parked.number == number:
            self._parked[sender] = parked
        else:
            self._attempt(sender, Parked(number, request, now + wait_s), frames)

    def retry(self, now: float) -> None:
        """Retry all parked requests, the oldest first; answer those that have timed out."""
        for sender, parked in list(self._parked.items()):
            self._attempt(sender, parked, (), again=True)
            if parked.until <= now and sender in self._parked:
                self._answer(sender, parked.number, (Waited(), ()))

    def refuse(self, sender: bytes, number: int, error: Exception) -> None:
        """Answer a request that cannot be handled."""
        self._answer(sender, number, (RefusedRequest(f"{type(error).__name__}: {error}"), ()))

    def _attempt(self, sender: bytes, parked: Parked, frames: Sequence[Frame], again: bool = False) -> None:
        try:
            answer = self._handle(parked.request, frames, again)
        except Exception as error:
            self.refuse(sender, parked.number, error)
            return
        if answer is not None:
            self._answer(sender, parked.number, answer)
        else:
            self._parked[sender] = parked

    def _answer(self, sender: bytes, number: int, answer: Answer) -> None:
        self._parked.pop(sender, None)
        if self._remembers:
            self._answered[sender] = (number, answer)
            self._answered.move_to_end(sender)
            if len(self._answered) > REMEMBERED:
                self._answered.popitem(last=False)
        self._send(sender, number, answer)


class QueueServer:
    """Serves `handle` on an address of this machine until it is closed."""

    def __init__(
        self,
        handle: Handler,
        requests: Any,
        tick: Callable[[], None] | None = None,
        address: str = "tcp://127.0.0.1:*",
        secret: str | None = None,
        remembers: bool = True,
    ) -> None:
        """Serve from a thread.

        Args:
            handle: Answers a request, or parks it.
            requests: The union of its types of requests; others are refused.
            tick: Called several times a second.
            address: Address to listen on.
            secret: Needed by every client; None for no secret.
            remembers: Keep answers for repeated requests; not needed if every request may be handled twice.

        Raises:
            zmq.ZMQError: The address cannot be bound.
        """
        self._requests, self._tick = requests, tick
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
        self._inside = self._context.socket(zmq.PULL)
        self._inside.bind("inproc://changed")
        self._outside = self._context.socket(zmq.PUSH)
        self._outside.connect("inproc://changed")
        self._outside_lock = threading.Lock()
        self._refused: OrderedDict[bytes, None] = OrderedDict()
        """The last senders of malformed messages."""
        self._closing = False
        self.failure: str | None = None
        self._thread = threading.Thread(target=self._run, name="queue-server", daemon=True)
        self._thread.start()

    def changed(self) -> None:
        """Retry parked requests after a change that no request made."""
        # Do not wait: the thread may have ended, or already have enough messages to wake it.
        with self._outside_lock, contextlib.suppress(zmq.Again):
            self._outside.send(b"", zmq.NOBLOCK)

    def close(self) -> None:
        """End the thread and free the port. Raises QueueError if it does not end."""
        self._closing = True
        self.changed()
        self._thread.join(END_LIMIT_S)
        if self._thread.is_alive():
            raise QueueError(f"the server of {self.address} does not end within {END_LIMIT_S:g} s")
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
                # Incoming messages, which may be many, are read before parked requests are retried.
                with contextlib.suppress(zmq.Again):
                    for _ in range(AT_ONCE if self._router in ready else 0):
                        self._receive(self._router.recv_multipart(zmq.NOBLOCK, copy=False))
                if self._tick is not None:
                    self._tick()
                self._parking.retry(time.monotonic())
        except Exception:
            self.failure = traceback.format_exc()
        finally:
            self._router.close()
            self._inside.close()

    def _receive(self, message: Sequence[zmq.Frame]) -> None:
        sender = message[0].bytes
        if sender in self._refused:
            return
        frames = [frame.buffer for frame in message[1:]]
        try:
            number, wait_s, packed = unpack_message(frames[0], Envelope)
            if len(frames) > FRAMES:
                raise ValueError("too many frames")
        except (ValueError, LookupError, RecursionError):
            # Not a client of this queue: there is no number to answer, and its later messages are not read.
            self._refused[sender] = None
            if len(self._refused) > REFUSED:
                self._refused.popitem(last=False)
            return
        try:
            request = unpack_message(packed, self._requests)
        except (ValueError, RecursionError) as error:
            self._parking.refuse(sender, number, error)
            return
        self._parking.receive(sender, number, request, frames[1:], time.monotonic(), wait_s)

    def _send(self, sender: bytes, number: int, answer: Answer) -> None:
        self._router.send_multipart([sender, pack_message((number, answer[0])), *answer[1]], copy=False)


@dataclass
class Holder:
    """A process that takes rows."""

    name: str
    address: str
    """Address of its node's server."""
    heard: float
    """Time of its last request, in seconds."""


class AwakeClock:
    """Seconds of a clock that skips the times when this process was stopped and could not receive heartbeats.

    For a server's thread, which reads it several times a second.
    """

    def __init__(self) -> None:
        self._last, self._slept = time.monotonic(), 0.0

    def __call__(self) -> float:
        now = time.monotonic()
        if now - self._last > ASLEEP_S:
            self._slept += now - self._last
        self._last = now
        return now - self._slept


class QueueController(ABC):
    """Answers requests. Thread-safe: one lock guards everything."""

    holders: Mapping[str, Holder]

    def __init__(self, lease_s: float, clock: Callable[[], float] | None = None) -> None:
        """Start without holders; a lease lasts `lease_s` seconds of the clock without a heartbeat."""
        self.lease_s, self.clock = lease_s, clock or AwakeClock()
        self.stopping = False
        self.changes = 0
        """Number of changes, for threads of this process that wait for one."""
        self.changed = threading.Condition(threading.RLock())

    @property
    @abstractmethod
    def queues(self) -> Collection[Tasks]:
        """Return the tasks of all rows of this controller."""

    def advance(self) -> None:
        """Make all decisions that are due; called after every request that changes something."""
        self.changes += 1
        self.changed.notify_all()

    @abstractmethod
    def respond(self, request: Any, frames: Sequence[Frame]) -> Answer | None:
        """Answer one request, or park it; the caller holds the lock."""

    def handle(self, request: QueueRequest, frames: Sequence[Frame], again: bool = False) -> Answer | None:
        """Answer a request, or park it; `again` is True for a parked request."""
        with self.changed:
            if request.holder in self.holders and not again:
                self.holders[request.holder].heard = self.clock()
            answer = self.respond(request, frames)
            if not isinstance(request, Take):
                self.advance()
        return answer

    def renew(self, request: Renew) -> Lost:
        """Extend the leases of a holder that sends heartbeats, except expired ones."""
        now = self.clock()
        self.tick()
        for tasks in self.queues:
            for lease in tasks.leases.of(request.holder):
                lease.deadline = max(now + self.lease_s, lease.deadline)
        return Lost(lost=self.lost(request.held))

    def give_back(self, request: GiveBack) -> Answer:
        """Release leases whose holder cannot use them."""
        for tasks in self.queues:
            leases = tasks.leases.held
            tasks.give_up([leases[number] for number in request.leases if number in leases])
        return NOTHING

    def lost(self, numbers: Sequence[int]) -> list[int]:
        """Return the leases that are no longer held."""
        return [number for number in numbers if not any(number in tasks.leases.held for tasks in self.queues)]

    def silent(self, seconds: float) -> list[str]:
        """Return hanging holders, without a request for this many seconds: others send heartbeats."""
        now = self.clock()
        with self.changed:
            return [name for name, holder in self.holders.items() if now - holder.heard > seconds]

    def tick(self) -> None:
        """Release expired leases."""
        now = self.clock()
        with self.changed:
            for tasks in self.queues:
                tasks.give_up(tasks.leases.expired(now))

    def wait(self, changes_before: int, seconds: float) -> int:
        """Wait until there are more changes than `changes_before`, or until the time limit; return their number."""
        with self.changed:
            self.changed.wait_for(lambda: self.changes != changes_before, seconds)
            return self.changes
