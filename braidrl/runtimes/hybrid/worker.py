"""A process of a pool: holds the models of its roles and the rows that it wrote, and hands rows to those who ask.

driver ──perform──▶ one call after the other      worker ──fetch──▶ its rows, also while a call runs
"""

from __future__ import annotations

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.notices import Notices
from braidrl.data.codec import decode, encode
from braidrl.data.rows import Column, Rows, tokens_of
from braidrl.errors import UserError
from braidrl.flow import Stage
from braidrl.models.parallel.replicated import DataParallel
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.observe.trace import Done, TraceWriter
from braidrl.placement.pools import Pool
from braidrl.rollout.requests import Uid
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.early_stop import EarlyStop, Needless, Segment
from braidrl.runtimes.generating.verification import checked_beside
from braidrl.runtimes.hybrid.failures import StageFailure, named_rows
from braidrl.runtimes.hybrid.parts import Answer, Numbers, Part, as_rows, assemble, columns_read, packed_rows
from braidrl.runtimes.prepare.setup import Prepared, set_up_torch
from braidrl.runtimes.saving.background import BackgroundWriter
from braidrl.runtimes.saving.row_store import Origin, with_added
from braidrl.transfer.protocols import register


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's place: its number among all workers, whose `names` it knows, its pool, its rank there; the folder for its trace."""

    number: int
    names: list[str]
    pool: Pool
    rank: int
    folder: Path | None
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.pool.name}-{self.rank}"


