"""An index of a file's lines: any of them is read without the lines before it, and the index takes no memory.

file ──newlines of 16 MiB at a time──▶ index, 16 bytes a line: (offset, number from 1) of each line that is not empty
"""

import codecs
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

LINE_BYTES = 32 << 20
"""Maximum size of one record."""
READ_BYTES = 16 << 20
NEWLINE = 10
WHITE = np.zeros(256, bool)
WHITE[list(b" \t\n\r\x0b\x0c")] = True
"""The bytes that an empty line may have."""


class Lines:
    """The lines of a file that are not empty, by position."""

    def __init__(self, path: Path, index: Path) -> None:
        """Map an index written by `index_lines`."""
        self.path = path
        # A plain view of the mapped file: an index into it takes a tenth of the time.
        self.starts = np.asarray(np.memmap(index, np.int64, "r")).reshape(-1, 2)
        """(N + 1, 2) offsets and numbers; the last one is the end of the file."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def sizes(self) -> np.ndarray:
        """Return the bytes of each line (N,) int64, including following empty lines."""
        return np.diff(self.starts[:, 0])

    def at(self, positions: Iterable[int]) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers and texts of the lines at some positions; lines beyond the limit are truncated."""
        with self.path.open("rb") as file:
            for position in positions:
                (offset, number), (end, _) = self.starts[position : position + 2].tolist()
                file.seek(offset)
                text = file.read(min(end - offset, LINE_BYTES + 1))
                yield number, text if len(text) > LINE_BYTES else text.rstrip()


def index_lines(path: Path, index: Path, update: Callable[[int], object] = int) -> None:
    """Write the index of a file's lines, in one pass over the file; `update` is called with the bytes read so far."""
    unfinished = index.with_name(f"{index.name}.unfinished")
    with path.open("rb") as file, unfinished.open("wb") as target:
        position = len(codecs.BOM_UTF8) if file.read(len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0
        file.seek(position)
        # The unfinished line at the end of the last block: its offset, and whether it is empty so far.
        start, number, is_empty = position, 1, True
        while block := file.read(READ_BYTES):
            values = np.frombuffer(block, np.uint8)
            ends = np.flatnonzero(values == NEWLINE)
            starts = np.concatenate([[start], position + ends + 1])
            written = np.ones(len(starts), bool)
            # Only lines that start with white space may be empty.
            first = WHITE[values[np.minimum(starts[1:] - position, len(block) - 1)]]
            for at in [0, *(np.flatnonzero(first) + 1).tolist()]:
                begin, end = int(starts[at]) - position, int(ends[at]) if at < len(ends) else len(block)
                written[at] = not ((at or is_empty) and not block[max(begin, 0) : end].strip())
            complete = np.stack([starts, number + np.arange(len(starts))], axis=1)[:-1]
            complete[written[:-1]].astype(np.int64).tofile(target)
            start, number, is_empty = int(starts[-1]), number + len(ends), not written[-1]
            position += len(block)
            update(position)
        if not is_empty:
            np.array([[start, number]], np.int64).tofile(target)
        np.array([[position, 0]], np.int64).tofile(target)
    unfinished.replace(index)


def has_more_lines(path: Path, most: int) -> bool:
    """Return True if a file has more than `most` ends of lines."""
    count = 0
    with path.open("rb") as file:
        while count <= most and (block := file.read(READ_BYTES)):
            count += block.count(b"\n")
    return count > most
