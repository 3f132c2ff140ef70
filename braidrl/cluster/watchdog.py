"""Watchdog: detect frozen processes, dump their stacks and kill them, so that waiting processes see an ordinary death.

watch ──each look──▶ all descendants of this process: stopped by a signal, or without heartbeat
      ──longer than `cluster.silence_s`──▶ stack into the run's folder ──▶ SIGKILL

A process sends a heartbeat each second over the connection to its parent, from a separate thread (`child`). The kernel
reports a process stopped by a signal, whatever started it: this covers Ray's own processes and the fork server.
"""

import contextlib
import faulthandler
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil

from braidrl.cluster.process import BEAT_S, END_LIMIT_S
from braidrl.observe.stalls import WORK

LOOKS = 6
"""Checks of a process within the time limit for a frozen one."""
ASLEEP_S = 5.0
"""A watch that wakes this many seconds late was itself stopped, and not only slow."""
STACK = "braid-stack"
STACK_S = 2.0
"""Seconds that a process may take to dump its stack, on a busy machine."""
COMM_BYTES = 15
FORK_SERVER = "fork server"
NEEDED_BY_RAY = ("gcs_server", "raylet")
"""Ray's processes that a cluster needs.

If one dies, Ray ends the waiting program without a line, at once or after a minute.
"""


def heartbeat_limit(silence_s: float) -> float:
    """Return the seconds without a heartbeat before a process is killed; a stopped process is reported earlier."""
    return 1.25 * silence_s + 2 * BEAT_S


def named(name: str) -> None:
    """Set this process's visible name, and dump its stack on SIGUSR1."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:COMM_BYTES])
    faulthandler.register(signal.SIGUSR1, file=os.memfd_create(STACK), all_threads=True)


def keep_stack(process: int, name: str, folder: Path | None) -> str:
    """Make a process of this run dump its stacks into the run's folder, and stop it; return text naming the file."""
    with contextlib.suppress(OSError):
        held = next((fd for fd in Path(f"/proc/{process}/fd").iterdir() if STACK in os.readlink(fd)), None)
        if held is None:
            return ""
        deaf = blocking_threads(process, signal.SIGUSR1)
        for number in (signal.SIGUSR1, signal.SIGCONT):
            os.kill(process, number)
        limit = time.monotonic() + STACK_S
        # A thread that handles a signal blocks a second one of the same kind.
        while time.monotonic() < limit and (
            not held.stat().st_size or blocking_threads(process, signal.SIGUSR1) - deaf
        ):
            time.sleep(0.01)
        os.kill(process, signal.SIGSTOP)
        stack = held.read_text()
        if stack and folder is not None:
            path = stack_file(folder, name, process)
            path.write_text(stack)
            return f"; its stack is in {path}"
    return ""


def blocking_threads(process: int, number: signal.Signals) -> set[str]:
    """Return the threads of a process that block or still handle a signal."""
    held = set()
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended
            (mask,) = re.findall(r"SigBlk:\t(\w+)", (thread / "status").read_text())
            if int(mask, 16) >> (number - 1) & 1:
                held.add(thread.name)
    return held


def stack_file(folder: Path, name: str, process: int) -> Path:
    """Return the path of a dumped stack in a run's folder."""
    path = folder / "stacks" / f"{re.sub('[ /]', '-', name)}-{process}.txt"
    path.parent.mkdir(exist_ok=True)
    return path


def descendants(process: int) -> dict[int, str]:
    """Return all descendants of a process with the status of each, as psutil names it."""
    names = dict[int, str]()
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                names[child.pid] = child.status()
    return names


def has_ended(process: int) -> bool:
    """Return True if a process has ended, or is a zombie."""
    try:
        return psutil.Process(process).status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def name_of(process: int) -> str:
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        name = Path(f"/proc/{process}/comm").read_text().strip()
        if name == FORK_SERVER or "multiprocessing.forkserver" in command:
            # Copies of the fork server share its command line, but `named` has set their names.
            was_named = any(STACK in os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir())
            return name if was_named else f"the {FORK_SERVER}"
        return name
    return "a process"


class FrozenWatch(AbstractContextManager["FrozenWatch"]):
    """Kills descendants of this process that are stopped for too long, and reports stalls of this process."""

    def __init__(self, silence_s: float, say: Callable[[str], object], folder: Path | None = None) -> None:
        """Start the watching thread.

        `say` prints a line for a process stopped for `silence_s` seconds, and for a stall of this process.
        """
        self.silence_s, self.say, self.folder = silence_s, say, folder
        self.killed: list[str] = []
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frozen", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(END_LIMIT_S)
        for process, state in descendants(os.getpid()).items():
            # The watch has ended, and this process, which is ending, waits for a stopped one.
            if state == psutil.STATUS_STOPPED:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGCONT)

    def _run(self) -> None:
        pause, looked, was_reported = self.silence_s / LOOKS, time.monotonic(), False
        since: dict[int, float] = {}
        while not self._ending.wait(pause):
            now = time.monotonic()
            if now - looked > pause + ASLEEP_S:
                since.clear()  # this process was itself stopped, perhaps together with all others
            looked = now
            stopped = [process for process, state in descendants(os.getpid()).items() if state == psutil.STATUS_STOPPED]
            since = {process: since.get(process, now) for process in stopped}
            for process in [process for process, first in since.items() if now - first >= self.silence_s]:
                name, seconds = name_of(process), now - since.pop(process)
                where, last = keep_stack(process, name, self.folder), ""
                if name in NEEDED_BY_RAY:
                    last = "; the cluster ends with it, and the run: go on with `braid train --resume`"
                message = f"{name} (process {process}) was stopped for {seconds:.0f} s and was killed{where}{last}"
                self.killed.append(message)
                self.say(message)  # before the kill: Ray may then end this process
                for candidate in (*(descendants(process) if name in NEEDED_BY_RAY else ()), process):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(candidate, signal.SIGKILL)
            # Report a stall of this process once; no other process watches it.
            stall = WORK.stalled()
            if stall is None or stall.seconds < self.silence_s:
                was_reported = stall is not None and was_reported
            elif not was_reported:
                was_reported, where = True, ""
                if self.folder is not None:
                    path = stack_file(self.folder, stall.name, os.getpid())
                    with path.open("w") as file:
                        faulthandler.dump_traceback(file)
                    where = f"; its stack is in {path}"
                self.say(f"{stall.described()}{where}")
