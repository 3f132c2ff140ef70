"""Processes as their parent sees them: specification, outcome, and the protocols that start and end them.

Launcher ──ProcessSpec──▶ Process: works ──▶ Outcome: a result, or a Failure        a killed process has no outcome
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from braidrl.errors import BadUpdate, FailedStep, LostProcess, UserError, WorkerError

if TYPE_CHECKING:
    # This module loads the configuration, which most processes of a run do not need.
    from braidrl.cluster.pools import Pool

LOOPBACK = "127.0.0.1"
BEAT_S = 1.0
"""Seconds between heartbeats of a process."""
END_LIMIT_S = 10.0
"""Seconds that processes get to end by themselves before they are killed."""


@dataclass(frozen=True)
class Failure:
    """The reason why a process failed its task."""

    kind: str
    """user (a UserError), update (a BadUpdate), step (a FailedStep), error, interrupted, preempted (asked to leave), or
    died (ended without an outcome).
    """
    message: str
    """Text for the user; for an error with the process's traceback."""
    follows: bool = False
    """True if the failure is only that other ranks were lost."""

    def error(self) -> BaseException:
        """Return the exception of this failure: UserError, BadUpdate, KeyboardInterrupt, LostProcess or WorkerError."""
        if self.kind == "interrupted":
            return KeyboardInterrupt()
        kinds: dict[str, type[Exception]] = {
            "user": UserError,
            "update": BadUpdate,
            "step": FailedStep,
            "died": LostProcess,
        }
        return kinds.get(self.kind, LostProcess if self.follows else WorkerError)(self.message)


@dataclass(frozen=True)
class Outcome:
    """The last message of a process: its task's result, or its failure."""

    result: Any = None
    failure: Failure | None = None


WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@dataclass(frozen=True)
class ProcessSpec:
    """The task, arguments and resources of a process; with `arguments` it is also the first message to the process."""

    name: str
    entry: str
    """`module:function`. With `arguments` it is called with them and its return value is the process's result. Without,
    it is called with the descriptor of its end of the connection and exchanges its own messages.
    """
    arguments: Mapping[str, Any] | None = None
    """Values that the message codec supports."""
    orphaned: str = ""
    """`module:function`, called with the arguments when the parent has ended, just before this process ends."""
    python: str = sys.executable
    threads: int | None = None
    """CPU threads (OMP_NUM_THREADS); None keeps the parent's environment."""
    devices: tuple[int, ...] | None = None
    """CUDA devices that it sees, as numbers among the parent's; None for all."""
    environment: Mapping[str, str] = field(default_factory=dict)
    inherits: tuple[str, ...] | None = None
    """Variables that it inherits from the parent; None for all."""
    wrapper: Sequence[str] = ()
    """A command that starts the interpreter; the interpreter's command line is appended to it."""
    descriptors: Sequence[int] = ()
    """Open files of the parent that `wrapper` reads."""
    also_calls: str = ""
    """`module:function` that the entry calls; a fork server imports its module too."""
    starts: tuple[str, ...] = ()
    """Modules of the processes that it starts from its own fork server on this machine."""

    @property
    def main(self) -> str:
        """Return the `module:function` that is called with the descriptor of the process's end of the connection."""
        return self.entry if self.arguments is None else "braidrl.cluster.child:main"


@contextmanager
def interrupts_handled(
    handle: Callable[[int, FrameType | None], None], numbers: Sequence[int] = (signal.SIGINT, signal.SIGTERM)
) -> Iterator[None]:
    """Call `handle` for these signals inside the block.

    Python allows this only in the main thread; in others this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment_of(spec: ProcessSpec, starter: Mapping[str, str]) -> dict[str, str]:
    """Return the full environment of a process started from `starter`; it must be set before torch is imported."""
    environment = dict(spec.environment)
    if spec.threads is not None:
        environment["OMP_NUM_THREADS"] = str(spec.threads)
    if spec.devices is not None:
        visible = starter.get("CUDA_VISIBLE_DEVICES", "").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible[n] if visible != [""] else str(n) for n in spec.devices)
    passed = starter if spec.inherits is None else {name: starter[name] for name in spec.inherits if name in starter}
    return {**passed, **environment}


def usable_cores() -> int:
    """Return the number of cores for this process: its CPU affinity, limited by its container's CPU quota."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def sleep_at_barriers() -> None:
    """Let OpenMP threads sleep at barriers, unless the user has set a wait policy.

    This affects this process if torch is not loaded yet, and its children. By default the threads spin: when another
    program takes the core of one thread, all others spin until it returns, and a step takes ten times as long.
    """
    if not any(name in os.environ for name in WAIT_SETTINGS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def default_threads(processes: int) -> int | None:
    """Return the threads per process for this many processes on this machine; None if OMP_NUM_THREADS is set."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, usable_cores() // processes)


class Process(Protocol):
    """A started process, on any machine."""

    name: str

    @property
    def pid(self) -> int:
        """Return the process id on its machine."""

    @property
    def alive(self) -> bool:
        """Return True while it runs."""

    @property
    def outcome(self) -> Outcome | None:
        """Return its last message; None while it runs, or if it ended without one."""

    def end_if_silent(self, limit_s: float, folder: Path | None = None) -> bool:
        """Kill it if no heartbeat or no progress was received for `limit_s` seconds; return True if it was killed.

        For progress the limit is at least ten times the longest recent interval. After a kill `describe_end` reports
        it, and the stack is in the run's `folder`.
        """

    def describe_end(self) -> str:
        """Describe in a few words why it ended."""

    def interrupt(self) -> None:
        """Forward Ctrl-C to it."""

    def hang_up(self) -> None:
        """Request its end, without waiting."""

    def kill(self) -> None:
        """Kill it and wait for its end."""

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Wait for its end, kill it after `limit_s` seconds, and free its resources here."""


class Launcher(Protocol):
    """Starts the processes of a run, each with its devices."""

    ip: str = LOOPBACK
    """The address at which other processes reach this one."""
    node: str = "here"
    devices_of_node: int | None = None
    """CUDA devices of the largest of several nodes; None on one machine, and without devices."""

    def reserve(self, pools: "Sequence[Pool]") -> None:
        """Assign devices and threads to every process of the pools. Raises UserError if there are too few devices."""

    def has_room(self, pool: str, number: int) -> bool:
        """Return True if a process with this number in a reserved pool has its devices."""
        return True

    def node_of(self, pool: str, number: int) -> str:
        """Return the name of the node for the process with this number in a pool."""
        return self.node

    def serve(self, service: type, *arguments: Any) -> list[Any]:
        """Make `service(node, ip, *arguments)` on every other reserved node, until `close`; return their `place()`s."""
        return []

    def start(self, pool: str, number: int, spec: ProcessSpec) -> Process:
        """Start the process with this number in a pool and set its threads and devices; the caller closes it."""

    def answered(self, processes: Sequence[Process], seconds: float) -> list[Process]:
        """Wait at most `seconds` for a process to finish or die; return all processes that have."""

    def close(self) -> None:
        """Release the reservations. The callers of `start` close their processes."""
