"""What a stage of a flow waits for: of each row the stages that write its columns, of a whole batch those that use the same weights."""

from typing import NamedTuple

from braidrl.flow.flow import ADMISSION, Flow
from braidrl.flow.stage import Kind

Uid = tuple[int, int, int]


class Consumer(NamedTuple):
    """Who takes rows: a stage, in one of its epochs (always 0 but for training)."""

    stage: str
    epoch: int = 0


def waits_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """Return for each stage the stages that must have written a row before it: writers of its columns, `after`, and earlier selects."""
    waits: dict[str, tuple[str, ...]] = {}
    selects: list[str] = []
    for stage in flow.stages:
        writers = [column.writer for column in flow.inputs[stage.name]]
        waits[stage.name] = tuple(dict.fromkeys([ADMISSION, *writers, *stage.after, *selects]))
        if stage.kind is Kind.SELECT:
            selects.append(stage.name)
    return waits


def weights_wait_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """Return for each stage that infers or trains the stages that must be done with the whole batch before it uses or changes weights.

    They are those before it in the list with which it shares a role's weights that one of the two changes. For a train stage it is
    the first optimizer step that waits; accumulating gradients does not. Generation is left out: an engine has its own weights,
    and a runtime in which it shares the trainer's takes turns anyway.
    """
    users = {stage.name for stage in flow.stages if stage.kind in (Kind.INFER, Kind.TRAIN)}
    edges = [edge for edge in flow.edges if edge.weights is not None and edge.source in users]
    return {name: tuple(dict.fromkeys(e.source for e in edges if e.target == name)) for name in sorted(users)}
