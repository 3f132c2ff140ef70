"""Calls the registered functions of compute and select stages: columns by name in, columns by name out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from braidrl.data.rows import Column, Rows
from braidrl.flow import Stage
from braidrl.flow.stage_state import keywords
from braidrl.flow.stages import compute_entry


def computed(stage: Stage, rows: Rows, totals: Mapping[str, Tensor] | None = None) -> dict[str, Column]:
    """The columns that a compute stage writes; one of scope batch is given the `totals` of `summed` over all rows."""
    entry = compute_entry(stage.type)
    return named(entry.function(*arguments(stage, rows), **keywords(stage, totals)), stage.writes)


def summed(stage: Stage, rows: Rows) -> dict[str, Tensor]:
    """What a stage adds up over all rows."""
    entry = compute_entry(stage.type)
    assert entry.sums is not None
    totals: dict[str, Tensor] = entry.sums(*arguments(stage, rows), **stage.settings)
    return totals


def dropped(stage: Stage, index: Rows) -> dict[int, str]:
    """The groups that a select stage drops, with its reason."""
    reasons: dict[int, str] = compute_entry(stage.type).function(*arguments(stage, index), **stage.params)
    return reasons


def arguments(stage: Stage, rows: Rows) -> list[Any]:
    """The columns that a registered function asks for, in its order."""
    entry = compute_entry(stage.type)
    required = [rows[entry.column(parameter)] for parameter in entry.reads]
    return required + [rows.get(entry.column(parameter)) for parameter in entry.optional]


def named(result: Any, writes: Sequence[str]) -> dict[str, Column]:
    """A function's result under the names of the columns that it writes. Raises ValueError when their numbers differ."""
    columns = result if isinstance(result, tuple) else (result,)
    if len(columns) != len(writes):
        raise ValueError(f"{len(writes)} columns are declared ({', '.join(writes)}) but {len(columns)} were returned")
    return dict(zip(writes, columns, strict=True))
