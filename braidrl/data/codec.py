"""The wire format of rows: a small header, and the columns' bytes as they are in memory.

    frame 0     mark, checksum, a message: number of rows; name, kind, dtype and shape of every column
    frame 1..   raw bytes     index column: its values    Ragged: offsets, then values    Objects: a JSON array

Encoded frames are views on the columns' memory, and decoded columns are views on the frames: neither copies a tensor.
Nothing is unpickled. Decoded tensors may be in read-only memory, because `Rows` are immutable.
"""

import json
import math
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.messages import CodecError, Frame, join, pack_message, split, unpack_message
from braidrl.data.rows import Column, Objects, Rows

MARK = b"braidrow"
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
AS_BYTES = ("bool", "bfloat16")
"""Types that are read as bytes: those of a bool are checked, and numpy has no bfloat16."""
FRAMES_OF_KIND = {"index": 1, "ragged": 2, "objects": 1}


class PayloadForbidden(RuntimeError):
    """A process that only schedules tried to decode payload."""


class ColumnHeader(NamedTuple):
    """The description of one column in frame 0: `shape` is the shape of the values, `dtype` is "json" for Objects."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]


_forbidding: list[object] = []
"""One entry for each active `payload_forbidden`, for all threads of the process: callbacks run in other threads."""


@contextmanager
def payload_forbidden() -> Iterator[None]:
    """Make `decode` raise PayloadForbidden for payload columns in this context, in every thread of this process."""
    _forbidding.append(None)
    try:
        yield
    finally:
        _forbidding.pop()


def encode(rows: Rows) -> list[Frame]:
    """Encode rows as frames that are views on the rows' memory.

    Raises CodecError, with the column's name, for unsupported values.
    """
    headers: list[ColumnHeader] = []
    frames: list[Frame] = []
    for name, column in rows.items():
        if isinstance(column, Objects):
            values = list(column.values)
            text = _exact_json(values)
            if text is None:
                row = next(i for i, value in enumerate(values) if _exact_json(value) is None)
                raise CodecError(
                    f"column {name!r}, row {row}: {values[row]!r} is not a JSON value "
                    "(None, bool, int, finite float, str, list, dict with str keys)"
                )
            headers.append(ColumnHeader(name, "objects", "json", (len(column),)))
            frames.append(text.encode())
            continue
        kind, tensor = ("ragged", column.values) if isinstance(column, Ragged) else ("index", column)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise CodecError(f"column {name!r} is {dtype}, which does not travel; use one of {', '.join(DTYPES)}")
        headers.append(ColumnHeader(name, kind, dtype, tuple(tensor.shape)))
        for part in (column.offsets, tensor) if isinstance(column, Ragged) else (tensor,):
            part = part.detach().cpu().contiguous()
            if part.dtype == torch.bfloat16:
                # numpy has no bfloat16: the values are sent as plain bytes.
                part = part.view(torch.int16)
            frames.append(part.numpy().reshape(-1).view(np.uint8).data)
    packed = pack_message([len(rows), headers])
    return [MARK + zlib.crc32(packed).to_bytes(4, "little") + packed, *frames]


def decode(frames: Sequence[Frame], columns: Sequence[str] | None = None) -> Rows:
    """Decode all columns, or those named, as views on the frames. Raises CodecError, KeyError, or PayloadForbidden."""
    size, headers = read_header(frames)
    known = {header.name for header in headers}
    names = [h.name for h in headers] if columns is None else list(columns)
    if missing := [name for name in names if name not in known]:
        raise KeyError(f"no column {missing[0]!r} among {', '.join(h.name for h in headers)}")
    wanted = set(names)
    decoded: dict[str, Column] = {}
    position = 1
    for header in headers:
        count = FRAMES_OF_KIND[header.kind]
        if header.name in wanted:
            column = _decode_column(header, size, frames[position : position + count])
            rows = column.shape[0] if isinstance(column, Tensor) else len(column)
            if rows != size:
                raise CodecError(f"column {header.name!r} has {rows} rows where the header says {size}")
            decoded[header.name] = column
        position += count
    return Rows({name: decoded[name] for name in names})


def pack_rows(rows: Rows) -> bytes:
    """Encode rows as one message."""
    return bytes(join(encode(rows)))


def packed_size(message: Frame) -> int:
    """Return the number of rows in a message from `pack_rows`; 0 for an empty message."""
    return read_header(split(message))[0] if len(message) else 0


def unpack_rows(message: Frame) -> Rows:
    """Decode a message from `pack_rows`; an empty message gives empty rows."""
    return decode(split(message)) if len(message) else Rows({})


def read_header(frames: Sequence[Frame]) -> tuple[int, list[ColumnHeader]]:
    """Return the number of rows, and each column's header.

    Raises CodecError for a damaged header or a wrong number of frames.
    """
    if not frames:
        raise CodecError("no frames")
    first = bytes(frames[0])
    packed = first[len(MARK) + 4 :]
    if not first.startswith(MARK):
        raise CodecError("these bytes are not rows: the mark at their beginning is missing")
    if zlib.crc32(packed) != int.from_bytes(first[len(MARK) : len(MARK) + 4], "little"):
        raise CodecError("the header of these rows is damaged: its checksum is wrong")
    try:
        size, headers = unpack_message(packed, tuple[int, list[ColumnHeader]])
    except ValueError as error:
        raise CodecError(f"the header of these rows cannot be read: {error}") from None
    are_known = all(header.kind in FRAMES_OF_KIND for header in headers)
    if not are_known or size < 0 or len({header.name for header in headers}) < len(headers):
        raise CodecError(f"the header of these rows does not describe columns: {headers}")
    expected = 1 + sum(FRAMES_OF_KIND[header.kind] for header in headers)
    if len(frames) != expected:
        raise CodecError(f"{len(frames)} frames where the header names {expected}")
    return size, headers


def _exact_json(value: Any) -> str | None:
    """Return JSON text that loads to an equal value, or None: tuples and int keys would silently change."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError):
        return None
    return text if json.loads(text) == value else None


