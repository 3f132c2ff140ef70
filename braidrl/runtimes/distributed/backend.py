"""The distributed runtime: every rank walks the same chain, and nobody decides for the others.

rank 0   its prompts ──generate──▶ its rows ──verify──▶ its rows ╮            ╭─▶ its rows ──forward_backward──╮
rank 1   its prompts ──generate──▶ its rows ──verify──▶ its rows ┼▶ balanced? ┼─▶ its rows ──forward_backward──┼▶ sum, step
                                       │                    │    ╰all-to-all──╯
                                       ╰── index columns ───┴──▶ gathered on every rank: selection, updates and partitions
                                                                 follow from them, the same everywhere

What is said of a row in a few numbers (its index columns) every rank knows of every row; its payload lies on one rank.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.data.codec import decode, encode
from braidrl.data.frames import join, split
from braidrl.data.loader import PromptLoader
from braidrl.data.partition import in_turn
from braidrl.data.rows import Column, Rows, tokens_of
from braidrl.flow import Flow, Kind, Scope, Stage
from braidrl.flow.flow import is_optimized
from braidrl.flow.updates import update_plan
from braidrl.models.checkpoint import Write
from braidrl.observe.metrics import Sums
from braidrl.observe.rollouts import join_parts, part_path
from braidrl.observe.trace import Done, State, TraceWriter
from braidrl.runtimes.controller import group_tokens
from braidrl.runtimes.distributed.shard import Shard, columns_of, joined, named_rows, only_present
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.early_stop import EarlyStop, Needless, Segment
from braidrl.runtimes.generating.verification import checked_beside
from braidrl.runtimes.interrupts import AgreedInterrupts
from braidrl.runtimes.saving.row_store import Admission, HeldOut, Origin, RowStore, with_added
from braidrl.transfer.data_buffer import DataBuffer, Key, balanced_owners, equal_shares


class DistributedBackend:
    """One rank's part of the work; every rank has one, and all are asked for the same things in the same order."""

    def __init__(
        self,
        config: Config,
        flow: Flow,
        loader: PromptLoader | None,
        executor: StageExecutor,
        store: RowStore,
        world: World,
        generating: Mapping[str, int],
        interrupts: AgreedInterrupts,
        trace: TraceWriter | None,
    ) -> None:
        """`generating` says how many ranks, from rank 0 on, generate for a role; all ranks do everything else."""
        self.config, self.flow, self.loader, self.executor, self.store = config, flow, loader, executor, store
        self.samples = config.rollout.samples_per_prompt
        self.world, self.generating, self.interrupts, self.trace = world, generating, interrupts, trace
        self.buffer, self.notices = DataBuffer(world), world.notices
        self.iteration = self.version = self.waves = 0

    def admit(self, groups: int) -> Shard:
        """Each rank reads and tokenises only the prompts of its own rows."""
        assert self.loader is not None, "this backend only evaluates"
        self.world.at("admission")
        numbers = self.loader.advance(groups)
        first_use = next((s for s in self.flow.stages if s.kind is Kind.GENERATE), self.flow.stages[0])
        ranks, group_of = self._ranks_of(first_use), [group for group in numbers for _ in range(self.samples)]
        # Where selection may turn out not to need the last groups, every rank begins with the first ones.
        selects = bool(self.flow.sampling_segment)
        owner = torch.tensor(in_turn(group_of, ranks)) if selects else equal_shares(len(group_of), ranks)
        mine = (owner == self.world.rank).nonzero().flatten().tolist()
        place = {group: number for number, group in enumerate(sorted({group_of[row] for row in mine}))}
        rows = Rows({})
        if mine:
            made = [place[group_of[row]] * self.samples + row % self.samples for row in mine]
            rows = self.store.make(Admission(tuple(place))).take(made)
        return self._gathered(Shard(Rows({}), owner, Rows({}), self.world.rank), columns_of(rows), Sums(), Sums())

    def generate_needed(self, segment: Segment, table: Shard, iteration: int, sums: Sums, needless: Needless) -> Shard:
        """Ranks tell each other of their rows meanwhile, and each ends those of its own that nobody needs."""
        self.waves += 1
        if self.notices is not None:
            self.notices.begin(str(self.waves))
        stop = EarlyStop.of(segment, needless, self.executor.verified, table.index.uids(), self.notices)
        return self.run(segment.generate, table, iteration, sums, stop)

    def run(self, stage: Stage, table: Shard, iteration: int, sums: Sums, stop: EarlyStop | None = None) -> Shard:
        self._at(stage, iteration)
        if self._known_everywhere(stage, table):
            totals = self.executor.sums(stage, table.index) if stage.scope is Scope.BATCH else None
            return table.with_everywhere(self._execute(stage, table.index, Sums(), totals))
        table = self._placed(stage, table)
        rows, own = table.rows, Sums()
        totals = self._totals(stage, rows) if stage.scope is Scope.BATCH else None
        columns: Mapping[str, Column] = {}
        try:
            # Where ranks compute together none may leave in the middle.
            together = self.executor.meets(stage)
            with nullcontext() if together else self.interrupts.local(), self._working(stage, rows) as done:
                if len(rows):
                    columns = self._execute(stage, rows, own, totals, stop)
                    done.tokens = tokens_of(Rows(columns)) or done.tokens
                elif together:
                    self.executor.join_collectives(stage)
        except KeyboardInterrupt:
            columns = {}  # all ranks end together, when they gather
        return self._gathered(table, columns, own, sums)

    def totals(self, stage: Stage, table: Shard) -> dict[str, float]:
        here = self._known_everywhere(stage, table)
        found = self.executor.sums(stage, table.index) if here else self._totals(stage, table.rows)
        return {name: float(total) for name, total in found.items()}

    def select(self, stage: Stage, table: Shard) -> dict[int, str]:
        return self.executor.select(stage, table.index)

    def train(self, stage: Stage, table: Shard, updates: Sequence[Sequence[int]], iteration: int, sums: Sums) -> None:
        """Each update's rows are divided among the ranks by length; every rank then makes the same optimizer step."""
        self._at(stage, iteration)
        if not is_optimized(stage):
            # Every rank holds both roles, with the same weights as all others.
            self.executor.copy_weights(stage)
            return
        own = Sums()
        needed = [column.name for column in self.flow.inputs[stage.name]]
        whole_groups = self.executor.objective(stage).whole_groups
        with self.executor.progress.stage(stage.name) as bar:
            for number, update in enumerate(updates, 1):
                self.world.at(f"step {iteration}, {stage.name}, update {number}")
                part = table.take(update)
                part = replace(part, index=part.index.with_columns({"group_tokens": group_tokens(part.index)}))
                part = self._moved_with(stage, part, needed, self._balanced(part, whole_groups))
                rows = part.rows
                with self._working(stage, rows):
                    self.executor.optimize(stage, part.index, rows, iteration, own, bar, self.world.first)
        self._gathered(replace(table, index=Rows({})), {}, own, sums)

    def index(self, table: Shard) -> Rows:
        return table.index

    def take(self, table: Shard, positions: Sequence[int]) -> Shard:
        return table.take(positions)

    def cat(self, tables: Sequence[Shard]) -> Shard:
        index, payload = Rows.cat([t.index for t in tables]), Rows.cat([t.payload for t in tables])
        return Shard(index, torch.cat([t.owner for t in tables]), payload, self.world.rank)

    def bring(self, origin: Origin) -> Shard:
        """Every rank reads the rows and keeps its own: equally many to generate, else balanced by their lengths."""
        rows = self.store.make(origin)
        if isinstance(origin, HeldOut):
            owner = equal_shares(len(rows), min(self.generating.values(), default=self.world.size))
        else:
            lengths = rows["length" if "length" in rows else "prompt_length"].tolist()
            owner = balanced_owners(lengths, torch.zeros(len(rows), dtype=torch.int64), self.world.size)
        return Shard(rows.index, owner, rows.payload.take(owner == self.world.rank), self.world.rank)

    def record(self, path: Path, table: Shard, final: Shard) -> None:
        """Each rank writes its own rows; the first joins the files, so that no rank ever holds all rows."""
        self.world.at(f"writing {path.name}")
        # A rank without rows knows no payload columns: the others tell it which were added.
        said = self._all({"known": list(table.payload), "later": list(final.payload)})
        added = {name for about in said for name in about["later"] if all(name not in o["known"] for o in said)}
        later = replace(final, payload=only_present(final.payload, sorted(added)))
        back = (
            self._moved(path.name, later, table.owner) if added else replace(final, owner=table.owner, payload=Rows({}))
        )
        rows = with_added(table.rows, back.rows)
        part = part_path(path, self.world.rank)
        if len(rows):
            self.store.record(part, rows)
        wrote = self._all({"wrote": len(rows)})
        parts = [part_path(path, rank) for rank, about in enumerate(wrote) if about["wrote"]]
        if self.world.first and parts:
            join_parts(path, parts)

    def keep(self, path: Path, table: Shard) -> None:
        """The rows that a checkpoint keeps, less than a batch, go to the rank that writes it."""
        self.world.at(f"writing {path.name}")
        whole = self._moved(path.name, table, torch.zeros_like(table.owner))
        if self.world.first:
            self.store.keep(path, whole.rows)

    def publish(self, version: int) -> None:
        self.executor.publish(version)
        self.version = version

    def save(self, folder: Path) -> None:
        self.executor.save(folder, self.world.first)

    def copy_for_saving(self, folder: Path) -> list[Write]:
        self.world.at(f"copying for {folder.name}")
        return self.executor.copy_for_saving(folder, self.world.first)

    def load(self, folder: Path, version: int) -> None:
        self.executor.load(folder)
        self.publish(version)

    def close(self) -> None:
        self.executor.close()
        if self.trace is not None:
            self.trace.close()

    def _at(self, stage: Stage, iteration: int) -> None:
        self.iteration = iteration
        self.world.at(f"step {iteration}, {stage.name}")

    def _ranks_of(self, stage: Stage) -> int:
        return self.generating.get(str(stage.role), self.world.size) if stage.kind is Kind.GENERATE else self.world.size

    def _known_everywhere(self, stage: Stage, table: Shard) -> bool:
        """True where a compute stage reads index columns alone: each rank then computes it for all rows."""
        inputs = [column.name for column in self.flow.inputs.get(stage.name, ())]
        return stage.kind is Kind.COMPUTE and stage.role is None and all(name in table.index for name in inputs)

    def _needed_from(self, stage: Stage) -> list[str]:
        """Columns that this stage or a later one reads; the others stay behind when rows move."""
        later = self.flow.stages[self.flow.stages.index(stage) :]
        return [column.name for s in later for column in self.flow.inputs[s.name]]

    def _execute(
        self, stage: Stage, rows: Rows, sums: Sums, totals: Mapping[str, Tensor] | None, stop: EarlyStop | None = None
    ) -> Mapping[str, Column]:
        if totals is not None:
            return self.executor.apply(stage, rows, totals)
        beside = self._checked_beside(stage) if stage.type == "generate" else ()
        return self.executor.execute(stage, rows, sums, beside, stop)

    def _checked_beside(self, stage: Stage) -> list[Stage]:
        """Verify stages that find the rows where they were generated: from the next infer stage on these may be elsewhere."""
        later = self.flow.stages[self.flow.stages.index(stage) + 1 :] if stage in self.flow.stages else ()
        before_moves = list(takewhile(lambda other: other.kind is not Kind.INFER, later))
        return [verify for verify in checked_beside(self.flow, stage) if verify in before_moves]

    def _placed(self, stage: Stage, table: Shard) -> Shard:
        """The rows on ranks that can do this stage: inference is balanced, generation stays on its own ranks."""
        if stage.kind is Kind.INFER:
            return self._moved_with(stage, table, self._needed_from(stage), self._owner_by_update(table))
        ranks = self._ranks_of(stage)
        if len(table.owner) and int(table.owner.max()) >= ranks:
            return self._moved(stage.name, table, equal_shares(len(table.owner), ranks))
        return table

    def _owner_by_update(self, table: Shard) -> Tensor:
        """Owners that are balanced in each update that the rows will be trained in, so that they need not move again."""
        index, owner = table.index, table.owner.clone()
        rows = self.config.trainer.rows_per_update or len(index)
        if len(index) % rows:
            rows = len(index)
        updates = update_plan(
            index["group"].tolist(), index["sample"].tolist(), rows_per_update=rows, epochs=1, seed=self.config.seed,
            iteration=self.iteration,
        )  # fmt: skip
        for update in updates:
            owner[update] = self._balanced(table.take(update))
        return owner

    def _balanced(self, table: Shard, whole_groups: bool = False) -> Tensor:
        groups = table.index["group"].tolist() if whole_groups else None
        return balanced_owners(table.index["length"].tolist(), table.owner, self.world.size, groups)

    def _moved_with(self, stage: Stage, table: Shard, needed: Sequence[str], owner: Tensor) -> Shard:
        """The rows on `owner`, in place or moved with the columns `needed` alone."""
        if torch.equal(owner, table.owner):
            return table
        return self._moved(stage.name, replace(table, payload=only_present(table.payload, needed)), owner)

    def _moved(self, edge: str, table: Shard, owner: Tensor) -> Shard:
        key = Key(self.iteration, edge)
        with self._waiting(edge):
            self.buffer.put(key, table.payload, table.owner, owner)
        return replace(table, owner=owner, payload=self.buffer.take(key))

    def _gathered(self, table: Shard, columns: Mapping[str, Column], own: Sums, sums: Sums) -> Shard:
        """The table with columns that each rank computed for its rows: index columns go to everybody, with all sums."""
        new = Rows(columns)
        about: dict[str, Any] = {"sums": own.pairs(), "interrupted": self.interrupts.asked}
        with self._waiting("index columns"):
            found = self.world.gather("index columns", message(about, new.index))
        parts = [parsed(part) for part in found]
        self.interrupts.agree(any(about["interrupted"] for about, _ in parts))
        for about, _ in parts:
            sums.merge(Sums(about["sums"]))
        order = torch.cat([(table.owner == rank).nonzero().flatten() for rank in range(self.world.size)]).argsort()
        everywhere = Rows.cat([rows for _, rows in parts])
        index = columns_of(everywhere.take(order)) if len(everywhere) else {}
        return replace(table, index=table.index.with_columns(index), payload=joined(table.payload, new.payload))

    def _totals(self, stage: Stage, rows: Rows) -> dict[str, Tensor]:
        """The sums of a stage of scope batch, added in the order of ranks; a rank without rows has none."""
        own = self.executor.sums(stage, rows) if len(rows) else {}
        parts = self.world.gather("sums over the batch", message({}, Rows({n: t[None] for n, t in own.items()})))
        found = [rows for _, rows in map(parsed, parts) if len(rows)]
        return {name: torch.stack([rows[name][0] for rows in found]).sum(0) for name in found[0]} if found else {}

    def _all(self, about: dict[str, Any]) -> list[dict[str, Any]]:
        """What every rank says."""
        return [found for found, _ in map(parsed, self.world.gather("a word", message(about, Rows({}))))]

    @contextmanager
    def _working(self, stage: Stage, rows: Rows) -> Iterator[Done]:
        """Around the work on rows: it is traced, and a failure can name them."""
        self.world.rows = named_rows(rows)
        with (
            self._span(stage.role or "compute", stage.name, len(rows), tokens_of(rows)) as done,
            self.world.supervised("what ranks compute together"),
        ):
            yield done
        self.world.rows = ""

    @contextmanager
    def _waiting(self, purpose: str) -> Iterator[None]:
        with self._span("ranks", purpose, 0, 0, "waiting"):
            yield

    @contextmanager
    def _span(self, role: str, stage: str, rows: int, tokens: int, state: State = "busy") -> Iterator[Done]:
        if self.trace is None:
            yield Done()
            return
        with self.trace.span(
            role, stage, self.iteration, rows=rows, tokens=tokens, version=self.version, state=state
        ) as done:  # fmt: skip
            yield done


def message(about: Mapping[str, Any], index: Rows) -> bytearray:
    """A few words and index columns as bytes."""
    return join([json.dumps(about).encode(), *encode(index)])


def parsed(found: memoryview) -> tuple[dict[str, Any], Rows]:
    """The reverse of `message`."""
    words, *frames = split(found)
    return json.loads(bytes(words)), decode(frames)
