"""The one form of messages between processes: MessagePack, by msgspec. Rows have a form of their own, `codec`.

A message is made of None, numbers, text, bytes, lists, dictionaries, dataclasses and msgspec Structs. A reader that names a type gets a
value of that type, checked field by field; without one tuples arrive as lists, and dataclasses as dictionaries. Nothing is unpickled.

    pack_message(value) ──bytes──▶ unpack_message(bytes, Type)
"""

from functools import cache
from typing import Any

import msgspec


def pack_message(value: Any) -> bytes:
    """Encode a message. Raises TypeError for a value that is none."""
    return msgspec.msgpack.encode(value)


def unpack_message(message: bytes | bytearray | memoryview, type: Any = Any) -> Any:
    """Decode a message. Raises ValueError for bytes that are not one of this type."""
    try:
        return _decoder(type).decode(message)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


@cache
def _decoder(type: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(type)
