"""Packing of several frames into one contiguous buffer, for shared memory and files.

mark, total bytes, number of frames, length of each │ frame 0 │ frame 1 │ ...      each begins at a multiple of 64 bytes
"""

import struct
from collections.abc import Sequence
from itertools import accumulate

Frame = bytes | bytearray | memoryview

MARK = b"braidfrm"
ALIGNMENT = 64
FIXED = struct.Struct("<8sQQ")


class CodecError(ValueError):
    """Bytes that are not complete rows, or rows that cannot be encoded."""


def join(frames: Sequence[Frame]) -> bytearray:
    """Join frames in one buffer. Only here are their bytes copied."""
    total, pieces = laid_out(frames)
    buffer = bytearray(total)
    for start, piece in pieces:
        buffer[start : start + piece.nbytes] = piece
    return buffer


def laid_out(frames: Sequence[Frame]) -> tuple[int, list[tuple[int, memoryview]]]:
    """Return the size of the joined frames in bytes, and their pieces with offsets; gaps between the pieces are padding."""
    views = [memoryview(frame).cast("B") for frame in frames]
    lengths = [view.nbytes for view in views]
    *starts, total = _starts(lengths)
    head = FIXED.pack(MARK, total, len(lengths)) + struct.pack(f"<{len(lengths)}Q", *lengths)
    return total, [(0, memoryview(head)), *zip(starts, views, strict=True)]


def split(buffer: Frame) -> list[memoryview]:
    """Return the frames as views on the buffer, which may be longer. Raises CodecError if it is damaged or truncated."""
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
