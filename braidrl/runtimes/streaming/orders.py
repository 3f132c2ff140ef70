"""The streaming backend beside iterations: evaluation, and reading and writing of files.

run ──read, run──▶ an evaluation's rows into the queue ──workers──▶ their columns
run ──save, load──order──▶ queue ──▶ leaders of trained roles ──ordered, result──▶ queue ──▶ run
"""

import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from braidrl.data.codec import encode
from braidrl.data.rows import Rows, Uid
from braidrl.errors import UserError, WorkerError
from braidrl.flow import Flow, Stage
from braidrl.flow.batches import Sizes
from braidrl.observe.metrics import Sums
from braidrl.queue.table import StoredRows, pieces_without
from braidrl.runtimes.interfaces import StartedBatch
from braidrl.runtimes.row_store import Origin, Recording, Surplus
from braidrl.runtimes.saving.checkpoints import LostWrite, check_written
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.groups import ROWS
from braidrl.runtimes.streaming.processes import Processes
from braidrl.runtimes.streaming.stream import Stream
from braidrl.runtimes.streaming.work import LoadCheckpoint, MakeRows, ReportWrite, Save, Task, WriteRows
from braidrl.runtimes.streaming.worker_orders import OrderResult
from braidrl.training.roles.checkpoint import Write

LOOK_EVERY_S = 0.05
ORDER_LIMIT_S = 600.0
"""Time limit for the leader of a trained role to execute an order."""


