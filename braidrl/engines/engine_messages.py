"""The messages between a run and the process of an engine, each with its length before it.

run ──EngineSpec, then Submit, AbortRow, UpdateWeights, EngineCall──▶ engine's process
    ◀──CallDone, CallFailed, TokenDrawn, EngineBeat, each with the engine's load──
"""

import asyncio
import struct
from typing import Any, Literal

import msgspec

from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import Uid
from braidrl.engines.engine import EngineError
from braidrl.engines.requests import Request, Response
from braidrl.errors import UserError
from braidrl.weights.collective import TransferNotice

READY = -1
"""The id of the answer to the first message, which holds the engine's settings."""
LENGTH = struct.Struct("!i")
"""The message length before each message, in the format of multiprocessing's pipes."""
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error for error in (UserError, EngineError, KeyError, ValueError, RuntimeError)
}
"""Exceptions of the engine protocol; any other exception is a failure of the engine."""


class Submit(msgspec.Struct, tag=True):
    """Generate a response; `followed` asks for each token as soon as it is known, in place of the request's `on_token`."""

    id: int
    request: Request
    followed: bool


class AbortRow(msgspec.Struct, tag=True):
    """End a row with the tokens that it has."""

    id: int
    uid: Uid


class UpdateWeights(msgspec.Struct, tag=True):
    """Load a version of the weights from a file, or over a process group with the trainer; with neither the weights stay."""

    id: int
    version: int
    path: str | None = None
    notice: TransferNotice | None = None


class EngineCall(msgspec.Struct, tag=True):
    """Call a method that takes no arguments."""

    id: int
    method: Literal["sleep", "wake", "recover"]


Order = Submit | AbortRow | UpdateWeights | EngineCall
"""The run's messages; each is answered by `CallDone` or `CallFailed` with its `id`."""


class Reply(msgspec.Struct, tag=True, kw_only=True):
    """A message from an engine's process. `load` is the engine's (slots, running, waiting); None while there is no engine."""

    load: tuple[int, int, int] | None = None


class CallDone(Reply, tag=True):
    """The result of a call."""

    id: int
    result: Response | int | None = None


class CallFailed(Reply, tag=True):
    """The exception of a call; one outside the engine protocol is sent as an EngineError."""

    id: int
    error: str
    text: str

    @staticmethod
    def of(id: int, error: Exception) -> "CallFailed":
        """Encode an exception."""
        name, text = type(error).__name__, str(error.args[0]) if error.args else ""
        if name not in ERRORS:
            name, text = "EngineError", f"{name}: {text}"
        return CallFailed(id=id, error=name, text=text)


class TokenDrawn(Reply, tag=True):
    """A token of a followed row; `id` is that of its `Submit`."""

    id: int
    number: int
    token: int


class EngineBeat(Reply, tag=True):
    """A heartbeat while rows are generated."""


EngineReply = CallDone | CallFailed | TokenDrawn | EngineBeat


def framed(message: Any) -> bytes:
    """Encode a message with its length before it."""
    body = pack_message(message)
    return LENGTH.pack(len(body)) + body


async def receive(reader: asyncio.StreamReader, type: Any) -> Any:
    """Receive the next message, of this type; None when the other side is gone."""
    try:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return unpack_message(await reader.readexactly(length), type)
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
