"""One call of code that is not trusted, in processes that cannot reach the run: what `reward.sandbox: process` does for each call.

worker ──fork──▶ supervisor: namespaces ──fork──▶ code: its first process, with limits and without capabilities
       ◀─answer─            ◀────pipe, at most ANSWER_BYTES────          what it starts ends with it

The code sees no process but its own, so that it can neither signal nor trace another, and holds no socket. It writes to one pipe, which
nothing that it executes inherits and which is of this one call: no other call's result can be forged.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
ANSWER_BYTES = 1 << 16
"""A score and a line of text; a longer answer is none."""
FILE_BYTES = 64 << 20
"""The longest file that the code may write, and the most that it may print."""
OPEN_FILES = 256
PRINTED_BYTES = 4096
"""How much of what was printed is shown."""
LOOK_EVERY_S = 0.02
PAGE_BYTES = resource.getpagesize()
ENDING_S = 1.0
NEW_MOUNTS = 0x00020000
NEW_NAMESPACES = 0x10000000 | 0x20000000 | 0x08000000 | NEW_MOUNTS
"""Of users, processes, semaphores and shared memory, mounts."""
MS_PRIVATE, MS_RECURSIVE, MS_RESTRICTED = 1 << 18, 1 << 14, 0b1110
PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVILEGES = 4, 38
LIBC = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class SandboxLimits:
    """What one call may take."""

    seconds: float
    memory_bytes: int
    """Address space of each of its processes, and memory of all together."""
    processes: int


def sandboxed(call: Callable[[], Message], limits: SandboxLimits) -> Message:
    """Return what `call` returned, a JSON object, or the failure of a process that was killed or took too much.

    A call whose processes were killed from outside is made once more.
    """
    for _ in range(2):
        reader, writer = os.pipe()
        supervisor = os.fork()
        if supervisor == 0:
            answer: bytes = b""
            try:
                os.setsid()  # whoever ends the worker's group must not end this process before the code
                os.close(reader)
                answer = json.dumps(supervised(call, limits)).encode()
            finally:
                os.write(writer, answer)
                os._exit(0)
        os.close(writer)
        with open(reader, "rb") as pipe:
            answer = pipe.read()
        os.waitpid(supervisor, 0)
        found: Message = (
            json.loads(answer) if answer else {"failure": "died", "again": True, "detail": "its supervisor was killed"}
        )
        if not found.pop("again", False):
            break
    return found


def supervised(call: Callable[[], Message], limits: SandboxLimits) -> Message:
    """Make the call in a process of its own, and see that it keeps within its limits; nothing that it started is left."""
    isolated, parent, before = enter_namespaces(), os.getppid(), processes_seen()
    reader, writer = os.pipe()
    printed = os.memfd_create("printed")
    code = os.fork()
    if code == 0:
        try:
            confine(writer, printed, limits, isolated)
            os.write(writer, json.dumps(call()).encode()[: ANSWER_BYTES + 1])
        finally:
            os._exit(1)
    os.close(writer)
    answer, failure = b"", ""
    deadline = time.monotonic() + limits.seconds
    while len(answer) <= ANSWER_BYTES:
        if select.select([reader], [], [], LOOK_EVERY_S)[0]:
            piece = os.read(reader, ANSWER_BYTES)
            answer += piece
            if not piece:
                break
        elif time.monotonic() > deadline:
            failure = "timeout"
            break
        elif os.getppid() != parent:
            failure = "the worker is gone"
            break
        elif isolated and (failure := excess(processes_beside(before), limits)):
            break
    status, usage = end(code, ended=not failure and len(answer) <= ANSWER_BYTES)
    show(printed)
    return outcome(answer, failure, status, usage.ru_utime + usage.ru_stime, limits)


def end(code: int, ended: bool) -> tuple[int, resource.struct_rusage]:
    """Kill the code, and with the first process of their namespace all that it started; return how it ended and what it used."""
    deadline = time.monotonic() + ENDING_S
    # It has closed its pipe a moment before it has ended.
    while ended and time.monotonic() < deadline and not os.waitid(os.P_PID, code, os.WEXITED | os.WNOHANG | os.WNOWAIT):
        time.sleep(0.001)
    with contextlib.suppress(ProcessLookupError):
        os.kill(code, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(code, signal.SIGKILL)
    _, status, usage = os.wait4(code, 0)
    return os.waitstatus_to_exitcode(status), usage


def outcome(answer: bytes, failure: str, status: int, seconds: float, limits: SandboxLimits) -> Message:
    """Return the code's answer, or why there is none."""
    if failure == "timeout" or (status == -signal.SIGKILL and not answer and seconds >= limits.seconds):
        return {"failure": "timeout", "detail": f"no answer within {limits.seconds:g} s"}
    if failure:
        return {"failure": "died", "detail": failure}
    if len(answer) > ANSWER_BYTES:
        return {"failure": "result", "detail": f"its answer has more than {ANSWER_BYTES} bytes"}
    with contextlib.suppress(ValueError):
        found = json.loads(answer)
        if isinstance(found, dict):
            return found
    how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
    outside = not answer and status in (-signal.SIGKILL, -signal.SIGTERM)
    return {"failure": "died", "detail": f"the verifier's process died: {how}", "again": outside}


