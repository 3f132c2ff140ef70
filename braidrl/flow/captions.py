"""Short texts about stages and columns that both drawings use."""

from __future__ import annotations

from braidrl.flow.columns import ColumnVersion
from braidrl.flow.flow import Flow
from braidrl.flow.stage import ALWAYS, Scope, Stage

SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")
SCOPES = {Scope.GROUP: "whole groups", Scope.BATCH: "sums over the batch"}


def heading(flow: Flow) -> str:
    """How many stages, and which models."""
    models = [f"{role} (trained)" if role in flow.trained_roles else role for role in flow.roles]
    return f"{len(flow.stages)} stages; models: {', '.join(models) or 'none'}"


def about(stage: Stage) -> str:
    """Kind and role of a stage, and what is out of the ordinary: scope, state, when."""
    parts = [stage.kind.value]
    if stage.role:
        parts.append(stage.role)
    if stage.scope in SCOPES:
        parts.append(SCOPES[stage.scope])
    if stage.state:
        parts.append(f"keeps {', '.join(stage.state)}")
    if stage.when != ALWAYS:
        parts.append(str(stage.when))
    return " · ".join(parts)


def versioned(column: ColumnVersion, versions: dict[ColumnVersion, int]) -> str:
    """`reward²` is the second version of a column that has several."""
    number = versions.get(column)
    return column.name if number is None else column.name + str(number).translate(SUPERSCRIPTS)
