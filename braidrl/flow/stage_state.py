"""The small state that a stage may own: a KL coefficient, a multiplier. It changes once per iteration, from sums over the whole batch.

stage ──with_state──▶ runs on rows ──▶ columns
  ▲                        └── sums ──reduced──▶ next_state ──┐
  └─────────────────── the next iteration ◀──────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from braidrl.flow import Flow, Scope, Stage
from braidrl.flow.stages import compute_entry

State = dict[str, float]


def initial_states(flow: Flow) -> dict[str, State]:
    """Every stateful stage's values before the first iteration, by its name."""
    return {stage.name: dict(stage.state) for stage in flow.stages if stage.state}


def with_state(stage: Stage, state: Mapping[str, float]) -> Stage:
    """The stage as it is to run now: a parameter of the state's name says its value, as it says the first one in a flow."""
    return replace(stage, params={**stage.params, **state})


def keywords(stage: Stage, totals: Mapping[str, Tensor] | None = None) -> dict[str, Any]:
    """What a compute stage's function is given beside columns: settings, its state, and totals where its scope is the batch."""
    given = dict(stage.settings)
    if stage.state:
        given["state"] = {name: float(stage.params.get(name, value)) for name, value in stage.state.items()}
    if stage.scope is Scope.BATCH:
        given["totals"] = dict(totals or {})
    return given


def next_state(stage: Stage, state: Mapping[str, float], totals: Mapping[str, float]) -> State:
    """The values for the next iteration, from sums over all rows of this one."""
    update = compute_entry(stage.type).update_state
    assert update is not None, f"{stage.name} has no state"
    return update(dict(state), dict(totals), **stage.settings)
