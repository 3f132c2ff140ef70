"""The processes of untrusted code: for one call of a verifier, or one trajectory's environment or agent.

host ──fork──▶ supervisor: namespaces, /tmp ──fork──▶ code: first process, with limits and without capabilities
     ◀─answer─                 ──── requests, a line each ────▶  what it starts ends with it
                               ◀── answers, at most answer_bytes each ──

The host (`host.py`) runs inside bubblewrap (`mounts.py`), where everything is read-only. The code sees only its own processes, and no
files of other calls. It communicates over two pipes, which processes that it executes do not inherit. Each process that it starts waits
until the supervisor has counted it.
"""

import contextlib
import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.sandbox.answers import shown
from braidrl.sandbox.fork_gate import LIBC, ForkGate, Start, hold_back_starts, send_listener

Message = dict[str, Any]
LOAD_LIMIT_S = 120.0
"""Seconds to start Python and import the code on a busy machine; the time limit of a call begins afterwards."""
PIECE_BYTES = 1 << 16
"""Bytes per read."""
FILE_BYTES = 64 << 20
"""Maximum size of a file that the code writes, and of its printed output."""
SCRATCH_BYTES, SCRATCH_FILES = 256 << 20, 65_536
"""Limits of each of the call's own folders."""
OPEN_FILES = 256
THREADS = 16
"""Allowed threads per allowed process."""
PRINTED_BYTES = 4096
"""Bytes of printed output that are shown."""
LOOK_EVERY_S = 0.02
IDLE_LOOK_S = 0.1
"""Seconds between checks of code without a request."""
PROGRAMS = "BRAID_MAY_RUN_PROGRAMS"
"""A variable that is set if models' programs may run."""
PAGE_BYTES = resource.getpagesize()
ENDING_S = 1.0
NEW_NAMESPACES = 0x20000000 | 0x08000000 | 0x00020000
"""Namespaces of processes, System V memory and queues, and mounts."""
NEW_NETWORK = 0x40000000
MS_READ_ONLY, MS_RESTRICTED, MS_BIND, MS_PRIVATE, MS_RECURSIVE = 1, 0b0110, 1 << 12, 1 << 18, 1 << 14
PR_SET_DEATH_SIGNAL, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVILEGES = 1, 4, 38
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
NOT_WAITED_FOR: Message = {"failure": "died", "detail": "its answer is not waited for"}
NO_ANSWER: Message = {"failure": "died", "detail": "its supervisor was killed", "again": True}


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of untrusted code, and its own folders."""

    seconds: float
    """Time limit of one answer."""
    cpu_seconds: float
    """Processor time of each of its processes."""
    memory_bytes: int
    """Address space of each process, and memory of all together, including shared memory and files in its own folders."""
    processes: int
    """Maximum number of processes at a time; of threads `THREADS` times as many."""
    answer_bytes: int = 1 << 16
    """Maximum size of an answer."""
    fresh: tuple[str, ...] = ()
    """Folders of which each call has its own; without any there are no namespaces, and so no sandbox."""
    kept: tuple[str, ...] = ()
    """Paths below them that stay visible."""
    network: bool = True
    """Whether it shares its host's network; otherwise it has its own with only loopback."""


def raised() -> tuple[type[BaseException], ...]:
    """Return the exceptions of the code that do not end its process; call it after an exception.

    asyncio's CancelledError is included only if the code imported asyncio, which takes long for processes that live for a second.
    """
    asyncio = sys.modules.get("asyncio")
    return (Exception, SystemExit, *([asyncio.CancelledError] if asyncio else []))


def supervised_talk(serve: Callable[[int, int], None], limits: SandboxLimits, asker: socket.socket) -> None:
    """Pass requests from a socket to `serve` in a process of its own, and return its answers.

    The talk ends with the socket, or after a failure, which is the last answer.

    Args:
        serve: Reads one request at a time from the first descriptor, and writes its answer to the second.
        limits: The code's limits.
        asker: Sends requests, a line each, one at a time.
    """
    code = SandboxedCode(serve, limits, lambda: hung_up(asker))
    try:
        while code.ready([asker], look_every_s=IDLE_LOOK_S):
            request = asker.recv(PIECE_BYTES)
            if not request:
                code.failure = NOT_WAITED_FOR
            if not request or not code.ask(request):
                break
            if request.endswith(b"\n"):
                answer = code.answer()
                if not answer:
                    break
                asker.sendall(answer)
    finally:
        with contextlib.suppress(OSError):
            asker.sendall(code.last_answer())


def hung_up(end: socket.socket) -> bool:
    """Return whether the other end of a socket is closed."""
    try:
        return not end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


def write_message(descriptor: int, message: Message) -> None:
    """Write a message as a line."""
    rest = memoryview(json.dumps(message).encode() + b"\n")
    while rest:
        rest = rest[os.write(descriptor, rest) :]


