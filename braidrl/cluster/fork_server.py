"""The fork server as a copy of a command that has just imported everything: processes are there at once, and the imports in memory once.

a command, all imported ──fork──▶ fork server ──fork──▶ ranks, workers, engines

Without this, multiprocessing starts a fresh interpreter as the fork server when the first process is asked for, which imports it all again.
"""

import contextlib
import ctypes
import gc
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterable, Sequence
from multiprocessing import forkserver, resource_tracker, util
from typing import NoReturn

from braidrl.cluster.watchdog import FORK_SERVER, goes_by

STANDARD_STREAMS = (0, 1, 2)
TRACKER = "tracker"
"""Multiprocessing's second process, which frees what others have left."""
PR_SET_PDEATHSIG = 1
SPAWN = util.spawnv_passfds


def copy_as_fork_server(modules: Iterable[str]) -> bool:
    """Make a copy of this process the fork server of all processes that it and they start from now on.

    Call it before this process computes, starts a thread or opens what copies must not have: threads, their locks and devices do not
    outlive a fork. Where that is too late nothing happens, and multiprocessing starts its own server when one is needed.

    Args:
        modules: imported here before, as copies run them.

    Returns:
        Whether the server was made.
    """
    if threading.active_count() > 1:
        return False
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # What is imported is no garbage; to look for some there would copy the server's memory.
    try:
        util.spawnv_passfds = _copy  # type: ignore[assignment]
        forkserver.ensure_running()  # and, before it, the resource tracker
    finally:
        util.spawnv_passfds = SPAWN
    return True


def _copy(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Do what `util.spawnv_passfds` does for an interpreter with `-c`, in a copy of this one; return its process id."""
    sys.stdout.flush()
    process = os.fork()
    if not process:
        _serve(arguments[-1], {*descriptors, *STANDARD_STREAMS})
    return process


def _serve(program: str, kept: set[int]) -> NoReturn:
    """Close every descriptor that is not `kept`, run the program that a fresh interpreter would, and end with it."""
    try:
        goes_by(FORK_SERVER if "forkserver" in program else TRACKER)
        # When the starter ends the kernel continues this process, should a signal have stopped it: stopped, it could not end.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
        # As in a fresh interpreter: what is copied is about to start these processes, and holds the lock for that.
        util.spawnv_passfds = SPAWN
        for module in (resource_tracker, forkserver):
            importlib.reload(module)
        for descriptor in map(int, os.listdir("/proc/self/fd")):
            if descriptor not in kept:
                with contextlib.suppress(OSError):  # that of the listing itself is closed already
                    os.close(descriptor)
        exec(program, {})
    except Exception:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(0)
