"""The backend of a streaming run: the queue, the worker processes, evaluation, and what is written to files and read from them.

run ──read, run──▶ an evaluation's rows into the queue ──workers──▶ their columns
run ──save, copy_for_saving, load──order──▶ queue ──▶ leaders of trained roles ──ordered, result──▶ queue ──▶ run
"""

import secrets
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from braidrl.cluster.process import Launcher
from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.errors import UserError, WorkerError
from braidrl.flow import Stage
from braidrl.flow.updates import Sizes, check_update_size
from braidrl.flow.waves import GroupSelector
from braidrl.models.checkpoint import Write
from braidrl.observe.metrics import Sums
from braidrl.runtimes.prepare.setup import Prepared
from braidrl.runtimes.saving.background import check_written
from braidrl.runtimes.saving.row_store import Origin, Recording, RowStore, Surplus, with_added
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.groups import check_streaming, samplers_of, worker_groups
from braidrl.runtimes.streaming.processes import Processes, worker_launcher
from braidrl.runtimes.streaming.stream import Stream
from braidrl.transfer.queue.client import assembled
from braidrl.transfer.queue.owner import StorageNode
from braidrl.transfer.queue.server import QueueServer

LOOK_EVERY_S = 0.05
ORDER_LIMIT_S = 600.0
"""How long the leader of a trained role may take to carry out an order."""


