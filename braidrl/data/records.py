"""Records of a file, a folder or a fetched data set, one after the other: nothing is held but the record that is yielded.

.jsonl       a JSON object on each line                     .parquet   rows, in batches
.json        a list of objects, or an object on each line   folder     files of any of these kinds, by the library `datasets`
"""

import codecs
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from braidrl.config import SourceConfig
from braidrl.errors import UserError, first_line, suggest
from braidrl.parsing import MOST_LEVELS, check_levels, parse_json, what_is_wrong

Record = dict[str, Any]
LINE_BYTES, FILE_BYTES = 32 << 20, 4 << 30
"""Of one record, and of a .json file, which is read whole."""


def read_records(source: SourceConfig, usual_split: str = "train") -> Iterator[tuple[int, Record]]:
    """Yield the line number, from 1, and the fields of each line or row.

    Args:
        source: A file or folder.
        usual_split: The split of a folder that is read where the source names none.

    Raises:
        UserError: It cannot be read.
    """
    check_source(source)
    if source.path.is_dir():
        return read_folder(source, usual_split)
    return READERS[source.path.suffix](source.path)


def check_source(source: SourceConfig) -> None:
    """Raise UserError for a file or folder that is not there or of a kind that is not read; it is not opened."""
    path = source.path
    if path.is_dir():
        if importlib.util.find_spec("datasets") is None:
            raise UserError(
                f"{path} is a folder, which needs the library datasets; install it with `pip install 'braidrl[data]'`"
            )
        return
    if path.suffix not in READERS:
        raise UserError(
            f"{path}: files of the kind {path.suffix!r} are not read; give a .jsonl, .json or .parquet file, or a folder of them"
        )
    if not path.is_file():
        where = "" if path.is_absolute() else f", neither beside the configuration nor in {Path.cwd()}"
        raise UserError(
            f"no data file {path}{where}; give the path of a .jsonl, .json or .parquet file, or of a folder"
        )
    if source.subset is not None or source.split is not None:
        raise UserError(f"{path} is one file, without subsets and splits; remove `subset` and `split` of this source")


def read_jsonl(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the JSON objects of a file by line; empty lines are skipped but counted."""
    with path.open("rb") as file:
        # No more of a line is read than is taken.
        for number, raw in enumerate(iter(lambda: file.readline(LINE_BYTES + 1), b""), start=1):
            if len(raw) > LINE_BYTES or raw.strip():
                text = raw if len(raw) > LINE_BYTES else raw.rstrip()
                yield number, _as_object(path, number, _parsed(place(path, number), text, LINE_BYTES))


def read_json(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield the objects of a JSON list; a file that does not begin one has an object on each line."""
    with path.open("rb") as file:
        if not file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
            yield from read_jsonl(path)
            return
    records = _parsed(str(path), path.read_bytes(), FILE_BYTES)
    for number, record in enumerate(records, start=1):
        yield number, _as_object(path, number, record)


def _parsed(where: str, raw: bytes, most_bytes: int) -> Any:
    """Return the JSON value. Raises UserError, with its place, for what is none, or is too long or too deep."""
    try:
        return parse_json(raw, most_bytes)
    except ValueError as error:
        raise UserError(f"{where} is {what_is_wrong('JSON', error)}") from None


def _as_object(path: Path, number: int, record: Any) -> Record:
    if not isinstance(record, dict):
        raise UserError(
            f'{place(path, number)} holds {kind_of(record)}; write a JSON object, as in {{"prompt": "1+1="}}'
        )
    return record


def read_parquet(path: Path) -> Iterator[tuple[int, Record]]:
    """Yield rows as dicts, read in batches, so that no second copy of the file is held."""
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for record in batch.to_pylist():
                    number += 1
                    _check_json(path, number, record)
                    yield number, record
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} is not a readable parquet file: {' '.join(str(error).split())}") from None


def read_folder(source: SourceConfig, usual_split: str = "train") -> Iterator[tuple[int, Record]]:
    """Yield the rows of one split of a folder, which `datasets` reads as a stream: subsets and splits are those that it finds."""
    # Imported here: it takes a second, and belongs to an extra.
    import datasets
    from datasets.exceptions import DatasetsError

    path = source.path
    try:
        splits = datasets.load_dataset(str(path), source.subset, streaming=True)
        rows = splits[choose_split(path, source.split, list(splits), usual_split)]
        for number, record in enumerate(rows, start=1):
            _check_json(path, number, record)
            yield number, record
    except (DatasetsError, pyarrow.ArrowException, OSError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read by datasets: {first_line(error)}; `subset` and `split` of this source choose a part"
        ) from error


READERS = {".jsonl": read_jsonl, ".json": read_json, ".parquet": read_parquet}
"""By the ending of a file's name."""


def choose_split(path: Path, wanted: str | None, known: list[str], usual: str) -> str:
    """Return the split to read: the one that is wanted, else the only one, else the usual one.

    Raises:
        UserError: There is none of this name, or several and none was named.
    """
    if wanted is None and len(known) == 1:
        return known[0]
    chosen = wanted or usual
    if chosen not in known:
        raise UserError(
            f"{path} has no split {chosen!r}. {suggest(chosen, known)} Set `split` of this source to one of {', '.join(known)}."
        )
    return chosen


def _check_json(path: Path, number: int, record: Mapping[str, Any]) -> None:
    """Raise UserError for bytes, dates, NaN and whatever else could not travel or be written as JSON."""
    for name, value in record.items():
        try:
            text = json.dumps(value, allow_nan=False)
            if text.count("[") + text.count("{") > MOST_LEVELS:
                check_levels(value)
            if len(text) > LINE_BYTES:
                raise UserError(
                    f"{place(path, number)}: column {name!r} has {len(text)} bytes, and at most {LINE_BYTES} are read"
                )
        except RecursionError:
            fault = f"is nested more than {MOST_LEVELS} levels deep"
            raise UserError(f"{place(path, number)}: column {name!r} {fault}") from None
        except TypeError:
            fault = "holds a value that JSON has no form for (such as bytes or a date); remove the column or store it as text"
            raise UserError(f"{place(path, number)}: column {name!r} {fault}") from None
        except ValueError as error:
            deep = f"is not read: {error}"
            fault = (
                deep
                if "nested" in str(error)
                else "holds a number that is not finite, which JSON has no form for; write null"
            )
            raise UserError(f"{place(path, number)}: column {name!r} {fault}") from None


def place(path: Path, line: int) -> str:
    """Return where an example stands, for messages."""
    return f"{path}, {'line' if path.suffix == '.jsonl' else 'row'} {line}"


def kind_of(value: Any) -> str:
    """Return what a JSON value is, in words."""
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
