"""One process as whoever starts it sees it: how it is started, what it is given, how it ended. Imports the standard library alone.

spawn        a fresh interpreter, perhaps of another environment                    ranks, engines, verifiers
from_server  a copy of a process that has imported the code and computed nothing    workers that are there in a moment
fork         a copy of this process, which must have computed nothing yet           the followers of an engine

starter ◀──connection──▶ process        whose end is the end of whoever is at its other end; output goes where the starter's goes
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
import types
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from braidrl.errors import UserError, WorkerError

BOOT = """
import importlib, json, sys
descriptor, module, function, path = json.loads(sys.argv[1])
sys.path[:] = path
getattr(importlib.import_module(module), function)(descriptor)
"""
BOOT_ELSEWHERE = BOOT.replace("sys.path[:] = path", "sys.path += [place for place in path if place not in sys.path]")
"""For the interpreter of another environment, whose own packages come first."""
CHILD = "braidrl.cluster.child:main"
END_LIMIT_S = 10.0
"""How long processes have to end by themselves before they are killed."""
LOOK_EVERY_S = 0.02


@dataclass(frozen=True)
class Failure:
    """Why a process did not do its task."""

    kind: str
    """user (a UserError), error, interrupted, or died for a process that ended without a word."""
    message: str
    """What the user is to read, with the process's own traceback for an error."""
    follows: bool = False
    """True where the process only noticed that others were gone."""

    @property
    def is_cause(self) -> bool:
        """Return whether this failure ends the run at once."""
        return not self.follows and self.kind != "interrupted"

    def error(self) -> BaseException:
        """Return the exception to raise for this failure: UserError, KeyboardInterrupt or WorkerError."""
        if self.kind == "interrupted":
            return KeyboardInterrupt()
        return UserError(self.message) if self.kind == "user" else WorkerError(self.message)


@dataclass(frozen=True)
class Outcome:
    """The last word of a process: what its task returned, a JSON value, or how it failed."""

    result: Any = None
    failure: Failure | None = None


@dataclass(frozen=True)
class ProcessSpec:
    """What a process does and what it is given."""

    name: str
    entry: str
    """`module:function`. With `arguments` it is called with them, and what it returns is the process's result; without, it is
    called with the descriptor of its end of the connection, over which it speaks as it likes."""
    arguments: Mapping[str, Any] | None = None
    """A JSON object."""
    orphaned: str = ""
    """`module:function`, called with the arguments when the starter is gone, just before the process ends too."""
    python: str = sys.executable
    threads: int | None = None
    """CPU threads (OMP_NUM_THREADS); None leaves what the starter's environment says."""
    devices: tuple[int, ...] | None = None
    """The CUDA devices that it sees, by their numbers among the starter's; None for all of those."""
    environment: Mapping[str, str] = field(default_factory=dict)


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
    return {**starter, **own}


