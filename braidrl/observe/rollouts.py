"""`rollouts/step-N.parquet`: generated rows, bit for bit, beside their text.

index column    a plain parquet column
Ragged          a list column
Objects         a column of JSON text
prompt_text, response_text   for people and other programs; ignored when rows are read back

When several ranks hold the rows, each writes its own file and `step-N.parquet` is a folder; parquet readers treat it as
one table. The exact types are kept in the file's metadata, so a replay trains on the very numbers of the run.
"""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from braidrl.data.identity import IDENTITY
from braidrl.errors import UserError, first_line

PROMPT_TEXT = "prompt_text"
RESPONSE_TEXT = "response_text"
SCHEMA_KEY = b"braidrl.columns"


def rollout_path(run: Path, step: int, evaluation: str | None = None) -> Path:
    """Return the path of a recording of a training step, or of an evaluation set: a file, or a folder with one file per
    rank.
    """
    return run / "rollouts" / f"{'' if evaluation is None else f'eval-{evaluation}-'}step-{step}.parquet"


def recorded_steps(run: Path, evaluation: str | None = None) -> list[int]:
    """Return the steps with recorded rows of training, or of an evaluation set, ascending."""
    prefix = "" if evaluation is None else re.escape(f"eval-{evaluation}-")
    matches = (
        re.fullmatch(rf"{prefix}step-(\d+)\.parquet", path.name) for path in (run / "rollouts").glob("*.parquet")
    )
    return sorted(int(match[1]) for match in matches if match)


def recorded_evaluations(run: Path) -> list[str]:
    matches = (re.fullmatch(r"eval-(.+)-step-\d+\.parquet", path.name) for path in (run / "rollouts").glob("*.parquet"))
    return sorted({match[1] for match in matches if match})


def part_path(path: Path, rank: int) -> Path:
    """Return the hidden path of a rank's file before `join_parts`."""
    return path.with_name(f".{path.name}.rank-{rank}")


def join_parts(path: Path, parts: Sequence[Path]) -> None:
    """Publish the files of ranks as one recording, a file or a folder of several.

    Raises ValueError if their columns differ.
    """
    names = sorted(pq.read_schema(parts[0]).names)
    for part in parts:
        if (columns := sorted(pq.read_schema(part).names)) != names:
            raise ValueError(f"{part} has other columns than {parts[0]}: {columns}, {names}")
    folder = path.with_name(f".{path.name}.parts")
    shutil.rmtree(folder, ignore_errors=True)
    if len(parts) > 1:
        folder.mkdir()
        for number, part in enumerate(parts):
            part.rename(folder / f"{number:05}.parquet")
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    (folder if len(parts) > 1 else parts[0]).rename(path)


def parts_of(path: Path) -> list[Path]:
    """Return the file at a path, or the sorted files of a folder."""
    return sorted(file for file in path.iterdir() if file.is_file()) if path.is_dir() else [path]


def check_recording(path: Path) -> None:
    """Raise UserError if a recording is missing, damaged, or was not made by a run.

    Only the ends of its files are read.
    """
    for file in parts_of(path):
        if not file.is_file():
            raise UserError(f"no recorded rollouts at {path}")
        try:
            metadata = pq.read_metadata(file).metadata or {}
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{file} cannot be read as a recording ({first_line(error)}); record it again") from None
        if SCHEMA_KEY not in metadata:
            raise UserError(f"{path} was not recorded by a run: it lacks the types of its columns")


def read_texts(path: Path, columns: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Read each row's prompt and response text, and the named `columns` that the recording has."""
    wanted, files, records = [PROMPT_TEXT, RESPONSE_TEXT, *columns], parts_of(path), []
    for file in files:
        known = set(pq.read_schema(file).names)
        records += pq.read_table(file, columns=[name for name in {*wanted, *IDENTITY} if name in known]).to_pylist()
    if len(files) > 1:
        records.sort(key=lambda row: [row[name] for name in IDENTITY])
    return [{name: row[name] for name in wanted if name in row} for row in records]