class HybridWorker:
    """One rank of all roles of a pool. Calls come through `perform` in the driver's order."""

    def __init__(self) -> None:
        self.chunks: dict[int, Rows] = {}
        self.ranks = DataParallel()
        self.notices: Notices | None = None
        # Of the call that a thread runs.
        self.call = threading.local()
        self.resources = ExitStack()
        self.trace: TraceWriter | None = None
        self.version = 0
        self.writing = BackgroundWriter()

    def perform(self, message: bytes, *answers: bytes) -> bytes:
        """Calls a method by name; `answers` are those of earlier calls that it needs. Raises StageFailure or UserError.

        The message also names chunks that nobody can ask for any more: they are forgotten first.
        """
        method, arguments, released = pickle.loads(message)
        for key in released:
            self.chunks.pop(key, None)
        self.call.asked = {}
        self.call.answers = [Answer.of(packed) for packed in answers]
        self.call.doing = (self.spec.pool.name, method, None)
        try:
            answer = getattr(self, method)(*arguments)
        except UserError:
            raise
        except Exception:
            role, doing, part = self.call.doing
            uids = part.uids() if part else ()
            story = f"{role} rank {self.spec.rank} failed in {doing}{named_rows(uids)}:\n{traceback.format_exc()}"
            raise StageFailure(story) from None
        return (answer if isinstance(answer, Answer) else Answer(result=answer)).packed()

    def fetch(self, key: int, rows: Numbers, columns: tuple[str, ...]) -> list[Numbers]:
        """The named columns of some rows of a chunk, encoded; as arrays, which Ray copies only once."""
        return [np.frombuffer(frame, dtype=np.uint8) for frame in encode(self._own(key, rows, columns))]

    def configure(self, spec: WorkerSpec, *peers: Any) -> None:
        """Takes a spec in a run, whose workers are `peers` by number."""
        self.spec, self.peers = spec, peers

    def close(self) -> None:
        """Ends the processes that check answers, and lets go of rows, files and ranks."""
        self.resources.close()
        self.trace = None
        self.chunks = {}
        self.ranks, self.notices = DataParallel(), None

    @register(protocol="RANK_ZERO")
    def rendezvous(self) -> tuple[str, int]:
        """Opens the store at which the ranks of the pool meet; its address."""
        address = ray.util.get_node_ip_address()
        self.meeting = dist.TCPStore(address, 0, self.spec.pool.workers, is_master=True, wait_for_workers=False)
        return address, self.meeting.port

    @register(protocol="ONE_TO_ALL")
    def join_process_group(self, address: tuple[str, int]) -> None:
        """Joins the other ranks of the pool."""
        size, limit = self.spec.pool.workers, timedelta(seconds=self.spec.limit_s)
        if self.spec.rank > 0:
            self.meeting = dist.TCPStore(*address, size, is_master=False)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        dist.init_process_group(backend, store=self.meeting, rank=self.spec.rank, world_size=size, timeout=limit)
        self.resources.callback(dist.destroy_process_group)
        self.ranks = DataParallel(dist.group.WORLD)
        self.notices = Notices(dist.PrefixStore("notices", self.meeting))

    @register(protocol="ALL_TO_ALL")
    def load_models(self, prepared: Prepared, generating: Sequence[str], verifies: bool) -> int:
        """Loads the pool's roles; with `verifies` also starts what checks answers. Returns this process's id."""
        set_up_torch(prepared.config)
        self.call.doing = (self.spec.pool.name, "loading its models", None)
        self.flow, self.rows = prepared.flow, prepared.store()
        if self.spec.folder is not None:
            self.trace = TraceWriter(self.spec.folder, self.spec.name)
            self.resources.callback(self.trace.close)
        # The driver shows progress; a worker's own would go to a log file.
        silent = self.resources.enter_context(open(os.devnull, "w"))  # noqa: SIM115
        own = [role for role in generating if role in self.spec.pool.roles]
        self.executor = StageExecutor(
            prepared.config, prepared.flow, self.spec.pool.roles, prepared.tokenizer,
            prepared.rewards() if verifies else None, Progress(stream=silent), own, self.ranks,
        )  # fmt: skip
        self.resources.callback(self.executor.close)
        return os.getpid()

    @register(protocol="RANK_ZERO")
    def make(self, origin: Origin, key: int) -> Answer:
        """Rows from data or a file."""
        self.call.doing = (self.spec.pool.name, f"reading {type(origin).__name__}", None)
        return self._keep(key, dict(self.rows.make(origin).items()))

    @register(protocol="DP")
    def execute(self, part: Part, stage: Stage, iteration: int, key: int) -> Answer:
        """The columns that a stage writes, kept here."""
        beside = checked_beside(self.flow, stage) if stage.type == "generate" and stage in self.flow.stages else ()
        return self._write(part, stage, iteration, key, lambda r, sums: self.executor.execute(stage, r, sums, beside))

    @register(protocol="DP")
    def generate_needed(
        self, part: Part, stage: Stage, iteration: int, key: int, segment: Segment, needless: Needless, uids: list[Uid]
    ) -> Answer:
        """As `execute`, of one wave with the rows `uids`: those of groups that are not needed end with what they have."""
        if self.notices is not None:
            self.notices.begin(str(key))
        stop = EarlyStop.of(segment, needless, self.executor.verified, uids, self.notices)
        beside = checked_beside(self.flow, stage)
        run = lambda rows, sums: self.executor.execute(stage, rows, sums, beside, stop)  # noqa: E731
        return self._write(part, stage, iteration, key, run)

    @register(protocol="DP_TOGETHER")
    def execute_together(self, part: Part, stage: Stage, iteration: int, key: int) -> Answer:
        """As `execute`, where ranks meet in the stage: one without rows takes part."""
        if len(part):
            return self.execute(part, stage, iteration, key)
        with self._span(stage, self._gather(part, stage, iteration), iteration):
            self.executor.join_collectives(stage)
        return Answer()

    @register(protocol="DP")
    def sums(self, part: Part, stage: Stage, iteration: int) -> Answer:
        """This part's share of what a stage of scope batch adds up."""
        rows = self._gather(part, stage, iteration)
        with self._span(stage, rows, iteration) as span:
            totals = self.executor.sums(stage, rows)
        return Answer(result=totals, seconds=span.seconds)

    @register(protocol="DP")
    def apply(self, part: Part, stage: Stage, iteration: int, key: int, totals: Mapping[str, Tensor]) -> Answer:
        """The columns of a stage of scope batch, by the sums over all rows."""
        return self._write(part, stage, iteration, key, lambda rows, _: self.executor.apply(stage, rows, totals))

    @register(protocol="ALL_TO_ALL")
    def update(self, part: Part, index: bytes, stage: Stage, iteration: int) -> Answer:
        """One optimizer step together with the other ranks, each by its own rows; `index` has those of all."""
        rows, sums = self._gather(part, stage, iteration), Sums()
        with (
            self._span(stage, rows, iteration) as span,
            self.executor.progress.stage(stage.name, len(rows)) as bar,
        ):
            counted = self.spec.rank == 0
            self.executor.optimize(stage, as_rows(index), rows, iteration, sums, bar, counted)
        return Answer(sums=sums.pairs(), seconds=span.seconds)

    @register(protocol="ONE_TO_ALL")
    def copy_weights(self, stage: Stage) -> Answer:
        """One role of the pool takes its weights from another one of it."""
        self.executor.copy_weights(stage)
        return Answer()

    @register(protocol="ONE_TO_ALL")
    def publish(self, version: int) -> None:
        self.executor.publish(version)
        self.version = version

    @register(protocol="ONE_TO_ALL")
    def save(self, folder: Path) -> None:
        """Rank 0 writes what is whole, and every rank its part of what they have divided."""
        self.executor.save(folder, self.spec.rank == 0)

    @register(protocol="ONE_TO_ALL")
    def copy_for_saving(self, folder: Path) -> None:
        """Begins to do as `save` does, from copies."""
        self.writing.begin(self.executor.copy_for_saving(folder, self.spec.rank == 0))

    @register(protocol="ONE_TO_ALL")
    def written(self) -> str:
        """Waits for what `copy_for_saving` began; why it could not be written, or nothing."""
        return self.writing.trouble()

    @register(protocol="ONE_TO_ALL")
    def load(self, folder: Path) -> None:
        self.executor.load(folder)

    @register(protocol="RANK_ZERO")
    def record(self, path: Path, part: Part, added: Part) -> None:
        """Writes rows, with the columns of `added` that they lack, for people and for a replay."""
        self.rows.record(path, with_added(self._rows_of(part, None), self._rows_of(added, None)))

    @register(protocol="RANK_ZERO")
    def keep(self, path: Path, part: Part) -> None:
        """Writes rows into a checkpoint."""
        self.rows.keep(path, self._rows_of(part, None))

    def _write(
        self, part: Part, stage: Stage, iteration: int, key: int, run: Callable[[Rows, Sums], Mapping[str, Column]]
    ) -> Answer:
        rows, sums = self._gather(part, stage, iteration), Sums()
        with self._span(stage, rows, iteration) as span:
            columns = run(rows, sums)
            span.count(Rows(columns))
        return self._keep(key, columns, sums, span.seconds)

    def _keep(self, key: int, columns: Mapping[str, Column], sums: Sums | None = None, seconds: float = 0.0) -> Answer:
        """Keeps payload and answers with the rest."""
        rows = Rows(columns)
        self.chunks[key] = rows.payload
        return Answer(packed_rows(rows.index), tuple(rows.payload), sums.pairs() if sums else {}, seconds)

    def _gather(self, part: Part, stage: Stage, iteration: int) -> Rows:
        """The part's rows with the columns that the stage may read."""
        self.call.doing = (stage.role or self.spec.pool.name, f"{stage.name} (iteration {iteration})", part)
        if self.trace is None:
            return self._rows_of(part, columns_read(stage))
        with self.trace.span(stage.role or "compute", stage.name, iteration, rows=len(part), state="waiting"):
            return self._rows_of(part, columns_read(stage))

    def _rows_of(self, part: Part, names: frozenset[str] | None) -> Rows:
        return assemble(part, self.call.answers, names, self._fetch, self._wait)

    def _fetch(self, worker: int, key: int, rows: Numbers, columns: tuple[str, ...]) -> Any:
        if worker == self.spec.number:
            return self._own(key, rows, columns)
        future = self.peers[worker].fetch.options(concurrency_group="rows").remote(key, rows, columns)
        self.call.asked[future] = self.spec.names[worker]
        return future

    def _wait(self, fetched: list[Any]) -> list[Rows]:
        """Rows that are here as they are, the others when they have come. Raises TimeoutError naming whose rows did not."""
        coming = [future for future in fetched if not isinstance(future, Rows)]
        try:
            come = iter(ray.get(coming, timeout=self.spec.limit_s))
        except ray.exceptions.GetTimeoutError:
            late = {self.call.asked[future] for future in ray.wait(coming, num_returns=len(coming), timeout=0)[1]}
            raise TimeoutError(f"waited {self.spec.limit_s:g} s for rows of {', '.join(sorted(late))}") from None
        return [
            rows if isinstance(rows, Rows) else decode([memoryview(frame) for frame in next(come)]) for rows in fetched
        ]

    def _own(self, key: int, rows: Numbers, columns: tuple[str, ...]) -> Rows:
        chunk = self.chunks[key].only(columns)
        everything = len(rows) == len(chunk) and bool((rows == np.arange(len(rows))).all())
        return chunk if everything else chunk.take(torch.tensor(rows))

    @contextmanager
    def _span(self, stage: Stage, rows: Rows, iteration: int) -> Iterator[SpanTimer]:
        """Times a stage, and writes it to the trace."""
        clock, start = SpanTimer(), time.perf_counter()
        with ExitStack() as spans:
            if self.trace is not None:
                role, count = stage.role or "compute", len(rows)
                clock.done = spans.enter_context(
                    self.trace.span(role, stage.name, iteration, rows=count, version=self.version)
                )
                clock.count(rows)
            yield clock
        clock.seconds = time.perf_counter() - start


@dataclass
class SpanTimer:
    """Seconds that a block took, once it has ended; `done` is what the trace says of it."""

    seconds: float = 0.0
    done: Done = field(default_factory=Done)

    def count(self, rows: Rows) -> None:
        """Notes how many tokens the rows have."""
        self.done.tokens = tokens_of(rows) or self.done.tokens
