"""The stage part of a pool's process: runs stages, keeps the rows that it has written, and sends rows to other workers.

driver ──perform──▶ one call after the other
worker of the same pool    ◀──all-to-all of the process group──▶ rows
worker of another pool     ──fetch──▶ rows in chunks, by Ray's object store, also while a call runs
"""

import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.process_groups import address_towards, all_gather_bytes, group_between
from braidrl.cluster.world import World
from braidrl.data.codec import decode, encode, pack_rows, unpack_rows
from braidrl.data.messages import join, pack_message, split, unpack_message
from braidrl.data.rows import Column, Rows, Uid, merged_rows, named_rows, tokens_of
from braidrl.errors import UserError, no_room
from braidrl.flow import Stage
from braidrl.flow.compute import computed, summed
from braidrl.observe.metrics import Sums
from braidrl.observe.rollouts import part_path
from braidrl.observe.trace import traced
from braidrl.runtimes.executor import checked
from braidrl.runtimes.generating.early_stop import EarlyStop, Segment
from braidrl.runtimes.hybrid.handles import CallResult, Numbers, Part, columns_read
from braidrl.runtimes.hybrid.pool_worker import PoolWorker
from braidrl.runtimes.hybrid.protocols import register
from braidrl.runtimes.row_store import TEXT_COLUMNS, Origin
from braidrl.training.objective import UpdateCounts

FETCHED_ROWS = 256
"""Rows in one message between workers of different pools."""
Wanted = tuple[int, int, Numbers, tuple[str, ...]]
"""Rows that a worker keeps under a key: the worker, the key, the rows' numbers, and the payload columns, or () for all columns."""


class StageFailure(Exception):
    """Raised in a worker; its text holds everything, since the exception behind it may not be serializable."""


