"""A process of a pool: holds the models of its roles and the rows that it has written, and sends rows to those that ask.

driver ──perform──▶ one call after the other      worker ──fetch──▶ its rows, also while a call runs
"""

import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.groups import connect_store, join_group, open_store
from braidrl.cluster.notices import Notices
from braidrl.config import Config
from braidrl.data.codec import decode, encode
from braidrl.data.rows import Column, Rows, named_rows, tokens_of
from braidrl.errors import UserError
from braidrl.flow import Stage
from braidrl.flow.compute import computed, summed
from braidrl.importing import import_function
from braidrl.models.parallel.replicated import DataParallel
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.observe.trace import Done, TraceWriter
from braidrl.placement.pools import Pool
from braidrl.rollout.requests import Uid
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.early_stop import EarlyStop, Needless, Segment
from braidrl.runtimes.hybrid.handles import Answer, Numbers, Part, assemble, columns_read, packed_rows, unpacked_rows
from braidrl.runtimes.prepare.setup import Prepared, set_up_torch
from braidrl.runtimes.saving.background import BackgroundWriter
from braidrl.runtimes.saving.row_store import Origin, with_added
from braidrl.transfer.protocols import register


class StageFailure(Exception):
    """Raised in a worker; its text is the whole story, since the exception behind it may not travel."""


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's number among all workers, the names of these, its pool and rank there, the folder for its trace, limits of waiting."""

    number: int
    names: list[str]
    pool: Pool
    rank: int
    folder: Path | None
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.pool.name}-{self.rank}"


def method_class(config: Config, role: str) -> type | None:
    """Return the user's class of methods for a role, which `roles.ROLE.methods` names."""
    own = config.roles.get(role)
    return import_function(own.methods) if own and own.methods else None  # type: ignore[return-value]


