"""Execution of compute and select stages: calls of registered functions on columns, and the small state that a stage
may own.

stage with its state ──▶ runs on rows ──▶ columns
  ▲                        └── sums ──reduced──▶ next_state ──┐
  └─────────────────── the next iteration ◀──────────────────┘

A state is a KL coefficient or a multiplier. It changes once per iteration, from sums over the whole batch.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from braidrl.data.rows import Column, Rows
from braidrl.errors import UserError, users_errors
from braidrl.flow import Scope, Stage
from braidrl.flow.signatures import SHARED, called, compute_entry, form_of

State = dict[str, float]


def computed(stage: Stage, rows: Rows, totals: Mapping[str, Tensor] | None = None) -> dict[str, Column]:
    """Return the columns that a compute stage writes for any rows; for scope group, rows of complete groups.

    For scope batch, `totals` is the result of `summed` over all rows. Raises UserError as `called` and `checked`.
    """
    settings = dict(stage.settings)
    if stage.state:
        settings["state"] = {name: float(stage.params.get(name, value)) for name, value in stage.state.items()}
    if stage.scope is Scope.BATCH:
        settings["totals"] = dict(totals or {})
    result = called(compute_entry(stage.type), arguments(stage, rows), settings)
    columns, writes = result if isinstance(result, tuple) else (result,), stage.writes
    if len(columns) != len(writes):
        returned = "1 column" if len(columns) == 1 else f"{len(columns)} columns"
        raise UserError(f"{stage.name} returned {returned} and is registered with writes={list(writes)}")
    return checked(stage, dict(zip(writes, columns, strict=True)), len(rows))


def checked(stage: Stage, columns: Mapping[str, Column], size: int) -> dict[str, Column]:
    """Return the columns of a user's function or method.

    Raises UserError unless they are the columns that it declares, each with `size` rows.
    """
    if set(columns) != set(stage.writes):
        raise UserError(f"{stage.name} returned {sorted(columns)} and is registered with writes={stage.writes}")
    for name, column in columns.items():
        is_column = isinstance(column, Column) and (not isinstance(column, Tensor) or column.dim() == 1)
        if not is_column or len(column) != size:
            raise UserError(
                f"{stage.name} returned {form_of(column)} as {name!r} for {size} rows; return a tensor ({size},) or "
                "a Ragged"
            )
    return dict(columns)


def summed(stage: Stage, rows: Rows) -> dict[str, Tensor]:
    """Return a stage's sums over some rows; the caller adds them up over all rows."""
    entry = compute_entry(stage.type)
    assert entry.sums is not None
    return called(replace(entry, function=entry.sums), arguments(stage, rows), named_settings(stage, entry.sums))


def added(low: Mapping[str, Tensor], high: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Add the sums of two sets of rows; one side may have none."""
    return {name: low[name] + high[name] for name in low} if low and high else dict(low or high)


def named_settings(stage: Stage, function: Callable[..., Any]) -> dict[str, Any]:
    """Return the settings that a stage's function takes by keyword."""
    parameters = inspect.signature(function).parameters
    every = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: value for name, value in stage.settings.items() if every or name in parameters}


def dropped(stage: Stage, index: Rows) -> dict[int, str]:
    """Return the groups that a select stage drops, with the reasons.

    Raises UserError if its function returns something else.
    """
    result = called(compute_entry(stage.type), arguments(stage, index), stage.settings)
    if not isinstance(result, Mapping):
        raise UserError(
            f"{stage.name} returned {form_of(result)}; return a dict from a dropped group's number to the reason"
        )
    # Keys may be tensors of one number, as of `group.unique()`.
    reasons = {int(group): str(reason) for group, reason in result.items()}
    if unknown := set(reasons).difference(index["group"].tolist()):
        raise UserError(
            f"{stage.name} dropped {sorted(unknown)}, which are no numbers of groups; return numbers of the column "
            "`group`"
        )
    return reasons


def arguments(stage: Stage, rows: Rows) -> Sequence[Column | None]:
    """Return a registered function's positional arguments: required columns, then optional ones."""
    entry, rows = compute_entry(stage.type), of_namespace(rows, stage.params.get("of"))
    required = [rows[entry.column(parameter)] for parameter in entry.reads]
    return required + [rows.get(entry.column(parameter)) for parameter in entry.optional]


def of_namespace(rows: Rows, namespace: str | None) -> Rows:
    """Return the rows with a namespace's columns in place of those of the first response; columns shared by all
    trajectories stay.
    """
    if namespace is None:
        return rows
    named = {n.removeprefix(f"{namespace}."): column for n, column in rows.items() if n.startswith(f"{namespace}.")}
    return rows.with_columns({name: column for name, column in named.items() if name not in SHARED})


def next_state(stage: Stage, state: Mapping[str, float], totals: Mapping[str, float]) -> State:
    """Return the state for the next iteration, from sums over all rows of this one."""
    update = compute_entry(stage.type).update_state
    assert update is not None, f"{stage.name} has no state"
    with users_errors(stage.name, update):
        return update(dict(state), dict(totals), **named_settings(stage, update))