class HybridWorker(PoolWorker):
    """Runs the stages of its roles. Calls come through `perform`, in the driver's order."""

    def perform(self, method: str, released: Sequence[int], count: int, *values: Any) -> CallResult:
        """Call a method by name, after rows under the keys `released` are freed. `values` are its `count` arguments, then the
        answers of earlier calls that hold the arguments' rows.

        Raises UserError if the method raised it, and StageFailure for any other error, also if rows did not arrive.
        """
        for key in released:
            self.kept.pop(key, None)
        self.call.answers = values[count:]
        self.call.doing = (self.spec.pool.name, method, Part())
        try:
            answer = getattr(self, method)(*values[:count])
        except UserError:
            raise
        except Exception as error:
            role, doing, part = self.call.doing
            who = f"{role} rank {self.spec.rank}"
            if full := no_room(error, "RUN"):
                raise UserError(f"{who} failed in {doing}: {full}") from None
            raise StageFailure(f"{who} failed in {doing}{named_rows(part.uids())}:\n{traceback.format_exc()}") from None
        return answer if isinstance(answer, CallResult) else CallResult(result=answer)

    def fetch(self, key: int, rows: Numbers, columns: tuple[str, ...]) -> list[Numbers]:
        """Return payload columns, or without names all columns, of some rows (n,) of the call `key`, encoded as arrays, which Ray
        copies only once.
        """
        return [np.frombuffer(frame, dtype=np.uint8) for frame in encode(self._own(key, rows, columns))]

    def give(self, beside: bool) -> None:
        """Send rows to other ranks of the pool, `beside` if they need them for a call beside others; this rank needs none."""
        self._collect((), True, beside)

    def make(self, origin: Origin, key: int) -> CallResult:
        """Read rows from data or a file, and keep them."""
        self.call.doing = (self.spec.pool.name, f"reading {type(origin).__name__}", Part())
        rows = self.kept[key] = self.rows.make(origin)
        return CallResult(pack_rows(rows.index), tuple(rows.payload), self.spec.number, key)

    @register(protocol="DP")
    def execute(
        self, part: Part, stage: Stage, iteration: int, key: int, totals: Mapping[str, Tensor] | None = None,
        segment: Segment | None = None, uids: Sequence[Uid] = (),
    ) -> CallResult:  # fmt: skip
        """Keep the columns that a stage writes; for a batch-scope stage `totals` are its sums over all rows.

        In a wave of a `segment` with the rows `uids`, rows of groups that are not needed end early.
        """
        if totals is not None:
            run = lambda rows, _: computed(stage, rows, totals) if len(rows) else {}  # noqa: E731
            return self._write(part, stage, iteration, key, run)
        stop = None
        if segment is not None:
            if self.notices is not None:
                self.notices.begin(str(key))
            stop = EarlyStop(segment, self.flow, uids, self.notices)
        return self._write(part, stage, iteration, key, partial(self.executor.run, stage, stop=stop))

    @register(protocol="DP")
    def sums(self, part: Part, stage: Stage, iteration: int) -> CallResult:
        """Return this part's sums of a batch-scope stage."""
        return self._compute(part, stage, iteration, lambda rows, _: summed(stage, rows) if len(rows) else {})

    def call_own(self, stage: Stage, iteration: int, key: int, *arguments: Any) -> CallResult:
        """Call a method of the user's class for a role, with rows in place of a part, and keep the columns that it writes.

        A rank without rows is left out, unless the role's ranks compute collectively.
        """
        call = partial(self.executor.own_method(stage), **stage.settings)
        self.executor.residency.before(stage)
        if not (arguments and isinstance(arguments[0], Part)):
            return CallResult(result=call(*arguments))
        part, *more = arguments
        if stage.writes:
            return self._write(part, stage, iteration, key, lambda rows, _: checked(stage, call(rows, *more)))
        if not len(part) and not self.executor.is_collective(stage):
            self._gather(part, stage, iteration)
            return CallResult()
        return self._compute(part, stage, iteration, lambda rows, _: call(rows, *more))

    @register(protocol="DP")
    def update(self, part: Part, counts: UpdateCounts, stage: Stage, iteration: int) -> CallResult:
        """Make one optimizer step with the other ranks, each on its own rows; rank 0 returns the global counts."""
        train, first = self.executor.train, self.spec.rank == 0
        answer = self._compute(
            part, stage, iteration,
            lambda rows, sums: train(stage, [nullcontext((counts, rows))], iteration, sums, len(rows), counted=first),
        )  # fmt: skip
        if self.world.group is None:
            return answer
        every = all_gather_bytes(pack_message(Sums(answer.sums).pairs()), self.world.group)
        together = Sums().merge(*(Sums(unpack_message(own)) for own in every))
        return replace(answer, sums=together.pairs() if first else {})

    @register(protocol="ONE_TO_ALL")
    def copy_weights(self, stage: Stage) -> None:
        """Move the weights of one role of the pool towards those of another."""
        self.executor.copy_weights(stage)

    @register(protocol="ONE_TO_ALL")
    def publish(self, version: int) -> None:
        self.executor.publish(version)
        self.version = version

    @register(protocol="ALL_TO_ALL")
    def record(self, path: Path, part: Part, added: Part) -> None:
        """Write rows, with the columns of `added` that they lack, as this rank's part of a recording."""
        rows, later = self._rows_of(part, None), self._rows_of(added, None)
        if len(rows):
            self.rows.record(part_path(path, self.spec.rank), rows, later)

    @register(protocol="ALL_TO_ALL")
    def texts(self, part: Part) -> CallResult:
        rows = self._rows_of(part, TEXT_COLUMNS)
        return CallResult(result=[list(text) for text in self.rows.row_texts(rows)])

    def keep(self, path: Path, part: Part) -> None:
        """Write rows as this rank's part of a checkpoint folder, beside another call."""
        self.rows.save(path / f"{self.spec.rank:05}", self._rows_of(part, None, beside=True))

    def _write(
        self, part: Part, stage: Stage, iteration: int, key: int, run: Callable[[Rows, Sums], Mapping[str, Column]]
    ) -> CallResult:
        """Keep the result of `run`. A rank without rows is left out if no other rank waits for it."""
        if not len(part) and not self.executor.is_collective(stage):
            self._gather(part, stage, iteration)
            return CallResult()
        answer = self._compute(part, stage, iteration, run)
        rows = self.kept[key] = Rows(answer.result)
        index, names = pack_rows(rows.index), tuple(rows.payload)
        return CallResult(index, names, self.spec.number, key, answer.sums, answer.seconds)

    def _compute(self, part: Part, stage: Stage, iteration: int, run: Callable[[Rows, Sums], Any]) -> CallResult:
        """Return the result of `run` for the rows of a part, its metric sums, and its seconds."""
        rows, sums, role = self._gather(part, stage, iteration), Sums(), stage.role or "compute"
        start = time.perf_counter()
        with traced(self.trace, role, stage.name, iteration, rows=len(rows), version=self.version) as done:
            result = run(rows, sums)
            done.tokens = tokens_of(Rows(result) if "length" in stage.writes and result else rows)
        return CallResult(result=result, sums=sums.pairs(), seconds=time.perf_counter() - start)

    def _gather(self, part: Part, stage: Stage, iteration: int) -> Rows:
        """Return the part's rows with the columns that the stage may read."""
        self.call.doing = (stage.role or self.spec.pool.name, f"{stage.name} (iteration {iteration})", part)
        role = stage.role or "compute"
        with traced(self.trace, role, stage.name, iteration, rows=len(part), state="waiting"):
            return self._rows_of(part, columns_read(stage))

    def _rows_of(self, part: Part, reads: frozenset[str] | None, beside: bool = False) -> Rows:
        """Return the rows of a part with their index columns and the payload to read; None reads all, index columns included.

        `beside` is for a call beside others. Raises TimeoutError naming the late workers.
        """
        came = {(answer.worker, answer.key): answer for answer in self.call.answers}
        segments, places, wanted = [], [], list[Wanted]()
        for key, known, workers, numbers in part.kept:
            for worker in np.unique(workers[workers >= 0]).tolist():
                positions = (workers == worker).nonzero()[0]
                rows, columns = numbers[positions], known
                if columns is None:
                    answer = came[worker, key]
                    columns = answer.columns
                    index = unpack_rows(answer.index).take(torch.from_numpy(rows))
                    segments.append((torch.from_numpy(positions), index))
                named = () if reads is None else tuple(name for name in columns if name in reads)
                if named or reads is None:
                    places.append(torch.from_numpy(positions))
                    wanted.append((worker, key, rows, named))
        segments += zip(places, self._collect(wanted, part.together, beside), strict=True)
        if not part.size:
            return Rows({})
        given = (torch.arange(part.size), unpack_rows(part.index))
        # If all columns are read, the driver's own take precedence; else running outputs come after the given ones.
        return merged_rows(part.size, [*segments, given] if reads is None else [given, *segments])

    def _collect(self, wanted: Sequence[Wanted], together: bool, beside: bool) -> list[Rows]:
        """Return kept rows: from here, or by the pool's process group if its ranks exchange rows `together` (`beside` others by a
        second group), else by Ray in chunks.
        """
        world = self.world if together and self.world.size > 1 else None
        if world and beside and self.beside is None:
            assert self.store is not None and self.meeting is not None
            store, address = dist.PrefixStore("beside", self.store), address_towards(self.meeting.host)
            group = group_between(store, world.rank, world.size, self.spec.limit_s, False, address)
            self.beside = World(world.rank, world.size, group, dist.PrefixStore("places", store))
            self.beside.at("a call beside others")
        world = self.beside if world and beside else world
        first = self.spec.number - self.spec.rank
        asked: list[list[Wanted]] = [[] for _ in range(world.size if world else 0)]
        begun: dict[int, list[Any]] = {}
        late: dict[Any, str] = {}
        for n, (worker, key, rows, columns) in enumerate(wanted):
            if worker == self.spec.number:
                continue
            if 0 <= worker - first < len(asked):
                asked[worker - first].append(wanted[n])
                continue
            if worker not in self.peers:
                self.peers[worker] = ray.get_actor(f"{self.spec.family}-{worker}")
            fetch = self.peers[worker].fetch.options(concurrency_group="rows")
            edges = range(0, len(rows), FETCHED_ROWS)
            begun[n] = [fetch.remote(key, rows[edge : edge + FETCHED_ROWS], columns) for edge in edges]
            late |= dict.fromkeys(begun[n], self.spec.peers[worker])
        # The exchange is collective: a rank that needs nothing takes part too.
        exchanged = [iter(rows) for rows in self._exchange(world, asked)] if world is not None else []
        try:
            frames = dict(zip(late, ray.get(list(late), timeout=self.spec.limit_s), strict=True))
        except ray.exceptions.GetTimeoutError:
            names = {late[future] for future in ray.wait(list(late), num_returns=len(late), timeout=0)[1]}
            raise TimeoutError(f"waited {self.spec.limit_s:g} s for rows of {', '.join(sorted(names))}") from None
        found = []
        for n, (worker, key, rows, columns) in enumerate(wanted):
            if worker == self.spec.number:
                found.append(self._own(key, rows, columns))
            elif n in begun:
                found.append(Rows.cat([decode([memoryview(frame) for frame in frames[ref]]) for ref in begun[n]]))
            else:
                found.append(next(exchanged[worker - first]))
        return found

    def _exchange(self, world: World, wanted: Sequence[Sequence[Wanted]]) -> list[list[Rows]]:
        """Ask each rank for the rows in its list, answer the other ranks, and return the rows of each rank's list."""
        requests = [[(key, rows.astype(np.int64).tobytes(), names) for _, key, rows, names in own] for own in wanted]
        asked = world.exchange("the rows that ranks need", [pack_message(own) for own in requests])
        replies = [
            [join(encode(self._own(key, np.frombuffer(rows, np.int64), tuple(columns)))) for key, rows, columns in own]
            for own in map(unpack_message, asked)
        ]
        came = world.exchange("rows of the pool", [join(reply) if reply else bytearray() for reply in replies])
        return [[unpack_rows(packed) for packed in split(message)] if len(message) else [] for message in came]

    def _own(self, key: int, rows: Numbers, columns: tuple[str, ...]) -> Rows:
        kept = self.kept[key].only(columns) if columns else self.kept[key]
        everything = len(rows) == len(kept) and bool((rows == np.arange(len(rows))).all())
        return kept if everything else kept.take(torch.tensor(rows))
