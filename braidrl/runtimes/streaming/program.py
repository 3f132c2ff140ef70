"""The controller of a streaming run: opens the queue, admits prompts, lets optimizer steps be made, and reports finished iterations.

loader ──admit──▶ queue ◀──take, done── workers
                    │
                    └──finished iteration──▶ rows as recorded, metrics ──▶ whoever writes the run's files
"""

import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from braidrl.config import Config
from braidrl.data.loader import PromptLoader
from braidrl.data.rows import Rows
from braidrl.errors import BadUpdate, WorkerError
from braidrl.flow import Flow
from braidrl.flow.batches import Sizes, admissible, check_update_size
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.queue.owner import StorageNode
from braidrl.queue.table import HeldBlocks, StoredRows
from braidrl.queue.transport import QueueServer
from braidrl.runtimes.interfaces import BegunBatch, IterationResult, Position, Restart, needed
from braidrl.runtimes.prepare.setup import Prepared
from braidrl.runtimes.row_store import Admission, Surplus
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.groups import (
    ROWS,
    Group,
    check_streaming,
    most_out,
    older_groups,
    samplers_of,
    worker_groups,
)
from braidrl.runtimes.streaming.orders import LOOK_EVERY_S, StreamingBackend
from braidrl.runtimes.streaming.processes import Processes, worker_launcher
from braidrl.runtimes.streaming.rows import RowsProcess
from braidrl.runtimes.streaming.stream import IterationRecord, Report, Stream, versions_of
from braidrl.weights.versions import LoadingSchedule


