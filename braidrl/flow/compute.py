"""Execution of compute and select stages: calls of registered functions on columns, and the small state that a stage may own.

stage with its state ──▶ runs on rows ──▶ columns
  ▲                        └── sums ──reduced──▶ next_state ──┐
  └─────────────────── the next iteration ◀──────────────────┘

A state is a KL coefficient or a multiplier. It changes once per iteration, from sums over the whole batch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from braidrl.data.rows import Column, Rows
from braidrl.flow import Scope, Stage
from braidrl.flow.signatures import compute_entry

State = dict[str, float]


def computed(stage: Stage, rows: Rows, totals: Mapping[str, Tensor] | None = None) -> dict[str, Column]:
    """Return the columns that a compute stage writes for any rows; for scope group, rows of complete groups.

    For scope batch, `totals` is the result of `summed` over all rows. Raises ValueError if the function returns another number of
    columns than it declares.
    """
    given = dict(stage.settings)
    if stage.state:
        given["state"] = {name: float(stage.params.get(name, value)) for name, value in stage.state.items()}
    if stage.scope is Scope.BATCH:
        given["totals"] = dict(totals or {})
    result = compute_entry(stage.type).function(*arguments(stage, rows), **given)
    columns, writes = result if isinstance(result, tuple) else (result,), stage.writes
    if len(columns) != len(writes):
        raise ValueError(f"{len(writes)} columns are declared ({', '.join(writes)}) but {len(columns)} were returned")
    return dict(zip(writes, columns, strict=True))


def summed(stage: Stage, rows: Rows) -> dict[str, Tensor]:
    """Return a stage's sums over some rows; the caller adds them up over all rows."""
    entry = compute_entry(stage.type)
    assert entry.sums is not None
    return entry.sums(*arguments(stage, rows), **named_settings(stage, entry.sums))


def named_settings(stage: Stage, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings of a stage that a function takes by keyword."""
    parameters = inspect.signature(function).parameters
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in stage.settings.items() if every or name in parameters}


def dropped(stage: Stage, index: Rows) -> dict[int, str]:
    """Return the groups that a select stage drops, with the reasons."""
    return compute_entry(stage.type).function(*arguments(stage, index), **stage.params)


def arguments(stage: Stage, rows: Rows) -> Sequence[Column | None]:
    """Return a registered function's positional arguments: required columns, then optional ones."""
    entry = compute_entry(stage.type)
    required = [rows[entry.column(parameter)] for parameter in entry.reads]
    return required + [rows.get(entry.column(parameter)) for parameter in entry.optional]


def of_namespace(rows: Rows, namespace: str | None) -> Rows:
    """Return the rows with a namespace's columns under plain names, so that they replace the first response."""
    if namespace is None:
        return rows
    prefix = f"{namespace}."
    return rows.with_columns({n.removeprefix(prefix): column for n, column in rows.items() if n.startswith(prefix)})


def next_state(stage: Stage, state: Mapping[str, float], totals: Mapping[str, float]) -> State:
    """Return the state for the next iteration, from sums over all rows of this one."""
    update = compute_entry(stage.type).update_state
    assert update is not None, f"{stage.name} has no state"
    return update(dict(state), dict(totals), **named_settings(stage, update))
