"""The controller of a streaming run: opens the queue, admits prompts, permits optimizer steps, and reports finished
iterations.

loader ──admit──▶ queue ◀──take, done── workers
                    │
                    └──finished iteration──▶ rows as recorded, metrics ──▶ files of the run
"""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.membership import RepairBudget
from braidrl.cluster.process import Launcher
from braidrl.cluster.ray_processes import RayLauncher
from braidrl.data.loader import PromptLoader
from braidrl.data.rows import Rows
from braidrl.engines.deployment_checks import check_deployment
from braidrl.engines.factory import with_nodes
from braidrl.errors import BadUpdate, WorkerError
from braidrl.flow import Flow
from braidrl.flow.batches import Sizes, admissible, check_update_size
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.queue.owner import StorageNode
from braidrl.queue.table import HeldBlocks, StoredRows
from braidrl.queue.transport import QueueServer
from braidrl.runtimes.interfaces import IterationResult, Position, Restart, StartedBatch, needed
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.row_store import Admission, Surplus
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.groups import Group, max_draining, older_groups, samplers_of, worker_groups
from braidrl.runtimes.streaming.orders import LOOK_EVERY_S, StreamingBackend
from braidrl.runtimes.streaming.processes import Processes
from braidrl.runtimes.streaming.resizing import answer_requests
from braidrl.runtimes.streaming.stream import IterationRecord, Report, Stream, versions_of
from braidrl.runtimes.streaming.weights import remove_weights
from braidrl.runtimes.streaming.work import WorkerRequest
from braidrl.weights.versions import LoadingSchedule


