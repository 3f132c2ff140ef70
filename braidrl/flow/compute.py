"""Runs compute and select stages: the registered function on columns, and the small state that a stage may own.

stage ──with_state──▶ runs on rows ──▶ columns
  ▲                        └── sums ──reduced──▶ next_state ──┐
  └─────────────────── the next iteration ◀──────────────────┘

A state is a KL coefficient or a multiplier. It changes once per iteration, from sums over the whole batch.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from braidrl.data.rows import Column, Rows
from braidrl.flow import Flow, Scope, Stage
from braidrl.flow.lookup import compute_entry

State = dict[str, float]


def computed(stage: Stage, rows: Rows, totals: Mapping[str, Tensor] | None = None) -> dict[str, Column]:
    """Return the columns that a compute stage writes.

    Args:
        stage: A compute stage.
        rows: Any rows, or of scope group those of complete groups.
        totals: Of scope batch what `summed` gives over all rows.

    Raises:
        ValueError: The function returns another number of columns than it declares.
    """
    result = compute_entry(stage.type).function(*arguments(stage, rows), **keywords(stage, totals))
    columns, writes = result if isinstance(result, tuple) else (result,), stage.writes
    if len(columns) != len(writes):
        raise ValueError(f"{len(writes)} columns are declared ({', '.join(writes)}) but {len(columns)} were returned")
    return dict(zip(writes, columns, strict=True))


def summed(stage: Stage, rows: Rows) -> dict[str, Tensor]:
    """Return what a stage adds up over all rows."""
    entry = compute_entry(stage.type)
    assert entry.sums is not None
    totals: dict[str, Tensor] = entry.sums(*arguments(stage, rows), **stage.settings)
    return totals


def dropped(stage: Stage, index: Rows) -> dict[int, str]:
    """Return the groups that a select stage drops, with its reason."""
    reasons: dict[int, str] = compute_entry(stage.type).function(*arguments(stage, index), **stage.params)
    return reasons


def arguments(stage: Stage, rows: Rows) -> Sequence[Column | None]:
    """Return the columns that a registered function asks for, in its order."""
    entry = compute_entry(stage.type)
    required = [rows[entry.column(parameter)] for parameter in entry.reads]
    return required + [rows.get(entry.column(parameter)) for parameter in entry.optional]


def keywords(stage: Stage, totals: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """Return what a compute stage's function is given after columns: settings, its state, and totals where its scope is the batch."""
    given = dict(stage.settings)
    if stage.state:
        given["state"] = {name: float(stage.params.get(name, value)) for name, value in stage.state.items()}
    if stage.scope is Scope.BATCH:
        given["totals"] = dict(totals or {})
    return given


def of_namespace(rows: Rows, namespace: str | None) -> Rows:
    """Return the rows with a namespace's columns under their plain names: the second response in place of the first."""
    if namespace is None:
        return rows
    prefix = f"{namespace}."
    return rows.with_columns({n.removeprefix(prefix): column for n, column in rows.items() if n.startswith(prefix)})


def initial_states(flow: Flow) -> dict[str, State]:
    """Return every stateful stage's values before the first iteration, by its name."""
    return {stage.name: dict(stage.state) for stage in flow.stages if stage.state}


def with_state(stage: Stage, state: Mapping[str, float]) -> Stage:
    """Return the stage as it is to run now: a parameter of the state's name says its value, as it says the first one in a flow."""
    return replace(stage, params={**stage.params, **state})


def next_state(stage: Stage, state: Mapping[str, float], totals: Mapping[str, float]) -> State:
    """Return the values for the next iteration, from sums over all rows of this one."""
    update = compute_entry(stage.type).update_state
    assert update is not None, f"{stage.name} has no state"
    return update(dict(state), dict(totals), **stage.settings)
