"""The processes of a queue: storage units and a controller per task, started, watched, and replaced after a kill.

serving process ──starts──▶ unit, unit │ controller, controller          each a thread at a socket, in its own process
   └── directory: all addresses           a dead process restarts at the same address, and asks the others for its state
"""

import atexit
import random
import socket
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

from braidrl.cluster.local import from_server
from braidrl.cluster.process import END_LIMIT_S, Process, ProcessSpec
from braidrl.data.frames import Frame
from braidrl.errors import WorkerError
from braidrl.queue.calls import CallingServer
from braidrl.queue.requests import Answer
from braidrl.queue.samplers import sampler_named
from braidrl.queue.storage import Place
from braidrl.queue.storage_backends import data_plane
from braidrl.queue.task_controller import TaskController
from braidrl.queue.transport import QueueServer
from braidrl.queue.unit import StorageUnit

PORTS = range(20_000, 32_000)
"""Ports below those that systems give to clients: a client that looks for a killed server must not connect to itself."""
LOOK_EVERY_S = 0.02
SILENT_S = 60.0
"""A process without an answer for this many seconds is replaced too."""
YOUNG_S = 1.0
DEATHS = 5
"""Number of ends before YOUNG_S seconds of life after which a process is not restarted: they have a common cause."""


@dataclass
class QueueProcess:
    """One process of the queue."""

    name: str
    entry: str
    arguments: Mapping[str, Any]
    process: Process
    started: float = field(default_factory=time.monotonic)
    died_young: int = 0


class Service:
    """All processes of one queue."""

    def __init__(
        self, tasks: Mapping[str, Collection[str]], samplers: Mapping[str, str], lease_s: float,
        budget_bytes: int | None, units: int, place: Place, ip: str, secret: str | None,
    ) -> None:  # fmt: skip
        """Start the processes.

        Args:
            tasks: By task the columns that it waits for.
            samplers: Samplers of tasks that do not take the oldest rows first.
            lease_s: Seconds without a heartbeat after which rows go to another consumer.
            budget_bytes: Limit of payload in the queue, in equal shares for the units.
            units: Number of storage units.
            place: The queue's own node.
            ip: Address to listen on.
            secret: Needed by every client.
        """
        addresses = iter(free_addresses(ip, units + len(tasks)))
        unit_addresses = [next(addresses) for _ in range(units)]
        task_addresses = {name: next(addresses) for name in tasks}
        share = None if budget_bytes is None else budget_bytes // units
        self.directory = {
            "place": place, "units": unit_addresses, "tasks": task_addresses, "columns": dict(tasks),
            "budget": budget_bytes is not None,
        }  # fmt: skip
        common = {"lease_s": lease_s, "secret": secret}
        self.members = [
            self._member(f"unit {n}", "serve_unit", address, {**common, "tasks": list(tasks), "place": place, "budget_bytes": share})
            for n, address in enumerate(unit_addresses)
        ]  # fmt: skip
        for name, columns in tasks.items():
            own = {
                "name": name,
                "columns": list(columns),
                "units": unit_addresses,
                "sampler": samplers.get(name, "first_in"),
            }
            self.members.append(self._member(name, "serve_task", task_addresses[name], {**common, **own}))
        self.server = QueueServer(self._answer, address=f"tcp://{ip}:*", secret=secret)
        self._closing = False
        self.failure: WorkerError | OSError | None = None
        """The reason why a process is not restarted."""
        self._watch = threading.Thread(target=self._keep_alive, name="queue-watch", daemon=True)
        self._watch.start()
        # A program that forgets to close the queue would wait for its processes at its end.
        atexit.register(self.close)

    def close(self) -> None:
        """End all processes."""
        atexit.unregister(self.close)
        self._closing = True
        self._watch.join(END_LIMIT_S)
        self.server.close()
        for member in self.members:
            member.process.kill()
            member.process.close(0.0)

    def _member(self, name: str, entry: str, address: str, arguments: Mapping[str, Any]) -> QueueProcess:
        arguments = {**arguments, "address": address, "recovers": False}
        return QueueProcess(name, entry, arguments, start(name, entry, arguments))

    def _keep_alive(self) -> None:
        try:
            while not self._closing:
                for member in self.members:
                    member.process.end_if_silent(SILENT_S)
                    if not member.process.alive:
                        replace(member)
                time.sleep(LOOK_EVERY_S)
        except (WorkerError, OSError) as error:
            self.failure = error

    def _answer(self, request: dict[str, Any], frames: Sequence[Frame]) -> Answer:
        """Return all addresses. Raises the error of a process that cannot live; a client asks for it after a time-out."""
        if self.failure is not None:
            raise self.failure
        return self.directory, ()


def replace(member: QueueProcess) -> None:
    """Restart a dead process. Raises WorkerError if it does not stay alive."""
    young = time.monotonic() - member.started < YOUNG_S
    member.died_young = member.died_young + 1 if young else 0
    outcome = member.process.outcome
    if member.died_young == DEATHS:
        why = outcome.failure.message if outcome and outcome.failure else member.process.describe_end()
        raise WorkerError(f"the queue's process {member.name} is gone for the {DEATHS}th time: {why}")
    member.process.close(0.0)
    member.arguments = {**member.arguments, "recovers": True}
    member.started, member.process = time.monotonic(), start(member.name, member.entry, member.arguments)


def start(name: str, entry: str, arguments: Mapping[str, Any]) -> Process:
    """Start a process that serves a unit or a task."""
    return from_server(ProcessSpec(f"queue {name}", f"{__name__}:{entry}", arguments, threads=1))


def serve_unit(arguments: Mapping[str, Any]) -> None:
    """Run a storage unit until the serving process ends."""
    data = data_plane(Place(*arguments["place"]), "unit", secret=arguments["secret"])
    unit = StorageUnit(
        arguments["tasks"], data, arguments["lease_s"], arguments["budget_bytes"], arguments["recovers"]
    )  # fmt: skip
    CallingServer(unit.handle, None, arguments["address"], arguments["secret"], unit.begin).join()


def serve_task(arguments: Mapping[str, Any]) -> None:
    """Run a task's controller until the serving process ends."""
    controller = TaskController(
        arguments["name"], arguments["columns"], sampler_named(arguments["sampler"]), arguments["lease_s"],
        arguments["units"], arguments["recovers"],
    )  # fmt: skip
    address, secret = arguments["address"], arguments["secret"]
    CallingServer(controller.handle, controller.tick, address, secret, controller.begin).join()


def free_addresses(ip: str, count: int) -> list[str]:
    """Return addresses that are free now. Raises OSError if `ip` is not this machine's."""
    with ExitStack() as sockets:
        sockets.enter_context(socket.socket()).bind((ip, 0))
        found: list[str] = []
        while len(found) < count:
            port = random.choice(PORTS)
            with suppress(OSError):
                sockets.enter_context(socket.socket()).bind((ip, port))
                found.append(f"tcp://{ip}:{port}")
        return found
