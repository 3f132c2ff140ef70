"""JSON lines that survive a kill: a line is whole or it is the last one and ignored."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from braidrl.errors import UserError


class LineFile:
    """Appends objects to a file, one line each, handed to the operating system before `append` returns."""

    def __init__(self, path: Path) -> None:
        """Continue after the last whole line of an existing file; what a kill left half-written is cut off."""
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
    """Yield where to write a file that appears at `path` when the block ends without an error, and not at all otherwise."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


def whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read all whole lines of a file. Raises UserError when there is no such file, or with the number of a line that is not JSON."""
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
    """Rewrite the file with the lines that `keep` accepts, and return them; a kill in between leaves the old file whole."""
    kept = [record for record in read_lines(path) if keep(record)]
    with whole_file(path) as unfinished:
        unfinished.write_text("".join(json.dumps(record, allow_nan=False) + "\n" for record in kept))
    return kept


def json_number(value: Any) -> int | float | None:
    """Return a number as JSON can hold it: NaN and infinities become null. Raises ValueError or TypeError for anything else."""
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
