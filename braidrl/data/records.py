"""Reading of records from a file, a folder or a fetched data set. No other module parses data files.

.jsonl, .json            parsed here, so that errors have a line number, and values stay as written
.parquet, folder, hub    read by `datasets` as a stream of Arrow batches; it finds a folder's subsets and splits
record ──as_json──▶ the same with JSON values alone: dates and decimals as text, bytes left out
"""

import codecs
import dataclasses
import datetime
import decimal
import glob
import math
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

from braidrl.config import SourceConfig
from braidrl.data.lines import LINE_BYTES
from braidrl.errors import UserError, first_line, suggest
from braidrl.parsing import check_levels, parse_fault, parse_json

Record = dict[str, Any]
BATCH = 1024
"""Rows of a parquet file in memory at a time."""
NO_FORM = object()
"""Marker for a value without a JSON form."""
FILE_BYTES = 4 << 30
"""Maximum size of a .json file, which is read whole."""


def read_objects(path: Path, may_be_list: bool = True) -> Iterator[tuple[int, Record]]:
    """Yield the JSON object of each line of a file, or each item if the file is a list, with its number from 1.

    Empty lines are skipped but counted. Raises UserError, with the location, for anything else, and for objects too
    long or too deep.
    """
    with path.open("rb") as file:
        is_list = may_be_list and file.read(64).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"[")
        file.seek(0)
        records: Iterable[tuple[int, Any]]
        if is_list:
            records = enumerate(parsed(str(path), file.read(), FILE_BYTES), start=1)
        else:
            hint = "; a .json file is a list of objects, or has one object per line" if path.suffix == ".json" else ""
            records = ((n, parsed(place(path, n), text, LINE_BYTES, hint)) for n, text in written_lines(file))
        for number, record in records:
            yield number, object_of(path, number, record)


def written_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """Yield the non-empty lines of an open file, with their numbers from 1."""
    # A line is read only up to the limit.
    lines = iter(lambda: file.readline(LINE_BYTES + 1), b"")
    texts = enumerate(chain([next(lines, b"").removeprefix(codecs.BOM_UTF8)], lines), start=1)
    written = ((n, text if len(text) > LINE_BYTES else text.rstrip()) for n, text in texts)
    return ((n, text) for n, text in written if text)


def object_of(path: Path, number: int, value: Any) -> Record:
    """Return the object of a line. Raises UserError for other values."""
    if not isinstance(value, dict):
        where = place(path, number)
        raise UserError(f'{where} holds {kind_of(value)}; write a JSON object, as in {{"prompt": "1+1="}}')
    return value


def parsed(where: str, raw: bytes, most_bytes: int, hint: str = "") -> Any:
    """Return the JSON value. Raises UserError, with location and hint, for other text, or too long or deep."""
    try:
        return parse_json(raw, most_bytes, refuse_surrogates=False)  # `as_json` makes characters whole
    except ValueError as error:
        raise UserError(f"{where} is {parse_fault('JSON', error)}{hint}") from None


