"""A worker: one rank of all roles of a pool. It loads their models, runs their stages, and keeps the rows that it has
written.

driver ──perform──▶ one call after the other
other workers ──fetch──▶ rows in chunks, by Ray's object store, also while a call runs
"""

import gc
import os
import secrets
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.pools import Pool
from braidrl.cluster.process_groups import address_towards, connect_store, group_between, open_store
from braidrl.cluster.world import World, world_at
from braidrl.config import parse_config
from braidrl.data.codec import decode, encode, pack_rows, unpack_rows
from braidrl.data.curricula import Units, units_of
from braidrl.data.rows import Column, Rows, merged_rows, named_rows, tokens_of
from braidrl.errors import UserError, WorkerError, no_room
from braidrl.flow import Kind, Stage
from braidrl.flow.compute import checked, computed, summed
from braidrl.importing import OBJECTS_BETWEEN_COLLECTIONS
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.observe.rollouts import merge_parts, part_path
from braidrl.observe.trace import TraceWriter, traced
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.verification import EarlyStop, Segment
from braidrl.runtimes.hybrid.handles import CallResult, Numbers, Part, columns_read
from braidrl.runtimes.hybrid.protocols import register
from braidrl.runtimes.prepare.run_data import Prepared, with_data
from braidrl.runtimes.prepare.setup import set_up_torch, without_data
from braidrl.runtimes.row_store import TEXT_COLUMNS, Origin, RowStore, RowText
from braidrl.runtimes.saving.checkpoints import BackgroundWriter
from braidrl.training.objective import Accumulated, UpdateCounts
from braidrl.training.optimizer import StepOverrides
from braidrl.training.parallel.layouts import DataParallel

FETCHED_ROWS = 256
"""Rows of each key in one message between workers."""
Wanted = tuple[int, int, Numbers, tuple[str, ...]]
"""Rows that a worker keeps under a key: the worker, the key, the rows' numbers, and the payload columns, () for all."""
Meeting = tuple[str, int, str]
"""Host and port of a store, and the key prefix of the ranks that use it."""


@dataclass(frozen=True)
class RunOrder:
    """The description of a run for all workers: each worker derives its part from this and its number."""

    settings: dict[str, Any]
    """The configuration's values that are not defaults."""
    train: bool
    """False to evaluate alone."""
    folder: Path | None
    """The run's folder, for files of workers."""
    family: str
    """Prefix of the names of the run's actors; their numbers follow it."""
    sizes: Mapping[str, int] = field(default_factory=dict)
    """The number of workers of each pool now, which is smaller than the configured one after the loss of a node."""


def sign_of(prepared: Prepared) -> int:
    """Return a hash of the stages; workers and driver must derive the same stages from a configuration."""
    return zlib.crc32(repr((*prepared.flow.stages, *prepared.evaluation.stages)).encode())


