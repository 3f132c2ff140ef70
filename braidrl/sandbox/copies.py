"""The copies of a host that run untrusted code: one for each call of a verifier, or one trajectory's environment or
agent.

run ◀── requests and answers, a line each ─▶ copy: first process of its namespaces, with limits and without capabilities
 ▲ a failure, at the copy's end               │ what it starts ends with it
host ──────────── watches, counts, kills ─────┘

The host (`host.py`) runs inside bubblewrap (`walls.py`), where everything is read-only. A copy sees only its own
processes, and no files of other calls. It has its end of the session and no other connection; processes that it
executes do not inherit it. Each process that it starts waits until the host has counted it.
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
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from braidrl.errors import printable
from braidrl.sandbox.answers import Message
from braidrl.sandbox.fork_gate import LIBC, Start, allow, hold_back_starts, next_start

FILE_BYTES = 64 << 20
"""Maximum size of a file that the code writes, and of its printed output."""
SCRATCH_BYTES, SCRATCH_FILES = 256 << 20, 65_536
"""Limits of each of the call's own folders."""
OPEN_FILES = 256
THREADS = 16
"""Allowed threads per allowed process."""
PRINTED_BYTES = 4096
LOOK_EVERY_S, LOOKING = 0.02, 0.1
"""Seconds between two looks at a copy, and the share of its time that the host may spend on looks at many copies."""
ENDING_S = 1.0
PROGRAMS = "BRAID_MAY_RUN_PROGRAMS"
"""A variable that is set if models' programs may run."""
MAPPINGS = 100_000
"""Allowed mappings of memory of all processes: code must not keep the host busy with reading their list."""
WAITING = "02"
"""The state of a connection to a UNIX socket that nothing has accepted."""
PAGE_BYTES = resource.getpagesize()
PIPE_BYTES, INODE_BYTES = 16 * PAGE_BYTES, 1024
"""Sizes of a pipe's buffers, and of an empty file's entries in the kernel."""
NEW_PROCESSES, NEW_MOUNTS, NEW_IPC, NEW_NETWORK = 0x20000000, 0x00020000, 0x08000000, 0x40000000
MS_READ_ONLY, MS_RESTRICTED, MS_NO_PROGRAMS = 0b0001, 0b0110, 0b1000
MS_BIND, MS_PRIVATE, MS_RECURSIVE = 1 << 12, 1 << 18, 1 << 14
PR_SET_DEATH_SIGNAL, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVILEGES = 1, 4, 38
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
REASON = b"\0"
"""Precedes the host's reason for a copy's end; no answer contains it, but the copy may have started one."""
NOT_WAITED_FOR: Message = {"failure": "died", "detail": "its answer is not waited for"}


def socket_buffers() -> int:
    """Return the size of a socket's buffers in bytes; the setting is readable only in the initial network namespace."""
    try:
        with open("/proc/sys/net/core/rmem_default") as received, open("/proc/sys/net/core/wmem_default") as sent:
            return int(received.read()) + int(sent.read())
    except OSError:
        return 2 * 212_992


@dataclass(frozen=True)
class SandboxLimits:
    """The limits of untrusted code, and its private folders."""

    seconds: float
    cpu_seconds: float
    """Processor time of each process."""
    memory_bytes: int
    """Address space of each process, and memory of all processes together, with shared memory and private files."""
    processes: int
    """Maximum number of concurrent processes; of threads `THREADS` times as many."""
    answer_bytes: int = 1 << 16
    fresh: Sequence[str] = ()
    """Folders that each call gets empty and private; without any there are no namespaces, and so no sandbox."""
    kept: Sequence[str] = ()
    """Paths below them that stay visible."""
    socket_bytes: int = field(default_factory=socket_buffers)
    """Size of a socket's buffers, which count as memory."""
    network: bool = True
    """True if it shares its host's network; otherwise it has a private one with only loopback."""


@dataclass(eq=False)
class SandboxedCopy:
    """A copy of the host, as the host sees it."""

    process: int
    handle: int
    """A descriptor of the process, readable at its end."""
    session: socket.socket
    printed: int
    confined: bool = False
    """True once it is in its namespaces. It runs no untrusted code before."""
    listeners: list[int] = field(default_factory=list)
    """The descriptor of its pending starts, if the kernel supports it."""
    failure: Message = field(default_factory=dict)
    next_look: float = 0.0


