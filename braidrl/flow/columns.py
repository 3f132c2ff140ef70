"""Column versions that each stage reads, and the serial order of the stages.

A column version is identified by (name, writer). A stage that reads and writes the same name creates its next version,
and later stages read the latest in serial order. A version never changes, so a writer need not wait for readers of
earlier versions.

    reward.verify ──reward──▶ shape.overlong_penalty ──reward──▶ advantage.group_normalized
"""

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from braidrl.errors import UserError, suggest
from braidrl.flow.stage import Stage, default_name

ADMISSION = "admission"
ADMITTED = ("source", "group", "sample", "prompt", "prompt_length", "metadata")
# Columns that admission writes where the data files have the field.
ADMITTED_IF_GIVEN = ("response", "response_mask", "ptx_tokens", "images", "image_tokens")


@dataclass(frozen=True)
class ColumnVersion:
    """One version of a column: its name and the stage that wrote it."""

    name: str
    writer: str


Inputs = dict[str, tuple[ColumnVersion, ...]]


def serial_order(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the stages in list order, except for moves that `after` requires, with unique names.

    The second and later stages with the same default name are numbered: `critic.update`, `critic.update_2`. Raises
    UserError for two stages with the same `id`, an unknown name in `after`, or a cycle.
    """
    counts: Counter[str] = Counter()
    named = list[Stage]()
    for stage in stages:
        counts[stage.name] += 1
        numbered = counts[stage.name] > 1 and stage.name == default_name(stage.type, stage.role, stage.params)
        named.append(replace(stage, name=f"{stage.name}_{counts[stage.name]}") if numbered else stage)
    for name, count in Counter(stage.name for stage in named).items():
        if count > 1:
            raise UserError(f"{count} stages are called {name!r}; give each its own `id`")
    position = {stage.name: i for i, stage in enumerate(named)}
    for stage in named:
        for name in stage.after:
            if name not in position:
                raise UserError(f"stage {stage.name}: after: no stage is called {name!r}. {suggest(name, position)}")
    sorter = TopologicalSorter({stage.name: stage.after for stage in named})
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
        # Of the ready stages, take the first in list order.
        order.append(named[heapq.heappop(ready)])
        sorter.done(order[-1].name)
        for name in sorter.get_ready():
            heapq.heappush(ready, position[name])
    return tuple(order)


def resolve_columns(stages: Sequence[Stage]) -> Inputs:
    """Return the column versions that each stage reads, by stage name.

    Raises UserError for a missing column or two writers of one.
    """
    latest = dict.fromkeys((*ADMITTED, *ADMITTED_IF_GIVEN), ADMISSION)
    inputs: Inputs = {}
    for position, stage in enumerate(stages):
        names = read_names(stage, latest, stages[position + 1 :])
        inputs[stage.name] = tuple(ColumnVersion(name, latest[name]) for name in names)
        for name in stage.writes:
            if name in latest and name not in names:
                raise UserError(
                    f"column {name!r} is written by {latest[name]} and by {stage.name}, of which neither reads it; "
                    "give one of them a namespace with `into`, or remove it"
                )
            latest[name] = stage.name
    by_name = {stage.name: stage for stage in stages}
    for stage in stages:
        for column in inputs[stage.name]:
            # In an iteration that skips a later version, the version before it is read.
            writers = [column.writer]
            while writers[-1] != ADMISSION:
                before = next((c.writer for c in inputs[writers[-1]] if c.name == column.name), None)
                if before is None:
                    break
                writers.append(before)
            sure = column.name in stage.optional or ADMISSION in writers
            if not sure and not any(by_name[writer].when.covers(stage.when) for writer in writers):
                raise UserError(
                    f"stage {stage.name} runs {stage.when} and reads {column.name!r}, but {writers[-1]}, which writes "
                    f"it, runs {by_name[writers[-1]].when}; give {stage.name} the same `when`"
                )
    return inputs


def read_names(stage: Stage, latest: Mapping[str, str], later: Sequence[Stage]) -> list[str]:
    """Return the columns that a stage reads, given those written before it.

    Raises UserError for one that is missing or written later.
    """
    names = [*stage.reads, *(name for name in stage.optional if name in latest)]
    for choices in [*((name,) for name in stage.reads), *stage.one_of]:
        written = next((name for name in choices if name in latest), None)
        if written is not None:
            names.append(written)
            continue
        reads = f"stage {stage.name} reads {' or '.join(map(repr, choices))}, which"
        writer = next((stage_after.name for stage_after in later if set(choices) & set(stage_after.writes)), None)
        if writer:
            raise UserError(f"{reads} {writer} writes later; move {writer} before {stage.name}")
        readable = {*latest, *(name for stage_after in later for name in stage_after.writes)} - set(ADMITTED_IF_GIVEN)
        raise UserError(f"{reads} no earlier stage writes. {suggest(choices[-1], readable)}")
    return list(dict.fromkeys(names))
