"""Names that are unique, and the order in which one process would run the stages."""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence

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
    for stage in stages:
        for name in stage.after:
            if name not in position:
                raise UserError(f"stage {stage.name}: after: no stage is called {name!r}. {suggest(name, position)}")
    order = first_ready([stage.name for stage in stages], {stage.name: set(stage.after) for stage in stages})
    if len(order) < len(stages):
        stuck = [stage.name for stage in stages if stage.name not in order]
        raise UserError(f"`after` makes a cycle of the stages {', '.join(stuck)}; remove one of the `after` entries")
    return tuple(stages[position[name]] for name in order)


def first_ready(names: Sequence[str], before: Mapping[str, set[str]]) -> list[str]:
    """Return the names such that each follows all that are `before` it, always the earliest listed one of those that may come next.

    Names on a cycle, or behind one, are left out.
    """
    waiting = {name: set(before[name]) for name in names}
    position = {name: i for i, name in enumerate(names)}
    ready = [i for i, name in enumerate(names) if not waiting[name]]
    order: list[str] = []
    while ready:
        chosen = names[heapq.heappop(ready)]
        order.append(chosen)
        for name, still in waiting.items():
            if chosen in still:
                still.discard(chosen)
                if not still:
                    heapq.heappush(ready, position[name])
    return order


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