def read_arrow(source: SourceConfig, usual_split: str) -> Iterator[tuple[int, Record]]:
    """Yield the rows of a parquet file, or of one split of a folder, with the parts that `datasets` finds."""
    # Imported here: it takes a second, and JSON files do not need it.
    import datasets
    import pyarrow
    from datasets.exceptions import DatasetsError

    path = source.path
    try:
        with quiet():
            if path.is_dir():
                saved = saved_splits(path)
                files = {} if saved else datasets.load_dataset_builder(str(path), source.subset).config.data_files or {}
                splits = list(map(str, saved or files))
                split = source.split or (splits[0] if len(splits) == 1 else usual_split)
                if split not in splits:
                    remedy = f"{suggest(split, splits)} Set `split` of this source to one of {', '.join(splits)}."
                    raise UserError(f"{path} has no split {split!r}. {remedy}")
                lines = [Path(file) for file in files.get(split, ())]
                if lines and all(file.suffix in (".jsonl", ".json") for file in lines):
                    yield from enumerate((record for file in lines for _, record in read_objects(file)), start=1)
                    return
                if saved:
                    rows = saved[split].to_iterable_dataset()
                else:
                    rows = datasets.load_dataset(str(path), source.subset, split=split, streaming=True)
            else:
                file = glob.escape(str(path))
                rows = datasets.load_dataset(
                    "parquet", data_files=file, split="train", streaming=True, batch_size=BATCH
                )
            for number, record in enumerate(rows.cast(with_bytes(rows.features)) if rows.features else rows, start=1):
                for name, value in record.items():
                    column = f"{place(path, number)}: column {name!r}"
                    if isinstance(value, str | bytes) and len(value) > LINE_BYTES:
                        raise UserError(f"{column} has {len(value)} bytes, and at most {LINE_BYTES} are read")
                    if isinstance(value, dict | list):
                        try:
                            check_levels(value)
                        except ValueError as error:
                            raise UserError(f"{column} is not read: {error}") from None
                yield number, record
    except (DatasetsError, pyarrow.ArrowException, OSError, ValueError, TypeError, KeyError, RuntimeError) as error:
        # `datasets` wraps the original error.
        cause = error.__cause__ if isinstance(error, DatasetsError) and error.__cause__ else error
        if path.is_dir():
            raise UserError(
                f"{path} cannot be read by datasets: {first_line(cause)}; `subset` and `split` of this source choose "
                "a part"
            ) from error
        raise UserError(f"{path} is not a readable parquet file: {' '.join(str(cause).split())}") from None


def saved_splits(path: Path) -> Mapping[str, Any]:
    """Return the splits of a folder that `save_to_disk` of `datasets` wrote; none of another folder."""
    import datasets

    if not any((path / name).is_file() for name in ("state.json", "dataset_dict.json")):
        return {}
    saved = datasets.load_from_disk(str(path))
    return saved if isinstance(saved, Mapping) else {"train": saved}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence progress bars and error logs of `datasets`: Braid reports errors."""
    import datasets

    hidden, level = datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        if not hidden:
            datasets.enable_progress_bars()


def with_bytes(feature: Any) -> Any:
    """Return features of a data set with images and sounds as undecoded bytes, for conversions."""
    import datasets

    if isinstance(feature, Mapping):
        return datasets.Features({name: with_bytes(part) for name, part in feature.items()})
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=with_bytes(feature.feature))
    media = hasattr(feature, "decode") and type(feature).__name__ != "Json"
    return dataclasses.replace(feature, decode=False) if media else feature


def as_json(value: Any) -> Any:
    """Return a value in JSON form, or NO_FORM for a value without one, such as bytes.

    Dates, times and decimals become text, non-finite numbers null, arrays lists, lone surrogates U+FFFD. A nested value
    without a form is omitted from its object, and is null in its list.
    """
    match value:
        case None | bool() | int():
            return value
        case str():
            return whole_text(value)
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            pairs = ((whole_text(str(name)), as_json(part)) for name, part in value.items())
            return {name: part for name, part in pairs if part is not NO_FORM}
        case list() | tuple() | set() | frozenset():
            return [None if part is NO_FORM else part for part in map(as_json, value)]
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta() | decimal.Decimal() | uuid.UUID() | Path():
            return str(value)
    return as_json(value.tolist()) if hasattr(value, "tolist") else NO_FORM


def whole_text(text: str) -> str:
    """Return text that UTF-8 can encode: a surrogate pair becomes its character, a lone surrogate U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def place(path: Path, line: int) -> str:
    """Return the location of an example, for messages."""
    return f"{named(path)} {line}"


@lru_cache(maxsize=64)
def named(path: Path) -> str:
    """Return a file and a description of its records, for messages; fast enough for every record."""
    return f"{path}, {'line' if path.suffix == '.jsonl' else 'row'}"


def kind_of(value: Any) -> str:
    """Return the type of a JSON value in words."""
    kinds: dict[type, str] = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return kinds.get(type(value), "a number")
