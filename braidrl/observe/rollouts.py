"""`rollouts/step-N.parquet`: generated rows, bit for bit, with their text.

index column    a plain parquet column
Ragged          a list column
Objects         a column of JSON text
prompt_text, response_text   for people and other programs; ignored when rows are read back

When ranks of several machines hold the rows, `step-N.parquet` is a folder with a file for each machine; parquet readers
treat it as one table. Each rank first writes a separate file, and one rank of the machine merges them. The exact
types are kept in the file's metadata, so a replay trains on exactly the numbers of the run.
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
ROW_GROUP = 128
"""Readers of one row, as `braid rollouts` is, decode its row group alone."""
# No dictionary encoding for numbers: it compares values, and would merge -0.0 with 0.0, and different NaNs.
WRITING: dict[str, Any] = {"compression": "zstd", "use_dictionary": [PROMPT_TEXT, RESPONSE_TEXT]}


def rollout_path(run: Path, step: int, evaluation: str | None = None) -> Path:
    """Return the path of a recording of a training step, or of an evaluation set: a file, or a folder of files."""
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
    """Return the hidden path of a rank's file, until it is part of the recording."""
    return path.with_name(f".{path.name}.rank-{rank}")


def unpublished(path: Path) -> Path:
    """Return the hidden folder of a recording's files before `publish`."""
    return path.with_name(f".{path.name}.parts")


def merge_parts(path: Path, number: int, parts: Sequence[Path]) -> list[str]:
    """Make the files of some ranks file `number` of a recording, and return its columns.

    Raises ValueError if those differ.
    """
    target = unpublished(path) / f"{number:05}.parquet"
    target.parent.mkdir(exist_ok=True)
    schema = pq.read_schema(parts[0])
    names = sorted(schema.names)
    for part in parts[1:]:
        if (columns := sorted(pq.read_schema(part).names)) != names:
            raise ValueError(f"{part} has other columns than {parts[0]}: {columns}, {names}")
    if len(parts) == 1:
        parts[0].rename(target)
        return names
    with pq.ParquetWriter(target, schema, **WRITING) as writer:
        for part in parts:
            writer.write_table(pq.read_table(part).select(schema.names), row_group_size=ROW_GROUP)
    for part in parts:
        part.unlink()
    return names


def publish(path: Path) -> None:
    """Make the files of `unpublished` the recording: one file, or a folder of several."""
    folder = unpublished(path)
    files = sorted(folder.iterdir())
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    (folder if len(files) > 1 else files[0]).rename(path)
    if len(files) == 1:
        folder.rmdir()


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


def check_recorded(replay: Path, steps: int, rollout_only: bool) -> None:
    """Raise UserError if the run to replay has not recorded every step, or a recording is damaged."""
    if rollout_only:
        raise UserError("--replay trains on recorded rows and --rollout-only records rows without training; choose one")
    recorded = recorded_steps(replay)
    if not recorded:
        raise UserError(f"{replay} has no recorded rollouts; give the folder of a run that recorded them")
    if missing := sorted(set(range(1, steps + 1)) - set(recorded)):
        raise UserError(f"{replay} has no recorded rollouts of step {missing[0]}; write trainer.steps={missing[0] - 1}")
    for step in range(1, steps + 1):
        check_recording(rollout_path(replay, step))


def read_texts(path: Path, columns: Sequence[str] = (), most_files: int | None = None) -> list[dict[str, Any]]:
    """Read each row's prompt and response text, and those of the named `columns` that the recording has, by identity.

    At most `most_files` of its files are read.
    """
    names, records = [PROMPT_TEXT, RESPONSE_TEXT, *columns], []
    for file in parts_of(path)[:most_files]:
        recorded = set(pq.read_schema(file).names)
        records += pq.read_table(file, columns=[name for name in {*names, *IDENTITY} if name in recorded]).to_pylist()
    if all(name in row for row in records[:1] for name in IDENTITY):
        records.sort(key=lambda row: [row[name] for name in IDENTITY])
    return [{name: row[name] for name in names if name in row} for row in records]