class HybridWorker:
    """One rank of all roles of a pool. Calls come through `perform`, in the driver's order."""

    def __init__(self) -> None:
        gc.freeze()  # Imported objects are not garbage.
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
        # State of the call in this thread.
        self.call = threading.local()
        self.resources = ExitStack()
        self.writing = BackgroundWriter()
        self.version = 0
        self.number, self.rank, self.pool = -1, 0, Pool(("worker",), 1)
        self.world = World()
        self.trace: TraceWriter | None = None
        self.meeting: dist.TCPStore | None = None
        self.rows_by_key: dict[int, Rows] = {}
        self.accumulated: dict[str, Accumulated] = {}
        """The objectives of each role's next optimizer step, of a session."""
        self.peers: dict[int, Any] = {}
        """Other workers of the run, found by name on first use."""
        self.exchanges: dict[str, dist.ProcessGroup] = {}
        """Process groups between the pools that train a role and generate for it, by role."""

    def close(self) -> None:
        self.resources.close()

    def perform(self, method: str, released: Sequence[int], count: int, *values: Any) -> CallResult:
        """Call a method by name with the first `count` of `values`; the rest are answers of earlier calls that hold the
        arguments' rows.

        Rows under the keys `released` are freed before. Any error except UserError becomes a WorkerError with the full
        text, since the original exception may not be serializable.
        """
        for key in released:
            self.rows_by_key.pop(key, None)
        self.call.answers = values[count:]
        self.call.doing = (self.pool.name, method, Part())
        try:
            answer = getattr(self, method)(*values[:count])
        except UserError:
            raise
        except Exception as error:
            role, doing, part = self.call.doing
            who = f"{role} rank {self.rank}"
            if full := no_room(error, "RUN"):
                raise UserError(f"{who} failed in {doing}: {full}") from None
            raise WorkerError(f"{who} failed in {doing}{named_rows(part.uids())}:\n{traceback.format_exc()}") from None
        return answer if isinstance(answer, CallResult) else CallResult(result=answer)

    @register(protocol="ALL_TO_ALL")
    def join_run(self, number: int, order: RunOrder) -> int:
        """Derive this worker's part from the run's configuration; return the hash of its stages.

        Raises UserError for a configuration that cannot run here.
        """
        config = parse_config(order.settings)
        self.prepared, self.order, self.limit_s = without_data(config, order.train), order, config.cluster.wait_limit_s
        # Numbers run from pool to pool.
        pool_ranks = [(pool, rank) for pool in self.prepared.deployment.pools for rank in range(pool.workers)]
        self.names = [f"{pool.name} rank {rank}" for pool, rank in pool_ranks]
        self.number, (pool, self.rank) = number, pool_ranks[number]
        self.pool = replace(pool, workers=order.sizes.get(pool.name, pool.workers))
        set_up_torch(config)
        return sign_of(self.prepared)

    @register(protocol="RANK_ZERO")
    def rendezvous(self) -> Meeting:
        """Open the store for the ranks of the pool; return its address and their key prefix."""
        address = ray.util.get_node_ip_address()
        self.meeting = self.meeting or open_store(address, self.limit_s)
        return address, self.meeting.port, secrets.token_hex(16)

    @register(protocol="ONE_TO_ALL")
    def join_process_group(self, meeting: Meeting) -> None:
        """Form a process group with the other ranks of the pool, given the address of their store."""
        host, port, secret = meeting
        store, cuda = connect_store(host, port, self.limit_s, secret), torch.cuda.is_available()
        self.world = world_at(store, self.rank, self.pool.workers, self.limit_s, cuda, host)
        self.resources.callback(self.world.close)

    @register(protocol="ONE_TO_ALL")
    def read_data(self) -> list[tuple[int, str, Units]]:
        """Read a share of the run's data with the pool's other ranks; return prompts, a message and a curriculum's
        units per source.
        """
        self.prepared = with_data(self.prepared, ranks=self.world)
        sources = self.prepared.sources if self.rank == 0 else []
        units = units_of(self.prepared.config, sources)
        return [(len(source), source.report(), of) for source, of in zip(sources, units, strict=True)]

    @register(protocol="ONE_TO_ALL")
    def load_models(self) -> tuple[int, str, str]:
        """Load the pool's roles, with engines for generating ones; return this process's id, Ray's node id, and the
        kind of device.
        """
        prepared, pool, folder = self.prepared, self.pool, self.order.folder
        self.call.doing = (pool.name, "loading its models", Part())
        self.flow, self.rows = prepared.deployment.flow, RowStore(prepared)
        if folder is not None:
            self.trace = TraceWriter(folder, f"{pool.name}-{self.rank}")
            self.resources.callback(self.trace.close)
        ranks = DataParallel(self.world.group)
        self.executor = StageExecutor(prepared, pool.models, Progress(shown=False), pool.generating, ranks)
        self.resources.callback(self.executor.close)
        self.executor.generation.moves.trace = self.trace
        return os.getpid(), ray.get_runtime_context().get_node_id(), self.executor.usage.device.type

    @register(protocol="ONE_TO_ALL")
    def exchange_weights(self, role: str, meeting: Meeting, first: int, size: int) -> None:
        """Plan the transfer of a role's weights between the pools that train and generate: `size` ranks, this pool's
        from `first` on.
        """
        host, port, secret = meeting
        if role in self.exchanges:
            # Some of its ranks have ended: waiting for them would time out.
            self.exchanges.pop(role).abort()
        store = connect_store(host, port, self.limit_s, secret)
        cuda = self.executor.usage.device.type == "cuda"
        group = group_between(store, first + self.rank, size, self.limit_s, cuda, address_towards(host))
        self.exchanges[role] = group
        self.executor.generation.exchange_weights(role, self.executor.workers.get(role), DataParallel(group))

    @register(protocol="ONE_TO_ALL")
    def forget_rows(self) -> None:
        """Wait for the running checkpoint; forget rows, unfinished checks, user methods' state, and other workers."""
        self.rows_by_key, self.peers, self.accumulated = {}, {}, {}
        self.executor.generation.checks.pending.clear()
        self.executor.methods.clear()
        self.writing.trouble()

    @register(protocol="ONE_TO_ALL")
    def save(self, folder: Path, copy: bool) -> None:
        """Write checkpoints; with `copy` make copies and start to write them. Rank 0 writes the replicated parts, and
        every rank its shards.
        """
        calls = self.executor.save(folder, self.rank == 0, copy)
        if copy:
            self.writing.begin(calls)

    @register(protocol="ONE_TO_ALL")
    def written(self) -> str:
        """Wait for the write that `save` started, and return its error, or an empty string."""
        return self.writing.trouble()

    @register(protocol="ONE_TO_ALL")
    def load(self, folder: Path) -> None:
        self.executor.load(folder)

    @register(protocol="ONE_TO_ALL")
    def make(self, origin: Origin, key: int) -> CallResult:
        """Read this rank's share of rows from data or a file, and keep them."""
        self.call.doing = (self.pool.name, f"reading {type(origin).__name__}", Part())
        rows = self.rows_by_key[key] = self.rows.make(origin, self.rank, self.pool.workers)
        return CallResult(pack_rows(rows.index), tuple(rows.payload), self.number, key)

    @register(protocol="DP")
    def execute(
        self,
        part: Part,
        stage: Stage,
        iteration: int,
        key: int,
        totals: Mapping[str, Tensor] | None = None,
        segment: Segment | None = None,
    ) -> CallResult:
        """Keep the columns that a stage writes; for a batch-scope stage `totals` are its sums over all rows.

        In a wave of a `segment`, rows of groups that are not needed end early.
        """
        if totals is not None:
            run = lambda rows, _: computed(stage, rows, totals) if len(rows) else {}  # noqa: E731
            return self._write(part, stage, iteration, key, run)
        if stage.kind is not Kind.GENERATE:
            return self._write(part, stage, iteration, key, partial(self.executor.run, stage))
        stop = EarlyStop(
            segment, self.flow, part.uids(), self.executor.config.rollout.samples_per_prompt, self.world, key
        )
        written = self._write(part, stage, iteration, key, partial(self.executor.run, stage, stop=stop))
        stop.close()
        return written

    @register(protocol="DP")
    def sums(self, part: Part, stage: Stage, iteration: int) -> CallResult:
        return self._compute(part, stage, iteration, lambda rows, _: summed(stage, rows) if len(rows) else {})

    def call_user_method(self, stage: Stage, iteration: int, key: int, *arguments: Any) -> CallResult:
        """Call a user's method for a role, with rows in place of a part, and keep the columns that it writes."""
        call = partial(self.executor.user_method(stage), **stage.settings)
        self.executor.residency.before(stage)
        if not (arguments and isinstance(arguments[0], Part)):
            return CallResult(result=call(*arguments))
        part, *more = arguments
        if stage.writes:
            return self._write(
                part, stage, iteration, key, lambda rows, _: checked(stage, call(rows, *more), len(rows))
            )
        if not len(part) and not self.executor.is_collective(stage):
            return CallResult()
        return self._compute(part, stage, iteration, lambda rows, _: call(rows, *more))

    @register(protocol="DP")
    def update(self, part: Part, counts: UpdateCounts, stage: Stage, iteration: int) -> CallResult:
        """Make one optimizer step with the other ranks, each on its rows; rank 0 counts shared quantities."""
        train, first = self.executor.train, self.rank == 0
        return self._compute(
            part,
            stage,
            iteration,
            lambda rows, sums: train(stage, [nullcontext((counts, rows))], iteration, sums, len(rows), counted=first),
        )

    @register(protocol="DP")
    def forward_backward(self, part: Part, counts: UpdateCounts, stage: Stage, iteration: int) -> CallResult:
        """Accumulate gradients of this rank's rows for the role's next optimizer step."""
        objective = self.executor.objective(stage)
        accumulated = self.accumulated.setdefault(objective.role, Accumulated())

        def run(rows: Rows, sums: Sums) -> None:
            with self.executor.progress.stage(stage.name, len(rows)) as bar:
                losses = self.executor.forward_backward(accumulated.own_sums(objective), rows, sums, bar)
            accumulated.add(objective, losses, counts)

        return self._compute(part, stage, iteration, run)

    @register(protocol="ONE_TO_ALL")
    def optim_step(self, stage: Stage, iteration: int, overrides: StepOverrides) -> CallResult:
        """Make one optimizer step of the accumulated objectives with the other ranks."""
        role, sums, start = str(stage.role), Sums(), time.perf_counter()
        accumulated, first = self.accumulated.pop(role), self.rank == 0
        with traced(self.trace, role, stage.name, iteration, version=self.version):
            self.executor.optim_step(role, accumulated, iteration, sums, first, overrides)
        return CallResult(sums=sums.pairs(), seconds=time.perf_counter() - start)

    @register(protocol="ONE_TO_ALL")
    def copy_weights(self, stage: Stage) -> None:
        self.executor.copy_weights(stage)

    @register(protocol="ONE_TO_ALL")
    def publish(self, version: int) -> None:
        self.executor.publish(version)
        self.version = version

    @register(protocol="ALL_TO_ALL")
    def record(self, path: Path, part: Part, added: Part) -> None:
        """Write rows, with the columns of `added` that they lack, as this rank's part of a recording."""
        if len(part):
            rows, later = self._rows_of(part, None), self._rows_of(added, None)
            self.rows.record(part_path(path, self.rank), rows, later)

    def merge_recorded(self, path: Path, number: int, ranks: Sequence[int]) -> list[str]:
        """Make the parts of ranks on this node file `number` of a recording; return its columns."""
        return merge_parts(path, number, [part_path(path, rank) for rank in ranks])

    @register(protocol="ALL_TO_ALL")
    def texts(self, part: Part) -> list[RowText]:
        return self.rows.row_texts(self._rows_of(part, TEXT_COLUMNS))

    @register(protocol="ALL_TO_ALL")
    def keep(self, path: Path, part: Part) -> None:
        """Write rows as this rank's part of a checkpoint folder."""
        if len(part):
            self.rows.save(path / f"{self.rank:05}", self._rows_of(part, None))

    def fetch(self, requests: Sequence[tuple[int, Numbers, tuple[str, ...]]]) -> list[list[Numbers]]:
        """Return payload columns, or without names all, of some rows (n,) kept under each key: as arrays, which Ray
        copies only once.
        """
        return [
            [np.frombuffer(frame, dtype=np.uint8) for frame in encode(self._kept_rows(*request))]
            for request in requests
        ]

    def _write(
        self, part: Part, stage: Stage, iteration: int, key: int, run: Callable[[Rows, Sums], Mapping[str, Column]]
    ) -> CallResult:
        """Keep the result of `run`.

        A rank without rows is skipped if no other rank waits for it.
        """
        if not len(part) and not self.executor.needs_all(stage):
            return CallResult()
        answer = self._compute(part, stage, iteration, run)
        rows = self.rows_by_key[key] = Rows(answer.result)
        index, names = pack_rows(rows.index), tuple(rows.payload)
        return CallResult(index, names, self.number, key, answer.sums, answer.seconds)

    def _compute(self, part: Part, stage: Stage, iteration: int, run: Callable[[Rows, Sums], Any]) -> CallResult:
        """Return the result of `run` for a part's rows with the columns that the stage may read, its metric sums, and
        its seconds.
        """
        self.call.doing = (stage.role or self.pool.name, f"{stage.name} (iteration {iteration})", part)
        sums, role = Sums(), stage.role or "compute"
        with traced(self.trace, role, stage.name, iteration, rows=len(part), state="waiting"):
            rows = self._rows_of(part, columns_read(stage))
        start = time.perf_counter()
        with traced(self.trace, role, stage.name, iteration, rows=len(rows), version=self.version) as done:
            result = run(rows, sums)
            done.tokens = tokens_of(Rows(result) if "length" in stage.writes and result else rows)
        return CallResult(result=result, sums=sums.pairs(), seconds=time.perf_counter() - start)

    def _rows_of(self, part: Part, reads: frozenset[str] | None) -> Rows:
        """Return a part's rows with index columns and the payload to read; None reads all.

        Raises TimeoutError with the names of late workers.
        """
        if not len(part):
            return Rows({})
        came = {(answer.worker, answer.key): answer for answer in self.call.answers}
        segments, targets, to_fetch = list[tuple[Tensor, Rows]](), list[Tensor](), list[Wanted]()
        for key, index_columns, workers, numbers in part.kept:
            for worker in np.unique(workers[workers >= 0]).tolist():
                positions = (workers == worker).nonzero()[0]
                rows, columns = numbers[positions], index_columns
                if columns is None:
                    answer = came[worker, key]
                    columns = answer.columns
                    index = unpack_rows(answer.index).take(torch.from_numpy(rows))
                    segments.append((torch.from_numpy(positions), index))
                named = () if reads is None else tuple(name for name in columns if name in reads)
                if named or reads is None:
                    targets.append(torch.from_numpy(positions))
                    to_fetch.append((worker, key, rows, named))
        segments += zip(targets, self._collect(to_fetch), strict=True)
        local = (torch.arange(len(part)), unpack_rows(part.index))
        # If all columns are read, the driver's take precedence; otherwise running outputs come last.
        return merged_rows(len(part), [*segments, local] if reads is None else [local, *segments])

    def _collect(self, requests: Sequence[Wanted]) -> list[Rows]:
        """Return kept rows: local ones, and those of other workers, of all keys in one message, in chunks of rows."""
        fetched: list[list[Rows]] = [[] for _ in requests]
        messages: dict[tuple[int, int], list[tuple[int, int, Numbers, tuple[str, ...]]]] = {}
        for n, (worker, key, rows, names) in enumerate(requests):
            if worker == self.number:
                fetched[n].append(self._kept_rows(key, rows, names))
                continue
            for start in range(0, len(rows), FETCHED_ROWS):
                messages.setdefault((worker, start), []).append((n, key, rows[start : start + FETCHED_ROWS], names))
        started: dict[Any, str] = {}
        for (worker, _), parts in messages.items():
            if worker not in self.peers:
                self.peers[worker] = ray.get_actor(f"{self.order.family}-{worker}")
            fetch = self.peers[worker].fetch.options(concurrency_group="rows")
            started[fetch.remote([part[1:] for part in parts])] = self.names[worker]
        try:
            answers = ray.get(list(started), timeout=self.limit_s)
        except ray.exceptions.GetTimeoutError:
            late = {started[ref] for ref in ray.wait(list(started), num_returns=len(started), timeout=0)[1]}
            raise TimeoutError(f"waited {self.limit_s:g} s for rows of {', '.join(sorted(late))}") from None
        for parts, answer in zip(messages.values(), answers, strict=True):
            for (n, *_), frames in zip(parts, answer, strict=True):
                fetched[n].append(decode([memoryview(frame) for frame in frames]))
        return [Rows.cat(parts) for parts in fetched]

    def _kept_rows(self, key: int, rows: Numbers, columns: tuple[str, ...]) -> Rows:
        kept = self.rows_by_key[key]
        kept = kept.only([name for name in columns if name in kept]) if columns else kept
        everything = len(rows) == len(kept) and bool((rows == np.arange(len(rows))).all())
        return kept if everything else kept.take(torch.tensor(rows))
