"""What passes between a run and an engine's process: which engine it makes, requests, responses. Nothing is unpickled.

Messages are msgpack behind their length.
"""

import asyncio
import io
import socket
import struct
from dataclasses import asdict, dataclass, field
from typing import Any

import msgpack
import numpy as np
import torch
from torch import Tensor

from braidrl.data.rows import FinishReason
from braidrl.engines.engine import EngineError
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.errors import UserError

Message = dict[str, Any]
LENGTH = struct.Struct("<Q")
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (UserError, EngineError, KeyError, ValueError, RuntimeError)
}
"""Exceptions of the engine protocol; any other one is the engine's failure."""


def packed(message: Message) -> bytes:
    """Encode a message with its length before it."""
    body = msgpack.packb(message)
    return LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader) -> Message | None:
    """Return the next message, or None when the other side is gone."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        message: Message = msgpack.unpackb(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
    return message


def receive_at_once(connection: socket.socket) -> Message | None:
    """Return the next message without an event loop, reading no more than it."""
    with connection.makefile("rb", buffering=0) as file:
        head = _exactly(file, LENGTH.size)
        body = None if head is None else _exactly(file, LENGTH.unpack(head)[0])
    return None if body is None else msgpack.unpackb(body)


def _exactly(file: io.RawIOBase, count: int) -> bytes | None:
    found = b""
    while len(found) < count:
        part = file.read(count - len(found))
        if not part:
            return None
        found += part
    return found


def plain_request(request: Request) -> Message:
    return {
        "uid": request.uid, "prompt": _bytes(request.prompt), "sampling": asdict(request.sampling),
        "purpose": request.purpose, "stage": request.stage, "first_draw": request.first_draw,
        "continues": request.continues, "followed": request.on_token is not None,
    }  # fmt: skip


def request_of(plain: Message) -> Request:
    """Invert `plain_request`."""
    return Request(
        _uid(plain["uid"]), _tensor(plain["prompt"], torch.int64), SamplingParams.of(plain["sampling"]),
        plain["purpose"], plain["stage"], plain["first_draw"], plain["continues"],
    )  # fmt: skip


def plain_response(finished: Response) -> Message:
    return {
        "uid": finished.uid, "tokens": _bytes(finished.tokens), "log_probs": _bytes(finished.log_probs),
        "double": finished.log_probs.dtype == torch.float64, "reason": int(finished.finish_reason),
        "versions": _bytes(finished.versions),
    }  # fmt: skip


def response_of(plain: Message) -> Response:
    """Invert `plain_response`."""
    dtype = torch.float64 if plain["double"] else torch.float32
    return Response(
        _uid(plain["uid"]), _tensor(plain["tokens"], torch.int64), _tensor(plain["log_probs"], dtype),
        FinishReason(plain["reason"]), _tensor(plain["versions"], torch.int64),
    )  # fmt: skip


def plain_error(error: Exception) -> Message:
    """Encode an exception for the other side to raise; one outside the protocol becomes an EngineError."""
    name, text = type(error).__name__, str(error.args[0]) if error.args else ""
    return {"error": name, "text": text} if name in ERRORS else {"error": "EngineError", "text": f"{name}: {text}"}


def error_of(plain: Message) -> Exception:
    """Invert `plain_error`."""
    return ERRORS[plain["error"]](plain["text"])


def _uid(plain: list[int]) -> tuple[int, int, int]:
    source, group, sample = plain
    return source, group, sample


def _bytes(values: Tensor) -> bytes:
    return values.numpy().tobytes()


def _tensor(plain: bytes, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.frombuffer(plain, dtype=str(dtype).removeprefix("torch.")).copy())


@dataclass(frozen=True)
class EngineSpec:
    """Which engine a process makes, as plain data."""

    kind: str
    """`embedded`, `vllm`, or `module:name` or `file.py:name` of a user's own."""
    model: str
    """A Hugging Face directory."""
    slots: int
    max_sequence_tokens: int
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    """cpu or cuda: the first of `devices`."""
    threads: int | None = 1
    """CPU threads of each of its processes; None leaves what the environment says."""
    tensor: int = 1
    """Processes that divide the weights."""
    limit_s: float = 600.0
    """How long these wait for one another."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of this kind of engine: `rollout.engine_settings` of a user's own."""
    devices: tuple[int, ...] | None = None
    """The CUDA devices that its processes see, one for each, by their numbers among the run's; None for all of those."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)
