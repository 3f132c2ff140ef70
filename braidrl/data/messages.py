"""The wire format of messages between processes: MessagePack, by msgspec. Rows have their own format, `codec`.

A message consists of None, numbers, text, bytes, lists, dictionaries, dataclasses, msgspec Structs, and tensors (N,) on the CPU. If the
reader names a type, it gets a value of that type, checked field by field; otherwise tuples become lists, and dataclasses dictionaries.
Nothing is unpickled.

    pack_message(value) ──bytes──▶ unpack_message(bytes, Type)
"""

from functools import cache
from typing import Any

import msgspec

TENSORS = ("int64", "float32", "float64")
"""The dtypes of tensors in messages."""


def pack_message(value: Any) -> bytes:
    """Encode a message. Raises TypeError for an unsupported value."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def unpack_message(message: bytes | bytearray | memoryview, type: Any = Any) -> Any:
    """Decode a message. Raises ValueError for bytes that are not a message of this type."""
    try:
        return _decoder(type).decode(message)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


@cache
def _decoder(type: Any) -> "msgspec.msgpack.Decoder[Any]":
    return msgspec.msgpack.Decoder(type, dec_hook=_tensor)


def _plain(value: Any) -> tuple[str, bytes]:
    """Return a tensor's dtype and bytes."""
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if dtype not in TENSORS:
        raise TypeError(f"a message cannot hold a {type(value).__name__} {dtype}")
    return dtype, value.numpy().tobytes()


def _tensor(type: Any, value: Any) -> Any:
    """Invert `_plain`."""
    # Imported here: a process without tensors needs no torch.
    import numpy as np
    import torch

    dtype, content = value
    if type is not torch.Tensor or dtype not in TENSORS:
        raise ValueError(f"a tensor of dtype {dtype} was expected")
    return torch.from_numpy(np.frombuffer(content, dtype=dtype).copy())
