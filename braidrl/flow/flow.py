"""A flow: an ordered list of stages, and the dataflow graph derived from it.

admission ──prompt──▶ actor.generate ──tokens──▶ reward.verify ──reward──▶ advantage ──▶ actor.update
                           ▲                                                                  │
                           └──────────────────── weights of the actor ────────────────────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from braidrl.algorithms import registry
from braidrl.errors import UserError, suggest
from braidrl.flow.columns import ADMISSION, ADMITTED_IF_GIVEN, Inputs, resolve_columns, serial_order
from braidrl.flow.signatures import columns_read_later, entry_of, in_namespace, log_probs_column, namespaces_of
from braidrl.flow.stage import Kind, Stage
from braidrl.flow.stages import make_stage, with_params

SCALARS = {"values", "scores"}


@dataclass(frozen=True)
class Edge:
    """A dependency of `target` on `source`: columns, the weights of a role, or neither if only the order matters."""

    source: str
    target: str
    columns: tuple[str, ...] = ()
    weights: str | None = None


class Flow:
    """Stages in serial order, the order in which one process would run them."""

    def __init__(self, name: str, stages: Sequence[Stage]) -> None:
        """Bring the stages into serial order and resolve the columns that each reads.

        The stages are in any order that their columns and `after` allow. A `log_probs` stage is inserted if an update
        has `old: recompute` and no stage writes the log-probs of its role; a `generate` stage writes the columns per
        token that later stages read. Raises UserError if a column has no writer or two independent writers, stages
        depend on each other in a cycle, or a stage trains or changes its state before a `select`.
        """
        self.name = name
        for stage in stages:
            if not isinstance(stage, Stage):
                raise UserError(
                    f"flow {name}: {stage!r} is no stage; call the function that makes one, as in actor.generate()"
                )
        if not stages:
            raise UserError(f"flow {name} has no stages; write at least one, such as actor.generate()")
        # A role that plays beside the role of a generate stage trains on its own trajectories.
        players = {role for stage in stages for role in policies_of(stage)[1:]}
        stages = [
            with_params(stage, {"of": stage.role})
            if stage.role in players
            and stage.type in ("log_probs", "update")
            and not {"of", "source"} & {*stage.params}
            else stage
            for stage in stages
        ]
        recomputed = ((str(s.role), s.params.get("of")) for s in stages if s.params.get("old") == "recompute")
        for role, of in dict.fromkeys(recomputed):
            (column,) = in_namespace(of, (log_probs_column(role),))
            if not any(column in stage.writes for stage in stages):
                replay = next((s.params["replay"] for s in stages if s.role == role and "replay" in s.params), None)
                # As late as possible, before the first stage that reads them or trains, so that dropped rows are not
                # computed.
                position = next(i for i, s in enumerate(stages) if s.kind is Kind.TRAIN or column in s.reads)
                inserted = make_stage("log_probs", role, {"replay": replay, "of": of})
                stages = [*stages[:position], inserted, *stages[position:]]
        ordered = list(serial_order(stages))
        for position, stage in enumerate(ordered):
            if stage.kind is Kind.GENERATE:
                # An engine returns a column per token because a later stage reads it.
                named = stage.params.get("columns", [])
                spaces, later = namespaces_of(stage.params), ordered[position + 1 :]
                read = dict.fromkeys(name for space in spaces for name in columns_read_later(space, later))
                if missing := [name for name in read if name not in named]:
                    ordered[position] = with_params(stage, {"columns": [*named, *missing]})
        self.stages = tuple(ordered)
        trained = stateful = None
        for stage in self.stages:
            trained = stage.name if stage.kind is Kind.TRAIN else trained
            stateful = stage.name if stage.state else stateful
            if stage.kind in (Kind.SELECT, Kind.GENERATE) and stateful:
                raise UserError(
                    f"{stateful} has a state, which changes once per iteration, and stages before {stage.name} run in "
                    f"waves; move {stage.name} before {stateful}"
                )
            if stage.kind is Kind.SELECT and trained:
                raise UserError(
                    f"{stage.name} comes after {trained}, but rows must be selected before any stage trains on them; "
                    f"move {stage.name} before {trained}"
                )
        self.inputs: Inputs = resolve_columns(self.stages)
        self.roles = tuple(dict.fromkeys(role for stage in self.stages for role in touched_weights(stage)))
        """The roles that need a model, in order of first use."""
        self.trained_roles = tuple(dict.fromkeys(s.role for s in self.stages if is_optimized(s) and s.role))
        """The roles with an optimizer, in order of first update."""
        self.changed_roles = tuple(dict.fromkeys(s.role for s in self.stages if s.kind is Kind.TRAIN and s.role))
        """The roles whose weights change during a run: trained roles, and copies of another role's weights."""
        stage_numbers = {kind: [i for i, s in enumerate(self.stages, 1) if s.kind is kind] for kind in Kind}
        self.sampling_segment = self.stages[: max(stage_numbers[Kind.SELECT], default=0)]
        """The stages up to the last `select`, which run in waves; empty for a flow without `select`."""
        self.recorded_stages = max(stage_numbers[Kind.SELECT] + stage_numbers[Kind.GENERATE], default=0)
        """The number of stages before rows are recorded: all up to the last `select` or `generate`."""
        for stage in self.stages:
            learns_tokens = "loss" in stage.params and "log_probs" in loss_of(stage).reads
            if stage.role in self.scalar_roles and (learns_tokens or stage.type in ("generate", "log_probs")):
                raise UserError(
                    f"flow {name}: {stage.name} needs a language model, and another stage of {stage.role} a head for "
                    "values or scores; name another role there, such as critic or reward"
                )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Flow) and (self.name, self.stages) == (other.name, other.stages)

    def __hash__(self) -> int:
        return hash((self.name, self.stages))

    def __repr__(self) -> str:
        return f"Flow({self.name!r}: {' → '.join(stage.name for stage in self.stages)})"

    def __getitem__(self, name: str) -> Stage:
        for stage in self.stages:
            if stage.name == name:
                return stage
        raise UserError(f"flow {self.name} has no stage {name!r}. {suggest(name, [s.name for s in self.stages])}")

    @cached_property
    def scalar_roles(self) -> tuple[str, ...]:
        """Return the roles whose model has a scalar head: they compute or learn values or scores."""
        scalar: dict[str, None] = {}
        for stage in self.stages:
            is_scalar = stage.type in ("values", "score")
            if "loss" in stage.params:
                is_scalar = bool(SCALARS & set(loss_of(stage).reads))
            if stage.role and is_scalar:
                scalar[stage.role] = None
        return tuple(scalar)

    @cached_property
    def trains_on_pairs(self) -> bool:
        """Return True if a loss compares given responses: each prompt of the data has a chosen and a rejected one."""
        losses = [loss_of(stage) for stage in self.stages if is_optimized(stage)]
        return "response" in self.needs_from_data() and any(entry.needs.whole_groups for entry in losses)

    @cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Return all edges: columns from writer to reader, weights from an update to their uses, and order alone."""
        edges: list[Edge] = []
        for reader, columns in self.inputs.items():
            by_writer: dict[str, list[str]] = {}
            for column in columns:
                by_writer.setdefault(column.writer, []).append(column.name)
            edges += [Edge(writer, reader, tuple(names)) for writer, names in by_writer.items()]
        # Two stages that use a role's weights stay in list order if one of them writes these.
        for i, stage in enumerate(self.stages):
            for later in self.stages[i + 1 :]:
                written = [s.role for s in (stage, later) if s.kind is Kind.TRAIN]
                shared = [role for role in touched_weights(stage) if role in touched_weights(later) and role in written]
                edges += [Edge(stage.name, later.name, weights=role) for role in shared]
        edges += [Edge(name, stage.name) for stage in self.stages for name in stage.after]
        # Stages after a `select` see only the rows that it keeps.
        for i, select in enumerate(self.stages):
            behind = {select.name}
            for stage in self.stages[i + 1 :] if select.kind is Kind.SELECT else ():
                if not any(edge.target == stage.name and edge.source in behind for edge in edges):
                    edges.append(Edge(select.name, stage.name))
                behind.add(stage.name)
        return tuple(edges)

    @cached_property
    def predecessors(self) -> dict[str, tuple[str, ...]]:
        """Return the sources of the edges to each stage, in the order of the stages."""
        return {s.name: tuple(edge.source for edge in self.edges if edge.target == s.name) for s in self.stages}

    @cached_property
    def depth(self) -> dict[str, int]:
        """Return the length of the longest path of edges to each stage: stages of equal depth may run together."""
        depth = {ADMISSION: 0}
        for stage, before in self.predecessors.items():
            depth[stage] = 1 + max((depth[name] for name in before), default=0)
        return depth

    def needs_from_data(self) -> tuple[str, ...]:
        """Return the columns that the data files must provide beyond the prompt."""
        read = {c.name for inputs in self.inputs.values() for c in inputs if c.writer == ADMISSION}
        return tuple(name for name in ADMITTED_IF_GIVEN if name in read)


def is_optimized(stage: Stage) -> bool:
    """Return True for an update with a loss, False for a copy of another role's weights."""
    return stage.kind is Kind.TRAIN and "source" not in stage.params


