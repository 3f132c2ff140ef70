"""Processes of a run that are frozen: found, named, their stack kept, and killed, so that those who wait go on as after any death.

watch ──each look──▶ all that this process has started, and what those have: stopped by a signal, or silent
      ──longer than `cluster.silence_s`──▶ stack into the run's folder ──▶ SIGKILL

A process says that it lives by a message each second over the connection to its starter, from a thread of its own (`child`). One that a
signal has stopped is seen by the kernel's word, whoever has started it: Ray's own processes and the fork server too.
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

from braidrl.cluster.process import BEAT_S, END_LIMIT_S
from braidrl.observe.stalls import WORK

LOOKS = 6
"""How often a process is looked at within the time after which it counts as frozen."""
ASLEEP_S = 5.0
"""So much later than it meant to a watch looks again that was stopped itself, and not only slow."""
STACK = "braid-stack"
STACK_S = 2.0
"""How long a process may take to write down its stack, on a busy machine."""
COMM_BYTES = 15
"""The kernel keeps so much of a process's name."""
FORK_SERVER = "fork server"
NEEDED_BY_RAY = ("gcs_server", "raylet")
"""Ray's processes without which a cluster answers no more. Ray says so by ending the program that waits for one, without a line, at once
or after a minute."""


def mute_after(silence_s: float) -> float:
    """Return after how many seconds a process is killed that says nothing; one that a signal has stopped is named before that."""
    return 1.25 * silence_s + 2 * BEAT_S


def named(name: str) -> None:
    """Give this process a name that others see, and have it write down its stack on SIGUSR1."""
    goes_by(name)
    faulthandler.register(signal.SIGUSR1, file=os.memfd_create(STACK), all_threads=True)


def goes_by(name: str) -> None:
    """Give this process a name that others see."""
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text(name[:COMM_BYTES])


def stack_of(process: int) -> str:
    """Return the stacks of a process of ours, also where a signal has stopped it; nothing for one that does not write them down."""
    with contextlib.suppress(OSError):
        held = next((fd for fd in Path(f"/proc/{process}/fd").iterdir() if STACK in os.readlink(fd)), None)
        if held is None:
            return ""
        deaf = holding_back(process, signal.SIGUSR1)
        for number in (signal.SIGUSR1, signal.SIGCONT):
            os.kill(process, number)
        limit = time.monotonic() + STACK_S
        # While a thread handles a signal it holds back a second one of the kind.
        while time.monotonic() < limit and (not held.stat().st_size or holding_back(process, signal.SIGUSR1) - deaf):
            time.sleep(0.01)
        os.kill(process, signal.SIGSTOP)
        return held.read_text()
    return ""


def holding_back(process: int, number: signal.Signals) -> set[str]:
    """Return the threads of a process that a signal would have to wait for."""
    found = set()
    for thread in Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            (mask,) = re.findall(r"SigBlk:\t(\w+)", (thread / "status").read_text())
            if int(mask, 16) >> (number - 1) & 1:
                found.add(thread.name)
    return found


def keep_stack(process: int, name: str, folder: Path | None) -> str:
    """Write a process's stack into a run's folder; return what is to be said of it."""
    stack = stack_of(process)
    if not stack or folder is None:
        return ""
    path = stack_file(folder, name, process)
    path.write_text(stack)
    return f"; its stack is in {path}"


def stack_file(folder: Path, name: str, process: int) -> Path:
    """Return where in a run's folder a stack is kept."""
    path = folder / "stacks" / f"{name.replace(' ', '-').replace('/', '-')}-{process}.txt"
    path.parent.mkdir(exist_ok=True)
    return path


def descendants(process: int) -> dict[int, str]:
    """Return all that a process has started, and what those have, with the kernel's letter for what each does (T is stopped)."""
    states, children = dict[int, str](), dict[int, list[int]]()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            number = int(entry.name)
            state, parent, *_ = (entry / "stat").read_text().rpartition(")")[2].split()
            states[number] = state
            children.setdefault(int(parent), []).append(number)
    found, waiting = dict[int, str](), [process]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            found[child] = states[child]
            waiting.append(child)
    return found


def has_ended(process: int) -> bool:
    """Return whether a process is gone, or waits only for its starter to notice its end."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def name_of(process: int) -> str:
    """Return what a process is called."""
    with contextlib.suppress(OSError):
        command = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        name = Path(f"/proc/{process}/comm").read_text().strip()
        if (name == FORK_SERVER or "multiprocessing.forkserver" in command) and not was_named(process):
            return f"the {FORK_SERVER}"
        return name
    return "a process"


def was_named(process: int) -> bool:
    """Return whether a process was given a name by `named`: copies of the fork server have its command."""
    return any(STACK in os.readlink(fd) for fd in Path(f"/proc/{process}/fd").iterdir())


class FrozenWatch(AbstractContextManager["FrozenWatch"]):
    """Kills what is stopped for too long among all that this process has started, and says where its own work does not come further."""

    def __init__(self, silence_s: float, say: Callable[[str], object], folder: Path | None = None) -> None:
        """Watch from a thread.

        Args:
            silence_s: how long a process may be stopped, in seconds.
            say: told of each that was killed, and of work here that makes no progress, in a line.
            folder: the run's, for stacks.
        """
        self.silence_s, self.say, self.folder = silence_s, say, folder
        self.killed: list[str] = []
        self._since: dict[int, float] = {}
        self._told = False
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="frozen", daemon=True)
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        self._thread.join(END_LIMIT_S)
        for process in self._stopped():  # nobody kills it any more, and this process waits for it when it ends
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)

    def _run(self) -> None:
        pause, looked = self.silence_s / LOOKS, time.monotonic()
        while not self._ending.wait(pause):
            now = time.monotonic()
            if now - looked > pause + ASLEEP_S:
                self._since.clear()  # this process was stopped itself, and perhaps with it all others
            looked = now
            self._look(now)
            self._look_here()

    def _look(self, now: float) -> None:
        self._since = {process: self._since.get(process, now) for process in self._stopped()}
        for process, since in list(self._since.items()):
            if now - since >= self.silence_s:
                self._end(process, now - since)

    def _stopped(self) -> set[int]:
        """Return what this process has started, and what those have, that a signal has stopped."""
        return {process for process, state in descendants(os.getpid()).items() if state == "T"}

    def _look_here(self) -> None:
        """Say once of each piece of work of this process, which nobody watches, that it makes no progress."""
        stall = WORK.stalled()
        if stall is None or stall.seconds < self.silence_s:
            self._told = stall is not None and self._told
        elif not self._told:
            self._told = True
            where = ""
            if self.folder is not None:
                path = stack_file(self.folder, stall.name, os.getpid())
                with path.open("w") as file:
                    faulthandler.dump_traceback(file)
                where = f"; its stack is in {path}"
            self.say(f"{stall.said()}{where}")

    def _end(self, process: int, seconds: float) -> None:
        name = name_of(process)
        where = keep_stack(process, name, self.folder)
        last = (
            "; the cluster ends with it, and the run: go on with `braid train --resume`"
            if name in NEEDED_BY_RAY
            else ""
        )
        self.killed.append(f"{name} (process {process}) was stopped for {seconds:.0f} s and was killed{where}{last}")
        self.say(self.killed[-1])  # before it is, for Ray may then end this process
        for each in (*(descendants(process) if name in NEEDED_BY_RAY else ()), process):
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        del self._since[process]