class StreamingBackend:
    """Passes a run's requests to the workers of the queue. A table is index columns and payload locations."""

    def __init__(
        self,
        evaluation: Flow,
        control: ControlPlane,
        processes: Processes,
        wait: Callable[[str | None], None],
        admit: Callable[[], object],
        resources: ExitStack,
    ) -> None:
        """Use a queue and workers that have been started; `close` ends `resources`.

        `wait` waits for a change of the queue, with a short limit, and raises the error of a worker, of all groups or
        of one. `admit` is called while batches that may start on an older version must be generated to completion.
        """
        self.evaluation, self.control, self.processes = evaluation, control, processes
        self.stream, self._wait, self.admit, self.resources = control.training, wait, admit, resources
        self.evaluating: Stream | None = None
        self.restored: tuple[dict[str, Any], list[StoredRows]] | None = {}, []
        """Selection state and rows of a checkpoint whose weights are to be loaded; None if all rows still exist."""
        self.started: list[StartedBatch] = []
        """Its batches that were started ahead."""
        self.forgotten: set[Uid] = set()
        """Rows started by engines, lost with a trainer, and not kept."""
        self.counted_bytes = 0

    def read(self, origin: Origin) -> StoredRows:
        """Return rows of a checkpoint, or of an evaluation set, which workers start to generate immediately."""
        if isinstance(origin, Recording):
            raise UserError("runtime=streaming cannot replay recorded rows; write runtime=eager, hybrid or distributed")
        rows, schedule = self.make_rows(origin), self.stream.schedule
        if isinstance(origin, Surplus):
            return rows
        # An evaluation is pinned to the newest version.
        while self.control.loading.target < schedule.progress.published:
            self.admit()
            self._wait(None)
        groups = len(set(rows.index["group"].tolist()))
        sizes = Sizes(1, groups, len(rows) // groups, len(rows))
        stream = self.evaluating = Stream(
            self.evaluation, sizes, during=schedule.progress.published, held=self.control.held
        )

        def begin() -> None:
            self.control.loading.pinned = True
            self.control.add_stream(stream)
            stream.schedule.admission.groups_wanted(0)
            stream.admit(rows)

        self.control.change(begin)
        return rows

    def run(self, stage: Stage, table: StoredRows, iteration: int, sums: Sums) -> StoredRows:
        """Return the rows of the evaluation with the columns of its next stage."""
        stream, uids = self.evaluating, table.uids()
        assert stream is not None
        consumer = stream.consumers.of_stage[stage.name]
        while any(stream.tasks[consumer].undone.values()):
            self._wait(None)
        with self.control.changed:
            table = stream.stored(uids)
        if stage is stream.flow.stages[-1]:
            self.end_evaluation()
        return table

    def end_evaluation(self) -> None:
        """Forget the rows of an evaluation, if any; engines may load newer versions again."""
        if (stream := self.evaluating) is not None:
            self.evaluating = None
            with self.control.changed:
                self.control.remove_stream(stream)
            self.control.change(lambda: setattr(self.control.loading, "pinned", False))

    def index(self, table: StoredRows) -> Rows:
        """Return the index columns."""
        return table.index

    # Files: the rows process makes and writes rows, since the main process carries no payload

    def make_rows(self, origin: Origin) -> StoredRows:
        """Return the rows of `origin`, with payload in the queue. Raises UserError if a file is missing."""
        if isinstance(origin, Recording):
            raise ValueError("recorded rows are not streamed")
        rows = self._ask_for_rows(MakeRows(origin)).rows
        assert rows is not None
        return rows

    def _ask_for_rows(self, task: Task, rows: StoredRows | None = None) -> OrderResult:
        """Return the rows process's result of an order.

        After its restart, which changes its name at the queue, the order is repeated.
        """
        maker = next(member for member in self.processes.members if member.group.name == ROWS)
        content = [bytes(frame) for frame in encode(rows.index)] if rows is not None else []
        while True:
            with self.control.changed:
                holder = maker.holder
                order = self.control.give_order(holder, task, content) if holder in self.control.holders else None
            self.control.notify()
            # Rows are written also after a trainer's failure.
            while order is not None and order not in self.control.orders.results and holder in self.control.holders:
                self._wait(ROWS)
            if order in self.control.orders.results:
                return self.control.orders.results.pop(order)
            self._wait(ROWS)

    def record(self, path: Path, table: StoredRows, final: StoredRows) -> None:
        """Write the rows to a parquet file, with the columns that later stages added."""
        recorded = set(table.columns)
        later = {name: column for name, column in final.index.items() if name not in recorded}
        payload = [*table.payload, *pieces_without(final.payload, recorded)]
        self.save_rows(path, StoredRows(table.index.with_columns(later), payload), recorded=True)

    def save_rows(self, path: Path, table: StoredRows, recorded: bool = False) -> None:
        """Write rows into a checkpoint, or as `recorded` for people and replays.

        Raises OSError if the disk is full or missing.
        """
        check_written(self._ask_for_rows(WriteRows(path.resolve(), table.payload, recorded), table).trouble)

    def save(self, folder: Path, copy: bool = False) -> list[Write]:
        """Let the leader of every changing role write it; with `copy` the leader continues as soon as it has copies."""

        def saved(role: str) -> Save:
            # Ranks that were lost may have left files there.
            shutil.rmtree(folder / role, ignore_errors=True)
            return Save(folder.resolve(), copy)

        self._carry_out(saved)
        if not copy:
            return []
        return [partial(self._written, *written) for written in self._give(lambda role: ReportWrite()).values()]

    def load(self, folder: Path, version: int) -> None:
        """Load every changing role; generation continues with these weights, and the queue after iteration `version`.

        If all rows still exist, engines already have, or load, that version.
        """
        published = version if self.restored is not None else None
        control, exported = self.control, self.control.weights.by_role
        self.processes.forget_states()

        def loaded(role: str) -> LoadCheckpoint:
            is_wanted = role in exported and (published is not None or control.lacks_weights(role))
            return LoadCheckpoint(folder.resolve(), version if is_wanted else None)

        self._carry_out(loaded)
        with self.control.changed:
            if self.restored is not None:
                # The rows of the checkpoint return to the queue; those that are drawn again are counted.
                self.stream.resume(version, *self.restored)
                for batch in self.started:
                    self.stream.restore_batch(batch)
                self.control.loading.target = self.control.steps.allowed = version
                self.control.loading.pinned = False
                kept = {*self.stream.schedule.versions.oldest, *self.stream.schedule.versions.suspended}
                self.control.activity.drawn_again += len(self.forgotten - kept)
                self.forgotten = set()
            self.control.orders.unloaded = frozenset()
        self.control.notify()

    def _carry_out(self, task_of: Callable[[str], Task]) -> None:
        """Wait until every leader has completed the task of its role. Raises WorkerError after the time limit."""
        limit = time.monotonic() + ORDER_LIMIT_S
        for role, (holder, number) in self._give(task_of).items():
            while number not in self.control.orders.results:
                if holder not in self.control.holders:
                    # The role's ranks have regrouped, and have a new leader.
                    holder, number = self._order(role, task_of, limit)
                self._wait_until(limit, holder)

    def _give(self, task_of: Callable[[str], Task]) -> dict[str, tuple[str, int]]:
        """Order every leader to do its role's task; return leaders and numbers of orders, by role.

        Raises WorkerError if a leader does not register in time.
        """
        limit = time.monotonic() + ORDER_LIMIT_S
        return {role: self._order(role, task_of, limit) for role in self.processes.leaders()}

    def _order(self, role: str, task_of: Callable[[str], Task], limit: float) -> tuple[str, int]:
        """Order the current leader of a role to do a task; return the leader and the number of the order."""
        while True:
            with self.control.changed:
                if (holder := self.processes.leaders()[role]) in self.control.holders:
                    number = self.control.give_order(holder, task_of(role))
                    break
            self._wait_until(limit, holder)
        self.control.notify()
        return holder, number

    def _wait_until(self, limit: float, holder: str) -> None:
        if time.monotonic() > limit:
            raise WorkerError(f"{holder} did not answer within {ORDER_LIMIT_S:g} s")
        self._wait(None)

    def _written(self, holder: str, number: int) -> None:
        """Wait, in any thread, until a leader has written its copy.

        Raises OSError if that failed, and LostWrite if one of its ranks has ended.
        """
        while number not in self.control.orders.results:
            if self.control.stopping or holder not in self.control.holders:
                raise LostWrite(f"{holder} has ended")
            time.sleep(LOOK_EVERY_S)
        check_written(self.control.orders.results[number].trouble)

    def close(self) -> None:
        """Notify all workers of the end of the run; no process, segment or port is left."""
        with self.resources:
            self.control.change(lambda: setattr(self.control, "stopping", True))
            self.processes.close()

    def bytes_between_nodes(self) -> int:
        """Return the bytes of payload and weights sent between nodes since the last call."""
        before = self.counted_bytes
        served = sum(
            self.control.data.served_by(location.address) for location in self.processes.storage_locations.values()
        )
        self.counted_bytes = served + self.control.weights_sent
        return self.counted_bytes - before