class SandboxedCopies:
    """The running copies of this process."""

    def __init__(self, run: socket.socket, serve: Callable[[socket.socket], None], limits: SandboxLimits) -> None:
        """Start no copy yet. The run asks for copies over `run`; a copy calls `serve` with its end of the session."""
        self.run, self.serve, self.limits, self.isolated = run, serve, limits, bool(limits.fresh)
        self.copies: dict[int, SandboxedCopy] = {}
        self.actions: dict[int, Callable[[int], None]] = {}
        self.poll, self.number = select.poll(), 0
        self.imported: set[int] | None = None
        self.namespace = os.open("/proc/self/ns/pid", os.O_RDONLY)
        # Over these, each copy sends its number and the descriptor of its starts.
        self.confined, self.sender = socket.socketpair(type=socket.SOCK_SEQPACKET)
        self.poll.register(run, select.POLLIN)
        self._watch(self.confined.fileno(), select.POLLIN, self._on_confined)

    def end_all(self) -> None:
        """Kill the copies, and wait until they have ended."""
        self.poll.unregister(self.run)
        for copy in self.copies.values():
            self._kill(copy, NOT_WAITED_FOR)
        deadline = time.monotonic() + ENDING_S
        while self.copies and time.monotonic() < deadline:
            self.watch_once(LOOK_EVERY_S)

    def _watch(self, descriptor: int, events: int, act: Callable[[int], None]) -> None:
        self.actions[descriptor] = act
        self.poll.register(descriptor, events)

    def _forget(self, descriptor: int) -> None:
        if self.actions.pop(descriptor, None):
            self.poll.unregister(descriptor)

    def watch_once(self, most_s: float | None = None) -> set[int]:
        """Wait for an event or the next check, handle all pending events, and return their descriptors."""
        running = [copy for copy in self.copies.values() if copy.confined and not copy.failure]
        for copy in running:
            if copy.next_look <= (started := time.monotonic()):
                if taken := self._excess(copy, None):
                    self._kill(copy, {"failure": "died", "detail": taken})
                now = time.monotonic()
                copy.next_look = now + max(LOOK_EVERY_S, (now - started) * len(running) / LOOKING)
        now = time.monotonic()
        waits = [copy.next_look - now for copy in running] + ([] if most_s is None else [most_s])
        ready = self.poll.poll(1 + 1000 * max(0.0, min(waits)) if waits else None)
        for descriptor, events in ready:
            if act := self.actions.get(descriptor):
                act(events)
        return {descriptor for descriptor, _ in ready}

    def start(self, session: socket.socket) -> None:
        """Start a copy that serves a session."""
        if self.imported is None:  # the files that the code opened at import, without sockets and pipes
            self.imported = set[int]()
            for number in set(map(int, os.listdir("/proc/self/fd"))) - {self.namespace}:
                with contextlib.suppress(OSError):  # the descriptor of the list itself
                    mode = os.fstat(number).st_mode
                    if not stat.S_ISSOCK(mode) and not stat.S_ISFIFO(mode):
                        self.imported.add(number)
        self.number += 1
        printed = os.memfd_create("printed")
        if self.isolated:
            checked(LIBC.unshare(NEW_PROCESSES))  # of the next child
        process = os.fork()
        if process == 0:
            try:
                self._confine(session, printed)
                self.serve(session)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        if self.isolated:
            checked(LIBC.setns(self.namespace, NEW_PROCESSES))
        copy = self.copies[self.number] = SandboxedCopy(process, os.pidfd_open(process), session, printed)
        on_end = lambda _, number=self.number: self._on_end(number)  # noqa: E731
        self._watch(copy.handle, select.POLLIN, on_end)
        self._watch(session.fileno(), select.POLLRDHUP, lambda _: self._kill(copy, NOT_WAITED_FOR))

    def _confine(self, session: socket.socket, printed: int) -> None:
        """Keep only the session and files that the code opened at import, and set limits; processes that this copy
        starts inherit both.
        """
        os.setsid()
        for stream in (1, 2):
            os.dup2(printed, stream)
        # First: with many copies the host has more descriptors than the limit of one copy.
        descriptors = {0, 1, 2, session.fileno(), self.sender.fileno(), *(self.imported or ())}
        for number in set(map(int, os.listdir("/proc/self/fd"))) - descriptors:
            with contextlib.suppress(OSError):  # the descriptor of the list itself
                os.close(number)
        if self.isolated:
            enter_namespaces(self.limits)
        checked(LIBC.prctl(PR_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
        checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
        checked(LIBC.prctl(PR_SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))  # its host may be killed
        for kind, most in (
            (resource.RLIMIT_AS, self.limits.memory_bytes),
            (resource.RLIMIT_FSIZE, FILE_BYTES),
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_NOFILE, OPEN_FILES),
            (resource.RLIMIT_CPU, int(self.limits.cpu_seconds) + 1),
        ):
            hard = resource.getrlimit(kind)[1]
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
        listeners = hold_back_starts() if self.isolated else []
        socket.send_fds(self.sender, [b"%d" % self.number], listeners)
        for number in (self.sender.fileno(), *listeners):
            os.close(number)

    def _on_confined(self, _: int) -> None:
        number, listeners, _, _ = socket.recv_fds(self.confined, 20, 1)
        copy = self.copies.get(int(number))
        if copy is None or copy.failure:
            for listener in listeners:
                os.close(listener)
            return
        copy.confined, copy.listeners, copy.next_look = self.isolated, listeners, time.monotonic() + LOOK_EVERY_S
        for listener in listeners:
            self._watch(listener, select.POLLIN, lambda events: self._on_start(copy, events))

    def _on_start(self, copy: SandboxedCopy, events: int) -> None:
        """Allow the copy's next start; kill the copy if it then exceeds a limit."""
        listener = copy.listeners[0]
        if not events & select.POLLIN:  # no process is left
            self._forget(listener)
        elif start := next_start(listener):
            if taken := self._excess(copy, start):
                self._kill(copy, {"failure": "died", "detail": taken})
            else:
                allow(listener, start)

    def _kill(self, copy: SandboxedCopy, failure: Message) -> None:
        """Kill a copy and, through the first process of its namespace, all its descendants; refuse later starts."""
        copy.failure = copy.failure or failure
        self._forget(copy.session.fileno())
        # First: a process whose start is refused must not see the error, and answer with it.
        for send in (os.kill, os.killpg):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                send(copy.process, signal.SIGKILL)
        while copy.listeners:
            self._forget(copy.listeners[-1])
            os.close(copy.listeners.pop())

    def _on_end(self, number: int) -> None:
        """Report to the run why the copy ended, if the run still listens, and print the copy's output."""
        copy = self.copies.pop(number)
        self._kill(copy, {})
        _, status, usage = os.wait4(copy.process, 0)
        if text := os.pread(copy.printed, PRINTED_BYTES, 0).decode(errors="replace"):
            os.write(2, printable(text, keep="\n\t").encode(errors="replace"))
        code, failure = os.waitstatus_to_exitcode(status), copy.failure
        if not failure and code == -signal.SIGKILL and usage.ru_utime + usage.ru_stime >= self.limits.cpu_seconds:
            failure = {"failure": "timeout", "detail": f"it took over {self.limits.cpu_seconds:g} s of a processor"}
        elif not failure:
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            outside = code in (-signal.SIGKILL, -signal.SIGTERM)
            failure = {"failure": "died", "detail": f"its process died: {how}", "again": outside}
        with contextlib.suppress(OSError):
            copy.session.send(REASON + json.dumps(failure).encode() + b"\n", socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        self._forget(copy.handle)
        copy.session.close()
        os.close(copy.handle)
        os.close(copy.printed)

    def _excess(self, copy: SandboxedCopy, start: Start | None) -> str:
        """Return the limit that a copy's processes, with a pending start, exceed; an empty text if none."""
        limits, root = self.limits, f"/proc/{copy.process}/root"
        try:
            processes = [name for name in os.listdir(f"{root}/proc") if name.isdecimal()]
        except OSError:  # it has ended
            return ""
        if len(processes) + (start is not None and not start.is_thread) > limits.processes:
            return f"it started more than {limits.processes} processes"
        threads = int(start is not None)
        for process in processes:
            with contextlib.suppress(OSError):
                threads += os.stat(f"{root}/proc/{process}/task").st_nlink - 2  # subfolders, one per thread
        if threads > THREADS * limits.processes:
            return f"it started more than {THREADS * limits.processes} threads"
        if start is not None:  # its memory is measured at the next check
            return ""
        private = mapped = 0
        for process in processes:
            with contextlib.suppress(OSError, IndexError), open(f"{root}/proc/{process}/statm") as file:
                size, resident, shared, *_ = map(int, file.read().split())
                private, mapped = private + (resident - shared) * PAGE_BYTES, mapped + size * PAGE_BYTES
        socket_count, pipe_count = buffered([f"{root}/proc/{process}" for process in processes])
        private += socket_count * limits.socket_bytes + pipe_count * PIPE_BYTES
        for folder in limits.fresh:
            with contextlib.suppress(OSError):
                files = os.statvfs(root + folder)
                private += (files.f_blocks - files.f_bfree) * files.f_frsize + (
                    files.f_files - files.f_ffree
                ) * INODE_BYTES
        if private + mapped > limits.memory_bytes:  # otherwise shared memory cannot exceed the limit
            shared_bytes = shared_memory([f"{root}/proc/{process}/maps" for process in processes])
            if shared_bytes is None:
                return f"its processes have more than {MAPPINGS} mappings of memory"
            private += shared_bytes
        return (
            f"its processes took more than {limits.memory_bytes / 2**30:g} GiB" if private > limits.memory_bytes else ""
        )


def enter_namespaces(limits: SandboxLimits) -> None:
    """Enter new namespaces for this copy, mount its empty folders and its processes there, drop all capabilities."""
    checked(LIBC.unshare(NEW_MOUNTS | NEW_IPC | (0 if limits.network else NEW_NETWORK)))
    checked(LIBC.mount(b"none", b"/", None, MS_PRIVATE | MS_RECURSIVE, None))
    open_folders = [(folder, os.open(folder, os.O_PATH)) for folder in limits.kept]
    size = f"size={min(SCRATCH_BYTES, limits.memory_bytes)},nr_inodes={SCRATCH_FILES},mode=1777".encode()
    for folder in limits.fresh:
        checked(LIBC.mount(b"none", folder.encode(), b"tmpfs", MS_RESTRICTED, size))
    for folder, descriptor in open_folders:
        source = f"/proc/self/fd/{descriptor}"
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.makedirs(folder, exist_ok=True)
            checked(LIBC.mount(source.encode(), folder.encode(), None, MS_BIND | MS_RECURSIVE, None))
        else:
            # A file of code is in memory without a name, so it cannot be mounted: the call gets a copy.
            os.makedirs(os.path.dirname(folder), exist_ok=True)
            with open(source, "rb") as kept_file, open(folder, "wb") as copy:
                copy.write(kept_file.read())
        os.close(descriptor)
    os.chdir(os.getcwd())  # otherwise it stays in the folder below the mount
    if not limits.network:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", IFF_UP))
    checked(LIBC.mount(b"proc", b"/proc", b"proc", MS_RESTRICTED | MS_NO_PROGRAMS | MS_READ_ONLY, None))
    # Version 3, this process; all three sets of 64 bits empty.
    checked(LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()))


def shared_memory(maps: list[str]) -> int | None:
    """Return the bytes of all anonymous shared mappings in these lists of mappings, each counted once; None for lists
    too long to read.

    Mappings count by size: pages touched by an ended process stay allocated, but appear in no resident count.
    """
    sizes, count = dict[str, int](), 0
    for path in maps:
        with contextlib.suppress(OSError), open(path) as lines:
            for line in lines:
                if (count := count + 1) > MAPPINGS:
                    return None
                if "/dev/zero (deleted)" in line:
                    (first, _, last), offset, inode = line.split()[0].partition("-"), line.split()[2], line.split()[4]
                    end = int(last, 16) - int(first, 16) + int(offset, 16)
                    sizes[inode] = max(sizes.get(inode, 0), end)
    return sum(sizes.values())


def buffered(processes: list[str]) -> tuple[int, int]:
    """Return the number of sockets of processes, including connections that their UNIX sockets have not accepted, and
    the number of their pipes.
    """
    links, waiting = set[str](), 0
    for process in processes:
        with contextlib.suppress(OSError):
            for number in os.listdir(f"{process}/fd"):
                with contextlib.suppress(OSError):
                    links.add(os.readlink(f"{process}/fd/{number}"))
    pipes = sum(name.startswith("pipe:") for name in links)
    sockets = {name.strip("socket:[]") for name in links if name.startswith("socket:")}
    if len(sockets) > 1:  # beside its session
        with contextlib.suppress(OSError), open(f"{processes[0]}/net/unix") as lines:
            # Columns 5 to 7 are state, inode and address; a connection that waits has its listener's address.
            table = [line.split() for line in lines]
            listening = {line[7] for line in table if line[6] in sockets and len(line) > 7}
            waiting = sum(line[5] == WAITING and line[7] in listening for line in table if len(line) > 7)
    return len(sockets) + waiting, pipes


def checked(result: int) -> None:
    """Raise OSError if a call into the C library failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