def enter_namespaces() -> bool:
    """Have the next child be the first process of namespaces of its own; return False where this system allows nobody that."""
    user, group = os.getuid(), os.getgid()
    if LIBC.unshare(NEW_NAMESPACES) != 0:
        return False
    for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    return True


def namespaces_allowed() -> bool:
    """Return whether this system gives a process namespaces of its own; without them the code could reach the run's processes."""
    child = os.fork()
    if child == 0:
        os._exit(LIBC.unshare(NEW_NAMESPACES) != 0)
    return os.waitpid(child, 0)[1] == 0


def confine(writer: int, printed: int, limits: SandboxLimits, isolated: bool) -> None:
    """Give up, in the code's process, whatever reaches beyond it."""
    os.setsid()
    for stream in (1, 2):
        os.dup2(printed, stream)
    close_connections(writer)
    if isolated:
        checked(LIBC.mount(b"none", b"/", None, MS_PRIVATE | MS_RECURSIVE, None))
        if LIBC.mount(b"proc", b"/proc", b"proc", MS_RESTRICTED, None) != 0:
            # Inside of bubblewrap nobody may list processes anew: the code sees none, its supervisor those of bubblewrap.
            checked(LIBC.unshare(NEW_MOUNTS))
            checked(LIBC.mount(b"none", b"/proc", b"tmpfs", MS_RESTRICTED, None))
        # Version 3, this process; three sets of 64 bits.
        checked(LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()))
    checked(LIBC.prctl(PR_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0))
    checked(LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0))
    seconds = int(limits.seconds) + 1
    for kind, most in (
        (resource.RLIMIT_AS, limits.memory_bytes), (resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NOFILE, OPEN_FILES), (resource.RLIMIT_CPU, seconds),
    ):  # fmt: skip
        hard = resource.getrlimit(kind)[1]
        most = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (most, most))


def close_connections(own: int) -> None:
    """Close every socket and pipe of this process but its own: the connection to the run, and the supervisor's to the worker."""
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            mode = os.fstat(number).st_mode
            if number != own and (stat.S_ISSOCK(mode) or stat.S_ISFIFO(mode)):
                os.close(number)


def processes_seen() -> tuple[int, set[str]]:
    """Return which list of processes is mounted here, and what it has."""
    return os.stat("/proc").st_dev, {name for name in os.listdir("/proc") if name.isdecimal()}


def processes_beside(before: tuple[int, set[str]]) -> set[str]:
    """Return the code's processes: all, once it has mounted its own list here, before that and in bubblewrap those that came since."""
    mounted, found = processes_seen()
    return found - (before[1] if mounted == before[0] else set())


def excess(processes: set[str], limits: SandboxLimits) -> str:
    """Return what the code's processes have too much of, or nothing."""
    if len(processes) > limits.processes:
        return f"it started more than {limits.processes} processes"
    own = 0
    for process in processes:
        with contextlib.suppress(OSError, IndexError), open(f"/proc/{process}/statm") as file:
            _, resident, shared, *_ = map(int, file.read().split())
            own += (resident - shared) * PAGE_BYTES
    return f"its processes took more than {limits.memory_bytes / 2**30:g} GiB" if own > limits.memory_bytes else ""


def show(printed: int) -> None:
    """Pass on the beginning of what the code has printed."""
    os.lseek(printed, 0, os.SEEK_SET)
    text = os.read(printed, PRINTED_BYTES)
    if text:
        os.write(2, text)


def checked(result: int) -> None:
    """Raise OSError where a call into the C library has failed."""
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
