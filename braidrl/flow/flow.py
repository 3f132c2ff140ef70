"""A flow: an ordered list of stages, and what follows from it.

    admission ──prompt──▶ actor.generate ──tokens──▶ reward.verify ──reward──▶ advantage ──▶ actor.update
                               ▲                                                                  │
                               └──────────────────── weights of the actor ────────────────────────┘

A column is known by (name, writer): a stage that reads and writes one name makes its next version, and later stages read the
latest in serial order.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from braidrl.errors import UserError, suggest
from braidrl.flow.stage import Kind, Stage

ADMISSION = "admission"
ADMITTED = ("source", "group", "sample", "prompt", "prompt_length", "metadata")
# Columns that admission writes where the data files have the field.
ADMITTED_IF_GIVEN = ("response", "ptx_tokens")


@dataclass(frozen=True)
class ColumnVersion:
    """One version of a column: its name and the stage that wrote it."""

    name: str
    writer: str


@dataclass(frozen=True)
class Edge:
    """`target` needs these columns, or the weights of a role, from `source`."""

    source: str
    target: str
    columns: tuple[str, ...] = ()
    weights: str | None = None


class Flow:
    """Stages in the order in which one process would run them. Raises UserError when no such order exists."""

    def __init__(self, name: str, stages: Sequence[Stage]) -> None:
        self.name = name
        self.stages = serial_order(unique_names(stages))
        self.inputs = {stage.name: inputs for stage, inputs in resolve_columns(self.stages)}
        check_selects(self.stages)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and (self.name, self.stages) == (other.name, other.stages)

    def __hash__(self) -> int:
        return hash((self.name, tuple(stage.name for stage in self.stages)))

    def __repr__(self) -> str:
        return f"Flow({self.name!r}: {' → '.join(stage.name for stage in self.stages)})"

    def __getitem__(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UserError(f"flow {self.name} has no stage {name!r}. {suggest(name, [s.name for s in self.stages])}")

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Roles that need a model, in order of first use."""
        used = [s.role for s in self.stages if s.role and s.kind in (Kind.GENERATE, Kind.INFER, Kind.TRAIN)]
        used += [s.params["source"] for s in self.stages if s.kind is Kind.TRAIN and "source" in s.params]
        return tuple(dict.fromkeys(used))

    @cached_property
    def trained_roles(self) -> tuple[str, ...]:
        """Roles with an optimizer, in order of first update."""
        return tuple(dict.fromkeys(s.role for s in self.stages if is_optimized(s) and s.role))

    @cached_property
    def sampling_segment(self) -> tuple[Stage, ...]:
        """The stages up to the last `select`, which run in waves; empty in a flow that selects nothing."""
        last = max((i for i, s in enumerate(self.stages) if s.kind is Kind.SELECT), default=-1)
        return self.stages[: last + 1]

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Columns from writer to reader, and weights from an update to whoever uses them next."""
        edges = []
        for stage in self.stages:
            by_writer: dict[str, list[str]] = {}
            for column in self.inputs[stage.name]:
                by_writer.setdefault(column.writer, []).append(column.name)
            edges += [Edge(writer, stage.name, tuple(columns)) for writer, columns in by_writer.items()]
        return (*edges, *weight_edges(self.stages))

    @cached_property
    def depth(self) -> dict[str, int]:
        """Length of the longest chain of edges before each stage: stages of one depth may run at the same time."""
        depth = {ADMISSION: 0}
        for stage in self.stages:
            before = [e.source for e in self.edges if e.target == stage.name and e.source in depth]
            depth[stage.name] = 1 + max((depth[name] for name in [*before, *stage.after]), default=0)
        return depth

    def live_after(self, stage: Stage) -> frozenset[ColumnVersion]:
        """Columns written so far that a later stage still reads; the others can be forgotten."""
        position = self.stages.index(stage)
        done = {ADMISSION, *(s.name for s in self.stages[: position + 1])}
        needed = (c for later in self.stages[position + 1 :] for c in self.inputs[later.name])
        return frozenset(column for column in needed if column.writer in done)

    def needs_from_data(self) -> tuple[str, ...]:
        """Columns that the data files must provide beyond the prompt."""
        read = {c.name for inputs in self.inputs.values() for c in inputs if c.writer == ADMISSION}
        return tuple(name for name in ADMITTED_IF_GIVEN if name in read)


def is_optimized(stage: Stage) -> bool:
    """True for an update by a loss, False for one that copies another role's weights."""
    return stage.kind is Kind.TRAIN and "source" not in stage.params


