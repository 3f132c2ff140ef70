"""What the main program has the leaders of trained roles do between two pieces of work: load, save, write what they have copied.

main program ──order──▶ queue ──▶ leader ──ordered, result──▶ queue ──▶ main program
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from braidrl.cluster.workers import WorkerFailed
from braidrl.runtimes.saving.background import check_written
from braidrl.runtimes.streaming.processes import Processes
from braidrl.transfer.queue.control import ControlPlane
from braidrl.transfer.queue.server import QueueServer

ORDER_LIMIT_S = 600.0
LOOK_EVERY_S = 0.05


class Orders:
    """`wait` waits for the queue to change, and raises what a worker has raised."""

    def __init__(
        self, control: ControlPlane, server: QueueServer, processes: Processes, wait: Callable[[], None]
    ) -> None:
        self.control, self.server, self.processes, self.wait = control, server, processes, wait

    def carry_out(self, order: dict[str, Any]) -> None:
        """Returns when every leader has done it. Raises WorkerFailed where one does not in time."""
        limit = time.monotonic() + ORDER_LIMIT_S
        for number, holder in self.give(order).items():
            while number not in self.control.results:
                self._wait_until(limit, holder)

    def give(self, order: dict[str, Any]) -> dict[int, str]:
        """Whom the order was given to, by its number. Raises WorkerFailed for a leader that is not there in time."""
        limit, given = time.monotonic() + ORDER_LIMIT_S, {}
        for holder, role in self.processes.trainers().items():
            while holder not in self.control.holders:
                self._wait_until(limit, holder)
            version = order.get("version") if role in self.control.exported else None
            given[self.control.give_order(holder, {**order, "version": version})] = holder
        self.server.changed()
        return given

    def written(self, number: int, holder: str) -> None:
        """Waits, in whatever thread, until a leader has written what it copied. Raises OSError where it could not, or has ended."""
        process = next(member.process for member in self.processes.members if member.holder == holder)
        while number not in self.control.results:
            if self.control.stopping or not process.alive:
                raise OSError(f"{holder} has ended")
            time.sleep(LOOK_EVERY_S)
        check_written(self.control.results[number]["trouble"])

    def _wait_until(self, limit: float, holder: str) -> None:
        if time.monotonic() > limit:
            raise WorkerFailed(f"{holder} did not answer within {ORDER_LIMIT_S:g} s")
        self.wait()