class StreamingController:
    """Drives iterations by admission and permits; the rows that are ready decide which stage runs when."""

    def __init__(
        self, prepared: Prepared, loader: PromptLoader, folder: Path, progress: Progress, repairs: RepairBudget
    ) -> None:
        """Start the queue and workers of a run that passed `check_streaming`; `repairs` limits restarts of trainers."""
        config, flow = prepared.config, prepared.flow
        self.loader, self.progress = loader, progress
        trainer, samples = config.trainer, config.rollout.samples_per_prompt
        sizes = Sizes(
            trainer.steps,
            trainer.prompts_per_step,
            samples,
            check_update_size(trainer.prompts_per_step, samples, trainer.rows_per_update),
            trainer.epochs,
            trainer.max_staleness,
            trainer.surplus,
            loader.epoch_size,
            config.seed,
            trainer.over_sampling,
            older_groups(config),
            config.rollout.tokens_per_iteration is not None,
        )
        self.new_stream = partial(Stream, flow, sizes, samplers=samplers_of(config, flow), held=HeldBlocks())
        self.stream = self.new_stream()
        self.opening: dict[int, Position] = {}
        """The run's position just before each iteration that was started and not finished."""
        self.seen, self.watch_at = 0, 0.0
        with ExitStack() as resources:
            launcher: Launcher = (
                RayLauncher(config.cluster, config.device)
                if prepared.deployment.launcher == "ray"
                else LocalLauncher(config.device)
            )
            resources.callback(launcher.close)
            prepared = replace(prepared, config=with_nodes(prepared.deployment, launcher.devices_of_node))
            check_deployment(prepared.deployment, flow)
            self.groups = worker_groups(prepared.deployment)
            self._start(prepared, folder, launcher, repairs, resources)
            self.backend = StreamingBackend(
                prepared.evaluation, self.control, self.processes, self.wait, self._admit, resources.pop_all()
            )

    def _start(
        self, prepared: Prepared, folder: Path, launcher: Launcher, repairs: RepairBudget, resources: ExitStack
    ) -> None:
        config, streaming = prepared.config, prepared.config.streaming
        # A client, also on this machine, needs a secret that only this run's processes know.
        secret = secrets.token_hex(32)
        node = StorageNode(launcher.node, launcher.ip, secret, streaming.storage)
        resources.callback(node.close)
        resources.callback(remove_weights, node.place().run)
        exported = [role for role in prepared.deployment.generating if role in prepared.flow.changed_roles]
        loading = LoadingSchedule(streaming.weights, max_draining(config, self.groups))
        episodes = config.rollout.environment.at_once
        self.control = ControlPlane(self.stream, node.data, streaming.lease_s, exported, loading, episodes)
        self.server = QueueServer(
            self.control.handle, WorkerRequest, self.control.tick, f"tcp://{launcher.ip}:*", secret
        )
        resources.callback(self.server.close)
        self.control.notify = self.server.changed
        # From here on it is an error if this process reads or writes payload.
        node.data.refuses_payload = True
        connected = self.server.address, node, secret
        self.processes = Processes(
            prepared.deployment, folder, self.control, launcher, *connected, prepared.kept, repairs
        )
        resources.callback(self.processes.close, 0.0)
        self.processes.start(self.groups)

    def iterate(
        self,
        iteration: int,
        version: int,
        recorded: StoredRows | None = None,
        train: bool = True,
        before_training: Callable[[], object] = lambda: None,
    ) -> IterationResult[StoredRows]:
        """Admit prompts until an iteration is published; `before_training` is called before its first step."""
        assert recorded is None and train, "checked when the run was set up"
        with self.progress.stage("generation") as generation, self.progress.stage("training") as training:
            while not self.control.finished:
                self._admit()
                with self.control.changed:
                    due = self.control.steps.allowed < iteration and self.control.steps.is_due
                    self._show(generation, training)
                if due:
                    before_training()
                    self.control.change(partial(self.control.steps.allow, iteration))
                try:
                    self.wait()
                except BadUpdate as error:
                    # The training batch as recorded, and with the columns that exist so far.
                    with self.control.changed:
                        uids = sorted(self.stream.schedule.progress.batches[iteration].uids, key=lambda uid: uid[1:])
                        error.batch = self.stream.stored(uids, recorded=True), self.stream.stored(uids)
                    raise
        finished = self.control.finished.popleft()
        assert finished.iteration == iteration
        self.opening.pop(iteration, None)
        # Immediately, while trainers have barely started the next batch.
        if self.processes.trained.is_copied and self.processes.trained.waiting():
            self.processes.continue_from_memory()
        result = self._result(finished)
        for name, value in self.loader.measure(iteration, result.generated).items():
            result.sums.add(name, value)
        # Generation of the next iteration continues while this one is recorded.
        self._admit()
        return result

    def position(self) -> Position:
        """Return the resume position after the last finished iteration; work started on the next one is repeated."""
        following = self.stream.schedule.progress.published + 1
        with self.control.changed:
            started = self.opening.get(following) or self._current()
        # The states at the start of the next iteration, which may already have updated them.
        ran = self.stream.record_of(following).states
        # Measurements since the next iteration was opened are part of the state.
        loader = {**self.loader.state(), "admitted": started.loader["admitted"]}
        return started._replace(
            loader=loader, stages={name: dict(ran.get(name, now)) for name, now in self.stream.states.items()}
        )

    def started_ahead(self) -> list[StartedBatch]:
        """Finish in-flight batches that were started on older versions and return them; newer rows continue."""
        stream, loading = self.stream, self.control.loading
        with self.progress.stage("generation") as bar:
            while True:
                with self.control.changed:
                    numbers = stream.started()
                    if loading.target >= stream.schedule.progress.published and all(
                        map(stream.schedule.progress.is_drawn, numbers)
                    ):
                        return [self._started(number) for number in numbers]
                    self._show(bar)
                self._admit()
                self.wait()

    def _started(self, number: int) -> StartedBatch:
        """Return a batch that has passed its recorded stages, in the form of a checkpoint."""
        stream = self.stream
        uids, record = stream.schedule.progress.batches[number].uids, stream.record_of(number)
        table = stream.stored(uids)
        names = [name for name in table.index if all(name in rows for rows in record.generated)]
        left_out = StoredRows(Rows.cat([rows.only(names) for rows in record.generated]))
        drawn = {s.name for name in stream.schedule.consumers.recorded for s in stream.consumers.by_name[name].stages}
        reports = [report for report in record.reports if report["stage"] in drawn]
        assert record.outcome is not None, "its groups are known"
        after = self.opening.get(number + 1) or self._current()
        return StartedBatch(number, table, left_out, record.outcome, reports, after)

    def is_awaited(self) -> bool:
        """Return True if lost trainers have restarted and will get their state from a checkpoint."""
        return not self.processes.trained.is_copied and self.processes.trained.waiting()

    def begin_again(self, version: int) -> Restart:
        """Regroup the ranks of all trained roles.

        Rows are kept if the checkpoint is of the last published version, otherwise forgotten: rows drawn by versions
        newer than the checkpoint would be trained by a run that never made those versions.
        """
        self.processes.forget_states()
        self.processes.regroup()
        if self.control.train_again(version):
            self.control.steps.allow(version)
            self.backend.restored = None
            self.backend.end_evaluation()
            return Restart.WITH_ROWS
        with self.control.changed:
            versions = self.stream.schedule.versions
            self.backend.forgotten = {*versions.started, *versions.oldest}
        self.stream, self.opening = self.new_stream(), {}
        self.control.begin_again(self.stream)
        self.backend.stream, self.backend.evaluating = self.stream, None
        return Restart.FROM_CHECKPOINT

    def restore(self, position: Position) -> None:
        """Resume from a checkpoint's loader, selection, surplus rows and stages' states; `load` names the iteration."""
        started = list[StartedBatch]()
        for batch in position.started:
            table, left_out, *surplus = (
                self.backend.make_rows(Surplus(path)) for path in (batch.table, batch.left_out, *batch.after.surplus)
            )
            # A batch too stale for the run's new limit, and all later ones, are generated again.
            sizes, oldest = self.stream.schedule.sizes, min(versions_of(table.index))
            if batch.iteration > sizes.iterations or not admissible(batch.iteration, oldest, sizes.max_staleness):
                break
            after = batch.after._replace(surplus=surplus)
            started.append(replace(batch, table=table, left_out=left_out, after=after))
        befores = [position, *(batch.after for batch in started)]
        self.opening = {batch.iteration: before for batch, before in zip(started, befores, strict=False)}
        last = befores[-1]
        self.loader.restore({**position.loader, "admitted": last.loader["admitted"]})
        self.backend.restored = last.sampling, last.surplus
        self.backend.started = started
        states = self.stream.states
        states |= {name: dict(state) for name, state in position.stages.items() if name in states}

    def wait(self, group: str | None = None) -> None:
        """Wait for a change of the queue, with a short limit; raise the error of a worker or of the queue.

        With `group` only that group's workers are watched: rows are written also after a trainer's failure.
        """
        if self.control.refused is not None:
            raise self.control.refused
        if (now := time.monotonic()) >= self.watch_at:
            # Not after each change: with small leases the queue changes a thousand times a second.
            self.watch_at = now + LOOK_EVERY_S
            self.processes.watch(group)
            for line in answer_requests(self.processes.folder, self.processes.resize):
                self.progress.print(line)
        if self.server.failure is not None:
            raise WorkerError(f"the queue's server failed:\n{self.server.failure}")
        self.seen = self.control.wait(self.seen, LOOK_EVERY_S)

    def _admit(self) -> None:
        """Admit the groups wanted now, for a new iteration if one may open."""
        admission, version = self.stream.schedule.admission, self.control.loading.target
        with self.control.changed:
            begins = not admission.is_open
            following = admission.opened + 1
            if begins and not (admission.may_open(version) and self.loader.is_ready(following)):
                return
            before, opened = self._current() if begins else None, (admission.opened, admission.lookahead)
            count = admission.groups_wanted(version)
            changed = count or opened != (admission.opened, admission.lookahead)
            if before is not None and admission.is_open:
                self.opening[following] = before
                self.loader.begin(following)
            # Rewind the loader if groups admitted ahead were returned.
            self.loader.admitted = min(self.loader.admitted, admission.sampling.admitted + 1)
            numbers = tuple(self.loader.advance(count))
        if count:
            self.control.admit(self.stream, self.backend.make_rows(Admission(numbers, self.loader.examples(numbers))))
        # A change wakes all waiting threads, including this one.
        if changed:
            self.control.change(lambda: None)

    def _current(self) -> Position:
        """Return the state of selection and loader between two batches, with the kept surplus.

        Groups admitted ahead are admitted again. If rows may be suspended, all rows in work are kept with their tokens.
        """
        admission, surplus = self.stream.schedule.admission, list[StoredRows]()
        sampling = admission.sampling.settled(admission.sizes.partial_rollout)
        waiting = [uid for group in admission.sampling.waiting for uid in admission.rows_of[group]]
        if waiting:
            surplus.append(self.stream.stored(waiting, recorded=True))
        if sampling.pending:
            surplus += self.stream.unfinished(sampling.pending)
        return Position({**self.loader.state(), "admitted": sampling.admitted + 1}, sampling.state(), surplus, {})

    def _show(self, generation: Bar, training: Bar | None = None) -> None:
        """Show the progress of rows in work: generated, on engines, and trained on."""
        schedule, activity = self.stream.schedule, self.control.current_metrics()
        generation.rows, rows = len(schedule.versions.oldest), sum(map(len, schedule.admission.rows_of.values()))
        generation.name = f"generation, from version {activity['streaming/oldest_version']:.0f} on"
        generation.update(in_flight=int(activity["streaming/in_flight"]), total_rows=rows)
        if training is not None:
            training.rows, planned = schedule.progress.rows_trained()
            training.update(total_rows=planned)

    def _result(self, finished: IterationRecord) -> IterationResult[StoredRows]:
        """Convert a finished iteration to the common result of all runtimes."""
        index, final = finished.table.index, finished.final.index
        assert finished.outcome is not None, "it is published"
        # As in serial order: the scores at selection, or without selection the final ones.
        parts = [*finished.generated, index] if self.stream.flow.sampling_segment else [final]
        common = [name for name in parts[-1] if all(name in part for part in parts)]
        sums = Sums().merge(*(Sums(report["sums"]) for report in finished.reports))
        for stage, state in finished.states.items():
            for name, value in state.items():
                sums.add(f"{stage}/{name}", value)
        surplus = self.stream.schedule.admission.sampling.surplus
        generated = needed(Rows.cat([part.only(common) for part in parts]), finished.outcome, surplus)
        outcome = finished.outcome
        result = IterationResult(generated, final, finished.table, finished.final, sums, dropped=outcome.dropped)
        with self.control.changed:
            observed = {**self.control.current_metrics(), **self.control.activity.take_sums()}
        observed |= {f"ranks/members/{group}": float(size) for group, size in self.processes.trained.sizes().items()}
        for name, value in observed.items():
            result.sums.add(name, value)
        data = self.control.data
        result.sums.add("streaming/main_payload_bytes", float(data.carried + data.served))
        result.seconds = stage_seconds(self.stream.flow, self.groups, finished.reports)
        if len(self.processes.storage_locations) > 1:
            result.sums.add("transfer/bytes_between_nodes", self.backend.bytes_between_nodes())
        return result


def stage_seconds(flow: Flow, groups: Sequence[Group], reports: Sequence[Report]) -> dict[str, float]:
    """Return for each stage the mean busy seconds of its workers."""
    seconds = dict.fromkeys((stage.name for stage in flow.stages), 0.0)
    consumers = Consumers(flow)
    workers = {
        stage.name: group.processes // group.ranks
        for group in groups
        for name in group.consumers
        if name in consumers.by_name
        for stage in consumers.by_name[name].stages
    }
    for report in reports:
        seconds[report["stage"]] += report["seconds"] / workers.get(report["stage"], 1)
    return seconds