def loss_of(stage: Stage) -> registry.Entry:
    return entry_of(registry.losses, stage.params["loss"]["name"])


def touched_weights(stage: Stage) -> tuple[str, ...]:
    """Return the roles whose weights a stage reads or writes."""
    if stage.kind in (Kind.COMPUTE, Kind.SELECT) or stage.role is None:
        return ()
    return tuple(dict.fromkeys((stage.role, stage.params.get("source", stage.role), *policies_of(stage)[1:])))


def policies_of(stage: Stage) -> tuple[str, ...]:
    """Return the roles with whose weights a generate stage samples: its own, and those that play in its episodes."""
    return (str(stage.role), *stage.params.get("policies", ())) if stage.kind is Kind.GENERATE else ()


def waits_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """Return, for each stage, the stages that must process a row before it: writers of its columns, `after`, and
    earlier selects.
    """
    waits: dict[str, tuple[str, ...]] = {}
    selects: list[str] = []
    for stage in flow.stages:
        writers = [column.writer for column in flow.inputs[stage.name]]
        waits[stage.name] = tuple(dict.fromkeys([ADMISSION, *writers, *stage.after, *selects]))
        if stage.kind is Kind.SELECT:
            selects.append(stage.name)
    return waits


def weights_wait_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """Return, for each infer and train stage, the stages that must finish the whole batch before it uses or changes
    weights.

    These are earlier stages that share a role's weights with it, if one of the two changes them. A train stage waits
    before its first optimizer step; gradient accumulation does not wait. Generation is excluded: an engine has its own
    weights, and a runtime in which it shares the trainer's runs the two in turn.
    """
    users = {stage.name for stage in flow.stages if stage.kind in (Kind.INFER, Kind.TRAIN)}
    edges = [edge for edge in flow.edges if edge.weights is not None and edge.source in users]
    return {name: tuple(dict.fromkeys(e.source for e in edges if e.target == name)) for name in sorted(users)}


def serial_chain(flow: Flow) -> tuple[Stage, ...]:
    """Return a deterministic topological order, stages up to a `select` first: those of the active model are preferred,
    then list order.
    """
    # A column's next version overwrites the last, so that its readers come before.
    before = {stage: set(sources) - {ADMISSION} for stage, sources in flow.predecessors.items()}
    for i, stage in enumerate(flow.stages):
        read = {column.name for column in flow.inputs[stage.name]}
        for later in flow.stages[i + 1 :]:
            if read & set(later.writes):
                before[later.name].add(stage.name)
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