class HybridWorker:
    """One rank of all roles of a pool. Calls come through `perform`, in the driver's order."""

    def __init__(self) -> None:
        self.kept: dict[int, Rows] = {}
        self.own: dict[str, Any] = {}
        self.ranks = DataParallel()
        self.notices: Notices | None = None
        # Of the call that a thread runs.
        self.call = threading.local()
        self.resources = ExitStack()
        self.trace: TraceWriter | None = None
        self.version = 0
        self.writing = BackgroundWriter()

    def perform(self, message: bytes, *answers: bytes) -> bytes:
        """Call a method by name; the message also names rows that nobody can ask for any more: they are forgotten first.

        Args:
            message: Method, arguments, and the keys of rows to forget.
            answers: Answers of earlier calls that have the arguments' rows.

        Returns:
            The packed answer.

        Raises:
            StageFailure: The method raised, or rows did not come.
            UserError: The method raised it.
        """
        method, arguments, released = pickle.loads(message)
        for key in released:
            self.kept.pop(key, None)
        self.call.asked = {}
        self.call.answers = [pickle.loads(packed) for packed in answers]
        self.call.doing = (self.spec.pool.name, method, Part())
        try:
            answer = getattr(self, method)(*arguments)
        except UserError:
            raise
        except Exception:
            role, doing, part = self.call.doing
            who = f"{role} rank {self.spec.rank}"
            raise StageFailure(f"{who} failed in {doing}{named_rows(part.uids())}:\n{traceback.format_exc()}") from None
        return pickle.dumps(answer if isinstance(answer, Answer) else Answer(result=answer))

    def fetch(self, key: int, rows: Numbers, columns: tuple[str, ...]) -> list[Numbers]:
        """Return columns of some of the rows that are kept here, encoded: as arrays, which Ray copies only once.

        Args:
            key: The number of the call that has written them.
            rows: Row numbers (n,) in what it has written.
            columns: Names of payload columns.
        """
        return [np.frombuffer(frame, dtype=np.uint8) for frame in encode(self._own(key, rows, columns))]

    def configure(self, spec: WorkerSpec, *peers: Any) -> None:
        """Join a run, whose workers are `peers` by number."""
        self.spec, self.peers = spec, peers

    def close(self) -> None:
        """End the processes that check answers, and forget rows, files and ranks."""
        self.resources.close()
        self.trace = None
        self.kept = {}
        self.ranks, self.notices = DataParallel(), None

    @register(protocol="RANK_ZERO")
    def rendezvous(self) -> tuple[str, int]:
        """Open the store through which the ranks of the pool find each other, and return its address."""
        address = ray.util.get_node_ip_address()
        self.meeting = open_store(address, self.spec.limit_s)
        return address, self.meeting.port

    @register(protocol="ONE_TO_ALL")
    def join_process_group(self, address: tuple[str, int]) -> None:
        """Form a process group with the other ranks of the pool, by the address of their store."""
        if self.spec.rank > 0:
            self.meeting = connect_store(*address, self.spec.limit_s)
        size, cuda = self.spec.pool.workers, torch.cuda.is_available()
        self.ranks = DataParallel(join_group(self.meeting, self.spec.rank, size, self.spec.limit_s, cuda))
        self.resources.callback(dist.destroy_process_group)
        self.notices = Notices(dist.PrefixStore("notices", self.meeting))

    @register(protocol="ALL_TO_ALL")
    def load_models(self, prepared: Prepared, generating: Sequence[str], verifies: bool) -> int:
        """Load the pool's roles.

        Args:
            prepared: The run; only one worker gets its training data.
            generating: Roles that need an engine.
            verifies: Start the processes that check answers.

        Returns:
            This process's id.
        """
        set_up_torch(prepared.config)
        self.call.doing = (self.spec.pool.name, "loading its models", Part())
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
        for role, worker in self.executor.workers.items():
            if (name := method_class(prepared.config, role)) is not None:
                self.own[role] = name(worker)
        return os.getpid()

    @register(protocol="RANK_ZERO")
    def make(self, origin: Origin, key: int) -> Answer:
        """Read rows from data or a file, and keep them."""
        self.call.doing = (self.spec.pool.name, f"reading {type(origin).__name__}", Part())
        return self._keep(key, self.rows.make(origin))

    @register(protocol="DP")
    def execute(
        self, part: Part, stage: Stage, iteration: int, key: int, totals: Mapping[str, Tensor] | None = None
    ) -> Answer:
        """Keep the columns that a stage writes; for one of scope batch `totals` are its sums over all rows."""

        def run(rows: Rows, sums: Sums) -> Mapping[str, Column]:
            if totals is None:
                return self.executor.run(stage, rows, sums)
            return computed(stage, rows, totals) if len(rows) else {}

        return self._write(part, stage, iteration, key, run)

    @register(protocol="DP")
    def generate_needed(
        self, part: Part, stage: Stage, iteration: int, key: int, segment: Segment, needless: Needless, uids: list[Uid]
    ) -> Answer:
        """As `execute`, for rows of a wave with the rows `uids`: those of groups that are not needed end with what they have."""
        if self.notices is not None:
            self.notices.begin(str(key))
        stop = EarlyStop.of(segment, needless, self.flow, uids, self.notices)
        return self._write(part, stage, iteration, key, lambda rows, sums: self.executor.run(stage, rows, sums, stop))

    @register(protocol="DP")
    def sums(self, part: Part, stage: Stage, iteration: int) -> Answer:
        """Return this part's share of what a stage of scope batch adds up."""
        return self._compute(part, stage, iteration, lambda rows, _: summed(stage, rows) if len(rows) else {})

    def call_own(self, stage: Stage, iteration: int, key: int, *arguments: Any) -> Answer:
        """Call a method of the user's class for a role, with rows in the place of a part, and keep the columns that it writes.

        A rank without rows is left out, unless the role's ranks compute with each other.
        """
        call = getattr(self.own[str(stage.role)], stage.type)
        self.executor.residency.before(stage)
        if not (arguments and isinstance(arguments[0], Part)):
            return Answer(result=call(*arguments))
        part, *more = arguments
        if stage.writes:
            return self._write(part, stage, iteration, key, lambda rows, _: checked(stage, call(rows, *more)))
        if not len(part) and not self.executor.is_collective(stage):
            return Answer()
        return self._compute(part, stage, iteration, lambda rows, _: call(rows, *more))

    @register(protocol="DP")
    def update(self, part: Part, index: bytes, stage: Stage, iteration: int) -> Answer:
        """Make one optimizer step with the other ranks, each by its own rows; `index` has the index columns of all rows."""

        def train(rows: Rows, sums: Sums) -> None:
            update = nullcontext((unpacked_rows(index), rows))
            self.executor.train(stage, [update], iteration, sums, len(rows), counted=self.spec.rank == 0)

        return self._compute(part, stage, iteration, train)

    @register(protocol="ONE_TO_ALL")
    def copy_weights(self, stage: Stage) -> None:
        """Move the weights of one role of the pool towards those of another one of it."""
        self.executor.copy_weights(stage)

    @register(protocol="ONE_TO_ALL")
    def publish(self, version: int) -> None:
        self.executor.publish(version)
        self.version = version

    @register(protocol="ONE_TO_ALL")
    def save(self, folder: Path) -> None:
        """Write checkpoints: rank 0 what is whole, and every rank its part of what they have divided."""
        self.executor.save(folder, self.spec.rank == 0)

    @register(protocol="ONE_TO_ALL")
    def copy_for_saving(self, folder: Path) -> None:
        """Begin to do as `save` does, from copies."""
        self.writing.begin(self.executor.copy_for_saving(folder, self.spec.rank == 0))

    @register(protocol="ONE_TO_ALL")
    def written(self) -> str:
        """Wait for what `copy_for_saving` began, and return why it could not be written, or nothing."""
        return self.writing.trouble()

    @register(protocol="ONE_TO_ALL")
    def load(self, folder: Path) -> None:
        self.executor.load(folder)

    @register(protocol="RANK_ZERO")
    def record(self, path: Path, part: Part, added: Part) -> None:
        """Write rows, with the columns of `added` that they lack, for people and for a replay."""
        self.rows.record(path, with_added(self._rows_of(part, None), self._rows_of(added, None)))

    @register(protocol="RANK_ZERO")
    def keep(self, path: Path, part: Part) -> None:
        """Write rows into a checkpoint."""
        self.rows.save(path, self._rows_of(part, None))

    def _write(
        self, part: Part, stage: Stage, iteration: int, key: int, run: Callable[[Rows, Sums], Mapping[str, Column]]
    ) -> Answer:
        """Keep what `run` returns. A rank without rows is left out where no other rank waits for it."""
        if not len(part) and not self.executor.is_collective(stage):
            return Answer()
        computed = self._compute(part, stage, iteration, run)
        return replace(self._keep(key, Rows(computed.result)), sums=computed.sums, seconds=computed.seconds)

    def _keep(self, key: int, rows: Rows) -> Answer:
        """Keep payload, and answer with the rest."""
        self.kept[key] = rows.payload
        return Answer(packed_rows(rows.index), tuple(rows.payload), self.spec.number, key)

    def _compute(self, part: Part, stage: Stage, iteration: int, run: Callable[[Rows, Sums], Any]) -> Answer:
        """Answer with what `run` returns for the rows of a part, the sums that it adds, and the seconds that it takes."""
        rows, sums, role = self._gather(part, stage, iteration), Sums(), stage.role or "compute"
        span = (
            self.trace.span(role, stage.name, iteration, rows=len(rows), version=self.version) if self.trace else None
        )
        start = time.perf_counter()
        with span or nullcontext(Done()) as done:
            result = run(rows, sums)
            done.tokens = tokens_of(Rows(result) if "length" in stage.writes and result else rows)
        return Answer(result=result, sums=sums.pairs(), seconds=time.perf_counter() - start)

    def _gather(self, part: Part, stage: Stage, iteration: int) -> Rows:
        """Return the part's rows with the columns that the stage may read."""
        self.call.doing = (stage.role or self.spec.pool.name, f"{stage.name} (iteration {iteration})", part)
        if self.trace is None:
            return self._rows_of(part, columns_read(stage))
        with self.trace.span(stage.role or "compute", stage.name, iteration, rows=len(part), state="waiting"):
            return self._rows_of(part, columns_read(stage))

    def _rows_of(self, part: Part, reads: frozenset[str] | None) -> Rows:
        return assemble(part, self.call.answers, reads, self._fetch, self._wait)

    def _fetch(self, worker: int, key: int, rows: Numbers, columns: tuple[str, ...]) -> Any:
        if worker == self.spec.number:
            return self._own(key, rows, columns)
        future = self.peers[worker].fetch.options(concurrency_group="rows").remote(key, rows, columns)
        self.call.asked[future] = self.spec.names[worker]
        return future

    def _wait(self, fetched: list[Any]) -> list[Rows]:
        """Return rows that are here as they are, and the others once they come. Raises TimeoutError naming whose did not."""
        coming = [future for future in fetched if not isinstance(future, Rows)]
        try:
            frames = iter(ray.get(coming, timeout=self.spec.limit_s))
        except ray.exceptions.GetTimeoutError:
            late = {self.call.asked[future] for future in ray.wait(coming, num_returns=len(coming), timeout=0)[1]}
            raise TimeoutError(f"waited {self.spec.limit_s:g} s for rows of {', '.join(sorted(late))}") from None
        return [rows if isinstance(rows, Rows) else decode([memoryview(f) for f in next(frames)]) for rows in fetched]

    def _own(self, key: int, rows: Numbers, columns: tuple[str, ...]) -> Rows:
        kept = self.kept[key].only(columns)
        everything = len(rows) == len(kept) and bool((rows == np.arange(len(rows))).all())
        return kept if everything else kept.take(torch.tensor(rows))


def checked(stage: Stage, columns: Mapping[str, Column]) -> Mapping[str, Column]:
    """Return the columns that a user's method returned. Raises UserError where they are not those that it is registered with."""
    if set(columns) != set(stage.writes):
        raise UserError(f"{stage.name} returned {sorted(columns)} and is registered with writes={stage.writes}")
    return columns