def default_threads(processes: int) -> int | None:
    """Return the threads of each of so many processes of this machine; None where OMP_NUM_THREADS says it already."""
    return None if "OMP_NUM_THREADS" in os.environ else max(1, (os.cpu_count() or 1) // processes)


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


class LocalProcess(Process):
    """A process of this machine, with the starter's end of the connection to it."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.connection = name, connection
        self._outcome: Outcome | None = None

    @property
    @abstractmethod
    def status(self) -> int | None:
        """Return the exit status, minus the signal for a process that was killed; None while it runs."""

    @abstractmethod
    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def outcome(self) -> Outcome | None:
        if self._outcome is None and not self.connection.closed and self.connection.poll():
            with contextlib.suppress(EOFError, OSError):
                self._outcome = decode_outcome(self.connection.recv_bytes())
        return self._outcome

    def describe_end(self) -> str:
        self.wait(END_LIMIT_S)
        status = self.status
        return f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"

    def interrupt(self) -> None:
        self.signal(signal.SIGINT)

    def hang_up(self) -> None:
        # Also while another thread waits for its word, for which a mere `close` would wait too.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    def wait(self, limit_s: float) -> bool:
        """Wait until it has ended; return False where it has not within so many seconds."""
        deadline = time.monotonic() + limit_s
        while self.alive:
            if time.monotonic() >= deadline:
                return False
            time.sleep(LOOK_EVERY_S)
        return True

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        self.wait(limit_s)
        self.kill()
        self.connection.close()


class Spawned(LocalProcess):
    """A fresh interpreter in a session of its own: what it started is killed with it, and a terminal's Ctrl-C does not reach it."""

    def __init__(self, spec: ProcessSpec) -> None:
        ours, theirs = Pipe()
        super().__init__(spec.name, ours)
        module, _, function = (spec.entry if spec.arguments is None else CHILD).partition(":")
        boot = BOOT if spec.python == sys.executable else BOOT_ELSEWHERE
        self._process = subprocess.Popen(
            [spec.python, "-c", boot, json.dumps([theirs.fileno(), module, function, sys.path])],
            stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True,
            env=environment_of(spec, os.environ),
        )  # fmt: skip
        theirs.close()
        send_task(ours, spec)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def status(self) -> int | None:
        # Looked at without reaping it, so that its number cannot have become another's when its group is killed.
        if self._process.returncode is None:
            seen = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if seen is None:
                return None
            return seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status
        return self._process.returncode

    def signal(self, number: int) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill_group(self) -> None:
        """Kill it and all that it started, and do not wait."""
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def kill(self) -> None:
        self.kill_group()
        self._process.wait()


class Forked(LocalProcess):
    """A copy of this process or of the fork server."""

    def __init__(self, name: str, connection: Connection, process: BaseProcess) -> None:
        super().__init__(name, connection)
        self._process, self._pid = process, process.pid

    @property
    def pid(self) -> int:
        assert self._pid is not None
        return self._pid

    @property
    def status(self) -> int | None:
        return self._process.exitcode

    def signal(self, number: int) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def spawn(spec: ProcessSpec) -> Spawned:
    """Start a fresh interpreter. Nothing of torch's threads is copied, and the user's main script does not run again."""
    return Spawned(spec)


def from_server(spec: ProcessSpec) -> Forked:
    """Start a copy of the fork server, a process that has imported the module of the entry; no thread or device is copied."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([spec.entry.partition(":")[0]])
    ours, theirs = context.Pipe()
    own = {name: value for name, value in environment_of(spec, os.environ).items() if os.environ.get(name) != value}
    process = context.Process(target=_copied, args=(theirs, own), name=spec.name, daemon=False)
    with _main_module_hidden():
        process.start()
    theirs.close()
    send_task(ours, spec)
    return Forked(spec.name, ours, process)


def fork(name: str, run: Callable[[Connection], None], kept_here: Sequence[int] = ()) -> Forked:
    """Start a copy of this process.

    Args:
        name: What it is called.
        run: Called there with its end of the connection.
        kept_here: Descriptors that it closes: what it kept of this process's would hide this one's end from others.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    process = context.Process(target=_forked, args=(run, theirs, [*kept_here, ours.fileno()]), name=name)
    process.start()
    theirs.close()
    return Forked(name, ours, process)


def send_task(connection: Connection, spec: ProcessSpec) -> None:
    """Send a process of `CHILD` its task."""
    if spec.arguments is None:
        return
    task = {"name": spec.name, "entry": spec.entry, "arguments": dict(spec.arguments), "orphaned": spec.orphaned}
    with contextlib.suppress(OSError):  # A process that is gone already shows when its last word is awaited.
        connection.send_bytes(json.dumps(task).encode())


def decode_outcome(message: bytes) -> Outcome:
    """Return the last word of a process, as `child` sends it."""
    plain = json.loads(message)
    failure = plain.get("failure")
    return Outcome(plain.get("result"), Failure(**failure) if failure else None)


@contextlib.contextmanager
def _main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the user's main script again in the process, which asks scripts for a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _copied(connection: Connection, environment: Mapping[str, str]) -> None:
    # Imported here: whoever spawns engines and verifiers needs nothing of it.
    from braidrl.cluster.child import serve

    os.setsid()
    os.environ.update(environment)
    serve(connection)


def _forked(run: Callable[[Connection], None], connection: Connection, kept_by_starter: Sequence[int]) -> None:
    for descriptor in kept_by_starter:
        os.close(descriptor)
    run(connection)
