"""What a runtime wants to know of a flow before it starts: one serial chain, and what may run at the same time."""

from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import Flow, touched_weights
from braidrl.flow.stage import Stage


def serial_chain(flow: Flow) -> tuple[Stage, ...]:
    """Return a deterministic topological order: of the stages that may come next, the first in list order that needs no other model.

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
    """Return, for each stage, those that must have run before it when a column's next version takes the place of the last."""
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
    """Return the stages by depth: those of one group need nothing of each other and may run at the same time."""
    deepest = max(flow.depth.values())
    return tuple(tuple(s for s in flow.stages if flow.depth[s.name] == d) for d in range(1, deepest + 1))
