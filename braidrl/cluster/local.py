"""Processes of this machine: two ways to start one, and the launcher that assigns cores and devices.

Spawned      a fresh interpreter, perhaps of another environment: vLLM, verifiers, processes with devices
from_server  a copy of a process that has imported the code and computed nothing: ranks, workers, engines on CPUs

parent ◀──connection──▶ process      the process ends when the connection closes; its output goes to the parent's output

The fork server is a copy of a command with all imports done: processes start at once and share the imported code's
memory.

a command, all imported ──fork──▶ fork server ──fork──▶ ranks, workers, engines
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import Pipe, forkserver, resource_tracker, util
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from braidrl.cluster.devices import Devices, assign_devices, device_count
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import (
    END_LIMIT_S,
    Launcher,
    Outcome,
    Process,
    ProcessSpec,
    default_threads,
    environment_of,
)
from braidrl.cluster.watchdog import FORK_SERVER, has_ended, keep_stack
from braidrl.data.messages import pack_message, unpack_message
from braidrl.errors import WorkerError
from braidrl.importing import OBJECTS_BETWEEN_COLLECTIONS
from braidrl.observe.stalls import Stall

BOOT = f"""
import ctypes, gc, importlib, json, signal, sys
# PR_SET_PDEATHSIG: when the starter dies, a stopped process continues, and so can end.
ctypes.CDLL(None).prctl(1, signal.SIGCONT)
gc.set_threshold({OBJECTS_BETWEEN_COLLECTIONS})
descriptor, module, function, path, name = json.loads(sys.argv[1])
open("/proc/self/comm", "w").write(name)
sys.path[:] = path
getattr(importlib.import_module(module), function)(descriptor)
"""
BOOT_ELSEWHERE = BOOT.replace("sys.path[:] = path", "sys.path += [place for place in path if place not in sys.path]")
"""Arguments for another environment's interpreter: its own packages come first."""
ENGINES = ("braidrl.engines.engine_process",)
"""Modules of the engines that ranks and workers start themselves."""
SERVER_START = "braidrl.cluster.server_start"
"""The first import of a fresh fork server."""
LOOK_EVERY_S = 0.02
STARTING = threading.Lock()
"""Lock around the start of a copy of the fork server: the main module is hidden per process, not per thread."""
PR_SET_PDEATHSIG = 1
SPAWN = util.spawnv_passfds
SERVER_IS_GONE = 255
"""Exit status that multiprocessing reports for all copies of a fork server when the server is gone."""


class LocalProcess(Process):
    """A process of this machine and the parent's end of its connection; by default a copy of the fork server."""

    pid: int = 0

    def __init__(self, spec: ProcessSpec, connection: Connection, process: Any) -> None:
        """Watch a process started by multiprocessing or subprocess, and send it its task if `spec` has one."""
        self.name, self.connection, self.pid, self._process = spec.name, connection, process.pid, process
        self._outcome: Outcome | None = None
        self._heard, self._silent = time.monotonic(), ""
        self.stall: Stall | None = None
        self.hung_up = False
        """True when no more messages can arrive."""
        if spec.arguments is not None:
            with contextlib.suppress(OSError):  # If the process has already ended, waiting for its outcome reports it.
                connection.send_bytes(pack_message(spec))

    @property
    def status(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        # The fork server reports how its copies ended. If the server was killed, its copies keep running and only this
        # status arrives.
        status: int | None = self._process.exitcode
        return None if status == SERVER_IS_GONE and not has_ended(self.pid) else status

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def outcome(self) -> Outcome | None:
        try:
            while self._outcome is None and not self.connection.closed and self.connection.poll():
                message, self._heard = self.connection.recv_bytes(), time.monotonic()
                word = unpack_message(message, Stall | Outcome | None)  # None is a heartbeat.
                self.stall = word if isinstance(word, Stall) else None
                self._outcome = word if isinstance(word, Outcome) else None
        except (EOFError, OSError):
            self.hung_up = True
        return self._outcome

    def end_if_silent(self, limit_s: float, folder: Path | None = None) -> bool:
        if self.outcome or not self.alive:
            return False
        silence = time.monotonic() - self._heard
        if self.stall is not None and self.stall.seconds > limit_s:
            what = f"{self.stall.described()},"
        elif silence > limit_s:
            what = f"said nothing for {silence:.0f} s"
        else:
            return False
        self._silent = f"{what} and was killed{keep_stack(self.pid, self.name, folder)}"
        self.kill()
        return True

    def describe_end(self) -> str:
        if self._silent:
            return self._silent
        self.wait(END_LIMIT_S)
        status = self.status
        return f"killed by signal {-status}" if status is not None and status < 0 else f"exit status {status}"

    def interrupt(self) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGINT)

    def hang_up(self) -> None:
        # Works also while another thread reads from the connection; a mere `close` would wait for that thread.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.connection.fileno())) as line:
            line.shutdown(socket.SHUT_RDWR)

    def wait(self, limit_s: float) -> bool:
        """Wait for the end; return False on timeout."""
        deadline = time.monotonic() + limit_s
        while self.alive and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        return not self.alive

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.alive:
                # It leads a process group, as fresh interpreters do, except in the moment after its start.
                leads = os.getpgid(self.pid) == self.pid
                (os.killpg if leads else os.kill)(self.pid, signal.SIGKILL)
        if not self.wait(END_LIMIT_S):
            raise WorkerError(f"{self.name} (process {self.pid}) was killed and does not end")

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        self.wait(limit_s)
        self.kill()
        self.connection.close()


