"""Names that are unique, and the order in which one process would run the stages."""

import heapq
from collections import Counter
from collections.abc import Sequence
from graphlib import CycleError, TopologicalSorter

from braidrl.errors import UserError, suggest
from braidrl.flow.stage import Kind, Stage


def unique_names(stages: Sequence[Stage]) -> list[Stage]:
    """Number the second and later stages of one default name: `critic.update`, `critic.update_2`.

    Raises UserError when two stages are given the same name.
    """
    seen: Counter[str] = Counter()
    named = []
    for stage in stages:
        seen[stage.name] += 1
        numbered = seen[stage.name] > 1 and stage.name == stage.default_name
        named.append(stage.renamed(f"{stage.name}_{seen[stage.name]}") if numbered else stage)
    for name, count in Counter(stage.name for stage in named).items():
        if count > 1:
            raise UserError(f"{count} stages are called {name!r}; give each its own `id`")
    return named


def serial_order(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages in list order, moved only as far as `after` asks. Raises UserError for an unknown name or a cycle."""
    position = {stage.name: i for i, stage in enumerate(stages)}
    sorter = TopologicalSorter({stage.name: stage.after for stage in stages})
    for stage in stages:
        for name in stage.after:
            if name not in position:
                raise UserError(f"stage {stage.name}: after: no stage is called {name!r}. {suggest(name, position)}")
    try:
        sorter.prepare()
    except CycleError as error:
        stuck = sorted(set(error.args[1]), key=position.__getitem__)
        raise UserError(
            f"`after` makes a cycle of the stages {', '.join(stuck)}; remove one of the `after` entries"
        ) from None
    ready, order = [position[name] for name in sorter.get_ready()], list[Stage]()
    heapq.heapify(ready)
    while ready:
        # Always the earliest listed of those that may come next.
        order.append(stages[heapq.heappop(ready)])
        sorter.done(order[-1].name)
        for name in sorter.get_ready():
            heapq.heappush(ready, position[name])
    return tuple(order)


def check_selects(stages: Sequence[Stage]) -> None:
    """Raise UserError for a train stage before a `select`, whose rows could still be dropped, and for a stateful one.

    Stages up to a `select`, or a `generate`, run once for each wave, and a state changes once per iteration.
    """
    trained = stateful = None
    for stage in stages:
        if stage.kind is Kind.TRAIN:
            trained = stage.name
        if stage.state:
            stateful = stage.name
        if stage.kind in (Kind.SELECT, Kind.GENERATE) and stateful:
            raise UserError(
                f"{stateful} has a state, which changes once per iteration, and stages before {stage.name} run in waves; "
                f"move {stage.name} before {stateful}"
            )
        if stage.kind is Kind.SELECT and trained:
            raise UserError(
                f"{stage.name} comes after {trained}, but rows must be selected before any stage trains on them; "
                f"move {stage.name} before {trained}"
            )
