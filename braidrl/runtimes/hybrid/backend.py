"""The hybrid driver: it calls roles by the flow's order and returns handles at once; the rows stay with the workers.

driver      run(verify) ─ run(reference.log_probs) ─ run(critic.values) ─ index: waits ─ train ─ train ─ publish: waits
actor pool      ├── verify ──┤                                             ├─ update ─┤
reference pool          ├── log_probs ──┤
critic pool                        ├── values ──┤                          ├─ update ─┤
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from braidrl.data.codec import payload_forbidden
from braidrl.data.loader import PromptLoader
from braidrl.data.rows import Column, Rows
from braidrl.flow import Kind, Scope, Stage
from braidrl.flow.flow import is_optimized
from braidrl.models.checkpoint import Write
from braidrl.models.parallel.layout import ParallelLayout
from braidrl.models.role_settings import inference_layouts, layout_of
from braidrl.observe.metrics import Sums
from braidrl.runtimes.controller import group_tokens
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.early_stop import Needless, Segment
from braidrl.runtimes.generating.engines import pools_ranks
from braidrl.runtimes.hybrid.calls import Calls, Work
from braidrl.runtimes.hybrid.dispatch import Deal, by_cost, by_length, by_number, by_prompt, in_place
from braidrl.runtimes.hybrid.group import Dealt, Future, Outgoing, WorkerGroup, outgoing
from braidrl.runtimes.hybrid.handle import Deferred, Handle, Layer
from braidrl.runtimes.hybrid.parts import columns_read, packed_rows
from braidrl.runtimes.saving.background import check_written
from braidrl.runtimes.saving.row_store import Admission, Origin


class HybridBackend:
    """Implements `iteration.Backend` with handles. Every role has a worker group; `home` is where rows are born."""

    def __init__(
        self,
        loader: PromptLoader | None,
        groups: Mapping[str, WorkerGroup],
        home: WorkerGroup,
        executor: StageExecutor,
        resources: ExitStack,
    ) -> None:
        """`groups` by role; `executor`, which holds no role, computes on index columns; `resources` are what `close` ends."""
        self.loader, self.groups, self.home = loader, groups, home
        self.executor, self.resources = executor, resources
        self.distinct = list(dict.fromkeys(groups.values()))
        self.calls = Calls(self.distinct, executor.progress)
        self.training: list[Work] = []
        resources.enter_context(payload_forbidden())

    def admit(self, groups: int) -> Handle:
        assert self.loader is not None, "this backend only evaluates"
        return self.bring(Admission(tuple(self.loader.advance(groups))))

    def bring(self, origin: Origin) -> Handle:
        self.calls.release()
        key = next(self.calls.keys)
        future = self.home.call("make", origin, key)
        (answer,) = self.home.wait([future])
        index = answer.rows()
        chunk = self.calls.chunk(key, len(index), future, ())
        chunk.columns, chunk.index = answer.columns, index
        layer = Layer.of(len(index), [(torch.arange(len(index)), chunk)])
        return Handle(len(index), index, {type(origin).__name__: layer})

    def run(self, stage: Stage, table: Handle, iteration: int, sums: Sums) -> Handle:
        """At once; a stage without a role is put off until somebody needs what it writes."""
        asked = Deferred(stage, iteration, sums)
        if stage.role is None:
            return table.deferring(*table.deferred, asked)
        self._compute_for(stage, table)
        method = "execute_together" if self._meets(stage) else "execute"
        return table.with_layer(stage.name, self.calls.begin(asked, table, *self._place(stage, table), method))

    def generate_needed(
        self, segment: Segment, table: Handle, iteration: int, sums: Sums, needless: Needless
    ) -> Handle:
        """Ranks tell each other of their rows meanwhile, and each ends those of its own that nobody needs."""
        if self._meets(segment.generate):
            # A rank without rows would have to be asked for those that others end: all are drawn to their ends.
            return self.run(segment.generate, table, iteration, sums)
        stage, uids, deal = segment.generate, table.index.uids(), by_number(table.index)
        self._compute_for(stage, table)
        asked, group = Deferred(stage, iteration, sums), self.groups[str(stage.role)]
        layer = self.calls.begin(asked, table, group, deal, "generate_needed", segment, needless, uids)
        return table.with_layer(stage.name, layer)

    def totals(self, stage: Stage, table: Handle) -> dict[str, float]:
        """What a stage adds up over all rows, each part where it lies."""
        asked = Deferred(stage, 0, Sums())
        self._compute_for(stage, table)
        return {name: float(total) for name, total in self._totals(asked, table, *self._where(asked, table)).items()}

    def select(self, stage: Stage, table: Handle) -> dict[int, str]:
        return self.executor.select(stage, self.index(table))

    def train(self, stage: Stage, table: Handle, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        """Begins every optimizer step; `publish` waits for them."""
        group = self.groups[str(stage.role)]
        if not is_optimized(stage):
            self.training.append(Work(stage, group, group.call("copy_weights", stage), [], sums))
            return
        index = self.index(table)
        size, whole_groups = group.mesh.size, self.executor.objective(stage).whole_groups
        for update in updates:
            rows = index.take(update)
            rows = rows.with_columns({"group_tokens": group_tokens(rows)})
            chosen = table.take(update).with_index(dict(rows.items()))
            parts = Dealt(chosen, by_length(rows, whole_groups), columns_read(stage)).divide(size)
            futures = group.call("update", parts, [packed_rows(rows)] * size, [stage] * size, [iteration] * size)
            self.training.append(Work(stage, group, futures, [], sums))

    def publish(self, version: int) -> None:
        """Waits for all training first."""
        for work in self.training:
            self.calls.answers(work)
        self.training = []
        self.calls.everywhere("publish", version)

    def index(self, table: Handle) -> Rows:
        """Waits for all that was begun and computes what was put off."""
        self.calls.resolve(table)
        self._compute(table, len(table.deferred))
        self.calls.resolve(table)
        return table.index

    def take(self, table: Handle, positions: Sequence[int]) -> Handle:
        return table.take(positions)

    def cat(self, tables: Sequence[Handle]) -> Handle:
        for table in tables:
            self.index(table)
        return Handle.cat(tables)

    def record(self, path: Path, table: Handle, final: Handle) -> None:
        self.index(table)
        self.index(final)
        later = {name: layer for name, layer in final.layers.items() if name not in table.layers}
        added = Handle(len(final), final.index.without(list(table.index)), later)
        self.home.wait([self.home.call("record", path.resolve(), outgoing(table), outgoing(added))])

    def keep(self, path: Path, table: Handle) -> None:
        self.index(table)
        self.home.wait([self.home.call("keep", path.resolve(), outgoing(table), aside=True)])

    def save(self, folder: Path) -> None:
        """Beside a call that may be running: an interrupt does not wait until all rows are generated.

        Where ranks have divided a model they meet to save it, and that they do in turn.
        """
        for group in self.distinct:
            group.wait(group.call("save", folder.resolve(), aside=not self._divided(group.pool.roles)))

    def copy_for_saving(self, folder: Path) -> list[Write]:
        """As `save`, but each worker goes on as soon as it has copies, and writes them in a thread."""
        for group in self.distinct:
            group.wait(group.call("copy_for_saving", folder.resolve(), aside=not self._divided(group.pool.roles)))
        return [partial(written, group) for group in self.distinct]

    def load(self, folder: Path, version: int) -> None:
        self.calls.everywhere("load", folder.resolve())
        self.calls.everywhere("publish", version)

    def close(self) -> None:
        self.resources.close()

    def _divided(self, roles: Iterable[str]) -> bool:
        """True where the ranks of one of the roles have parts of its weights, or compute together."""
        return any(self._together(role, layout_of(role, self.executor.config)) for role in roles)

    def _meets(self, stage: Stage) -> bool:
        """True where the ranks of a role meet to generate or infer, or to bring the weights to the layout that they infer in."""
        role, config = str(stage.role), self.executor.config
        if stage.kind is Kind.GENERATE:
            return pools_ranks(config)
        if stage.kind is not Kind.INFER:
            return False
        other = inference_layouts(config, self.executor.flow).get(role)
        return self._divided([role]) or (other is not None and self._together(role, other))

    def _together(self, role: str, layout: ParallelLayout) -> bool:
        return not layout.over(self.groups[role].mesh.size).copies

    def _place(self, stage: Stage, table: Handle) -> tuple[WorkerGroup, Deal]:
        """The group that runs a role's stage, and how rows are dealt to its ranks."""
        if stage.type == "verify":
            # Checks were begun where the rows were generated.
            tokens = f"{stage.params['of']}.tokens" if "of" in stage.params else "tokens"
            for layer in table.layers.values():
                work = layer.chunks[0].work if layer.chunks else None
                if work is not None and work.stage.type == "generate" and tokens in work.stage.writes:
                    return work.group, in_place(layer, work.group.first)
            return self.home, by_length(table.index)
        group = self.groups[str(stage.role)]
        return group, by_prompt(table.index) if stage.type == "generate" else by_length(table.index)

    def _compute_for(self, stage: Stage, table: Handle) -> None:
        """Computes what was put off as far as `stage` reads it."""
        reads = columns_read(stage)
        needed = [number for number, put_off in enumerate(table.deferred, 1) if reads & set(put_off.stage.writes)]
        self._compute(table, max(needed, default=0))

    def _compute(self, table: Handle, count: int) -> None:
        """Computes the first `count` stages that were put off: here if they need index columns alone, else where the payload is."""
        for _ in range(count):
            first, *others = table.deferred
            if first.done is None:
                group, deal = self._where(first, table)
                first.done = self._computed_here(first, table) if group is None else None
                first.done = first.done or self._computed_there(first, table, group or self.home, deal)
            done = first.done
            whole = table.with_layer(first.stage.name, done) if isinstance(done, Layer) else table.with_index(done)
            table.settle(whole.deferring(*others))

    def _where(self, asked: Deferred, table: Handle) -> tuple[WorkerGroup | None, Deal]:
        """The group that holds the payload which a compute stage reads, or None where it reads index columns alone.

        Rows stay where they are, but for those of a group, which have to be together.
        """
        reads = columns_read(asked.stage)
        self.calls.resolve(table, reads)
        holders = [layer for layer in table.layers.values() if layer.holds_any(reads)]
        if asked.stage.scope is Scope.GROUP:
            whole = by_cost([1.0] * len(table), table.index["group"].tolist())
            return (self.home if holders else None), whole
        if not holders:
            return None, by_length(table.index)
        group = self.calls.group_of[holders[0].chunks[0].worker]
        return group, in_place(holders[0], group.first)

    def _computed_here(self, asked: Deferred, table: Handle) -> Mapping[str, Column] | None:
        """The index columns that a stage makes of index columns; None where it makes payload."""
        stage, index = asked.stage, table.index
        if stage.scope is Scope.BATCH:
            columns = self.executor.apply(stage, index, self.executor.sums(stage, index))
        else:
            columns = self.executor.execute(stage, index, Sums())
        return columns if all(isinstance(column, Tensor) for column in columns.values()) else None

    def _computed_there(self, asked: Deferred, table: Handle, group: WorkerGroup, deal: Deal) -> Layer:
        if asked.stage.scope is not Scope.BATCH:
            return self.calls.begin(asked, table, group, deal, "execute")
        return self.calls.begin(asked, table, group, deal, "apply", self._totals(asked, table, group, deal))

    def _totals(self, asked: Deferred, table: Handle, group: WorkerGroup | None, deal: Deal) -> dict[str, Tensor]:
        if group is None:
            return self.executor.sums(asked.stage, table.index)
        rows = Dealt(table, deal, columns_read(asked.stage))
        called: list[tuple[Outgoing, Future]] = group.call("sums", rows, asked.stage, asked.iteration)
        totals: dict[str, Tensor] = {}
        for answer in group.wait([future for _, future in called]):
            for name, value in answer.result.items():
                totals[name] = totals[name] + value if name in totals else value
        return totals


def written(group: WorkerGroup) -> None:
    """Waits until the workers have written what they staged. Raises OSError where one could not."""
    for answer in group.wait(group.call("written", aside=True)):
        check_written(answer.result)
