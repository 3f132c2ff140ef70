"""Stages under way on workers: sent to a group, waited for when somebody needs what they write, forgotten when nobody does.

begin ──▶ Layer of chunks, at once        resolve ──▶ their index columns, when they are there
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from braidrl.data.rows import Column, Rows
from braidrl.flow import Stage
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.runtimes.hybrid.dispatch import Deal
from braidrl.runtimes.hybrid.group import Dealt, Future, Outgoing, WorkerGroup
from braidrl.runtimes.hybrid.handle import Chunk, Deferred, Handle, Layer, merged_column
from braidrl.runtimes.hybrid.parts import Answer, columns_read


@dataclass(eq=False)
class Work:
    """A stage under way on a group: its futures, what they write, and where its sums go."""

    stage: Stage
    group: WorkerGroup
    futures: list[Future]
    chunks: list[Chunk]
    sums: Sums


class Calls:
    """All that was begun on the worker groups of a run."""

    def __init__(self, groups: Sequence[WorkerGroup], progress: Progress) -> None:
        self.groups, self.progress = groups, progress
        self.group_of = {group.first + rank: group for group in groups for rank in range(group.mesh.size)}
        self.keys = itertools.count()
        self.forgotten: deque[tuple[int, int]] = deque()

    def begin(self, of: Deferred, table: Handle, group: WorkerGroup, deal: Deal, method: str, *more: Any) -> Layer:
        """Sends a stage that writes columns to a group; where they will be."""
        stage, key = of.stage, next(self.keys)
        rows = Dealt(table, deal, columns_read(stage))
        called: list[tuple[Outgoing, Future]] = group.call(method, rows, stage, of.iteration, key, *more)
        filled = [(part, future) for part, future in called if len(part)]
        chunks = [self.chunk(key, len(part), future, stage.writes) for part, future in filled]
        work = Work(stage, group, [future for _, future in called], chunks, of.sums)
        for chunk in chunks:
            chunk.work = work
        positions = [torch.as_tensor(part.positions) for part, _ in filled]
        return Layer.of(len(table), list(zip(positions, chunks, strict=True)))

    def chunk(self, key: int, size: int, future: Future, writes: tuple[str, ...]) -> Chunk:
        """A chunk whose worker forgets it when nobody here refers to it any more."""
        chunk = Chunk(future.worker, key, size, future, writes)
        weakref.finalize(chunk, self.forgotten.append, (future.worker, key)).atexit = False
        return chunk

    def resolve(self, table: Handle, names: frozenset[str] | None = None) -> None:
        """Waits for the index columns of the layers that write one of `names`, or of all."""
        for name in table.waiting_for(names):
            segments: dict[str, list[tuple[Tensor, Column]]] = {}
            for chunk, rows, positions in table.layers[name].pieces():
                for column, values in self._index_of(chunk).take(rows).items():
                    segments.setdefault(column, []).append((positions, values))
            merged = {column: merged_column(len(table), found) for column, found in segments.items()}
            arrived = {column: values for column, values in merged.items() if values is not None}
            table.settle(table.with_index(arrived, [name]))

    def _index_of(self, chunk: Chunk) -> Rows:
        """A chunk's index columns; waits for the stage that writes them."""
        if chunk.index is None:
            answers = zip(chunk.work.futures, self.answers(chunk.work), strict=True)
            wrote = [answer for future, answer in answers if future.size]
            for written, answer in zip(chunk.work.chunks, wrote, strict=True):
                written.columns, written.index = answer.columns, answer.rows()
            # In a ring with its work a chunk would be forgotten only when Python next looks for rings.
            chunk.work.chunks = []
        assert chunk.index is not None
        return chunk.index

    def answers(self, work: Work) -> list[Answer]:
        """Waits for a stage, shows its progress, and adds its sums."""
        with self.progress.stage(work.stage.name, sum(future.size for future in work.futures)) as bar:
            answers = work.group.wait(work.futures, lambda future: bar.update(future.size))
        for answer in answers:
            work.sums.merge(Sums(answer.sums))
        work.sums.add(f"time/{work.stage.name}", max((answer.seconds for answer in answers), default=0.0))
        return answers

    def everywhere(self, method: str, *arguments: Any) -> None:
        """Calls all workers of all groups and waits."""
        for group, futures in [(group, group.call(method, *arguments)) for group in self.groups]:
            group.wait(futures)

    def release(self) -> None:
        """Has workers told which chunks they can forget."""
        while self.forgotten:
            worker, key = self.forgotten.popleft()
            self.group_of[worker].release(worker, key)
