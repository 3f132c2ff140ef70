"""The wire format of messages between processes: MessagePack, by msgspec. Rows have their own format, `codec`.

A message consists of None, numbers, text, bytes, lists, dictionaries, dataclasses and msgspec Structs. If the reader names a type, it gets
a value of that type, checked field by field; otherwise tuples become lists, and dataclasses dictionaries. Nothing is unpickled.

    pack_message(value) ──bytes──▶ unpack_message(bytes, Type)
"""

from functools import cache
from typing import Any

import msgspec


def pack_message(value: Any) -> bytes:
    """Encode a message. Raises TypeError for an unsupported value."""
    return msgspec.msgpack.encode(value)


def unpack_message(message: bytes | bytearray | memoryview, type: Any = Any) -> Any:
    """Decode a message. Raises ValueError for bytes that are not a message of this type."""
    try:
        return _decoder(type).decode(message)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


@cache
def _decoder(type: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(type)
