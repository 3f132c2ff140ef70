"""Rows of a recording: written and read bit for bit.

index column    a plain parquet column
Ragged          a list column
Objects         a column of JSON text

The exact types are kept in the file's metadata, so a replay trains on exactly the numbers of the run.
"""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.codec import DTYPES as CODEC_DTYPES
from braidrl.data.identity import FinishReason
from braidrl.data.packing import equal_share
from braidrl.data.rows import Column, Objects, Rows
from braidrl.errors import UserError
from braidrl.observe.metrics import whole_file
from braidrl.observe.rollouts import (
    PROMPT_TEXT,
    RESPONSE_TEXT,
    ROW_GROUP,
    SCHEMA_KEY,
    WRITING,
    check_recording,
    parts_of,
)

TOKEN_IDS, FINITE = ("tokens", "prompt"), ("score", "correct", "reward")
"""Columns of token ids, and index columns that must be finite."""
COUNTED = {
    "action_mask": "tokens",
    "length": "tokens",
    "sequence_lengths": "tokens",
    "prompt_length": "prompt",
    "action_tokens": "actions",
    "rollout_log_probs": "actions",
    "rollout_versions": "actions",
}
"""What the numbers of a column count, or of what it has one entry each."""
LEAST = {"sequence_lengths": 0, "version": 0, "rollout_versions": 0, "finish_reason": 0}
MOST = {"finish_reason": max(FinishReason), "rollout_log_probs": 1e-3}
"""The smallest and the largest possible numbers of columns; rounding may lift a log-prob a little above 0."""
DTYPES = CODEC_DTYPES | {"uint16": torch.uint16, "uint32": torch.uint32, "uint64": torch.uint64}


def write_rollouts(path: Path, rows: Rows, prompt_texts: Sequence[str], response_texts: Sequence[str]) -> None:
    """Write all columns and the texts of each row atomically. Raises ValueError for values that cannot be recorded."""
    described, arrays = dict[str, Any](), dict[str, Any]()
    for name, column in rows.items():
        if isinstance(column, Objects):
            described[name] = {"kind": "objects"}
            arrays[name] = pa.array([json.dumps(value) for value in column.values], pa.large_string())
            continue
        kind, values = ("ragged", column.values) if isinstance(column, Ragged) else ("index", column)
        dtype = str(values.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"column {name} is of type {values.dtype}, which cannot be recorded")
        described[name] = {"kind": kind, "dtype": dtype, "shape": list(values.shape[1:])}
        numbers = values.detach().cpu().contiguous().flatten()
        if numbers.dtype == torch.bfloat16:
            # Parquet has no bfloat16: its bits move into a float32, so NaN survives.
            numbers = (numbers.view(torch.int16).to(torch.int32) << 16).view(torch.float32)
        arrays[name], width = pa.array(numbers.numpy()), values[0].numel() if len(values) else 1
        if isinstance(column, Ragged) or values.dim() > 1:
            starts = column.offsets.cpu().numpy() if isinstance(column, Ragged) else np.arange(len(values) + 1)
            arrays[name] = pa.LargeListArray.from_arrays(pa.array(starts * width), arrays[name])
    for name, texts in ((PROMPT_TEXT, prompt_texts), (RESPONSE_TEXT, response_texts)):
        if len(texts) != len(rows):
            raise ValueError(f"{len(texts)} {name} for {len(rows)} rows")
        if name in rows:
            raise ValueError(f"a column may not be called {name}: the text is written under this name")
        # UTF-8 cannot encode halves of surrogate pairs, so they are removed; the tokens stay exact.
        printable = (text.encode("utf-8", "replace").decode() for text in texts)
        arrays[name] = pa.array(printable, pa.large_string())
    table = pa.table(arrays).replace_schema_metadata({SCHEMA_KEY: json.dumps(described).encode()})
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        # Several ranks recorded this step before a single one resumed the run.
        shutil.rmtree(path)
    with whole_file(path) as unfinished:
        pq.write_table(table, unfinished, row_group_size=ROW_GROUP, **WRITING)