class StreamingProgram:
    """Drives iterations by what it admits and allows; which stage runs when is decided by who has rows."""

    def __init__(self, prepared: Prepared, loader: PromptLoader, folder: Path, progress: Progress) -> None:
        """Start the queue and all workers.

        Args:
            prepared: the checked configuration, with flow, data and models.
            loader: the training prompts.
            folder: the run's, for what workers write.
            progress: shows how far an iteration is.

        Raises:
            UserError: before anything starts, for what cannot stream.
        """
        config, flow = prepared.config, prepared.flow
        check_streaming(config, flow)
        self.groups = worker_groups(config, flow, prepared.evaluation if config.data.evaluation_sources else None)
        self.loader, self.progress = loader, progress
        self.new_stream = partial(
            Stream, flow, sizes_of(config, loader.epoch_size), samplers=samplers_of(config, flow), held=HeldBlocks()
        )
        self.stream = self.new_stream()
        self.opening: dict[int, Position] = {}
        """For each iteration that was begun and not finished, where the run stood just before."""
        self.seen = 0
        with ExitStack() as resources:
            self._start(prepared, folder, resources)
            self.backend = StreamingBackend(
                self.rows, prepared.evaluation, self.control, self.processes, self.wait,
                lambda: self._admit(may_begin=False), resources.pop_all(),
            )  # fmt: skip

    def _start(self, prepared: Prepared, folder: Path, resources: ExitStack) -> None:
        config, streaming = prepared.config, prepared.config.streaming
        launcher = worker_launcher(config)
        resources.callback(launcher.close)
        # Whoever connects, from this machine too, must know what only this run's processes are told.
        secret = secrets.token_hex(32)
        node = StorageNode(launcher.node, launcher.ip, secret, streaming.storage)
        resources.callback(node.close)
        exported = [role for role in prepared.generating if role in prepared.flow.changed_roles]
        loading = LoadingSchedule(streaming.weights, most_out(config, self.groups))
        episodes = config.rollout.environment.at_once
        self.control = ControlPlane(self.stream, node.data, streaming.lease_s, exported, loading, episodes)
        self.server = QueueServer(self.control.handle, self.control.tick, f"tcp://{launcher.ip}:*", secret)
        resources.callback(self.server.close)
        self.control.notify = self.server.changed
        # From here on payload that this process reads or writes is an error.
        node.data.refuses_payload = True
        self.processes = Processes(
            config, folder, self.control, launcher, self.server.address, node, secret, prepared.kept
        )
        self.rows = RowsProcess(self.control, self.processes.rows_holder, partial(self._wait_for, ROWS))
        resources.callback(self.processes.kill)
        self.processes.start(self.groups)

    def iterate(
        self,
        iteration: int,
        version: int,
        recorded: StoredRows | None = None,
        train: bool = True,
        before_training: Callable[[], object] = lambda: None,
    ) -> IterationResult[StoredRows]:
        """Wait until an iteration is published, and admit prompts meanwhile; `before_training` is called before its first step."""
        assert recorded is None and train, "checked when the run was set up"
        with self.progress.stage("generation") as generation, self.progress.stage("training") as training:
            while not self.control.finished:
                self._admit()
                with self.control.changed:
                    due = self.control.allowed < iteration and self.stream.schedule.due_steps()
                    self._show(generation, training)
                if due:
                    before_training()
                    self.control.change(lambda: setattr(self.control, "allowed", iteration))
                try:
                    self.wait()
                except BadUpdate as error:
                    error.batch = self._unfinished(iteration)
                    raise
        finished = self.control.finished.popleft()
        assert finished.iteration == iteration
        self.opening.pop(iteration, None)
        # Generation of the next goes on while this one is written down.
        self._admit()
        return self._result(finished)

    def position(self) -> Position:
        """Return where a run resumes from after the last finished iteration; what was begun of the next one is done again then."""
        following = self.stream.schedule.published + 1
        with self.control.changed:
            begun = self.opening.get(following) or self._current()
        return begun._replace(stages=self.stream.states_before(following))

    def begun_ahead(self) -> list[BegunBatch]:
        """Wait until rows are drawn that older weights have begun, and return their batches; what newer ones begin goes on."""
        stream, loading = self.stream, self.control.loading
        with self.progress.stage("generation") as bar:
            while True:
                with self.control.changed:
                    numbers = stream.begun()
                    if loading.target >= stream.schedule.published and all(map(stream.schedule.is_drawn, numbers)):
                        return [self._begun(number) for number in numbers]
                    self._show(bar)
                self._admit()
                self.wait()

    def _begun(self, number: int) -> BegunBatch:
        """Return a batch whose rows have come through the recorded stages, as a checkpoint keeps it."""
        stream = self.stream
        uids, record = stream.schedule.batches[number].uids, stream.record_of(number)
        table = stream.table.stored(uids, stream.recorded_writers)
        names = [name for name in table.index if all(name in rows for rows in record.generated)]
        left_out = StoredRows(Rows.cat([rows.only(names) for rows in record.generated]))
        recorded = {stage.name for stage in stream.flow.stages[: stream.flow.recorded_stages]}
        reports = [report for report in record.reports if report["stage"] in recorded]
        assert record.outcome is not None, "its groups are known"
        after = self.opening.get(number + 1) or self._current()
        return BegunBatch(number, table, left_out, record.outcome, reports, after)

    def begin_again(self, version: int) -> Restart:
        """Replace the processes that train. Rows are kept where the checkpoint is of the last published version, and else forgotten.

        Rows that weights drew which are newer than the checkpoint's would be trained by a run that has not made those weights.
        """
        self.control.unloaded = frozenset(group.name for group in self.groups if group.trained)
        self.processes.replace_trainers()
        if self.control.train_again(version):
            self.backend.restored = None
            return Restart.WITH_ROWS
        with self.control.changed:
            self.backend.forgotten = {uid for _, uid in self.stream.schedule.begun}
        self.stream, self.opening = self.new_stream(), {}
        self.control.begin_again(self.stream)
        self.backend.stream, self.backend.evaluating = self.stream, None
        return Restart.FROM_CHECKPOINT

    def restore(self, position: Position) -> None:
        """Go on from a checkpoint's loader, selection, surplus rows and stages' states; `load` says after which iteration."""
        begun = self._usable(position.begun)
        befores = [position, *(batch.after for batch in begun)]
        self.opening = {batch.iteration: before for batch, before in zip(begun, befores, strict=False)}
        last = befores[-1]
        self.loader.restore(last.loader)
        self.backend.restored = last.sampling, last.surplus
        self.backend.begun = begun
        known = self.stream.states.values
        known |= {name: dict(state) for name, state in position.stages.items() if name in known}

    def _usable(self, begun: Sequence[BegunBatch]) -> list[BegunBatch]:
        """Return batches of a checkpoint with their rows, up to one that is too old for a run that was given less staleness."""
        found: list[BegunBatch] = []
        for batch in begun:
            table, left_out, *surplus = (
                self.rows.make(Surplus(path)) for path in (batch.table, batch.left_out, *batch.after.surplus)
            )
            after = batch.after._replace(surplus=surplus)
            oldest = min(versions_of(table.index))
            if batch.iteration > self.stream.schedule.sizes.iterations or not admissible(
                batch.iteration, oldest, self.stream.schedule.sizes.max_staleness
            ):
                break
            found.append(replace(batch, table=table, left_out=left_out, after=after))
        return found

    def wait(self) -> None:
        """Wait until something changes at the queue, or shortly; raise what a worker, or the queue itself, has raised."""
        if self.control.refused is not None:
            raise self.control.refused
        self._wait_for(None)

    def _wait_for(self, group: str | None) -> None:
        """Wait as `wait` does, and look after one group alone: rows are written also when a trainer has failed."""
        self.processes.watch(group)
        if self.server.failure is not None:
            raise WorkerError(f"the queue's server failed:\n{self.server.failure}")
        self.seen = self.control.wait(self.seen, LOOK_EVERY_S)

    def _admit(self, may_begin: bool = True) -> None:
        """Admit the groups that are wanted now, of a new iteration only if one may begin."""
        schedule, version = self.stream.schedule, self.control.loading.target
        with self.control.changed:
            begins = not schedule.is_open
            following = schedule.opened + 1
            if begins and not (may_begin and admissible(following, version, schedule.sizes.ahead)):
                return
            before, known = self._current() if begins else None, (schedule.opened, schedule.horizon)
            count = schedule.groups_wanted(version)
            changed = count or known != (schedule.opened, schedule.horizon)
            if before is not None and schedule.is_open:
                self.opening[following] = before
            self.loader.go_back(schedule.next_group)
            numbers = tuple(self.loader.advance(count))
        if count:
            self.control.admit(self.stream, self.rows.make(Admission(numbers)))
        # A change wakes everybody who waits, this process too.
        if changed:
            self.control.change(lambda: None)

    def _current(self) -> Position:
        """Return the state of selection and loader between two batches, with the rows of kept surplus; what went ahead is done again.

        Where rows may be set aside, all that are in work are kept, with what they had drawn then.
        """
        schedule, surplus = self.stream.schedule, list[StoredRows]()
        sampling = schedule.sampling.settled(schedule.sizes.sets_aside)
        waiting = [uid for group in schedule.sampling.waiting for uid in schedule.rows_of[group]]
        if waiting:
            surplus.append(self.stream.table.stored(waiting, self.stream.recorded_writers))
        if sampling.pending:
            surplus += self.stream.unfinished(sampling.pending)
        return Position({**self.loader.state(), "admitted": sampling.admitted + 1}, sampling.state(), surplus, {})

    def _show(self, generation: Bar, training: Bar | None = None) -> None:
        """Show how many of the rows in work are generated, how many engines have, and how many are trained on."""
        schedule, seen = self.stream.schedule, self.control.seen_now()
        generation.rows, rows = len(schedule.versions), sum(map(len, schedule.rows_of.values()))
        generation.name = f"generation, from version {seen['streaming/oldest_version']:.0f} on"
        generation.update(in_flight=int(seen["streaming/in_flight"]), total_rows=rows)
        if training is not None:
            training.rows, planned = schedule.rows_trained()
            training.update(total_rows=planned)

    def _unfinished(self, iteration: int) -> tuple[StoredRows, StoredRows]:
        """Return the batch of an iteration that trains, as it is recorded, and with the columns that its rows have by now."""
        stream = self.stream
        with self.control.changed:
            uids = sorted(stream.schedule.batches[iteration].uids, key=lambda uid: uid[1:])
            return stream.table.stored(uids, stream.recorded_writers), stream.table.stored(uids, stream.writers)

    def _result(self, finished: IterationRecord) -> IterationResult[StoredRows]:
        result = iteration_result(self.stream.flow, self.stream.schedule.sampling.surplus, finished)
        with self.control.changed:
            told = {**self.control.seen_now(), **self.control.activity.told()}
        for name, value in told.items():
            result.sums.add(name, value)
        data = self.control.data
        result.sums.add("streaming/main_payload_bytes", float(data.carried + data.served))
        result.seconds = stage_seconds(self.stream.flow, self.groups, finished.reports)
        if len(self.processes.places) > 1:
            result.sums.add("transfer/bytes_between_nodes", self.backend.bytes_between_nodes())
        return result


