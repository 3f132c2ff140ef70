"""The worker processes of a shared run of tests (`pytest -n 3`) as copies of the process that shares them out.

pytest, which has imported the tests ──fork──▶ workers ──fork──▶ fork servers ──fork──▶ ranks, engines, commands

Fresh interpreters would import torch, Braid and the tests once per worker, for eight seconds of a core each.
"""

from __future__ import annotations

import gc
import logging
import os
import pdb
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
from _pytest.debugging import pytestPDB
from _pytest.pathlib import import_path
from execnet import gateway_io
from execnet.gateway_base import Popen2IO


def import_tests(config: pytest.Config) -> None:
    """Import the modules that will be collected, as the collection does, which then finds them."""
    for place in (Path(argument.partition("::")[0]).resolve() for argument in config.args):
        for path in sorted(place.rglob("test_*.py")) if place.is_dir() else [place]:
            try:
                import_path(path, mode="importlib", root=config.rootpath, consider_namespace_packages=False)
            except (Exception, pytest.skip.Exception):  # It occurs again in the workers, which report it.
                for name, module in list(sys.modules.items()):
                    if getattr(module, "__file__", None) == str(path):
                        del sys.modules[name]


class Copy(Popen2IO):
    """execnet's connection to a copy of this process."""

    def __init__(self, others: list[Copy]) -> None:
        """Fork this process; the copy closes its connections to `others`, so that these notice this process's end."""
        (read, told), (asked, write) = os.pipe(), os.pipe()
        self.process = os.fork()
        if not self.process:
            for descriptor in (told, asked, *(file.fileno() for io in others for file in (io.infile, io.outfile))):
                os.close(descriptor)
            become_worker(read, write)
        os.close(read)
        os.close(write)
        super().__init__(os.fdopen(told, "wb"), os.fdopen(asked, "rb"), None)  # type: ignore[arg-type]

    def wait(self) -> int | None:
        with suppress(ChildProcessError):
            return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])
        return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)


def become_worker(read: int, write: int) -> NoReturn:
    """Do what execnet has a fresh interpreter do: execute the program that comes on standard input, which serves until that ends."""
    for descriptor, standard in ((read, 0), (write, 1)):
        os.dup2(descriptor, standard)
        os.close(descriptor)
    # Libraries' handlers write to what was the standard error when they were imported: pytest's capture in the process above.
    for reference in logging._handlerList:  # type: ignore[attr-defined]
        if type(handler := reference()) is logging.StreamHandler:
            handler.setStream(sys.stderr)
    # The run above has replaced the debugger by one that knows its own capture.
    pdb.set_trace, pytestPDB._pluginmanager, pytestPDB._config = pytestPDB._saved.pop()
    try:
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
        exec(gateway_io.popen_bootstrapline, {"__name__": "__main__"})
    finally:
        os._exit(0)


def start_workers(count: int) -> None:
    """Fork this process before it has threads. execnet gets the copies for its next workers, and then interpreters again."""
    gc.freeze()
    copies: list[Copy] = []
    for _ in range(count):
        copies.append(Copy(copies))
    fresh = gateway_io.create_io

    def create_io(spec: Any, execmodel: Any) -> Any:
        if not copies:
            return fresh(spec, execmodel)
        copy = copies.pop(0)
        copy.execmodel = execmodel
        return copy

    gateway_io.create_io = create_io
