"""The fork server as a copy of a command with all imports done: processes start at once and share the imported code's memory.

a command, all imported ──fork──▶ fork server ──fork──▶ ranks, workers, engines

By default multiprocessing starts a fresh interpreter as its fork server, and that imports everything again.
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

from braidrl.cluster.watchdog import FORK_SERVER, goes_by

STANDARD_STREAMS = (0, 1, 2)
TRACKER = "tracker"
"""multiprocessing's resource tracker, which frees resources that dead processes leave."""
PR_SET_PDEATHSIG = 1
SPAWN = util.spawnv_passfds


def copy_as_fork_server(modules: Iterable[str]) -> bool:
    """Fork this process as the fork server of all processes that it and they start from now on; return True if that was possible.

    Call it before this process computes, starts a thread or opens anything private: threads, locks and devices do not survive a
    fork. If it is too late, this does nothing and multiprocessing starts its own server when needed. `modules` are imported first, for
    the copies to run.
    """
    if threading.active_count() > 1:
        return False
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # Freeze imports: a garbage collection over them would copy the server's memory.
    try:
        util.spawnv_passfds = _copy  # type: ignore[assignment]
        forkserver.ensure_running()  # and, before it, the resource tracker
    finally:
        util.spawnv_passfds = SPAWN
    return True


def _copy(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
    """Replace `util.spawnv_passfds` for an interpreter with `-c` by a fork of this process; return its process id."""
    sys.stdout.flush()
    process = os.fork()
    if not process:
        program = arguments[-1]
        kept = {*descriptors, *STANDARD_STREAMS}
        try:
            goes_by(FORK_SERVER if "forkserver" in program else TRACKER)
            # The kernel sends SIGCONT when the parent ends: a stopped process could not notice it and end.
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
            # A fresh interpreter has no such lock held; the parent holds it while it starts these processes.
            util.spawnv_passfds = SPAWN
            for module in (resource_tracker, forkserver):
                importlib.reload(module)
            for descriptor in map(int, os.listdir("/proc/self/fd")):
                if descriptor not in kept:
                    with contextlib.suppress(OSError):  # the descriptor of the listing itself is already closed
                        os.close(descriptor)
            exec(program, {})
        except EOFError:  # a client without room for descriptors: it says so itself
            pass
        except Exception:
            sys.excepthook(*sys.exc_info())
        finally:
            os._exit(0)
    return process
