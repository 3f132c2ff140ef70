"""The wire format of messages between processes: MessagePack, by msgspec. Rows have their own format, `codec`.

A message consists of None, numbers, text, bytes, paths, lists, dictionaries, dataclasses, `Message`s, and tensors on
the CPU. If the reader names a type, it gets a value of that type, checked field by field; otherwise tuples become
lists, and dataclasses dictionaries. Nothing is unpickled.

    pack_message(value) ──bytes──▶ unpack_message(bytes, Type)      of a union of `Message`s, the type that was sent

Several frames are packed into one contiguous buffer, for shared memory and files:

    mark, total bytes, number of frames, length of each │ frame 0 │ frame 1 │ ...  each begins at a multiple of 64 bytes
"""

import struct
from collections.abc import Sequence
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec

Frame = bytes | bytearray | memoryview
TENSORS = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
"""The dtypes of tensors in messages."""


class Message(msgspec.Struct, tag=True, omit_defaults=True):
    """A request, an answer or an order; readers name a union of such types, and dispatch by type."""


Packed = msgspec.Raw
"""A value within a message that its reader decodes later: it is packed as it is, and read as bytes."""


def pack_message(value: Any) -> bytes:
    """Encode a message. Raises TypeError for an unsupported value."""
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def unpack_message(message: Frame, type: Any = Any) -> Any:
    """Decode a message. Raises ValueError for bytes that are not a message of this type."""
    try:
        return _decoder(type).decode(message)
    except msgspec.DecodeError as error:
        raise ValueError(str(error)) from None


def _plain(value: Any) -> tuple[str, list[int], bytes] | str:
    if isinstance(value, Path):
        return str(value)
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if dtype not in TENSORS:
        raise TypeError(f"a message cannot hold a {type(value).__name__} {dtype}")
    return dtype, list(value.shape), value.numpy().tobytes()


def _typed(type: Any, value: Any) -> Any:
    if type is Path:
        return Path(value)
    # Imported here: a process without tensors needs no torch.
    import numpy as np
    import torch

    dtype, shape, content = value
    if not issubclass(torch.Tensor, type) or dtype not in TENSORS:
        raise ValueError(f"a tensor of dtype {dtype} was expected")
    return torch.from_numpy(np.frombuffer(content, dtype=dtype).copy()).reshape(shape)


_decoder = cache(partial(msgspec.msgpack.Decoder, dec_hook=_typed))

MARK, ALIGNMENT = b"braidfrm", 64
FIXED = struct.Struct("<8sQQ")


class CodecError(ValueError):
    """Bytes that are not complete rows, or rows that cannot be encoded."""


def join(frames: Sequence[Frame]) -> bytearray:
    """Join frames in one buffer. This is the only copy of their bytes."""
    total, pieces = laid_out(frames)
    buffer = bytearray(total)
    for start, piece in pieces:
        buffer[start : start + piece.nbytes] = piece
    return buffer


def laid_out(frames: Sequence[Frame]) -> tuple[int, list[tuple[int, memoryview]]]:
    """Return the size of the joined frames in bytes, and their pieces with offsets; gaps between pieces are padding."""
    views = [memoryview(frame).cast("B") for frame in frames]
    lengths = [view.nbytes for view in views]
    *starts, total = _starts(lengths)
    head = FIXED.pack(MARK, total, len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    return total, [(0, memoryview(head)), *zip(starts, views, strict=True)]


def split(buffer: Frame) -> list[memoryview]:
    """Return the frames as views on the buffer, which may be longer.

    Raises CodecError if it is damaged or truncated.
    """
    view = memoryview(buffer).cast("B")
    if view.nbytes < FIXED.size:
        raise CodecError(f"{view.nbytes} bytes are too few to hold frames")
    mark, total, count = FIXED.unpack_from(view)
    if mark != MARK:
        raise CodecError("this buffer does not hold frames: the mark at its beginning is missing")
    if total > view.nbytes or FIXED.size + 8 * count > total:
        raise CodecError(
            f"the buffer is cut off or damaged: {count} frames in {total} bytes, of which {view.nbytes} are there"
        )
    lengths = struct.unpack_from(f"<{count}Q", view, FIXED.size)
    *starts, end = _starts(lengths)
    if end != total:
        raise CodecError(f"the buffer is damaged: its frames end at {end} and not at {total}")
    return [view[start : start + length] for start, length in zip(starts, lengths, strict=True)]


def _starts(lengths: Sequence[int]) -> list[int]:
    """Return the offset of each frame, and the end of the last one."""
    aligned = [-(-size // ALIGNMENT) * ALIGNMENT for size in (FIXED.size + 8 * len(lengths), *lengths)]
    return list(accumulate(aligned))