class SandboxedCode:
    """A process of untrusted code, as its supervisor sees it."""

    def __init__(self, serve: Callable[[int, int], None], limits: SandboxLimits, abandoned: Callable[[], bool]) -> None:
        """Start the process.

        Args:
            serve: The code, called with descriptors for requests and for answers.
            limits: The code's limits.
            abandoned: Returns whether the caller no longer waits for answers.
        """
        self.limits, self.abandoned = limits, abandoned
        self.failure: Message = {}
        self.isolated, self.mounted = bool(limits.fresh), os.stat("/proc").st_dev
        if self.isolated:
            enter_namespaces(limits)
        requests, self.requests = os.pipe()
        self.answers, answers = os.pipe()
        self.printed = os.memfd_create("printed")
        self.unread = bytearray()
        gate, sender = socket.socketpair()
        self.process = os.fork()
        if self.process == 0:
            try:
                confine({requests, answers, sender.fileno()}, self.printed, limits, self.isolated)
                send_listener(sender, hold_back_starts() if self.isolated else [])
                serve(requests, answers)
            finally:
                os._exit(1)
        os.close(requests)
        os.close(answers)
        sender.close()
        with gate:
            self.gate = ForkGate(gate)
        flags = fcntl.fcntl(self.requests, fcntl.F_GETFL)
        fcntl.fcntl(self.requests, fcntl.F_SETFL, flags | os.O_NONBLOCK)

    def ready(
        self, readable: Sequence[Any] = (), writable: Sequence[int] = (), seconds: float | None = None,
        look_every_s: float = LOOK_EVERY_S,
    ) -> bool:  # fmt: skip
        """Wait for a descriptor; return False, with `failure` set, if the code exceeds a limit or the caller no longer waits."""
        deadline = None if seconds is None else time.monotonic() + seconds
        while not self.failure:
            read, written, _ = select.select([*readable, *self.gate.listeners], writable, [], look_every_s)
            if written or any(end in read for end in readable):
                return True
            if deadline is not None and time.monotonic() > deadline:
                self.failure = {"failure": "timeout", "detail": f"no answer within {self.limits.seconds:g} s"}
            elif self.abandoned():
                self.failure = NOT_WAITED_FOR
            elif self.isolated and (taken := self._excess()):
                self.failure = {"failure": "died", "detail": taken}
        return False

    def _excess(self) -> str:
        """Return the limit that the code exceeds, or an empty text; a pending start is allowed if there is none."""
        start = self.gate.next_start()
        taken = excess(processes_of(self.process, self.mounted, self.limits.processes), self.limits, start)
        if start and not taken:
            self.gate.allow(start)
        return taken

    def ask(self, request: bytes) -> bool:
        """Send the code a part of a request, or all of it; return whether it accepted it."""
        with contextlib.suppress(BrokenPipeError):
            while request and self.ready(writable=[self.requests], seconds=self.limits.seconds):
                request = request[os.write(self.requests, request) :]
        return not request

    def answer(self) -> bytes:
        """Return the code's next line; empty if there is none."""
        deadline = time.monotonic() + self.limits.seconds
        while b"\n" not in self.unread and len(self.unread) <= self.limits.answer_bytes:
            if not self.ready([self.answers], seconds=deadline - time.monotonic()):
                return b""
            piece = os.read(self.answers, PIECE_BYTES)
            if not piece:
                return b""
            self.unread += piece
        line, end, rest = self.unread.partition(b"\n")
        if not end or len(line) > self.limits.answer_bytes:
            most = self.limits.answer_bytes
            self.failure = {"failure": "result", "detail": f"its answer has more than {most} bytes"}
            return b""
        self.unread = rest
        return bytes(line + end)

    def last_answer(self) -> bytes:
        """End the code's processes, and return its answer or its failure."""
        answer = b"" if self.failure else self.answer()
        status, usage = end(self.process, ended=not self.failure)
        show(self.printed)
        failure = self.failure or exit_failure(status, usage.ru_utime + usage.ru_stime, self.limits)
        return answer or json.dumps(failure).encode() + b"\n"


def exit_failure(status: int, cpu_seconds: float, limits: SandboxLimits) -> Message:
    """Return the failure of a process that ended without an answer, by itself or from outside."""
    if status == -signal.SIGKILL and cpu_seconds >= limits.cpu_seconds:
        return {"failure": "timeout", "detail": f"it took over {limits.cpu_seconds:g} s of a processor"}
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    outside = status in (-signal.SIGKILL, -signal.SIGTERM)
    return {"failure": "died", "detail": f"its process died: {how}", "again": outside}


