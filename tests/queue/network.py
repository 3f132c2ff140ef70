"""A queue's controller and its clients in one thread: chance chooses the next message, loss and death, and the clock is
simulated.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from braidrl.data.messages import Frame, pack_message, unpack_message
from braidrl.data.rows import Rows
from braidrl.queue.calls import (
    Answer,
    ColumnRequest,
    Done,
    Finish,
    LeasedColumns,
    Lost,
    Put,
    QueueRequest,
    RefusedRequest,
    TakeColumns,
    Waited,
)
from braidrl.queue.controller import ColumnController
from braidrl.queue.samplers import sampler_named
from braidrl.queue.storage import Place
from braidrl.queue.table import Block, StoredMessage, StoredRows
from braidrl.queue.transport import REPEAT_S, Parking

TASKS = {"score": ["x"], "train": ["x", "score"]}
LEASE_S = 3.0


class Memory:
    """The payload's blocks, by name."""

    host = "here"

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.written = 0

    def write(self, size: int) -> Block:
        self.written += 1
        self.names.add(name := f"block-{self.written}")
        return Block(self.host, "", name, size)

    def free(self, blocks: Sequence[Block]) -> None:
        self.names -= {block.name for block in blocks}


class Client:
    """A process that puts rows, or takes them for a task; it repeats one request until it is answered."""

    numbers = 0

    def __init__(self, network: Network, name: str, task: str | None) -> None:
        self.network, self.name, self.task = network, name, task
        self.asked: tuple[int, QueueRequest] | None = None
        self.frames: list[Frame] = []
        self.batch: tuple[int, list[int]] | None = None

    def ask(self, request: QueueRequest) -> None:
        Client.numbers += 1
        request.holder = self.name
        self.asked = Client.numbers, request
        self.send()

    def send(self) -> None:
        assert self.asked is not None
        self.sent = self.network.now
        number, request = self.asked
        self.network.to_queue.append((self.name, number, carried(request, ColumnRequest), self.frames))

    def act(self) -> None:
        """Begin the next thing."""
        if self.task is None:
            self.network.put_next(self)
        elif self.batch is None:
            most = self.network.chance.randint(1, 4)
            self.ask(TakeColumns([self.task], most, 2))
        else:
            number, rows = self.batch
            parts = []
            if self.task == "score":
                parts = [(self.part("score", len(rows)), [(number, list(range(len(rows))))])]
            self.ask(Done(self.task, [(number, None)], parts))

    def part(self, column: str, rows: int) -> StoredMessage:
        self.frames = []
        return StoredRows.of_block(Rows({}), self.network.memory.write(rows), [column], rows).message(self.frames)

    def hear(self, number: int, answer: Any) -> None:
        if self.asked is None or number != self.asked[0]:
            return
        answer = carried(answer, self.asked[1].answer | Waited | RefusedRequest)
        assert not isinstance(answer, RefusedRequest), answer
        (_, asked), self.asked = self.asked, None
        if isinstance(answer, LeasedColumns):
            self.batch = answer.lease, [int(str(row)) for row in answer.rows]
        elif isinstance(asked, Done):
            assert self.batch is not None and isinstance(answer, Lost)
            (number, rows), self.batch = self.batch, None
            if number not in answer.lost:
                self.network.done.update((str(self.task), row) for row in rows)


class Network:
    """All of it; `step` lets one thing happen."""

    def __init__(self, seed: int, sampler: str, rows: int) -> None:
        self.chance, self.now, self.rows = random.Random(seed), 100.0, rows
        self.to_queue: deque[tuple[str, int, Any, list[Frame]]] = deque()
        self.from_queue: deque[tuple[str, int, Any]] = deque()
        self.memory, self.unborn = Memory(), list(range(rows))
        samplers = dict.fromkeys(TASKS, sampler_named(sampler))
        place, clock = Place("here", "0", ""), lambda: self.now
        self.controller = ColumnController(TASKS, samplers, self.memory, place, LEASE_S, clock=clock)  # type: ignore[arg-type]
        self.parking = Parking(self.controller.handle, self.answer)
        self.clients: dict[str, Client] = {}
        self.joined = 0
        for task in (None, "score", "score", "train"):
            self.join(task)
        self.done: Counter[tuple[str, int]] = Counter()
        self.uncertain: set[tuple[str, int]] = set()
        """Rows of the last message of a dead client, which may or may not arrive."""
        self.untold: set[str] = set()
        """Blocks that it had written for this; they stay until the queue ends."""

    def join(self, task: str | None) -> None:
        self.joined += 1
        self.clients[f"client{self.joined}"] = Client(self, f"client{self.joined}", task)

    def answer(self, sender: bytes, number: int, answer: Answer) -> None:
        self.from_queue.append((sender.decode(), number, answer[0]))

    def put_next(self, client: Client) -> None:
        """Put up to three rows; when there are no more, say so."""
        rows, self.unborn = self.unborn[:3], self.unborn[3:]
        if rows:
            lengths, groups = [row * 7 % 5 + 1 for row in rows], [row // 2 for row in rows]
            client.ask(Put(client.part("x", len(rows)), rows, 0, groups, lengths))
        elif not self.controller.finished:
            client.ask(Finish())

    def step(self, is_harmful: bool) -> None:
        """Let one thing happen; if harmful, a message may be lost or a client die."""
        weights = [10, 10, 6, 2, is_harmful, 0.2 * is_harmful]
        kind = self.chance.choices(["request", "answer", "client", "time", "loss", "death"], weights)[0]
        if kind == "request" and self.to_queue:
            sender, number, request, frames = self.to_queue.popleft()
            self.parking.receive(sender.encode(), number, request, frames, self.now, wait_s=1.0)
            self.parking.retry(self.now)
        elif kind == "answer" and self.from_queue:
            receiver, number, answer = self.from_queue.popleft()
            if receiver in self.clients:
                self.clients[receiver].hear(number, answer)
        elif kind == "client":
            idle = [client for client in self.clients.values() if client.asked is None]
            if idle:
                self.chance.choice(idle).act()
        elif kind == "loss":
            lines = [line for line in (self.to_queue, self.from_queue) if line]
            if lines:
                self.chance.choice(lines).pop()
        elif kind == "death":
            self.die(self.chance.choice([name for name, client in self.clients.items() if client.task]))
        else:
            self.now += self.chance.uniform(0.0, 0.8)
            self.controller.tick()
            self.parking.retry(self.now)
            for client in self.clients.values():
                if client.asked is not None and self.now - client.sent > REPEAT_S:
                    client.send()

    def die(self, name: str) -> None:
        client = self.clients.pop(name)
        if client.asked is not None:
            parts = client.asked[1].parts if isinstance(client.asked[1], Done) else ()
            self.untold |= {block.name for part, _ in parts for piece in part.payload if (block := piece.block)}
            if client.batch is not None:
                self.uncertain.update((str(client.task), row) for row in client.batch[1])
        self.join(client.task)

    def is_over(self) -> bool:
        counted = set(self.done) | self.uncertain
        return len(counted) == len(TASKS) * self.rows and not self.controller.tasks.rows


def carried(message: Any, type: Any) -> Any:
    """A message as another process gets it."""
    return unpack_message(pack_message(message), type)
