"""Dependencies of a stage, per row (writers of its columns) and per batch (users of the same weights).

A runtime derives from them one serial chain, or groups of stages that may run at the same time.
"""

from braidrl.data.rows import Uid as Uid
from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import Flow, touched_weights
from braidrl.flow.stage import Kind, Stage


def waits_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """Return, for each stage, the stages that must process a row first: writers of its columns, `after`, and earlier selects."""
    waits: dict[str, tuple[str, ...]] = {}
    selects: list[str] = []
    for stage in flow.stages:
        writers = [column.writer for column in flow.inputs[stage.name]]
        waits[stage.name] = tuple(dict.fromkeys([ADMISSION, *writers, *stage.after, *selects]))
        if stage.kind is Kind.SELECT:
            selects.append(stage.name)
    return waits


def weights_wait_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """Return, for each infer and train stage, the stages that must finish the whole batch before it uses or changes weights.

    These are earlier stages that share a role's weights with it, if one of the two changes them. A train stage waits before its first
    optimizer step; gradient accumulation does not wait. Generation is excluded: an engine has its own weights, and a runtime in which
    it shares the trainer's runs the two in turn.
    """
    users = {stage.name for stage in flow.stages if stage.kind in (Kind.INFER, Kind.TRAIN)}
    edges = [edge for edge in flow.edges if edge.weights is not None and edge.source in users]
    return {name: tuple(dict.fromkeys(e.source for e in edges if e.target == name)) for name in sorted(users)}


def serial_chain(flow: Flow) -> tuple[Stage, ...]:
    """Return a deterministic topological order. Among ready stages it prefers those of the active model, then list order.

    The stages up to a `select` stay in front: they run in waves, the others once.
    """
    before = constraints(flow)
    segment = {stage.name for stage in flow.sampling_segment}
    waiting = list(flow.stages)
    chain: list[Stage] = []
    active: set[str] = set()
    while waiting:
        done = {stage.name for stage in chain}
        part = [stage for stage in waiting if stage.name in segment] or waiting
        ready = [stage for stage in part if before[stage.name] <= done]
        chosen = min(ready, key=lambda stage: (not set(touched_weights(stage)) <= active, flow.stages.index(stage)))
        active = set(touched_weights(chosen)) or active
        waiting.remove(chosen)
        chain.append(chosen)
    return tuple(chain)


def constraints(flow: Flow) -> dict[str, set[str]]:
    """Return, for each stage, those that must run before it if a column's next version overwrites the last."""
    before: dict[str, set[str]] = {stage.name: set() for stage in flow.stages}
    for edge in flow.edges:
        if edge.source != ADMISSION:
            before[edge.target].add(edge.source)
    for i, stage in enumerate(flow.stages):
        read = {column.name for column in flow.inputs[stage.name]}
        for later in flow.stages[i + 1 :]:
            if read & set(later.writes):
                before[later.name].add(stage.name)
    return before


def parallel_groups(flow: Flow) -> tuple[tuple[Stage, ...], ...]:
    """Return the stages by depth: stages of one group are independent and may run at the same time."""
    deepest = max(flow.depth.values())
    return tuple(tuple(s for s in flow.stages if flow.depth[s.name] == d) for d in range(1, deepest + 1))
