"""What the processes of a run are to whoever starts them: what one is given, how it ended, and what starts and ends it.

Launcher ──ProcessSpec──▶ Process: works ──▶ Outcome: a result, or a Failure        or it is killed, and has none
"""

import os
import signal
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Protocol

from braidrl.errors import BadUpdate, FailedStep, LostProcess, UserError, WorkerError

if TYPE_CHECKING:
    # It loads the configuration, which most processes of a run have no use for.
    from braidrl.cluster.pools import Pool

LOOPBACK = "127.0.0.1"
BEAT_S = 1.0
"""Seconds between the signs of life of a process."""
END_LIMIT_S = 10.0
"""How long processes have to end by themselves before they are killed."""


@dataclass(frozen=True)
class Failure:
    """Why a process did not do its task."""

    kind: str
    """user (a UserError), update (a BadUpdate), step (a FailedStep), error, interrupted, or died for one that ended without a word."""
    message: str
    """What the user is to read, with the process's own traceback for an error."""
    follows: bool = False
    """True where the process only noticed that others were gone."""

    @property
    def is_cause(self) -> bool:
        """Return whether this failure ends the run at once."""
        return not self.follows and self.kind != "interrupted"

    def error(self) -> BaseException:
        """Return the exception to raise for this failure: UserError, BadUpdate, KeyboardInterrupt, LostProcess or WorkerError."""
        if self.kind == "interrupted":
            return KeyboardInterrupt()
        kinds: dict[str, type[Exception]] = {
            "user": UserError, "update": BadUpdate, "step": FailedStep, "died": LostProcess,
        }  # fmt: skip
        return kinds.get(self.kind, LostProcess if self.follows else WorkerError)(self.message)


@dataclass(frozen=True)
class Outcome:
    """The last word of a process: what its task returned, a message, or how it failed."""

    result: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class ChildTask:
    """The first message to a process: its name, and the names of functions with their arguments, as in `ProcessSpec`."""

    name: str
    entry: str
    arguments: dict[str, Any]
    orphaned: str = ""


WAIT_SETTINGS = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Environment variables that say how OpenMP's threads wait for one another."""


@dataclass(frozen=True)
class ProcessSpec:
    """What a process does and what it is given."""

    name: str
    entry: str
    """`module:function`. With `arguments` it is called with them, and what it returns is the process's result; without, it is
    called with the descriptor of its end of the connection, whose messages are its own."""
    arguments: Mapping[str, Any] | None = None
    """Values that a message can have."""
    orphaned: str = ""
    """`module:function`, called with the arguments when the starter is gone, just before the process ends too."""
    python: str = sys.executable
    threads: int | None = None
    """CPU threads (OMP_NUM_THREADS); None leaves what the starter's environment says."""
    devices: tuple[int, ...] | None = None
    """The CUDA devices that it sees, by their numbers among the starter's; None for all of those."""
    environment: Mapping[str, str] = field(default_factory=dict)
    inherits: tuple[str, ...] | None = None
    """The variables that it gets of the starter's; None for all."""
    wrapper: tuple[str, ...] = ()
    """A command that starts the interpreter in its place, with its arguments after its own."""
    descriptors: tuple[int, ...] = ()
    """Open files of the starter that `wrapper` reads."""
    also_calls: str = ""
    """`module:function` that the entry calls, so that a fork server imports its module too."""

    starts: tuple[str, ...] = ()
    """The modules of what it starts itself, on this machine, as copies of a fork server of its own."""

    @property
    def main(self) -> str:
        """Return the `module:function` that is called with the descriptor of the process's end of the connection."""
        return self.entry if self.arguments is None else "braidrl.cluster.child:main"

    def modules(self) -> tuple[str, ...]:
        """Return the names of the modules that the process runs."""
        return tuple(name.partition(":")[0] for name in (self.entry, self.also_calls) if name)