def _decode_column(header: ColumnHeader, size: int, frames: Sequence[Frame]) -> Column:
    if header.kind == "index":
        return _tensor(header, header.dtype, header.shape, frames[0])
    if _forbidding:
        raise PayloadForbidden(
            f"column {header.name!r} is payload, and this process schedules: it carries index columns only"
        )
    if header.kind == "objects":
        try:
            items = json.loads(bytes(frames[0]))
        except (ValueError, RecursionError) as error:
            raise CodecError(f"column {header.name!r} is not JSON: {error}") from None
        if not isinstance(items, list):
            raise CodecError(f"column {header.name!r} is not a JSON array")
        return Objects(tuple(items))
    offsets = _tensor(header, "int64", (size + 1,), frames[0])
    values = _tensor(header, header.dtype, header.shape, frames[1])
    if offsets[0] < 0 or offsets[-1] != len(values) or bool((offsets.diff() < 0).any()):
        raise CodecError(f"column {header.name!r}: its offsets are damaged")
    return Ragged(values, offsets)


def _tensor(header: ColumnHeader, dtype: str, shape: tuple[int, ...], frame: Frame) -> Tensor:
    if dtype not in DTYPES or not shape or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise CodecError(f"column {header.name!r}: no tensor is {dtype} of shape {shape}")
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if memoryview(frame).nbytes != expected:
        raise CodecError(f"column {header.name!r}: {memoryview(frame).nbytes} bytes where its shape takes {expected}")
    if expected == 0:
        return torch.empty(shape, dtype=DTYPES[dtype])
    # DLPack accepts read-only memory; torch.frombuffer warns about it.
    values = torch.from_dlpack(np.frombuffer(frame, dtype=np.uint8 if dtype in AS_BYTES else dtype))
    if dtype == "bool" and int(values.max()) > 1:
        raise CodecError(f"column {header.name!r}: bytes that are neither true nor false")
    if dtype in AS_BYTES:
        values = values.view(DTYPES[dtype])
    return values if len(shape) == 1 else values.reshape(shape)