class StreamingBackend:
    """What a run asks for is done by the workers of the queue. The table is the rows."""

    def __init__(
        self, prepared: Prepared, folder: Path, epoch_groups: int, admit_refills: Callable[[], object]
    ) -> None:
        """Start the queue and all workers.

        Args:
            prepared: the checked configuration, with flow, data and models.
            folder: the run's, for what workers write.
            epoch_groups: prompts of an epoch.
            admit_refills: called while the batch that is open must be generated to its end.

        Raises:
            UserError: before anything starts, for what cannot stream.
        """
        config, flow = prepared.config, prepared.flow
        check_streaming(config, flow)
        self.groups = worker_groups(config, flow, prepared.evaluation if prepared.eval_sources else None)
        self.config, self.flow, self.evaluation = config, flow, prepared.evaluation
        self.store: RowStore = prepared.store()
        self.stream = Stream(flow, sizes_of(config, epoch_groups), samplers=samplers_of(config, flow))
        self.admit_refills = admit_refills
        self.evaluating: Stream | None = None
        self.restored: tuple[dict[str, Any], Rows | None] = {}, None
        """The selection state and the surplus of a checkpoint whose weights are about to be loaded."""
        self.seen = self.counted_bytes = 0
        self.exported = [role for role in prepared.generating if role in flow.changed_roles]
        with ExitStack() as resources:
            launcher = worker_launcher(config)
            resources.callback(launcher.close)
            # Whoever connects, from this machine too, must know what only this run's processes are told.
            secret = secrets.token_hex(32)
            self._open_queue(launcher, secret, resources)
            self.processes = Processes(config, folder, self.control, launcher, self.server.address, self.node, secret)
            resources.callback(self.processes.kill)
            self.processes.start(self.groups)
            self.resources = resources.pop_all()

    def _open_queue(self, launcher: Launcher, secret: str, resources: ExitStack) -> None:
        streaming = self.config.streaming
        self.node = StorageNode(launcher.node, launcher.ip, secret, streaming.storage)
        resources.callback(self.node.close)
        self.data = self.node.data
        together = streaming.weights == "delayed"
        self.control = ControlPlane(self.stream, self.data, streaming.lease_s, self.exported, together)
        self.server = QueueServer(self.control.handle, self.control.tick, f"tcp://{launcher.ip}:*", secret)
        resources.callback(self.server.close)

    # Rows

    def read(self, origin: Origin) -> Rows:
        """Return rows of a checkpoint, or those of an evaluation set, which workers begin to generate at once."""
        if isinstance(origin, Recording):
            raise UserError("runtime=streaming cannot replay recorded rows; write runtime=eager, hybrid or distributed")
        rows = self.store.make(origin)
        if not isinstance(origin, Surplus):
            self._begin_evaluation(rows)
        return rows

    def run(self, stage: Stage, table: Rows, iteration: int, sums: Sums) -> Rows:
        """Return the rows of the evaluation with the columns of its next stage."""
        stream, uids = self.evaluating, table.uids()
        assert stream is not None
        while not stream.schedule.is_done(stage.name):
            self.wait()
        with self.control.changed:
            index = stream.table.index(uids, [stage.name])
            payload = stream.table.payload(uids, [stage.name], None)
        table = table.with_columns(dict(assembled(self.data, index, payload).items()))
        if stage is stream.flow.stages[-1]:
            self.control.end_stream(stream)
            self.evaluating = None
            self.change(lambda: setattr(self.control, "pinned", False))
        return table

    def index(self, table: Rows) -> Rows:
        """Return the index columns."""
        return table.index

    def record(self, path: Path, table: Rows, final: Rows) -> None:
        """Write a parquet file of the rows, with the columns that later stages added."""
        self.store.record(path, with_added(table, final))

    def save_rows(self, path: Path, table: Rows) -> None:
        """Write rows into a checkpoint."""
        self.store.save(path, table)

    # Weights

    def save(self, folder: Path) -> None:
        """Have every role that changes written by its leader."""
        self._carry_out({"do": "save", "folder": str(folder.resolve())})

    def copy_for_saving(self, folder: Path) -> list[Write]:
        """Do as `save`, but leaders go on as soon as they have copies, and write them in a thread."""
        self._carry_out({"do": "copy", "folder": str(folder.resolve())})
        return [partial(self._written, *given) for given in self._give({"do": "tell"}).items()]

    def load(self, folder: Path, version: int) -> None:
        """Have every role that changes loaded; generation goes on with these weights, and the queue after iteration `version`."""
        self._carry_out({"do": "load", "folder": str(folder.resolve()), "version": version})
        state, surplus = self.restored
        with self.control.changed:
            versions = (
                dict(zip(surplus.uids(), surplus["version"].tolist(), strict=True)) if surplus is not None else {}
            )
            self.stream.schedule.resume(version, GroupSelector.restored(state), versions)
            if surplus is not None:
                self.stream.restore(surplus, self.data.write_rows(surplus))
            self.control.engine_version = self.control.allowed = version
        self.server.changed()

    def close(self) -> None:
        """Tell all workers that the run is over, and leave no process, segment or port behind."""
        with self.resources:
            self.change(lambda: setattr(self.control, "stopping", True))
            self.processes.close()

    def wait(self) -> None:
        """Wait until something changes at the queue, or shortly; raise what a worker, or the queue itself, has raised."""
        if self.control.refused is not None:
            raise self.control.refused
        self.processes.watch()
        if self.server.failure is not None:
            raise WorkerError(f"the queue's server failed:\n{self.server.failure}")
        self.seen = self.control.wait(self.seen, LOOK_EVERY_S)

    def change(self, change: Callable[[], object]) -> None:
        """Change something at the queue, and have waiting workers asked again."""
        with self.control.changed:
            change()
            self.control.advance()
        self.server.changed()

    def bytes_between_nodes(self) -> int:
        """Return the bytes of payload and weights that nodes have given to one another since this was asked last."""
        before = self.counted_bytes
        self.counted_bytes = sum(self.data.served_by(place.address) for place in self.processes.places.values())
        return self.counted_bytes - before

    def _begin_evaluation(self, rows: Rows) -> None:
        """Waits until engines may load the newest version, keeps them at it, and puts the set's rows into the queue."""
        schedule = self.stream.schedule
        while self.control.engine_version < schedule.published:
            self.admit_refills()
            self.wait()
        groups = len(set(rows["group"].tolist()))
        sizes = Sizes(1, groups, len(rows) // groups, len(rows))
        stream = self.evaluating = Stream(self.evaluation, sizes, during=schedule.published)
        with self.control.changed:
            self.control.pinned = True
            self.control.streams.append(stream)
            stream.schedule.groups_wanted(0)
        self.control.admit(stream, rows)
        self.change(lambda: None)

    def _carry_out(self, order: dict[str, Any]) -> None:
        """Returns when every leader has done it. Raises WorkerError where one does not in time."""
        limit = time.monotonic() + ORDER_LIMIT_S
        for number, holder in self._give(order).items():
            while number not in self.control.results:
                self._wait_until(limit, holder)

    def _give(self, order: dict[str, Any]) -> dict[int, str]:
        """Whom the order was given to, by its number. Raises WorkerError for a leader that is not there in time."""
        limit, given = time.monotonic() + ORDER_LIMIT_S, {}
        for holder, role in self.processes.trainers().items():
            while holder not in self.control.holders:
                self._wait_until(limit, holder)
            version = order.get("version") if role in self.control.exported else None
            given[self.control.give_order(holder, {**order, "version": version})] = holder
        self.server.changed()
        return given

    def _written(self, number: int, holder: str) -> None:
        """Waits, in whatever thread, until a leader has written what it copied. Raises OSError where it could not, or has ended."""
        process = next(member.process for member in self.processes.members if member.holder == holder)
        while number not in self.control.results:
            if self.control.stopping or not process.alive:
                raise OSError(f"{holder} has ended")
            time.sleep(LOOK_EVERY_S)
        check_written(self.control.results[number]["trouble"])

    def _wait_until(self, limit: float, holder: str) -> None:
        if time.monotonic() > limit:
            raise WorkerError(f"{holder} did not answer within {ORDER_LIMIT_S:g} s")
        self.wait()


def sizes_of(config: Config, epoch_groups: int) -> Sizes:
    """Return the sizes that mean something for the result; `epoch_groups` are the prompts of an epoch."""
    trainer, samples = config.trainer, config.rollout.samples_per_prompt
    rows = check_update_size(trainer.prompts_per_step, samples, trainer.rows_per_update)
    return Sizes(
        trainer.steps, trainer.prompts_per_step, samples, rows, trainer.epochs, trainer.max_staleness, trainer.surplus,
        epoch_groups, config.seed, trainer.over_sampling,
    )  # fmt: skip
