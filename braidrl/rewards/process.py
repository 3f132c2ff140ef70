"""A process that calls verifiers, seen from the run: its start, the pipe to it, and its end.

What a verifier started is killed with the process, and Ctrl-C reaches the run alone.
"""

import os
import socket
import struct
from dataclasses import asdict
from multiprocessing.connection import Connection

from braidrl.config import RewardConfig
from braidrl.rewards.verifier import Verifier
from braidrl.rewards.worker import Message, encode, receive
from braidrl.sandbox.sandbox import LOAD_LIMIT_S
from braidrl.sandbox.untrusted import limits_of, spawn_untrusted

SEND_LIMIT_S = 30
"""A process that reads nothing for so long is stuck."""


class WorkerProcess:
    """One process and the pipe to it."""

    def __init__(self, settings: RewardConfig) -> None:
        self.settings = settings
        self.process = spawn_untrusted(
            "verifier", "braidrl.rewards.worker:main", "reward", settings, settings.environment
        )
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
        limit_s = self.settings.timeout_s
        limits = None if self.settings.sandbox == "none" else asdict(limits_of(self.settings, limit_s))
        message = {"load": verifier.key, "concurrent": concurrent, "limit_s": limit_s, "limits": limits}
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