def unique_names(stages: Sequence[Stage]) -> list[Stage]:
    """Numbers the second and later stages of one name: `critic.update`, `critic.update_2`."""
    seen: dict[str, int] = {}
    named = []
    for stage in stages:
        seen[stage.name] = count = seen.get(stage.name, 0) + 1
        named.append(stage if count == 1 else stage.renamed(f"{stage.name}_{count}"))
    return named


def serial_order(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """List order, moved only as far as `after` asks. Raises UserError for an unknown name or a cycle."""
    position = {stage.name: i for i, stage in enumerate(stages)}
    waiting = [set(stage.after) for stage in stages]
    for stage in stages:
        for name in stage.after:
            if name not in position:
                raise UserError(f"stage {stage.name}: after: {name!r} is no stage. {suggest(name, position)}")
    ready = [i for i, before in enumerate(waiting) if not before]
    heapq.heapify(ready)
    order: list[Stage] = []
    while ready:
        chosen = stages[heapq.heappop(ready)]
        order.append(chosen)
        for i, before in enumerate(waiting):
            if chosen.name in before:
                before.discard(chosen.name)
                if not before:
                    heapq.heappush(ready, i)
    if len(order) < len(stages):
        stuck = [stage.name for i, stage in enumerate(stages) if waiting[i]]
        raise UserError(f"`after` makes a cycle of the stages {', '.join(stuck)}; remove one of the `after` entries")
    return tuple(order)


def resolve_columns(stages: Sequence[Stage]) -> Iterable[tuple[Stage, tuple[ColumnVersion, ...]]]:
    """For each stage the versions that it reads. Raises UserError for a missing, later or doubly written column."""
    latest = dict.fromkeys((*ADMITTED, *ADMITTED_IF_GIVEN), ADMISSION)
    for position, stage in enumerate(stages):
        names = list(stage.reads)
        for name in stage.reads:
            if name not in latest:
                raise UserError(missing_column(stage, name, stages[position:]))
        names += [name for name in stage.signature.optional if name in latest and name not in names]
        for choices in stage.signature.one_of:
            found = next((name for name in choices if name in latest), None)
            if found is None:
                raise UserError(missing_column(stage, choices[-1], stages[position:]))
            names.append(found)
        yield stage, tuple(ColumnVersion(name, latest[name]) for name in names)
        for name in stage.writes:
            if name in latest and name not in names:
                raise UserError(
                    f"column {name!r} is written by {latest[name]} and by {stage.name}, of which neither reads it; "
                    "give one of them a namespace with `into`, or remove it"
                )
            latest[name] = stage.name


def missing_column(stage: Stage, name: str, later: Sequence[Stage]) -> str:
    """Why a column is not there: because its writer comes later, or because there is none."""
    writer = next((s.name for s in later if name in s.writes), None)
    if writer:
        return f"stage {stage.name} reads {name!r}, which {writer} writes later; move {writer} before {stage.name}"
    known = {c for s in later for c in s.writes} | set(ADMITTED)
    return f"stage {stage.name} reads {name!r}, which no stage writes. {suggest(name, known)}"


def check_selects(stages: Sequence[Stage]) -> None:
    """Raises UserError for a train stage before a `select`: its rows could still be dropped."""
    trained = None
    for stage in stages:
        if stage.kind is Kind.TRAIN:
            trained = stage.name
        if stage.kind is Kind.SELECT and trained:
            raise UserError(
                f"{stage.name} comes after {trained}, but rows must be selected before any stage trains on them"
            )


def weight_edges(stages: Sequence[Stage]) -> list[Edge]:
    """List order gives them: a stage that uses a role's weights and the next one that writes them, or the reverse."""
    edges = []
    for i, stage in enumerate(stages):
        for later in stages[i + 1 :]:
            touched = touched_weights(stage) & touched_weights(later)
            written = written_weights(stage) | written_weights(later)
            edges += [Edge(stage.name, later.name, weights=role) for role in sorted(touched & written)]
    return edges


def written_weights(stage: Stage) -> set[str]:
    return {stage.role} if stage.kind is Kind.TRAIN and stage.role else set()


def touched_weights(stage: Stage) -> set[str]:
    """Roles whose weights a stage reads or writes."""
    if stage.kind in (Kind.COMPUTE, Kind.SELECT) or stage.role is None:
        return set()
    return {stage.role, stage.params.get("source", stage.role)}
