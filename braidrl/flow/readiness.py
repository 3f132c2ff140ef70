"""Which rows are ready for which stage: two bits per stage and row, written and consumed.

written    a stage's columns of a row are there           (a select writes a row by keeping it)
consumed   a consumer has the row, or is done with it     (a consumer is a stage, and an epoch where it trains)

ready for a stage  =  written by every stage that it waits for, and not consumed
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from braidrl.flow.flow import ADMISSION, Flow, is_optimized
from braidrl.flow.stage import Kind, Scope

Bits = NDArray[np.bool_]
Uid = tuple[int, int, int]


class Consumer(NamedTuple):
    """Who takes rows: a stage, in one of its epochs (always 0 but for training)."""

    stage: str
    epoch: int = 0


def waits_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """For each stage, the stages that must have written a row before it: writers of its columns, `after`, and earlier selects."""
    waits: dict[str, tuple[str, ...]] = {}
    selects: list[str] = []
    for stage in flow.stages:
        writers = [column.writer for column in flow.inputs[stage.name]]
        waits[stage.name] = tuple(dict.fromkeys([ADMISSION, *writers, *stage.after, *selects]))
        if stage.kind is Kind.SELECT:
            selects.append(stage.name)
    return waits


def weights_wait_for(flow: Flow) -> dict[str, tuple[str, ...]]:
    """For each stage that infers or trains, the stages that must be done with the whole batch before it uses or changes weights.

    They are those before it in the list with which it shares a role's weights that one of the two changes. For a train stage it is
    the first optimizer step that waits; accumulating gradients does not. Generation is left out: an engine has its own weights,
    and a runtime in which it shares the trainer's takes turns anyway.
    """
    users = {stage.name for stage in flow.stages if stage.kind in (Kind.INFER, Kind.TRAIN)}
    edges = [edge for edge in flow.edges if edge.weights is not None and edge.source in users]
    return {name: tuple(dict.fromkeys(e.source for e in edges if e.target == name)) for name in sorted(users)}


def ready_rows(written: Sequence[Bits], consumed: Bits) -> Bits:
    """Rows (R,) that are written in all of `written` and not consumed."""
    return np.logical_and.reduce([*written, ~consumed])


def complete_groups(ready: Bits, groups: NDArray[np.int64]) -> Bits:
    """Rows (R,) of the groups of which every row is ready; `groups` (R,) names the group of each."""
    _, group, size = np.unique(groups, return_inverse=True, return_counts=True)
    complete = np.bincount(group, weights=ready, minlength=len(size)) == size
    return complete[group]


def complete_sets(ready: Bits, sets: Iterable[Sequence[int]]) -> list[int]:
    """Numbers of the sets of row positions (updates, batches) of which every row is ready."""
    return [number for number, positions in enumerate(sets) if bool(ready[list(positions)].all())]


class StageProgress:
    """What every stage has written and consumed of the rows in work. Rows are named by uid and kept in the order of admission."""

    def __init__(self, flow: Flow, epochs: int = 1) -> None:
        """`epochs` are the passes of train stages over a batch."""
        self.flow = flow
        self.waits = waits_for(flow)
        self.consumers = [
            Consumer(stage.name, epoch)
            for stage in flow.stages
            for epoch in range(epochs if is_optimized(stage) else 1)
        ]
        self.uids: list[Uid] = []
        self.position: dict[Uid, int] = {}
        self.groups = np.empty(0, dtype=np.int64)
        self.written = {name: np.empty(0, dtype=np.bool_) for name in (ADMISSION, *(s.name for s in flow.stages))}
        self.consumed = {consumer: np.empty(0, dtype=np.bool_) for consumer in self.consumers}

    def admit(self, uids: Sequence[Uid]) -> None:
        """Rows are born. Raises ValueError for one that is known."""
        for uid in uids:
            if uid in self.position:
                raise ValueError(f"row {uid} is admitted twice")
            self.position[uid] = len(self.uids)
            self.uids.append(uid)
        self.groups = np.append(self.groups, np.array([group for _, group, _ in uids], dtype=np.int64))
        new = np.zeros(len(uids), dtype=np.bool_)
        self.written = {stage: np.append(bits, new) for stage, bits in self.written.items()}
        self.consumed = {consumer: np.append(bits, new) for consumer, bits in self.consumed.items()}
        self.written[ADMISSION][:] = True

    def write(self, stage: str, uids: Sequence[Uid]) -> None:
        """Notes that the stage's columns of these rows are there. Raises ValueError where they were: columns do not change."""
        positions = self._positions(uids)
        if self.written[stage][positions].any():
            raise ValueError(f"{stage} writes a row of {list(uids)[:4]}... for the second time")
        self.written[stage][positions] = True

    def consume(self, consumer: Consumer, uids: Sequence[Uid]) -> None:
        """Notes that a consumer has these rows. Raises ValueError where they are not ready for it."""
        positions = self._positions(uids)
        if not self._ready(consumer)[positions].all():
            raise ValueError(f"{consumer} takes a row of {list(uids)[:4]}... that is not ready for it")
        self.consumed[consumer][positions] = True

    def skip(self, stage: str, uids: Sequence[Uid]) -> None:
        """Notes that a stage leaves these rows out (`when`): nobody waits for it, and it takes none of them."""
        positions = self._positions(uids)
        self.written[stage][positions] = True
        self.consumed[Consumer(stage)][positions] = True

    def give_back(self, consumer: Consumer, uids: Sequence[Uid]) -> None:
        """Notes that a consumer lost these rows before it was done; they are ready again."""
        self.consumed[consumer][self._positions(uids)] = False

    def ready(self, consumer: Consumer, among: Iterable[Uid] | None = None) -> list[Uid]:
        """Rows that the consumer can take, in order: any (row scope), of complete groups, or nothing until all `among` are ready.

        `among` are the rows of one batch or update; a stage of batch scope needs it. Rows that are gone are ready for nobody.
        """
        ready = self._ready(consumer)
        scope = self.flow[consumer.stage].scope
        if scope is Scope.GROUP:
            ready = complete_groups(ready, self.groups)
        if among is None:
            if scope is Scope.BATCH:
                raise ValueError(f"{consumer.stage} sees a whole batch: say which rows are one")
            return [self.uids[position] for position in ready.nonzero()[0]]
        chosen = self._positions([uid for uid in among if uid in self.position])
        if scope is Scope.BATCH and not complete_sets(ready, [chosen]):
            return []
        return [self.uids[position] for position in sorted(chosen) if ready[position]]

    def is_written(self, stage: str, uids: Sequence[Uid]) -> bool:
        """True if the stage has written all of these rows."""
        return bool(self.written[stage][self._positions(uids)].all())

    def is_consumed(self, consumer: Consumer, uids: Sequence[Uid]) -> bool:
        """True if the consumer has taken all of these rows."""
        return bool(self.consumed[consumer][self._positions(uids)].all())

    def forget(self, uids: Iterable[Uid]) -> None:
        """Rows that are dropped, or that every stage is done with, leave."""
        keep = np.ones(len(self.uids), dtype=np.bool_)
        keep[self._positions(list(uids))] = False
        self.uids = [uid for position, uid in enumerate(self.uids) if keep[position]]
        self.position = {uid: position for position, uid in enumerate(self.uids)}
        self.groups = self.groups[keep]
        self.written = {stage: bits[keep] for stage, bits in self.written.items()}
        self.consumed = {consumer: bits[keep] for consumer, bits in self.consumed.items()}

    def _ready(self, consumer: Consumer) -> Bits:
        return ready_rows([self.written[stage] for stage in self.waits[consumer.stage]], self.consumed[consumer])

    def _positions(self, uids: Sequence[Uid]) -> list[int]:
        return [self.position[uid] for uid in uids]
