"""Each start of a process or thread by code that is not trusted waits until its supervisor allows it: the kernel asks (seccomp).

code ──fork──▶ kernel ──descriptor──▶ supervisor: counts, then allows it, or ends the code

It needs no rights, and it holds for the superuser too, whom `ulimit -u` does not limit.
"""

import ctypes
import errno
import fcntl
import os
import platform
import select
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass

LIBC = ctypes.CDLL(None, use_errno=True)
SET_FILTER, NEW_LISTENER = 1, 1 << 3
RECEIVE, SEND = 0xC0502100, 0xC0182101
"""Requests of ioctl to the listener, of 80 and of 24 bytes."""
REQUEST, ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
"""Of a request: its number, process, flags, call, architecture, place in the code and arguments."""
CONTINUE = 1
ALLOW, ASK, KILL, ABSENT = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000 | errno.ENOSYS
LOAD, EQUAL, AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
"""Instructions of the filter (classic BPF) on the call: its number is at byte 0, its architecture at byte 4."""
OTHER_CALLS = 0x40000000
"""From here on, calls of another way to call the kernel of x86-64 (x32)."""
CLONE_THREAD = 0x10000
CLONE3 = 435


@dataclass(frozen=True)
class Architecture:
    """The numbers of one processor's calls."""

    audited: int
    """How the kernel names it."""
    seccomp: int
    clone: int
    forks: tuple[int, ...] = ()


ARCHITECTURES = {
    "x86_64": Architecture(0xC000003E, 317, 56, (57, 58)),
    "aarch64": Architecture(0xC00000B7, 277, 220),
}


@dataclass(frozen=True)
class Start:
    """A process or thread that is about to begin."""

    number: int
    is_thread: bool


def filter_of(kind: Architecture) -> bytes:
    """Return the filter's program: it asks for calls that start something, and refuses ways around them.

    `clone3` is told to be absent: its flags lie in memory, where nobody can tell what they will be, and every C library then
    calls `clone`.
    """
    asked = (kind.clone, *kind.forks)
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, kind.audited), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    for code, value, action in (
        (AT_LEAST, OTHER_CALLS, ABSENT), (EQUAL, CLONE3, ABSENT), *((EQUAL, number, ASK) for number in asked),
    ):  # fmt: skip
        steps += [(code, 0, 1, value), (RETURN, 0, 0, action)]
    return b"".join(struct.pack("=HBBI", *step) for step in (*steps, (RETURN, 0, 0, ALLOW)))


def hold_back_starts() -> list[int]:
    """Have the kernel ask before this process, or whatever it starts, starts anything; return the descriptor that it asks at.

    The list is empty where the kernel does not do that (before Linux 5.5, or on a processor that is not listed here). Nothing can undo it.
    """
    kind = ARCHITECTURES.get(platform.machine())
    if kind is None:
        return []
    program = filter_of(kind)
    text = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(program) // 8, ctypes.addressof(text))
    listener = LIBC.syscall(kind.seccomp, SET_FILTER, NEW_LISTENER, described)
    return [listener] if listener >= 0 else []


class ForkGate:
    """The supervisor's end: which process or thread is about to begin, and leave for it."""

    def __init__(self, code: socket.socket) -> None:
        """Wait for the listener that the code's process sends, or its word that there is none."""
        _, self.listeners, _, _ = socket.recv_fds(code, 1, 1)
        self.polled = select.poll()
        for listener in self.listeners:
            self.polled.register(listener, select.POLLIN)

    def next_start(self) -> Start | None:
        """Return who waits for leave to begin, without waiting; None where nobody does."""
        for listener, events in self.polled.poll(0):
            if not events & select.POLLIN:  # nobody is left who could ask
                self.close()
                return None
            request = bytearray(REQUEST.size)
            try:
                fcntl.ioctl(listener, RECEIVE, request)
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.EINTR):
                    raise
                return None  # it has ended meanwhile
            number, _, _, call, _, _, flags, *_ = REQUEST.unpack(request)
            kind = ARCHITECTURES[platform.machine()]
            return Start(number, call == kind.clone and bool(flags & CLONE_THREAD))
        return None

    def allow(self, start: Start) -> None:
        """Let it begin."""
        try:
            fcntl.ioctl(self.listeners[0], SEND, ANSWER.pack(start.number, 0, 0, CONTINUE))
        except OSError as error:
            if error.errno != errno.ENOENT:
                raise

    def close(self) -> None:
        """Ask no more; whoever waits or comes is refused."""
        while self.listeners:
            listener = self.listeners.pop()
            self.polled.unregister(listener)
            os.close(listener)


def send_listener(supervisor: socket.socket, listeners: Sequence[int]) -> None:
    """Give the supervisor the listener, which this process must not keep: it could allow itself everything."""
    socket.send_fds(supervisor, [b" "], listeners)
    supervisor.close()
    for listener in listeners:
        os.close(listener)
