"""`braid ...` for tests, as a copy of the fork server, which has imported it; a fresh interpreter would need seconds
per command.

test ──arguments, folder, environment, pipes──▶ fork server ──fork──▶ command, in a session of its own
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver, reduction, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn, TextIO

from braidrl.cluster.local import STARTING, main_module_hidden

LOOK_S = 0.01
CLONE_NEWNS, MS_REC, MS_PRIVATE = 0x20000, 0x4000, 0x40000
COMMAND = ("braidrl.cli.commands", "braidrl.runtimes.evaluation", "braidrl.engines.engine_process")
"""Modules that commands import on demand; the fork server imports them in advance."""


class Command:
    """A running command, with the part of the interface of `subprocess.Popen` that tests use."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, environment: Mapping[str, str], prefix: str = ""
    ) -> None:
        """Start it; it runs the Python code `prefix` first."""
        self.args = ["braid", *arguments]
        (out, told), (err, complained) = os.pipe(), os.pipe()
        context = multiprocessing.get_context("forkserver")
        self._process: BaseProcess = context.Process(
            target=become,
            args=(list(arguments), str(folder), dict(environment), Descriptor(told), Descriptor(complained), prefix),
        )
        with STARTING, main_module_hidden():
            self._process.start()
        for descriptor in (told, complained):
            os.close(descriptor)
        assert self._process.pid is not None, "the command was not started"
        self.pid = self._process.pid
        self.stdout: TextIO = os.fdopen(out)
        self.stderr: TextIO = os.fdopen(err)
        self._texts: dict[TextIO, str] = {}
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> Command:
        return self

    def __exit__(self, *_: object) -> None:
        self.wait()
        for file in (self.stdout, self.stderr):
            file.close()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait until both outputs are closed and the command has ended; return the outputs."""
        end = None if timeout is None else time.monotonic() + timeout
        files = (self.stdout, self.stderr)
        if not self._readers:
            self._readers = [threading.Thread(target=self._read, args=(file,), daemon=True) for file in files]
            for reader in self._readers:
                reader.start()
        for reader in self._readers:
            reader.join(None if end is None else max(0.0, end - time.monotonic()))
            if reader.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        self.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._texts[self.stdout], self._texts[self.stderr]

    def _read(self, file: TextIO) -> None:
        self._texts[file] = file.read()

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Descriptor:
    """A file descriptor of the starter that the copy also gets."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return received, (reduction.DupFd(self.number),)


def received(sent: Any) -> int:
    """Return the number of a descriptor in the copy."""
    return int(sent.detach())


def become(
    arguments: list[str], folder: str, environment: dict[str, str], told: int, complained: int, prefix: str
) -> NoReturn:
    """Run `braid` with these arguments in this process, and end as an interpreter does."""

    def main() -> None:
        exec(prefix, {})
        importlib.import_module("braidrl.cli.commands").main()

    for descriptor, standard in ((told, 1), (complained, 2)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    run_as_interpreter(["braid", *arguments], folder, environment, main)


def mount(place: str, size: str) -> None:
    """Mount a file system of this size that only this process and its children see; only root may."""
    libc = ctypes.CDLL(None)
    failed = libc.unshare(CLONE_NEWNS) or libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None)
    assert not (failed or libc.mount(b"braid", place.encode(), b"tmpfs", 0, f"size={size}".encode()))


def run_as_interpreter(
    arguments: list[str], folder: str, environment: dict[str, str], main: Callable[[], Any]
) -> NoReturn:
    """Call `main` in this copy of the fork server as the program of a new interpreter, in a session of its own, and end
    as one does.
    """
    os.setsid()
    sys.stdout, sys.stderr = (open(number, "w", closefd=False) for number in (1, 2))  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv, sys.path[0] = arguments, ""
    # Its children are independent of the tests' fork server and of its cleanup process.
    multiprocessing.set_start_method(None, force=True)
    multiprocessing.process._parent_process = None  # type: ignore[attr-defined]
    multiprocessing.current_process()._config.pop("daemon", None)  # type: ignore[attr-defined]
    for module in (resource_tracker, forkserver):
        importlib.reload(module)
    status = 0
    try:
        main()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else bool(ended.code)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
