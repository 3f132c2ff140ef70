"""The seccomp filter of untrusted code: each start of a process or thread waits for the host; calls that escape limits
are blocked.

code ──fork──▶ kernel ──descriptor──▶ host: counts, then allows it, or kills the code

The filter is needed because `RLIMIT_NPROC` does not apply to root, which runs most containers; memory of memfds, System
V segments and queues, huge pages, pages that `vmsplice` and `splice` keep in a pipe, and tmpfs mounts of a new user
namespace counts to no process; and kernel keys outlive a call. Buffers of sockets and pipes keep their default size, by
which the host counts them, and a message of a UNIX socket that is closed would not be counted. It needs no privileges.
"""

import ctypes
import errno
import fcntl
import platform
import struct
from dataclasses import dataclass

LIBC = ctypes.CDLL(None, use_errno=True)
SET_FILTER, NEW_LISTENER = 1, 1 << 3
RECEIVE, SEND = 0xC0502100, 0xC0182101
"""ioctl requests to the listener, of 80 and of 24 bytes."""
REQUEST, ANSWER = struct.Struct("=QIIiIQ6Q"), struct.Struct("=QqiI")
"""A request holds its id, process, flags, call, architecture, instruction pointer and arguments."""
CONTINUE = 1
ALLOW, ASK, KILL, IGNORE = 0x7FFF0000, 0x7FC00000, 0x80000000, 0x00050000
ABSENT, NO_PROTOCOL = IGNORE | errno.ENOSYS, IGNORE | errno.EPROTONOSUPPORT
LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
"""Instructions of the filter (classic BPF).

The call's number is at byte 0, its architecture at byte 4, its arguments from byte 16 on.
"""
OTHER_CALLS = 0x40000000
"""Call numbers from here on belong to x32, a second interface to the kernel of x86-64."""
CLONE_THREAD, CLONE_NAMESPACES = 0x10000, 0x7E020080
CLONE3 = 435
F_SETPIPE_SZ, MAP_HUGETLB = 1031, 0x40000
AF_UNIX, NOT_STREAM, SOL_SOCKET, SO_SNDBUF, SO_RCVBUF = 1, 0b110, 1, 7, 8
ABSENT_EVERYWHERE = (447, 425, 428, 429, 430, 432, 442)
"""memfd_secret, io_uring_setup, open_tree, move_mount, fsopen, fsmount, mount_setattr."""


@dataclass(frozen=True)
class Architecture:
    """The system call numbers of one processor architecture."""

    audited: int
    """The kernel's number of the architecture."""
    seccomp: int
    clone: int
    socket: int
    setsockopt: int
    fcntl: int
    mmap: int
    absent: tuple[int, ...]
    """memfd_create, shmget, msgget, semget, unshare, setns, add_key, request_key, keyctl, bpf, userfaultfd,
    perf_event_open, mount, splice, tee, vmsplice.
    """
    forks: tuple[int, ...] = ()


ARCHITECTURES = {
    "x86_64": Architecture(
        0xC000003E,
        317,
        56,
        41,
        54,
        72,
        9,
        (319, 29, 68, 64, 272, 308, 248, 249, 250, 321, 323, 298, 165, 275, 276, 278),
        (57, 58),
    ),
    "aarch64": Architecture(
        0xC00000B7,
        277,
        220,
        198,
        208,
        25,
        222,
        (279, 194, 186, 190, 97, 268, 217, 218, 219, 280, 282, 241, 40, 76, 77, 75),
    ),
}


@dataclass(frozen=True)
class Start:
    """A process or thread that is about to start."""

    number: int
    is_thread: bool


def hold_back_starts() -> list[int]:
    """Make the kernel ask before this process or its children start anything; return the descriptor of these requests.

    The list is empty if the kernel does not support this (before Linux 5.5, or on a processor not listed here). It
    cannot be undone. This process must not keep the descriptor: with it, untrusted code could allow starts.

    `clone3` is blocked: its flags are in memory, where another thread may change them. Every C library then calls
    `clone`.
    """
    kind = ARCHITECTURES.get(platform.machine())
    if kind is None:
        return []
    steps = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, kind.audited), (RETURN, 0, 0, KILL), (LOAD, 0, 0, 0)]
    absent = (CLONE3, *ABSENT_EVERYWHERE, *kind.absent)
    for code, value, action in (
        (AT_LEAST, OTHER_CALLS, ABSENT),
        *((EQUAL, number, ABSENT) for number in absent),
        *((EQUAL, number, ASK) for number in kind.forks),
    ):
        steps += [(code, 0, 1, value), (RETURN, 0, 0, action)]
    # A jump names the steps that are left out if the comparison holds, and if it does not.
    steps += [(EQUAL, 0, 6, kind.socket), (LOAD, 0, 0, 16), (EQUAL, 0, 2, AF_UNIX), (LOAD, 0, 0, 24)]
    steps += [(ANY_BIT, 1, 0, NOT_STREAM), (RETURN, 0, 0, ALLOW), (RETURN, 0, 0, NO_PROTOCOL)]
    steps += [(EQUAL, 0, 7, kind.setsockopt), (LOAD, 0, 0, 24), (EQUAL, 0, 4, SOL_SOCKET), (LOAD, 0, 0, 32)]
    steps += [(EQUAL, 1, 0, SO_SNDBUF), (EQUAL, 0, 1, SO_RCVBUF), (RETURN, 0, 0, IGNORE), (RETURN, 0, 0, ALLOW)]
    for number, argument, code, value, error in (
        (kind.fcntl, 24, EQUAL, F_SETPIPE_SZ, errno.EPERM),
        (kind.mmap, 40, ANY_BIT, MAP_HUGETLB, errno.ENOMEM),
    ):
        steps += [(EQUAL, 0, 4, number), (LOAD, 0, 0, argument), (code, 0, 1, value)]
        steps += [(RETURN, 0, 0, IGNORE | error), (RETURN, 0, 0, ALLOW)]
    steps += [(EQUAL, 1, 0, kind.clone), (RETURN, 0, 0, ALLOW), (LOAD, 0, 0, 16)]
    steps += [(ANY_BIT, 0, 1, CLONE_NAMESPACES), (RETURN, 0, 0, ABSENT), (RETURN, 0, 0, ASK)]
    program = b"".join(struct.pack("=HBBI", *step) for step in steps)
    text = ctypes.create_string_buffer(program, len(program))
    described = struct.pack("@HP", len(steps), ctypes.addressof(text))
    listener = LIBC.syscall(kind.seccomp, SET_FILTER, NEW_LISTENER, described)
    return [listener] if listener >= 0 else []


def next_start(listener: int) -> Start | None:
    """Return a pending start; None if its process has ended in the meantime."""
    request = bytearray(REQUEST.size)
    try:
        fcntl.ioctl(listener, RECEIVE, request)
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.EINTR):
            raise
        return None
    number, _, _, call, _, _, flags, *_ = REQUEST.unpack(request)
    return Start(number, call == ARCHITECTURES[platform.machine()].clone and bool(flags & CLONE_THREAD))


def allow(listener: int, start: Start) -> None:
    try:
        fcntl.ioctl(listener, SEND, ANSWER.pack(start.number, 0, 0, CONTINUE))
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
