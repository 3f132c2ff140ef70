"""What a launcher is, and the one that starts processes on this machine.

reserve(pools) ──▶ start(pool, number, spec) ──▶ Process: works ──▶ has ended, has failed, was killed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import wait
from typing import Any, Protocol

from braidrl.cluster.devices import Devices, assign_devices, device_count
from braidrl.cluster.process import LocalProcess, Process, ProcessSpec, default_threads, from_server, spawn
from braidrl.placement.pools import Pool

LOOPBACK = "127.0.0.1"


class Launcher(Protocol):
    """Starts the processes of a run, each with the devices that it is to see."""

    @property
    def ip(self) -> str:
        """Return the address at which the processes reach this one."""

    @property
    def node(self) -> str:
        """Return the name of this process's node."""

    def reserve(self, pools: Sequence[Pool]) -> int | None:
        """See to devices for every process of the pools, and return the threads of each; None where the environment says them.

        Raises UserError where there are too few devices.
        """

    def node_of(self, pool: str, number: int) -> str:
        """Return the name of the node on which a process of a pool will be."""

    def serve(self, service: type) -> list[Any]:
        """Make `service(node, ip)` on every reserved node but this one, closed in the end; return what `place()` of each is."""

    def start(self, pool: str, number: int, spec: ProcessSpec, copied: bool = False) -> Process:
        """Start a process of a pool.

        Args:
            pool: The pool's name.
            number: The process's number there.
            spec: What it does, with `arguments`; threads and devices are the launcher's to say.
            copied: The process may be a copy of one that has imported the code: it is there sooner.
        """

    def answered(self, processes: Sequence[Process], seconds: float) -> list[Process]:
        """Return those that have said their last word or are gone; wait at most so many seconds for the first of them."""

    def close(self) -> None:
        """Free what was reserved. Each process is closed by whoever has started it."""


class LocalLauncher:
    """Starts processes on this machine, whose cores they share."""

    ip = LOOPBACK
    node = "here"

    def __init__(self, device: str = "cpu") -> None:
        """`device` is what the configuration says: cpu, cuda or auto."""
        self._devices = device_count(device)
        self._table: dict[str, Devices] = {}
        self._threads: int | None = None

    def reserve(self, pools: Sequence[Pool]) -> int | None:
        if self._devices is not None:
            self._table = assign_devices(pools, self._devices)
        self._threads = default_threads(sum(pool.workers for pool in pools))
        return self._threads

    def node_of(self, pool: str, number: int) -> str:
        return self.node

    def serve(self, service: type) -> list[Any]:
        return []

    def start(self, pool: str, number: int, spec: ProcessSpec, copied: bool = False) -> Process:
        given = self._table.get(f"{pool}-{number}")
        spec = replace(spec, threads=self._threads, devices=given.every if given else None)
        return from_server(spec) if copied else spawn(spec)

    def answered(self, processes: Sequence[Process], seconds: float) -> list[Process]:
        lines = {each.connection: each for each in processes if isinstance(each, LocalProcess)}
        return [lines[line] for line in wait(list(lines), seconds)]  # type: ignore[index]

    def close(self) -> None:
        """Nothing was reserved that others could want."""
