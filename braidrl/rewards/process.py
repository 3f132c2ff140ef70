"""A process that calls verifiers, seen from the run: its start, the pipe to it, and its end.

What a verifier started is killed with the process, and Ctrl-C reaches the run alone.
"""

import os
import shutil
import socket
import struct
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from braidrl.cluster.local import spawn
from braidrl.cluster.process import ProcessSpec
from braidrl.config import RewardConfig
from braidrl.errors import UserError
from braidrl.rewards.verifier import Verifier
from braidrl.rewards.worker import LOAD_LIMIT_S, Message, encode, receive

PASSED = (
    "PATH", "HOME", "LANG", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONHASHSEED", "VIRTUAL_ENV",
    "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM",
)  # fmt: skip
"""What every verifier gets of the run's environment."""
PACKAGES = Path(__file__).parents[2]
"""Where this package lies, which an editable install may keep out of sys.path."""
SEND_LIMIT_S = 30
"""A process that reads nothing for so long is stuck."""


class WorkerProcess:
    """One process and the pipe to it."""

    def __init__(self, settings: RewardConfig) -> None:
        self.settings = settings
        inherits = None if settings.sandbox == "none" else (*PASSED, *settings.environment)
        wrapper = without_network_and_home() if settings.sandbox == "bubblewrap" else ()
        self.process = spawn(ProcessSpec("verifier", "braidrl.rewards.worker:main", inherits=inherits, wrapper=wrapper))
        self.connection = self.process.connection
        _limit_sending(self.connection)
        self.loaded: set[str] = set()

    def ask(self, message: bytes, limit_s: float) -> Message:
        """Send a message and wait for the answer. Raises TimeoutError, or EOFError or OSError if the process dies."""
        self.connection.send_bytes(message)
        if not self.connection.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return receive(self.connection)

    def load(self, verifier: Verifier, concurrent: bool = False) -> Message:
        """Import the verifier in the process, once; returns the failure, empty where there is none. Raises as `ask`."""
        if verifier.key in self.loaded:
            return {}
        settings, limits = self.settings, None
        if settings.sandbox != "none":
            memory = int(settings.memory_gib * 2**30)
            limits = {"seconds": settings.timeout_s, "memory_bytes": memory, "processes": settings.max_processes}
        message = {"load": verifier.key, "concurrent": concurrent, "limit_s": settings.timeout_s, "limits": limits}
        failure = self.ask(encode(message), LOAD_LIMIT_S)
        if not failure:
            self.loaded.add(verifier.key)
        return failure

    def signal(self) -> None:
        """Kill the process and all that it started, without waiting."""
        self.process.kill_group()

    def kill(self) -> int:
        """Kill and wait, once; return the exit status of a process that had ended by itself, else minus the signal."""
        self.process.kill()
        self.connection.close()
        status = self.process.status
        assert status is not None
        return status


def _limit_sending(connection: Connection) -> None:
    """Make a blocked write end in BlockingIOError, which is an OSError, and not block the thread for good."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT_S, 0))


def without_network_and_home() -> tuple[str, ...]:
    """Return the command that starts a worker where there is no network, nothing can be written but in /tmp, and home is empty.

    Of what is hidden, Python's environment and packages and the working directory can be read. Raises UserError without bubblewrap.
    """
    if shutil.which("bwrap") is None:
        raise UserError(
            "reward.sandbox=bubblewrap: there is no command bwrap; install bubblewrap, or write reward.sandbox=process"
        )
    hidden = (Path("/tmp"), Path.home())
    needed = {Path(place).resolve() for place in (sys.prefix, sys.base_prefix, *sys.path, str(PACKAGES), ".")}
    command = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
    for place in hidden:
        command += ["--tmpfs", str(place)]
    for place in sorted(needed):
        if place.exists() and any(place != parent and place.is_relative_to(parent) for parent in hidden):
            command += ["--ro-bind", str(place), str(place)]
    return (*command, "--unshare-all", "--die-with-parent", "--new-session", "--chdir", "/")
