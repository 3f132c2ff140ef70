"""A process that calls verifiers, seen from the run: its start, the pipe to it, and its end.

It starts afresh, and not as a copy of this one: nothing of torch's threads is forked and the user's main script does not run
again. It leads a process group, so that what a verifier started is killed with it and Ctrl-C reaches the run alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import subprocess
import sys
from multiprocessing import Pipe
from multiprocessing.connection import Connection

from braidrl.rewards.verifier import Verifier
from braidrl.rewards.worker import LOAD_LIMIT_S, Message, encode, receive

BOOT = """
import json, sys
sys.path[:] = json.loads(sys.argv[2])
from braidrl.rewards.worker import main
main(int(sys.argv[1]))
"""
SEND_LIMIT_S = 30
"""A process that reads nothing for so long is stuck."""


class WorkerProcess:
    """One process and the pipe to it."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        _limit_sending(self.connection)
        self.process = subprocess.Popen(
            [sys.executable, "-c", BOOT, str(theirs.fileno()), json.dumps(sys.path)],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()
        self.loaded: set[str] = set()

    def ask(self, message: bytes, limit_s: float) -> Message:
        """Send a message and wait for the answer. Raises TimeoutError, or EOFError or OSError if the process dies."""
        self.connection.send_bytes(message)
        if not self.connection.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return receive(self.connection)

    def load(self, verifier: Verifier, timeout_s: float, concurrent: bool = False) -> Message:
        """Import the verifier in the process, once; returns the failure, empty where there is none. Raises as `ask`."""
        if verifier.key in self.loaded:
            return {}
        message = {"load": verifier.key, "concurrent": concurrent, "limit_s": timeout_s}
        failure = self.ask(encode(message), LOAD_LIMIT_S)
        if not failure:
            self.loaded.add(verifier.key)
        return failure

    def signal(self) -> None:
        """Kill the process and all that it started, without waiting."""
        # The number cannot have become another's: nobody waits for the process before `kill` does.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def kill(self) -> int:
        """Kill and wait, once; returns the exit status of a process that had ended by itself, else minus the signal."""
        self.signal()
        status = self.process.wait()
        self.connection.close()
        return status


def _limit_sending(connection: Connection) -> None:
    """Make a blocked write end in BlockingIOError, which is an OSError, and not block the thread for good."""
    with socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_LIMIT_S, 0))