def read_rollouts(path: Path, rank: int = 0, size: int = 1) -> Rows:
    """Read recorded rows bit for bit, sorted, or one of `size` ranks' share. Raises UserError for other files."""
    check_recording(path)
    files = parts_of(path)
    counts = [pq.read_metadata(file).num_rows for file in files]
    share, first = equal_share(sum(counts), rank, size), 0
    schema = pq.read_schema(files[0])
    described: dict[str, Any] = json.loads(schema.metadata[SCHEMA_KEY])
    names = list(described)
    # Without rows the columns keep their types. Only files with rows of the share are read.
    tables = [schema.empty_table().select(names)]
    for file, count in zip(files, counts, strict=True):
        start, stop = max(share.start, first) - first, min(share.stop, first + count) - first
        if start < stop:
            tables.append(pq.read_table(file, columns=names).select(names).slice(start, stop - start))
        first += count
    table, columns = pa.concat_tables(tables), dict[str, Column]()
    for name, about in described.items():
        array = table.column(name).combine_chunks()
        if about["kind"] == "objects":
            columns[name] = Objects(tuple(json.loads(text) for text in array.to_pylist()))
            continue
        is_list = pa.types.is_list(array.type) or pa.types.is_large_list(array.type)
        # A copy, because parquet's buffers are read-only.
        values = torch.from_numpy(np.array((array.flatten() if is_list else array).to_numpy(zero_copy_only=False)))
        if DTYPES[about["dtype"]] == torch.bfloat16:
            values = (values.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)
        columns[name] = values = values.reshape(-1, *about["shape"])
        if about["kind"] == "ragged":
            lengths = array.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64)
            width = int(np.prod(about["shape"], dtype=np.int64))
            columns[name] = Ragged.from_lengths(values, torch.from_numpy(lengths // width))
    rows = Rows(columns)
    # The rows of several ranks, in one file or more, are in the order of ranks.
    return rows.ordered() if size == 1 and "group" in rows else rows


def check_rows(path: Path, rows: Rows, vocabulary: int) -> None:
    """Raise UserError for an invalid recording: inconsistent lengths, ids that are not the model's tokens, or numbers
    that are not finite.
    """
    for name, column in rows.items():
        if isinstance(column, Objects):
            continue
        values = column.values if isinstance(column, Ragged) else column
        trained = isinstance(column, Ragged) or name.rpartition(".")[2] in FINITE
        if values.is_floating_point() and trained and not bool(values.isfinite().all()):
            raise UserError(f"{path}: column {name} has numbers that are not finite; record the step again")
        ids = name.rpartition(".")[2] in TOKEN_IDS
        if ids and len(values) and not 0 <= int(values.min()) <= int(values.max()) < vocabulary:
            raise UserError(f"{path}: column {name} has ids beyond the model's {vocabulary} tokens; record it again")
        least, most = (limits.get(name.rpartition(".")[2]) for limits in (LEAST, MOST))
        too_small = least is not None and len(values) and float(values.min()) < least
        if too_small or (most is not None and len(values) and float(values.max()) > most):
            raise UserError(f"{path}: column {name} has numbers that no run records; record the step again")
    for prefix in {name.removesuffix("tokens") for name in rows if name.rpartition(".")[2] == "tokens"}:
        counts = {what: rows[prefix + what].lengths for what in TOKEN_IDS if prefix + what in rows}
        if prefix + "action_mask" in rows:
            mask = rows[prefix + "action_mask"]
            counts["actions"] = sums_of_rows(mask)
        for name, what in COUNTED.items():
            if prefix + name in rows and what in counts:
                column = rows[prefix + name]
                per_row = column if isinstance(column, Tensor) else column.lengths
                per_row = sums_of_rows(column) if name == "sequence_lengths" else per_row
                if not torch.equal(per_row.long(), counts[what]):
                    raise UserError(
                        f"{path}: column {prefix + name} does not fit the number of {what} of its rows; record it again"
                    )


def sums_of_rows(column: Ragged) -> Tensor:
    """Return the sum of each row's values, (B,) int64."""
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), column.values.long().cumsum(0)])[column.offsets]
    return ends.diff()
