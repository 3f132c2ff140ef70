"""A queue's units, controllers and clients in one thread: chance chooses the next message and the next kill, and the clock is simulated."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import msgpack

from braidrl.data.frames import Frame
from braidrl.queue.requests import Answer, Parking
from braidrl.queue.samplers import sampler_named
from braidrl.queue.table import Block, home
from braidrl.queue.task_controller import TaskController
from braidrl.queue.transport import REPEAT_S
from braidrl.queue.unit import StorageUnit

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

    def free(self, blocks: Sequence[Sequence[Any]]) -> None:
        self.names -= {Block(*block).name for block in blocks}

    def missing(self, blocks: Sequence[Block]) -> set[str]:
        return {block.name for block in blocks} - self.names


class Node:
    """A unit or a controller with its requests, as `QueueServer` has them."""

    def __init__(self, network: Network, address: str, answering: Any) -> None:
        self.network, self.address, self.answering = network, address, answering
        self.parking = Parking(answering.handle, self.send)
        self.wake, self.calls = self.parking.wake, self
        self.open: dict[Hashable, tuple[Asking, Callable[[dict[str, Any]], None]]] = {}
        answering.begin(self)

    def send(self, sender: bytes, number: int, answer: Answer) -> None:
        # Another process gets a copy.
        self.network.send(self.address, sender.decode(), {**carried(answer[0]), "number": number})

    def ask(
        self, line: Hashable, address: str, request: dict[str, Any], frames: Sequence[Frame],
        then: Callable[[dict[str, Any]], None],
    ) -> None:  # fmt: skip
        assert line not in self.open
        self.open[line] = Asking(self.network, f"{self.address}/{line}/{id(self)}", address, request), then

    def receive(self, sender: str, message: dict[str, Any]) -> None:
        if "request" in message:
            self.parking.receive(sender.encode(), message["number"], dict(message), (), self.network.now)
        self.settle()

    def answered(self, name: str, message: dict[str, Any]) -> None:
        for line, (asking, then) in list(self.open.items()):
            if asking.name == name and asking.hear(message) is not None:
                del self.open[line]
                then(message)
        self.settle()

    def settle(self) -> None:
        if hasattr(self.answering, "tick"):
            self.answering.tick()
        self.parking.ask_parked(self.network.now)
        while self.parking.is_woken:
            self.parking.ask_parked(self.network.now)


class Asking:
    """A request that is repeated until it is answered."""

    numbers = 0

    def __init__(self, network: Network, name: str, address: str, request: Mapping[str, Any]) -> None:
        Asking.numbers += 1
        self.network, self.name, self.address = network, name, address
        self.message = {**carried(request), "number": Asking.numbers}
        self.repeat()

    def repeat(self) -> None:
        self.sent = self.network.now
        self.network.send(self.name, self.address, self.message)

    def hear(self, message: dict[str, Any]) -> dict[str, Any] | None:
        return message if message["number"] == self.message["number"] else None


class Client:
    """A process that puts rows, or takes them for a task; it does one thing at a time."""

    def __init__(self, network: Network, name: str, task: str | None) -> None:
        self.network, self.name, self.task = network, name, task
        self.asking: Asking | None = None
        self.batch: list[tuple[int, list[int]]] = []
        self.claims: list[tuple[int, list[int]]] = []

    def ask(self, address: str, request: str, **fields: Any) -> None:
        self.asking = Asking(self.network, self.name, address, {"request": request, "holder": self.name, **fields})

    def act(self) -> None:
        """Begin the next thing."""
        if self.task is None:
            self.network.put_next(self)
        elif self.batch:
            number, rows = self.batch[0]
            parts = self.network.written(rows) if self.task == "score" else []
            self.ask(self.task, "done", leases=[number], parts=parts)
        else:
            most = self.network.chance.randint(1, 4)
            self.ask(self.task, "take", wait_s=1.0, consumers=[self.task], most=most, ranks=2, held=[])

    def hear(self, message: dict[str, Any]) -> None:
        if self.asking is None or self.asking.hear(message) is None:
            return
        asked = self.asking.message
        assert "error" not in message, message
        if message.get("unknown"):
            self.before = asked
            hello = {"request": "hello", "holder": self.name, "address": "", "held": self.batch}
            self.asking = Asking(self.network, self.name, self.asking.address, hello)
        elif asked["request"] == "hello":
            self.asking = Asking(self.network, self.name, self.asking.address, self.before)
        else:
            self.asking = None
            self.finish(asked, message)

    def finish(self, asked: Mapping[str, Any], message: Mapping[str, Any]) -> None:
        if asked["request"] == "take" and message.get("kind") == "rows":
            self.batch = [(message["lease"], list(message["rows"]))]
        elif asked["request"] == "done":
            (number, rows), self.batch = self.batch[0], []
            if number in message["lost"]:
                self.network.memory.free([part["block"] for part in asked["parts"]])
            else:
                self.network.done.update((str(self.task), row) for row in rows)


class Network:
    """All of it; `step` lets one thing happen."""

    def __init__(self, seed: int, samplers: Mapping[str, str], units: int, rows: int) -> None:
        self.chance, self.now = random.Random(seed), 100.0
        self.samplers, self.rows = samplers, rows
        self.lines: dict[tuple[str, str], deque[dict[str, Any]]] = {}
        self.memory = Memory()
        self.unborn = [[row for row in range(rows) if home(row, units) == n] for n in range(units)]
        self.unit_names = [f"unit{n}" for n in range(units)]
        self.nodes: dict[str, Node] = {}
        for name in [*self.unit_names, *TASKS]:
            self.start(name, recovers=False)
        self.clients: dict[str, Client] = {}
        self.joined, self.killed_at = 0, 0.0
        for task in (None, "score", "score", "train"):
            self.join(task)
        self.done: Counter[tuple[str, int]] = Counter()
        self.uncertain: set[tuple[str, int]] = set()
        """The last message of a dead client, which may or may not arrive."""
        self.untold: set[str] = set()
        """Blocks that it had written for this; they stay until the queue ends."""

    def start(self, name: str, recovers: bool) -> None:
        answering: Any
        if name in self.unit_names:
            answering = StorageUnit(list(TASKS), self.memory, LEASE_S, None, recovers, lambda: self.now)  # type: ignore[arg-type]
        else:
            sampler = sampler_named(self.samplers[name])
            answering = TaskController(name, TASKS[name], sampler, LEASE_S, self.unit_names, recovers, lambda: self.now)
        self.nodes[name] = Node(self, name, answering)

    def join(self, task: str | None) -> None:
        self.joined += 1
        self.clients[f"client{self.joined}"] = Client(self, f"client{self.joined}", task)

    def send(self, sender: str, receiver: str, message: dict[str, Any]) -> None:
        self.lines.setdefault((sender, receiver), deque()).append(message)

    def put_next(self, client: Client) -> None:
        """Up to three rows of one unit; when there are no more, that this is so."""
        unit = next((n for n, rows in enumerate(self.unborn) if rows), None)
        if unit is None:
            for name in self.unit_names:
                if not self.nodes[name].answering.finished:
                    client.ask(name, "finish")
                    return
            return
        rows, self.unborn[unit] = self.unborn[unit][:3], self.unborn[unit][3:]
        block = self.memory.write(len(rows))
        client.ask(
            self.unit_names[unit], "put", rows=rows, places=None, columns=["x"], block=block, size=len(rows), by="",
            table=0, lengths=[row * 7 % 5 + 1 for row in rows], groups=[row // 2 for row in rows],
        )  # fmt: skip

    def written(self, rows: Sequence[int]) -> list[dict[str, Any]]:
        """The column `score` of some rows, a part for each unit."""
        units = len(self.unit_names)
        shares = [[row for row in rows if home(row, units) == unit] for unit in range(units)]
        return [
            {
                "rows": share,
                "places": None,
                "columns": ["score"],
                "block": self.memory.write(len(share)),
                "size": len(share),
            }
            for share in shares
            if share
        ]

    def step(self, kills: bool, deaths: bool) -> None:
        """Let one thing happen; whether it may be that a process of the queue is killed, or that a client dies."""
        kind = self.chance.choices(["message", "client", "time", "kill", "die"], [20, 6, 2, 0.3 * kills, 0.2 * deaths])[
            0
        ]
        if kind == "message":
            self.deliver()
        elif kind == "client":
            idle = [client for client in self.clients.values() if client.asking is None]
            if idle:
                self.chance.choice(idle).act()
        elif kind == "time":
            self.pass_time(self.chance.uniform(0.0, 0.8))
        elif kind == "kill" and self.is_settled():
            self.kill(self.chance.choice(list(self.nodes)))
        elif kind == "die":
            self.die(self.chance.choice([name for name, client in self.clients.items() if client.task]))

    def deliver(self) -> None:
        lines = [line for line, messages in self.lines.items() if messages]
        if not lines:
            self.pass_time(0.1)
            return
        sender, receiver = self.chance.choice(lines)
        message = self.lines[sender, receiver].popleft()
        if receiver in self.nodes:
            self.nodes[receiver].receive(sender, message)
        elif receiver in self.clients:
            self.clients[receiver].hear(message)
        elif (owner := receiver.split("/")[0]) in self.nodes:
            self.nodes[owner].answered(receiver, message)

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for node in self.nodes.values():
            for asking, _ in node.open.values():
                if self.now - asking.sent > REPEAT_S:
                    asking.repeat()
            node.settle()
        for client in self.clients.values():
            if client.asking is not None and self.now - client.asking.sent > REPEAT_S:
                client.asking.repeat()

    def is_settled(self) -> bool:
        """Return True if the last killed process is back and known to all: only one at a time may be killed."""
        units = [self.nodes[name].answering for name in self.unit_names]
        controllers = [self.nodes[name].answering for name in TASKS]
        return all(unit.held is None for unit in units) and all(
            known.life == unit.life for one in controllers for known, unit in zip(one.units, units, strict=True)
        )

    def kill(self, name: str) -> None:
        """Kill a process with all that was on its way to it and from it, and start another in its place."""
        for (sender, receiver), messages in self.lines.items():
            if name in (sender, receiver, sender.split("/")[0], receiver.split("/")[0]):
                messages.clear()
        self.start(name, recovers=True)

    def die(self, name: str) -> None:
        client = self.clients.pop(name)
        if client.asking is not None:
            self.untold |= {part["block"][2] for part in client.asking.message.get("parts", ())}
        if client.batch and client.asking is not None:
            self.uncertain.update((str(client.task), row) for row in client.batch[0][1])
        self.join(client.task)

    def is_over(self) -> bool:
        counted = set(self.done) | self.uncertain
        return len(counted) == len(TASKS) * self.rows and not any(
            self.nodes[name].answering.rows or not self.nodes[name].answering.log.is_over for name in self.unit_names
        )


def carried(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as another process gets it."""
    found: dict[str, Any] = msgpack.unpackb(msgpack.packb(dict(message)), strict_map_key=False)
    return found
