"""The main program of a streaming run: admits prompts, lets steps be made, evaluates, has checkpoints written.

loader ──admit──▶ queue ◀──take, done── workers
                    │
                    └──finished iteration──▶ rows as recorded, metrics ──▶ whoever writes the run's files
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from braidrl.cluster.workers import Launcher, WorkerFailed
from braidrl.config import Config
from braidrl.data.loader import PromptLoader
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.flow import Stage
from braidrl.flow.sizes import Sizes
from braidrl.flow.stage_state import State
from braidrl.flow.updates import check_update_size
from braidrl.flow.versions import admissible
from braidrl.flow.waves import GroupSelector
from braidrl.models.checkpoint import Write
from braidrl.observe.metrics import Sums
from braidrl.runtimes.controller import IterationResult, Position
from braidrl.runtimes.prepare.setup import Prepared
from braidrl.runtimes.saving.row_store import Admission, Origin, Recording, RowStore, Surplus, with_added
from braidrl.runtimes.streaming.groups import check_streaming, worker_groups
from braidrl.runtimes.streaming.orders import Orders
from braidrl.runtimes.streaming.processes import Processes, worker_launcher
from braidrl.runtimes.streaming.results import iteration_result
from braidrl.transfer.queue.client import assembled
from braidrl.transfer.queue.control import ControlPlane
from braidrl.transfer.queue.data_plane import DataPlane, Place
from braidrl.transfer.queue.segments import Owner, Segments
from braidrl.transfer.queue.server import QueueServer
from braidrl.transfer.queue.stream import FinishedIteration, Stream

LOOK_EVERY_S = 0.05


class StreamingProgram:
    """Backend and controller at once: what the run asks for is done by the workers of the queue. The table is the rows."""

    def __init__(self, prepared: Prepared, loader: PromptLoader, folder: Path) -> None:
        """Raises UserError, before anything starts, for what cannot stream."""
        config, flow = prepared.config, prepared.flow
        check_streaming(config, flow)
        evaluation = prepared.evaluation if prepared.eval_sources else None
        self.groups = worker_groups(config, flow, evaluation)
        self.config, self.flow, self.evaluation, self.loader = config, flow, prepared.evaluation, loader
        self.store: RowStore = prepared.store()
        self.stream = Stream(flow, sizes_of(config, loader.epoch_size))
        self.opening: dict[int, Position] = {}
        """For each iteration that was begun and not finished, where the run stood just before."""
        self.evaluating: Stream | None = None
        self.restored: tuple[dict[str, Any], Rows | None] = {}, None
        self.seen = self.counted_bytes = 0
        self.exported = [role for role in prepared.generating if role in flow.changed_roles]
        with ExitStack() as resources:
            launcher = worker_launcher(config)
            resources.callback(launcher.close)
            self._open_queue(launcher, resources)
            place = Place(launcher.node, self.owner.run, self.server.address)
            self.processes = Processes(config, folder, self.control, launcher, place)
            resources.callback(self.processes.kill)
            self.processes.start(self.groups)
            self.orders = Orders(self.control, self.server, self.processes, self._wait)
            self.resources = resources.pop_all()

    def _open_queue(self, launcher: Launcher, resources: ExitStack) -> None:
        streaming = self.config.streaming
        self.owner = Owner()
        resources.callback(self.owner.close)
        self.data = DataPlane(Segments(self.owner.run, "main"), "", launcher.node)
        resources.callback(self.data.close)
        together = streaming.weights == "delayed"
        self.control = ControlPlane(self.stream, self.data, streaming.lease_s, self.exported, together)
        self.server = QueueServer(self.control.handle, self.control.tick, f"tcp://{launcher.ip}:*")
        resources.callback(self.server.close)
        self.data.address = self.server.address

    # The controller

    @property
    def recorded_stages(self) -> int:
        return len(self.stream.recorded)

    @property
    def sampling(self) -> GroupSelector:
        return self.stream.schedule.sampling

    def iterate(
        self, iteration: int, version: int, recorded: Rows | None, train: bool, before_training: Callable[[], object]
    ) -> IterationResult[Rows]:
        """Waits until an iteration is published, and admits prompts meanwhile; `before_training` is called before its first step."""
        assert recorded is None and train, "checked when the run was set up"
        while not self.control.finished:
            self._admit()
            with self.control.changed:
                due = self.control.assignments.allowed < iteration and self.stream.schedule.due_steps()
            if due:
                before_training()
                self._change(lambda: setattr(self.control.assignments, "allowed", iteration))
            self._wait()
        finished = self.control.finished.popleft()
        assert finished.iteration == iteration
        self.opening.pop(iteration, None)
        # Generation of the next goes on while this one is written down.
        self._admit()
        return self._result(finished)

    def position(self, loader: PromptLoader) -> Position:
        """Where a run resumes from after the last finished iteration; what was begun of the next one is done again then."""
        following = self.stream.schedule.published + 1
        loaded, sampling, surplus, _ = self.opening.get(following) or self._current()
        return loaded, sampling, surplus, self.stream.states_before(following)

    def restore(self, sampling: dict[str, Any], surplus: Sequence[Rows], states: Mapping[str, State]) -> None:
        """Goes on from a checkpoint's selection state, surplus rows and stages' states; `load` says after which iteration."""
        self.restored = sampling, Rows.cat(list(surplus)) if surplus else None
        known = self.stream.states.values
        known |= {name: dict(state) for name, state in states.items() if name in known}

    # The backend

    def bring(self, origin: Origin) -> Rows:
        """Rows of a checkpoint, or those of an evaluation set, which workers begin to generate at once."""
        if isinstance(origin, Recording):
            raise UserError("runtime=streaming cannot replay recorded rows; write runtime=eager, hybrid or distributed")
        rows = self.store.make(origin)
        if not isinstance(origin, Surplus):
            self._begin_evaluation(rows)
        return rows

    def run(self, stage: Stage, table: Rows, iteration: int, sums: Sums) -> Rows:
        """The rows of the evaluation with the columns of its next stage."""
        stream, uids = self.evaluating, table.uids()
        assert stream is not None
        while not stream.schedule.progress.is_written(stage.name, uids):
            self._wait()
        with self.control.changed:
            index = stream.table.index(uids, [stage.name])
            payload = stream.table.payload(uids, [stage.name], None)
        table = table.with_columns(dict(assembled(self.data, index, payload).items()))
        if stage is stream.flow.stages[-1]:
            self._end_evaluation()
        return table

    def index(self, table: Rows) -> Rows:
        return table.index

    def record(self, path: Path, table: Rows, final: Rows) -> None:
        self.store.record(path, with_added(table, final))

    def keep(self, path: Path, table: Rows) -> None:
        self.store.keep(path, table)

    def save(self, folder: Path) -> None:
        """Has every role that changes written by its leader."""
        self.orders.carry_out({"do": "save", "folder": str(folder.resolve())})

    def copy_for_saving(self, folder: Path) -> list[Write]:
        """As `save`, but leaders go on as soon as they have copies, and write them in a thread."""
        self.orders.carry_out({"do": "copy", "folder": str(folder.resolve())})
        return [partial(self.orders.written, *given) for given in self.orders.give({"do": "tell"}).items()]

    def load(self, folder: Path, version: int) -> None:
        """Has every role that changes loaded; generation goes on with these weights, and the queue after iteration `version`."""
        self.orders.carry_out({"do": "load", "folder": str(folder.resolve()), "version": version})
        state, surplus = self.restored
        with self.control.changed:
            versions = (
                dict(zip(surplus.uids(), surplus["version"].tolist(), strict=True)) if surplus is not None else {}
            )
            self.stream.schedule.resume(version, GroupSelector.restored(state), versions)
            if surplus is not None:
                self.stream.restore(surplus, self.data.write_rows(surplus))
            self.control.engine_version = self.control.assignments.allowed = version
        self.server.changed()

    def close(self) -> None:
        """Tells all workers that the run is over, and leaves no process, segment or port behind."""
        with self.resources:
            self._change(lambda: setattr(self.control, "stopping", True))
            self.processes.close()

    # Inside

    def _admit(self, may_begin: bool = True) -> None:
        """Admits the groups that are wanted now, of a new iteration only if one may begin."""
        schedule, version = self.stream.schedule, self.control.engine_version
        with self.control.changed:
            begins = not schedule.is_open
            following = schedule.opened + 1
            if begins and not (may_begin and admissible(following, version, self.config.trainer.max_staleness)):
                return
            before = self._current() if begins else None
            count = schedule.groups_wanted(version)
            if before is not None and schedule.is_open:
                self.opening[following] = before
        if count:
            self.control.admit(self.stream, self.store.make(Admission(tuple(self.loader.advance(count)))))
        self._change(lambda: None)

    def _current(self) -> Position:
        """The state of selection and loader as it is, with the rows of kept surplus."""
        waiting = [uid for group in self.sampling.waiting for uid in self.stream.schedule.rows_of[group]]
        surplus = []
        if waiting:
            writers = self.stream.recorded_writers
            index = self.stream.table.index(waiting, writers)
            surplus = [assembled(self.data, index, self.stream.table.payload(waiting, writers, None))]
        return self.loader.state(), self.sampling.state(), surplus, {}

    def _result(self, finished: FinishedIteration) -> IterationResult[Rows]:
        table = assembled(self.data, finished.index, finished.payload)
        final = assembled(self.data, finished.final, finished.final_payload)
        self.control.release(finished)
        result = iteration_result(self.flow, self.groups, self.sampling.surplus, finished, table, final)
        if len(self.processes.places) > 1:
            result.sums.add("transfer/bytes_between_nodes", self._bytes_between_nodes())
        return result

    def _bytes_between_nodes(self) -> int:
        """Payload and weights that nodes have given to one another since this was asked last."""
        before = self.counted_bytes
        self.counted_bytes = sum(self.data.served_by(place.address) for place in self.processes.places.values())
        return self.counted_bytes - before

    def _begin_evaluation(self, rows: Rows) -> None:
        """Waits until engines may load the newest version, keeps them at it, and puts the set's rows into the queue."""
        schedule = self.stream.schedule
        while self.control.engine_version < schedule.published:
            self._admit(may_begin=False)
            self._wait()
        groups = len(set(rows["group"].tolist()))
        sizes = Sizes(1, groups, len(rows) // groups, len(rows))
        stream = self.evaluating = Stream(self.evaluation, sizes, during=schedule.published)
        with self.control.changed:
            self.control.pinned = True
            self.control.streams.append(stream)
            stream.schedule.groups_wanted(0)
        self.control.admit(stream, rows)
        self._change(lambda: None)

    def _end_evaluation(self) -> None:
        assert self.evaluating is not None
        self.control.end_stream(self.evaluating)
        self.evaluating = None
        self._change(lambda: setattr(self.control, "pinned", False))

    def _wait(self) -> None:
        """Until something changes at the queue, or shortly; raises what a worker, or the queue itself, has raised."""
        if self.control.refused is not None:
            raise self.control.refused
        self.processes.watch()
        if self.server.failure is not None:
            raise WorkerFailed(f"the queue's server failed:\n{self.server.failure}")
        self.seen = self.control.wait(self.seen, LOOK_EVERY_S)

    def _change(self, change: Callable[[], object]) -> None:
        """Changes something at the queue, and has waiting workers asked again."""
        with self.control.changed:
            change()
            self.control.advance()
        self.server.changed()


def sizes_of(config: Config, epoch_groups: int) -> Sizes:
    """The sizes that mean something for the result."""
    trainer, samples = config.trainer, config.rollout.samples_per_prompt
    rows = check_update_size(trainer.prompts_per_step, samples, trainer.rows_per_update)
    return Sizes(
        trainer.steps, trainer.prompts_per_step, samples, rows, trainer.epochs, trainer.max_staleness, trainer.surplus,
        epoch_groups, config.seed, trainer.over_sampling,
    )  # fmt: skip