class Spawned(LocalProcess):
    """A fresh interpreter in its own session: its children are killed with it, and a terminal's Ctrl-C does not reach
    it.

    No torch thread is copied, and the user's main script does not run again.
    """

    def __init__(self, spec: ProcessSpec) -> None:
        ours, theirs = Pipe()
        module, _, function = spec.main.partition(":")
        boot = BOOT if spec.python == sys.executable else BOOT_ELSEWHERE
        process = subprocess.Popen(
            [
                *spec.wrapper,
                spec.python,
                "-c",
                boot,
                json.dumps([theirs.fileno(), module, function, sys.path, spec.name[:15]]),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno(), *spec.descriptors],
            start_new_session=True,
            env=environment_of(spec, os.environ),
        )
        theirs.close()
        super().__init__(spec, ours, process)

    @property
    def status(self) -> int | None:
        ended: int | None = self._process.returncode
        if ended is not None:
            return ended
        # Checked without reaping: the process id must stay reserved until its group is killed.
        state = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return None if state is None else state.si_status if state.si_code == os.CLD_EXITED else -state.si_status

    def kill(self) -> None:
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        try:
            self._process.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise WorkerError(f"{self.name} (process {self.pid}) was killed and does not end") from None


def from_server(spec: ProcessSpec) -> LocalProcess:
    """Fork from the fork server, a process that has imported the entry's modules.

    No thread or device is copied. A process has one server, whose imports are fixed at its start. A copy that starts
    further copies has its own server: a fork of itself at its start if `spec.starts` names modules, otherwise a fresh
    interpreter.
    """
    context = multiprocessing.get_context("forkserver")
    modules = [name.partition(":")[0] for name in (spec.entry, spec.also_calls) if name]
    context.set_forkserver_preload([SERVER_START, *modules])
    ours, theirs = context.Pipe()
    changed = {name: value for name, value in environment_of(spec, os.environ).items() if os.environ.get(name) != value}
    process = context.Process(
        target=_copied, args=(theirs, changed, spec.threads, spec.starts, spec.main), name=spec.name, daemon=False
    )
    with STARTING, main_module_hidden():
        process.start()
    theirs.close()
    return LocalProcess(spec, ours, process)


