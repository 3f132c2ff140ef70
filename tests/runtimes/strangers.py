"""A process of the same user that does not know the secret and sends invalid messages to every socket of a run.

    python -m tests.runtimes.strangers COUNT RECORDING ADDRESS...        each message goes to the next address

RECORDING holds a message that a process of the run has sent to the first address; it is replayed unchanged.
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgpack
import zmq

from braidrl.queue.transport import asking_socket

GREETING = b"\xff" + b"\0" * 7 + b"\x01\x7f\x03\0" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
ANYBODY = GREETING + b"\x04" + bytes([len(READY)]) + READY
"""First bytes of an unauthenticated ZeroMQ conversation."""
REQUESTS = ("take", "done", "stepped", "ordered", "weights", "given", "hello", "renew", "unlink", "read", "selected")
FULL = 0.01
"""Pause after a refused connection."""


def request(draw: random.Random) -> bytes:
    """A request in the run's own format."""
    return msgpack.packb(
        {
            "request": draw.choice(REQUESTS),
            "number": draw.randrange(1 << 20),
            "holder": draw.choice(["actor.0.0", "stranger"]),
            "stage": "actor.update",
            "leases": [draw.randrange(1000)],
            "stages": ["actor.update"],
            "held": [],
            "parts": [],
            "generates": False,
            "address": "here",
            "blocks": [],
            "role": "actor",
            "version": 99,
            "report": {},
        }
    )


def frame(content: bytes) -> bytes:
    """Return a frame of ZeroMQ."""
    return b"\x02" + struct.pack(">Q", len(content)) + content


def forged(draw: random.Random, recording: bytes) -> bytes:
    return ANYBODY + frame(request(draw))


def replayed(draw: random.Random, recording: bytes) -> bytes:
    return recording


def malformed(draw: random.Random, recording: bytes) -> bytes:
    return draw.choice([b"\x81\x91\x01\x02", draw.randbytes(draw.randrange(1, 4096)), GREETING[: draw.randrange(64)]])


def oversized(draw: random.Random, recording: bytes) -> bytes:
    return draw.choice([ANYBODY + b"\x02" + struct.pack(">Q", 1 << 40) + b"x" * 100, draw.randbytes(1 << 17)])


KINDS: tuple[Callable[[random.Random, bytes], bytes], ...] = (forged, replayed, malformed, oversized)


def shout(address: tuple[str, int], content: bytes) -> None:
    """Send bytes over a new connection; the server may close it at any time."""
    try:
        with socket.create_connection(address, timeout=5) as line:
            line.settimeout(0.2)
            line.sendall(content)
    except OSError:
        time.sleep(FULL)


def knock(address: tuple[str, int], draw: random.Random) -> bool:
    """Send a request with a wrong secret; return whether there was an answer."""
    with (
        zmq.Context() as context,
        asking_socket(context, "tcp://{}:{}".format(*address), draw.randbytes(8).hex()) as line,
    ):
        with contextlib.suppress(zmq.Again):
            line.send_multipart([request(draw), os.urandom(32)], zmq.NOBLOCK)
        return bool(line.poll(20))


def main() -> None:
    """Send the messages; exit with 1 if any server answers."""
    count, recording, addresses = int(sys.argv[1]), Path(sys.argv[2]).read_bytes(), sys.argv[3:]
    draw, places = random.Random(0), [(host, int(port)) for host, port in (each.split(":") for each in addresses)]
    for number in range(count):
        place = places[number % len(places)]
        # Each address gets every kind of message; one in fifty is a conversation with a wrong key.
        if number % 50 == 0 and knock(place, draw):
            raise SystemExit(1)
        shout(place, KINDS[number // len(places) % len(KINDS)](draw, recording))


if __name__ == "__main__":
    main()