@contextmanager
def interrupts_handled(handle: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Call `handle` for SIGINT and SIGTERM inside; Python allows it in the main thread alone, in others nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def environment_of(spec: ProcessSpec, starter: Mapping[str, str]) -> dict[str, str]:
    """Return the whole environment of a process, which holds before it imports torch.

    Args:
        spec: The process.
        starter: The environment of the process that starts it.
    """
    own = dict(spec.environment)
    if spec.threads is not None:
        own["OMP_NUM_THREADS"] = str(spec.threads)
    if spec.devices is not None:
        seen = starter.get("CUDA_VISIBLE_DEVICES", "").split(",")
        own["CUDA_VISIBLE_DEVICES"] = ",".join(seen[n] if seen != [""] else str(n) for n in spec.devices)
    passed = starter if spec.inherits is None else {name: starter[name] for name in spec.inherits if name in starter}
    return {**passed, **own}


def usable_cores() -> int:
    """Return the cores that this process may use: of its affinity, and no more than its container's share of time."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
    except (OSError, ValueError):
        return cores
    return cores if quota == "max" else max(1, min(cores, round(int(quota) / int(period))))


def sleep_at_barriers() -> None:
    """Let OpenMP's threads sleep while they wait for one another, unless the user has set how they wait.

    It holds in this process where torch is not loaded yet, and in processes that it starts. By default these threads spin: where another
    program has the core of one of them, all of them spin until it is back, and a step takes ten times as long.
    """
    if not any(name in os.environ for name in WAIT_SETTINGS):
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"


def default_threads(processes: int) -> int | None:
    """Return the threads of each of so many processes of this machine; None where OMP_NUM_THREADS says it already."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, usable_cores() // processes)


class Process(ABC):
    """A process that was started, wherever it runs."""

    name: str

    @property
    @abstractmethod
    def pid(self) -> int:
        """Return its process id on its machine."""

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Return whether it still works."""

    @property
    @abstractmethod
    def outcome(self) -> Outcome | None:
        """Return its last word; None for a process that still works, or that has ended without one."""

    @abstractmethod
    def end_if_silent(self, limit_s: float, folder: Path | None = None) -> bool:
        """Kill it where nothing was heard of it, or of progress in its work, for too long, which `describe_end` says then.

        Args:
            limit_s: How long, in seconds; for progress ten times the longest stretch without any of late where that is more.
            folder: The run's, for its stack.

        Returns:
            Whether it was killed.
        """

    @abstractmethod
    def describe_end(self) -> str:
        """Return why it is gone, in a few words."""

    @abstractmethod
    def interrupt(self) -> None:
        """Pass Ctrl-C on to it."""

    @abstractmethod
    def hang_up(self) -> None:
        """Tell it to end, and do not wait."""

    @abstractmethod
    def kill(self) -> None:
        """End it at once and wait until it is gone."""

    @abstractmethod
    def close(self, limit_s: float = END_LIMIT_S) -> None:
        """Wait until it has ended, kill it when that takes too long, and free what it took here."""


class Launcher(Protocol):
    """Starts the processes of a run, each with the devices that it is to see."""

    @property
    def ip(self) -> str:
        """Return the address at which the processes reach this one."""

    @property
    def node(self) -> str:
        """Return the name of this process's node."""

    def reserve(self, pools: "Sequence[Pool]") -> None:
        """See to devices and threads for every process of the pools. Raises UserError where there are too few devices."""

    def node_of(self, pool: str, number: int) -> str:
        """Return the name of the node on which a process will be.

        Args:
            pool: Its pool's name.
            number: Its number there.
        """

    def serve(self, service: type, *arguments: Any) -> list[Any]:
        """Run a service on every reserved node but this one; it is closed in the end.

        Args:
            service: Its class, made there as `service(node, ip, *arguments)`.
            arguments: What it is made with beside its node's name and address.

        Returns:
            What `place()` of each returns.
        """

    def start(self, pool: str, number: int, spec: ProcessSpec) -> Process:
        """Start a process of a pool.

        Args:
            pool: The pool's name.
            number: The process's number there.
            spec: What it does, with `arguments`; threads and devices are the launcher's to say.

        Returns:
            The process, which whoever has called closes.
        """

    def answered(self, processes: Sequence[Process], seconds: float) -> list[Process]:
        """Return those that have said their last word or are gone.

        Args:
            processes: Whose word is waited for.
            seconds: The longest wait for the first of them.
        """

    def close(self) -> None:
        """Free what was reserved. Each process is closed by whoever has started it."""