def end(code: int, ended: bool) -> tuple[int, resource.struct_rusage]:
    """Kill the code and, with the namespace's first process, all that it started; return its exit status and resource usage."""
    deadline = time.monotonic() + ENDING_S
    # The code closes its pipe a moment before it ends.
    while ended and time.monotonic() < deadline and not os.waitid(os.P_PID, code, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.kill(code, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(code, signal.SIGKILL)
    _, status, usage = os.wait4(code, 0)
    return os.waitstatus_to_exitcode(status), usage


def enter_namespaces(limits: SandboxLimits) -> None:
    """Enter namespaces in which the next child is the first process, and mount the call's own empty folders."""
    own = 0 if limits.network else NEW_NETWORK
    checked(LIBC.unshare(NEW_NAMESPACES | own))
    checked(LIBC.mount(b"none", b"/", None, MS_PRIVATE | MS_RECURSIVE, None))
    kept = [(place, os.open(place, os.O_PATH)) for place in limits.kept]
    size = f"size={min(SCRATCH_BYTES, limits.memory_bytes)},nr_inodes={SCRATCH_FILES},mode=1777".encode()
    for place in limits.fresh:
        checked(LIBC.mount(b"none", place.encode(), b"tmpfs", MS_RESTRICTED, size))
    for place, descriptor in kept:
        source = f"/proc/self/fd/{descriptor}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.makedirs(place, exist_ok=True)
            checked(LIBC.mount(source.encode(), place.encode(), None, MS_BIND | MS_RECURSIVE, None))
        else:
            # A file of code lies in memory and has no name any more, so it cannot be mounted: the call gets a copy.
            os.makedirs(os.path.dirname(place), exist_ok=True)
            with open(source, "rb") as kept_file, open(place, "wb") as copy:
                copy.write(kept_file.read())
        os.close(descriptor)
    os.chdir(os.getcwd())  # otherwise it stays in the folder below the mount
    if not limits.network:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))


def confine(own: Collection[int], printed: int, limits: SandboxLimits, isolated: bool) -> None:
    """Drop the code process's access to everything but its own pipes, and set its limits."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(printed, stream)
    # Sockets and pipes connect to the run and to the supervisor's caller.
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if number not in own and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                os.close(number)
    if isolated:
        checked(LIBC.mount(b"proc", b"/proc", b"proc", MS_RESTRICTED | 0b1000 | MS_READ_ONLY, None))
        # Version 3, this process; all three sets of 64 bits empty.
        checked(LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()))
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    checked(LIBC.prctl(PR_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))  # its supervisor may be killed
    seconds = int(limits.cpu_seconds) + 1
    for kind, most in (
        (resource.RLIMIT_AS, limits.memory_bytes), (resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_CPU, seconds),
    ):  # fmt: skip
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def processes_of(code: int, mounted: int, most: int) -> set[str]:
    """Return the code's processes; stop counting when there are more than `most`.

    Args:
        code: The first process, which adopts orphans.
        mounted: The device of the first mounted /proc.
        most: The limit on processes.
    """
    if os.stat("/proc").st_dev != mounted:  # the namespace's own /proc is mounted
        return {name for name in os.listdir("/proc") if name.isdecimal()}
    found, waiting = set[str](), [str(code)]
    while waiting and len(found) <= most:
        process = waiting.pop()
        found.add(process)
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{process}/task"):
                with open(f"/proc/{process}/task/{thread}/children") as children:
                    waiting += children.read().split()
    return found


def excess(processes: set[str], limits: SandboxLimits, start: Start | None) -> str:
    """Return the limit that the code's processes exceed, or an empty text.

    Args:
        processes: Their ids.
        limits: The code's limits.
        start: A pending start of one more process or thread.
    """
    if len(processes) + (start is not None and not start.is_thread) > limits.processes:
        return f"it started more than {limits.processes} processes"
    own, mapped, threads = 0, 0, int(start is not None)
    for process in processes:
        with contextlib.suppress(OSError):
            threads += os.stat(f"/proc/{process}/task").st_nlink - 2  # subfolders, one per thread
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/statm") as file:
            size, resident, shared, *_ = map(int, file.read().split())
            own, mapped = own + (resident - shared) * PAGE_BYTES, mapped + size * PAGE_BYTES
    if threads > THREADS * limits.processes:
        return f"it started more than {THREADS * limits.processes} threads"
    for place in limits.fresh:
        files = os.statvfs(place)
        own += (files.f_blocks - files.f_bfree) * files.f_frsize
    if own + mapped > limits.memory_bytes:  # otherwise shared memory cannot exceed the limit
        own += shared_memory(processes)
    return f"its processes took more than {limits.memory_bytes / 2**30:g} GiB" if own > limits.memory_bytes else ""


def shared_memory(processes: set[str]) -> int:
    """Return the bytes of all anonymous shared mappings of these processes, each counted once.

    They count by size: pages that an ended process touched stay allocated, but appear in no resident count.
    """
    found: dict[str, int] = {}
    for process in processes:
        with contextlib.suppress(OSError), open(f"/proc/{process}/maps") as maps:
            for line in maps:
                if "/dev/zero (deleted)" in line:
                    (first, _, last), offset, inode = line.split()[0].partition("-"), line.split()[2], line.split()[4]
                    end = int(last, 16) - int(first, 16) + int(offset, 16)
                    found[inode] = max(found.get(inode, 0), end)
    return sum(found.values())


def show(printed: int) -> None:
    """Print the beginning of the code's output, without control characters."""
    os.lseek(printed, 0, os.SEEK_SET)
    text = os.read(printed, PRINTED_BYTES).decode(errors="replace")
    if text:
        os.write(2, shown(text, keep="\n\t").encode(errors="replace"))


def checked(result: int) -> None:
    """Raise OSError if a call into the C library failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
