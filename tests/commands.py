"""`braid ...` for tests, as a copy of a process that has imported it: a fresh interpreter takes seconds to do so, for each command.

test ──arguments, folder, environment, pipes──▶ template ──fork──▶ command in a session of its own ──status──▶ test
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

ROOT = Path(__file__).parent.parent
LOOK_S = 0.01
NUMBER = struct.Struct("i")
PRELOADED = (
    "braidrl.cli", "braidrl.config", "braidrl.runtimes.run", "braidrl.runtimes.evaluation", "braidrl.runtimes.streaming.processes",
    "braidrl.rollout.process.server", "braidrl.flow.recipes.parameters", "braidrl.rewards.verifier", "pandas", "pyarrow.compute",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("qwen2", "qwen3", "llama")),
)  # fmt: skip


class Command:
    """A command that runs, with what tests use of `subprocess.Popen`."""

    def __init__(self, arguments: Sequence[str], folder: Path | None, environment: dict[str, str]) -> None:
        self.args = ["braid", *arguments]
        self.returncode: int | None = None
        request = {"arguments": list(arguments), "folder": str(folder or Path.cwd()), "environment": environment}
        out, err, (self._status, theirs) = os.pipe(), os.pipe(), socket.socketpair()
        with SENDING:
            sent = json.dumps(request).encode()
            socket.send_fds(template(), [struct.pack("I", len(sent)) + sent], [out[1], err[1], theirs.fileno()])
        for end in (out[1], err[1]):
            os.close(end)
        theirs.close()
        (self.pid,) = NUMBER.unpack(self._status.recv(NUMBER.size, socket.MSG_WAITALL))
        self.stdout: TextIO = os.fdopen(out[0])
        self.stderr: TextIO = os.fdopen(err[0])
        self._texts: dict[str, str] = {}
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for file in (self.stdout, self.stderr):
            file.close()
        self._status.close()

    def poll(self) -> int | None:
        if self.returncode is None:
            with contextlib.suppress(BlockingIOError):
                (status,) = NUMBER.unpack(self._status.recv(NUMBER.size, socket.MSG_DONTWAIT))
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(LOOK_S)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it has said until both its outputs were closed and it has ended."""
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._readers:
            for name in ("stdout", "stderr"):
                self._readers.append(threading.Thread(target=self._read, args=(name,), daemon=True))
                self._readers[-1].start()
        for reader in self._readers:
            reader.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return self._texts["stdout"], self._texts["stderr"]

    def _read(self, name: str) -> None:
        self._texts[name] = getattr(self, name).read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


SENDING = threading.Lock()


@functools.cache
def template() -> socket.socket:
    """Return the line to the process whose copies run commands; it is started now and ends with this one."""
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.commands", str(theirs.fileno())], cwd=ROOT, env=environment, pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    theirs.close()
    atexit.register(process.kill)
    return ours


class Template:
    """The process that is copied: it imports, and afterwards only forks and says how its copies ended."""

    def __init__(self, descriptor: int) -> None:
        for name in PRELOADED:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
        gc.freeze()
        self.line = socket.socket(fileno=descriptor)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.line, selectors.EVENT_READ)
        self.running: dict[int, tuple[int, socket.socket]] = {}

    def serve(self) -> None:
        """Answer requests until nobody can send one; return in each copy, as the command that it is."""
        while True:
            for key, _ in self.selector.select():
                if key.fileobj is not self.line:
                    self._ended(key.fd)
                elif self._asked():
                    return

    def _asked(self) -> bool:
        message, descriptors, _, _ = socket.recv_fds(self.line, 4, 3)
        if not message:
            sys.exit(0)
        (size,) = struct.unpack("I", message)
        request = json.loads(self.line.recv(size, socket.MSG_WAITALL))
        process = os.fork()
        if not process:
            self._become(request, descriptors)
            return True
        out, err, status = descriptors
        os.close(out)
        os.close(err)
        told = socket.socket(fileno=status)
        told.sendall(NUMBER.pack(process))
        end = os.pidfd_open(process)
        self.running[end] = (process, told)
        self.selector.register(end, selectors.EVENT_READ)
        return False

    def _ended(self, end: int) -> None:
        process, told = self.running.pop(end)
        self.selector.unregister(end)
        os.close(end)
        _, status = os.waitpid(process, 0)
        with told, contextlib.suppress(OSError):
            told.sendall(NUMBER.pack(status))

    def _become(self, request: dict[str, Any], descriptors: Sequence[int]) -> None:
        os.setsid()
        self.selector.close()
        self.line.close()
        for end, (_, told) in self.running.items():
            os.close(end)
            told.close()
        out, err, status = descriptors
        os.dup2(out, 1)
        os.dup2(err, 2)
        for descriptor in (out, err, status):
            os.close(descriptor)
        os.chdir(request["folder"])
        os.environ.clear()
        os.environ.update(request["environment"])
        sys.argv, sys.path[0] = ["-c", *request["arguments"]], ""


if __name__ == "__main__":
    Template(int(sys.argv[1])).serve()
    from braidrl.cli import main

    main()