@contextlib.contextmanager
def main_module_hidden() -> Iterator[None]:
    """Keep multiprocessing from running the user's main script again in the child; scripts would need a guard."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _copied(
    connection: Connection, environment: Mapping[str, str], threads: int | None, starts: Sequence[str], main: str
) -> None:
    gc.freeze()  # Freeze the server's imports: a garbage collection over them would copy its memory.
    gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
    gc.enable()
    # As in a fresh interpreter. The server's own method names each lock of a library (tqdm's), Python's resource
    # tracker records the names, and a restarted tracker prints a traceback for each name that it does not know.
    multiprocessing.set_start_method(None, force=True)
    os.setsid()
    # Have the kernel send SIGCONT when the parent ends; a stopped process could not notice it and end. The parent is
    # the fork server, which lives as long as its copies, and this the end of a pipe that it never writes to.
    starter = multiprocessing.parent_process()
    assert starter is not None, "a copy has a starter"
    end = starter.sentinel
    fcntl.fcntl(end, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(end, fcntl.F_SETSIG, signal.SIGCONT)
    fcntl.fcntl(end, fcntl.F_SETFL, fcntl.fcntl(end, fcntl.F_GETFL) | os.O_ASYNC)
    os.environ.update(environment)
    if threads is not None and (torch := sys.modules.get("torch")):  # OpenMP read its variable when torch was imported.
        torch.set_num_threads(threads)
    if starts:
        copy_as_fork_server(starts)
    descriptor = os.dup(connection.fileno())
    connection.close()
    resolve_name(main)(descriptor)


def copy_as_fork_server(modules: Iterable[str]) -> bool:
    """Fork this process as the fork server for it and its descendants; return True if that was possible.

    By default multiprocessing starts a fresh interpreter as its fork server, which imports everything again. Call this
    before this process computes, starts a thread or opens private files: threads, locks and devices do not survive a
    fork. If it is too late, this does nothing and multiprocessing starts its default server when needed. `modules` are
    imported first, for the copies to run.
    """
    if threading.active_count() > 1:
        return False
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # Freeze imports: a garbage collection over them would copy the server's memory.
    try:
        util.spawnv_passfds = _fork_as  # type: ignore[assignment]
        forkserver.ensure_running()  # and, before it, the resource tracker
    finally:
        util.spawnv_passfds = SPAWN
    return True


def _fork_as(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Replace `util.spawnv_passfds` for an interpreter with `-c` by a fork of this process; return its process id."""
    sys.stdout.flush()
    process = os.fork()
    if not process:
        program = arguments[-1]
        kept = {*descriptors, 0, 1, 2}
        try:
            with contextlib.suppress(OSError):
                # The other call starts multiprocessing's resource tracker, which frees resources of dead processes.
                Path("/proc/self/comm").write_text(FORK_SERVER if "forkserver" in program else "tracker")
            # The kernel sends SIGCONT when the parent ends: a stopped process could not notice it and end.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
            # A fresh interpreter has no such lock held; the parent holds it while it starts these processes.
            util.spawnv_passfds = SPAWN
            for module in (resource_tracker, forkserver):
                importlib.reload(module)
            # Not closed: a logger that still has a file of the parent would write into a socket with the file's number.
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - kept - {nothing}:
                os.dup2(nothing, descriptor, inheritable=False)
            exec(program, {})
        except EOFError:  # a client without free descriptors reports this itself
            pass
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    return process


class LocalLauncher(Launcher):
    """Starts processes on this machine, which share its cores."""

    def __init__(self, device: str = "cpu") -> None:
        """Start a launcher for the configured `device`: cpu, cuda or auto."""
        self._devices = device_count(device)
        self._table: dict[str, Devices] = {}
        self._threads: int | None = None
        self._start_engines: set[str] = set()

    def reserve(self, pools: Sequence[Pool]) -> None:
        if self._devices is not None:
            self._table = assign_devices(pools, self._devices)
        self._threads = default_threads(sum(pool.workers for pool in pools))
        self._start_engines = {pool.name for pool in pools if pool.engines}

    def has_room(self, pool: str, number: int) -> bool:
        return self._devices is None or f"{pool}-{number}" in self._table

    def start(self, pool: str, number: int, spec: ProcessSpec) -> Process:
        """Start a process.

        With devices it is a fresh interpreter, since CUDA_VISIBLE_DEVICES must be set before torch is imported.
        """
        devices = self._table.get(f"{pool}-{number}")
        starts = ENGINES if pool in self._start_engines else ()
        spec = replace(spec, threads=self._threads, devices=devices.every if devices else None, starts=starts)
        return from_server(spec) if devices is None else Spawned(spec)

    def answered(self, processes: Sequence[Process], seconds: float) -> list[Process]:
        lines = {process.connection: process for process in processes if isinstance(process, LocalProcess)}
        deadline = time.monotonic() + seconds
        while True:
            remaining_s = max(0.0, deadline - time.monotonic())
            spoken = [lines[line] for line in wait(list(lines), remaining_s)]  # type: ignore[index]
            ended: list[Process] = [process for process in spoken if process.outcome is not None or process.hung_up]
            if ended or time.monotonic() >= deadline:  # Most messages are heartbeats.
                return ended

    def close(self) -> None:
        """Do nothing: local cores and devices are not reserved."""
