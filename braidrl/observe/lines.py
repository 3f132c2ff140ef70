"""JSON lines files that survive a kill: only the last line can be incomplete, and readers ignore it."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from braidrl.errors import UserError


class LineFile:
    """Appends objects to a file, one line each. `append` returns when the operating system has the line."""

    def __init__(self, path: Path) -> None:
        """Open a file to append to; an incomplete last line is cut off."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = whole_lines(path.read_bytes()) if path.exists() else b""
        self._file = path.open("ab")
        self._file.truncate(len(whole))

    def append(self, record: Mapping[str, Any]) -> None:
        self._file.write((json.dumps(record, allow_nan=False) + "\n").encode())
        self._file.flush()

    def close(self) -> None:
        self._file.close()


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path; the file moves to `path` when the block ends without an error, else it is discarded."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines of a file. Raises UserError when the file is missing, or with the number of a line that is not JSON."""
    if not path.is_file():
        raise UserError(f"no file {path}: is {path.parent} the folder of a run?")
    records = []
    for number, line in enumerate(whole_lines(path.read_bytes()).splitlines(), start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise UserError(f"{path}, line {number}: not a JSON object; remove the line to read the rest") from None
    return records


def keep_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Rewrite the file with only the lines that `keep` accepts, and return them. A kill during this leaves the old file intact."""
    kept = [record for record in read_lines(path) if keep(record)]
    with whole_file(path) as unfinished:
        unfinished.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))
    return kept