def iteration_result(flow: Flow, surplus: str, finished: IterationRecord) -> IterationResult[StoredRows]:
    """Return a finished iteration as every runtime reports it.

    Args:
        flow: the stages.
        surplus: what becomes of groups that are over.
        finished: what the queue and its workers noted.
    """
    index, final = finished.table.index, finished.final.index
    assert finished.outcome is not None, "it is published"
    # As in serial order: scores as selection saw them, or where nothing is selected as they were in the end.
    parts = [*finished.generated, index] if flow.sampling_segment else [final]
    common = [name for name in parts[-1] if all(name in part for part in parts)]
    sums = Sums.merged(Sums(report["sums"]) for report in finished.reports)
    for stage, state in finished.states.items():
        for name, value in state.items():
            sums.add(f"{stage}/{name}", value)
    generated = needed(Rows.cat([part.only(common) for part in parts]), finished.outcome, surplus)
    return IterationResult(generated, final, finished.table, finished.final, sums, dropped=finished.outcome.dropped)


def stage_seconds(flow: Flow, groups: Sequence[Group], reports: Sequence[Report]) -> dict[str, float]:
    """Return for each stage the seconds that its workers were busy with it, on average."""
    seconds = dict.fromkeys((stage.name for stage in flow.stages), 0.0)
    workers = {name: group.processes // group.ranks for group in groups for name in group.stages}
    for report in reports:
        seconds[report["stage"]] += report["seconds"] / workers[report["stage"]]
    return seconds


def sizes_of(config: Config, epoch_groups: int) -> Sizes:
    """Return the sizes that mean something for the result; `epoch_groups` are the prompts of an epoch."""
    trainer, samples = config.trainer, config.rollout.samples_per_prompt
    rows = check_update_size(trainer.prompts_per_step, samples, trainer.rows_per_update)
    return Sizes(
        trainer.steps, trainer.prompts_per_step, samples, rows, trainer.epochs, trainer.max_staleness, trainer.surplus,
        epoch_groups, config.seed, trainer.over_sampling, older_groups(config), config.rollout.tokens_per_iteration is not None,
    )  # fmt: skip
