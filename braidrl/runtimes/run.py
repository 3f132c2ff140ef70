"""A training run: its folder, the loop over iterations, evaluation, checkpoints, resume and records.

configuration ─prepare─▶ flow, data, models ─▶ each step: run the flow ─▶ rollouts ─▶ evaluate? ─▶ metrics
    ─▶ checkpoint?
"""

import gc
import time
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from braidrl.cluster.membership import RepairBudget
from braidrl.cluster.process import interrupts_handled
from braidrl.cluster.row_deaths import RowDeaths, skipped_row_line
from braidrl.cluster.watchdog import FrozenWatch
from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.errors import BadUpdate, FailedStep, LostPeers, LostProcess, UserError, WorkerError, first_line
from braidrl.observe.metrics import REQUIRED_KEYS
from braidrl.observe.progress import Progress
from braidrl.observe.rollouts import check_recorded, rollout_path
from braidrl.observe.trace import Span
from braidrl.runtimes.evaluation import RunScores
from braidrl.runtimes.interfaces import Interrupts, Restart
from braidrl.runtimes.isolation import can_isolate
from braidrl.runtimes.prepare.checks import without_effect
from braidrl.runtimes.prepare.run_data import settle, vocabulary_lines
from braidrl.runtimes.prepare.setup import set_up_torch
from braidrl.runtimes.replicas import free_groups
from braidrl.runtimes.row_store import Recording, Surplus
from braidrl.runtimes.run_records import RunRecords
from braidrl.runtimes.saving.checkpoints import Checkpoints, RunState, load_checkpoint, resume_point
from braidrl.runtimes.saving.fingerprints import check_unchanged, fingerprints
from braidrl.runtimes.saving.folders import full_disk_named, held_alone, identity, new_run_folder, write_config
from braidrl.runtimes.sizing import check_engine_memory, prepared_to_fit
from braidrl.runtimes.spmd.rank_backend import rank_backend
from braidrl.runtimes.spmd.regrouping import Regrouping
from braidrl.runtimes.start import check_runtime, start_controller
from braidrl.runtimes.step_metrics import FailureWatch, GapWatch, LearningWatch, step_metrics, summary
from braidrl.training.objective import NAMES_A_TOKEN
from braidrl.training.role_settings import unusual_rates


class TrainingRun(AbstractContextManager["TrainingRun"]):
    """A training run as a context manager; its exit always closes files and ends processes."""

    def __init__(
        self,
        config: Config,
        *,
        resume: Path | None = None,
        replay: Path | None = None,
        rollout_only: bool = False,
        newest_whole: bool = False,
        world: World | None = None,
        repairs: RepairBudget | None = None,
        deaths: RowDeaths | None = None,
    ) -> None:
        """Check everything that can be checked before a model loads. Raises UserError if the run is not possible.

        `world` holds the ranks that run this together, each in its own TrainingRun. `repairs` limits automatic
        restarts; by default it is that of the configuration. `deaths` has the rows with which processes have ended.
        """
        self.replay, self.rollout_only = replay, rollout_only
        if replay is not None:
            check_recorded(replay, config.trainer.steps, rollout_only)
        self.world = world or World()
        self.prepared, chosen = prepared_to_fit(config, self.world)
        config, flow = self.config, self.flow = self.prepared.config, self.prepared.flow
        check_runtime(self.prepared.deployment, generates=replay is None, trains=not rollout_only)
        if not rollout_only:
            check_engine_memory(self.prepared)

        self.regrouping = Regrouping(self.prepared.deployment, self.world)
        if self.world.is_waiting:
            assert config.name, "a run whose ranks may come back has a name"
            resume = config.output / config.name
        self.folder = resume or Path(
            self.world.share("run folder", str(new_run_folder(config)) if self.world.first else None)
        )
        self.folder_identity = identity(self.folder)
        self.fingerprints = fingerprints(self.prepared) if self.world.first else {}
        self.progress = Progress(config.trainer.steps, shown=self.world.first)
        lines = [*chosen, *without_effect(config), *unusual_rates(config, flow)]
        lines += [source.report() for source in self.prepared.sources]
        for line in [str(self.folder), *lines, *vocabulary_lines(self.prepared)]:
            self.progress.print(line)
        set_up_torch(config)
        self.interrupts = Interrupts(alone=world is None)
        self.keeps_rows = any("tokens" in stage.writes for stage in flow.stages[: flow.recorded_stages])
        self.records = RunRecords(self.folder, config, self.progress)
        self.gaps, reward = GapWatch(config.rollout.max_log_prob_gap), config.reward
        self.learning = LearningWatch(flow, self.progress.print)
        self.failed = FailureWatch(reward.max_failed_fraction, reward.max_failed_steps, self.folder)
        self.checkpoints = Checkpoints(self.folder, config, self.world.first)
        self.step, self.version = 0, 0
        self.repairs, self.deaths = repairs or repair_budget(config), deaths or RowDeaths()
        self.controller: Any = None
        self.backend: Any = None
        self.saved_step: int | None = None
        self.scores = RunScores(self.prepared, self.folder, self.checkpoints, self.world)

        with ExitStack() as resources, full_disk_named(self.folder):
            if self.world.first:
                resources.enter_context(held_alone(self.folder))
            if world is None:  # the launcher watches ranks
                resources.enter_context(FrozenWatch(config.cluster.silence_s, self.progress.print, self.folder))
            saved = self._saved(newest_whole) if resume and not self.world.is_waiting else None
            if self.regrouping.has_replicas or not self.world.is_waiting:
                self._start_controller()
            resources.callback(self._close)
            if saved:
                self._restore(*saved)
                if self.step >= config.trainer.steps > 0:
                    done = f"{self.step} steps are done, and trainer.steps={config.trainer.steps}"
                    self.progress.print(
                        f"{done}: nothing is trained; write trainer.steps={self.step + 10} for ten more"
                    )
            if self.world.first:
                self.records.open(self.step if resume else None)
            if not resume:
                self.records.report(rehearsal=True)
            self.resources = resources.pop_all()

    @property
    def isolates_rows(self) -> bool:
        """Return True if the run continues after a rank or a worker has died with its rows."""
        mode = self.prepared.deployment.mode
        return self.world.elastic is not None or (mode.placed and self.repairs.per_hour > 0)

    def _start_controller(self) -> None:
        self.controller = start_controller(
            self.prepared, self.progress, self.folder, self.world, self.interrupts, self.repairs, self.deaths
        )
        self.backend = self.controller.backend

    def _close(self) -> None:
        """End the backend, or after a failure between two backends the verifiers, and the reading of data."""
        for source in self.prepared.sources:
            source.stop()
        if self.backend is not None:
            self.backend.close()
        elif self.prepared.running is not None:
            self.prepared.running.close()

    def _saved(self, newest_whole: bool) -> tuple[Path, RunState] | None:
        """Return the checkpoint from which the run resumes, and its state, if there is one.

        Raises UserError if the data has changed.
        """
        checkpoint = resume_point(self.folder, newest_whole, self.world)
        if checkpoint is None:
            return None
        state = load_checkpoint(checkpoint)
        check_unchanged(state.fingerprints, self.fingerprints, self.config.trainer.accept_changes, state.step)
        return checkpoint, state

    def __exit__(self, *_: object) -> None:
        self.resources.close()
        self.records.close()

    def train(self) -> None:
        """Run to `trainer.steps`. On Ctrl-C save the last complete step and raise KeyboardInterrupt again."""
        # From here on garbage collection skips imported objects, which takes a fifth of a second and frees nothing.
        gc.collect()
        gc.freeze()
        with interrupts_handled(self.interrupts.handle), full_disk_named(self.folder):
            if is_new := self.world.is_waiting:
                self.world.wait_until_member()
                self._regroup(None)
            snapshot = self._snapshot()
            try:
                if not is_new:
                    if self.world.elastic is not None:
                        self.regrouping.learn_rows(rank_backend(self.backend))
                    self._begin()
                while True:
                    snapshot = self._snapshot()
                    try:
                        if self.step >= self.config.trainer.steps or self.scores.are_enough:
                            self._save(snapshot, wait=True)
                            break
                        self.checkpoints.wait(block=False)
                        if self._take_in(snapshot):
                            continue
                        for line in settle(self.prepared, self.world):
                            self.progress.print(line)
                        self._one_step(snapshot)
                    except LostPeers as error:
                        if self.world.elastic is None:
                            raise
                        self._regroup(snapshot, error)
                    except LostProcess as error:
                        self._bring_back(error)
            except FailedStep:
                # Every rank raises this error: the step is complete, and everything independent of it is kept.
                self._save(self._snapshot(), wait=True)
                self.records.report()
                self.world.gather("the checkpoint of the last step", None)
                raise
            except KeyboardInterrupt:
                if not self.interrupts.torn:
                    # A second Ctrl-C waits until the step is saved, a third does not.
                    with self.interrupts.hold():
                        self._save(snapshot if snapshot.step == self.step else self._snapshot(), wait=True)
                        self.records.report()
                        self.progress.print(f"saved step {self.step}; go on with: braid train --resume {self.folder}")
                raise
        for source in self.prepared.sources:
            if source.opening is not None:
                self.progress.print(f"{source.path}: the run ended before all lines were read and checked")
        self.records.report()

    def _begin(self) -> None:
        """Evaluate before the first step."""
        last = self.world.share("metrics", self.records.writer.last if self.records.writer else None)
        if metrics := self.scores.begin(last, self.backend, self.step):
            # The training metrics of a line before the first step are null.
            self.records.write(0, {**dict.fromkeys(REQUIRED_KEYS), **metrics, "version": self.version})
            self.progress.print(summary(metrics))

    def _check_folder(self) -> None:
        """Raise UserError if the run's folder was removed or replaced: everything written since is lost.

        If this process alone drives the run, it first makes the folder again with a checkpoint, so that the run can
        resume.
        """
        if not self.world.first or identity(self.folder) == self.folder_identity:
            return
        lost = f"{self.folder} was removed, or replaced, while the run wrote into it"
        if self.world.size > 1:
            raise UserError(f"{lost}; step {self.step} was the last, start a new run")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_config(self.folder, self.config)
        self._save(self._snapshot(), wait=True)
        raise UserError(
            f"{lost}. It is made again with a checkpoint of step {self.step}, without the metrics and rollouts of "
            f"earlier steps: go on with `braid train --resume {self.folder}`"
        )

    def _bring_back(self, error: LostProcess) -> None:
        """Resume from the newest complete checkpoint with the remaining processes, or raise `error`."""
        self._record_rows(error)
        checkpoint = resume_point(self.folder, newest_whole=True)
        if checkpoint is None or not (error.is_counted or self.repairs.spend()):
            raise error
        error.is_counted = True
        state = load_checkpoint(checkpoint)
        with self.interrupts.hold():
            restart = self.controller.begin_again(state.version)
            if restart is Restart.OF_ALL:
                raise error
            self.progress.print(f"{error}; it starts again by itself, the others go on ({self.repairs})")
            try:
                self._load_again(checkpoint, state, restart)
            except LostProcess as another:
                self._bring_back(another)

    def _record_rows(self, error: LostProcess) -> None:
        """Record the rows with which a process of `hybrid` has died."""
        isolated = {stage.name for stage in (*self.flow.stages, *self.prepared.evaluation.stages) if can_isolate(stage)}
        for row in self.deaths.record("worker", error.rows if error.stage in isolated else ()):
            self.progress.print(skipped_row_line(row, "workers", first_line(error)))
        error.rows = ()

    def _load_again(self, checkpoint: Path, state: RunState, restart: Restart) -> None:
        """Continue from a checkpoint with processes of which some are new."""
        if restart is Restart.WITH_ROWS:
            self.backend.load(checkpoint, state.version)
            return
        with suppress(UserError, WorkerError):  # unfinished files of a later step
            self.checkpoints.wait()
        self._restore(checkpoint, state)
        if self.records.writer is not None:
            self.records.open(self.step)

    def _take_in(self, state: RunState) -> bool:
        """Between two steps, admit processes that wait to become ranks; return True if there were any."""
        elastic = self.world.elastic
        if elastic is None:
            if not self.controller.is_awaited():
                return False
            self._save(state, wait=True)
            checkpoint = self.folder / "checkpoints" / f"step-{state.step}"
            self._load_again(checkpoint, load_checkpoint(checkpoint), self.controller.begin_again(state.version))
            return True
        came = self.world.share("processes that wait", elastic.waiting() if self.world.first else None)
        if came:
            if not self.regrouping.is_copied:
                self._save(state, wait=True)
            if self.world.first:
                elastic.add(came)
            self._regroup(state)
        return bool(came)

    def _regroup(self, state: RunState | None, error: LostPeers | None = None) -> None:
        """Continue with the ranks of the newest membership, which all join here.

        `state` is that after the last complete step, None in a restarted process. Raises LostPeers if the membership
        has not changed.
        """
        start = time.time()
        while True:
            self.regrouping.hold(state, rank_backend(self.backend) if self.backend is not None else None)
            if not self.regrouping.has_replicas:
                self._drop_backend(error)
            self.world.regroup(error)
            try:
                with self.interrupts.hold():
                    self.regrouping.wait_for_enough()
                    self._settle(is_new=state is None)
                    self.regrouping.end(self._snapshot(), rank_backend(self.backend))
                if (trace := self.backend.trace) is not None:
                    stage = f"{self.world.size} ranks"
                    trace.record(Span(trace.worker, "ranks", stage, self.step + 1, start, time.time()))
                return
            except LostPeers as another:
                error = another

    def _settle(self, is_new: bool) -> None:
        """Continue after the newest step whose state is in the ranks' memory, otherwise from a checkpoint."""
        settled, source = self._restored(is_new), "memory"
        if settled is not None:
            self.step, self.version = settled.step, settled.version
            self.controller.restore(settled.position)
            self.backend.publish(settled.version)
            self.saved_step = None if (self.saved_step or 0) > self.step else self.saved_step
            self.scores.forget()
        else:
            source = self._load_newest()
        if self.world.first:
            self._write_files()
        ranks = "1 rank continues" if self.world.size == 1 else f"{self.world.size} ranks continue"
        self.progress.print(f"{ranks} after step {self.step}, from {source}")

    def _restored(self, is_new: bool) -> RunState | None:
        """Restore all ranks' models to the newest state that is complete in memory; return None if there is none."""
        state, has_state = self.regrouping.agreed(is_new), self.backend is not None and not is_new
        if state is not None and self.backend is None:
            self._start_controller()
        elif state is not None:
            rank_backend(self.backend).regroup()
        while state is not None:
            if self.regrouping.replica.restore(state.step, rank_backend(self.backend).executor, has_state):
                return state
            # A rank was lost while it copied this state to others.
            state = self.regrouping.agreed(is_new, before=state.step)
        return None

    def _drop_backend(self, error: BaseException | None = None) -> None:
        """Free the backend, with its process groups, which an error's stack frames may hold."""
        with suppress(UserError, WorkerError, RuntimeError):
            self.checkpoints.wait()
        if self.backend is not None:
            rewards = rank_backend(self.backend).executor.generation.release_rewards()
            self.prepared = replace(self.prepared, running=rewards)
            self.backend.close()
        self.backend = self.controller = None
        free_groups(error)

    def _load_newest(self) -> str:
        """Rebuild this process's backend for the current ranks, and load the newest checkpoint; return its name."""
        self.regrouping.load_instead()
        self._drop_backend()
        self._start_controller()
        checkpoint = resume_point(self.folder, newest_whole=True, world=self.world)
        if checkpoint is None:
            self.step = self.version = 0
            return "the beginning"
        self._restore(checkpoint, load_checkpoint(checkpoint))
        return f"checkpoint {checkpoint.name}"

    def _write_files(self) -> None:
        """Write the run's files from this process, which is now the first rank, after the current step."""
        if self.records.writer is None:
            self.resources.enter_context(held_alone(self.folder))
            self.fingerprints = self.fingerprints or fingerprints(self.prepared)
            self.checkpoints.first = True
            self.progress.show()
        self.records.open(self.step)

    def _one_step(self, state: RunState) -> None:
        """Make the step that follows a state."""
        if self.world.elastic is not None:
            self.regrouping.keep(state, rank_backend(self.backend))
        step, start = self.step + 1, time.perf_counter()
        self.progress.step = step
        recorded = self.backend.read(Recording(rollout_path(self.replay, step))) if self.replay is not None else None
        with ExitStack() as interrupts_held:
            try:

                def before_training() -> None:
                    # Once weights have changed, an interrupt waits until the step is written.
                    interrupts_held.enter_context(self.interrupts.hold())

                result = self.controller.iterate(
                    step, self.version, recorded, not self.rollout_only, before_training=before_training
                )
            except BadUpdate as error:
                raise UserError(self._kept_for_replay(step, error)) from error
            interrupts_held.enter_context(self.interrupts.hold())
            seconds = time.perf_counter() - start
            metrics = step_metrics(self.flow, result, step, self.version, seconds)
            counted = result.sums.pairs()
            skipped = [n.removesuffix("/skipped_updates") for n in counted if n.endswith("/skipped_updates")]
            # A role that skipped every optimizer step has not been trained.
            self.checkpoints.learning = all(f"{role}/grad_norm" in counted for role in skipped)
            if self.keeps_rows:
                self.backend.record(rollout_path(self.folder, step), result.table, result.final)
            self.step = step
            self.version += 0 if self.rollout_only else 1
            every = self.config.evaluation.every
            if every and (step % every == 0 or step == self.config.trainer.steps):
                try:
                    metrics |= self.scores.measure(self.backend, step)
                except LostProcess as error:
                    self._bring_back(error)
                    if self.step != step:
                        return
                    metrics |= self.scores.measure(self.backend, step)
            if self.world.elastic is not None:
                metrics["ranks/members"] = self.world.size
            if self.isolates_rows:
                left_out = self.deaths.left_out.intersection(result.generated.uids())
                metrics["ranks/rows_left_out"] = len(left_out)
            self.records.write(step, metrics)
        self.progress.print(summary(metrics))
        self.learning.note(metrics)
        try:
            self.failed.check(step, result.sums)
            # Rows of a replay, and stale rows, come from weights other than those in training.
            if self.replay is None and not self.prepared.deployment.trains_on_stale_rows:
                self.gaps.check(metrics)
        except UserError:
            # All ranks get the same result. The first that fails ends the others, and one of them writes the step's
            # line.
            self.world.gather("the line of the last step", None)
            raise
        self._check_folder()
        often = self.config.trainer.checkpoint_every
        if self.scores.best_of_step or (often and step % often == 0):
            self._save(self._snapshot())

    def _kept_for_replay(self, step: int, error: BadUpdate) -> str:
        """Record the batch of a failed update; return a message about it."""
        # If several ranks failed, the message names those with non-finite numbers.
        message = max(self.world.gather("failure", str(error)), key=lambda word: NAMES_A_TOKEN in word)
        if error.batch is not None:
            if self.keeps_rows:
                self.backend.record(rollout_path(self.folder, step), *error.batch)
            # The first rank that fails ends the others, so they must have written their parts.
            self.world.gather("the batch that is kept", None)
        again = (
            f"braid train {self.folder}/config.yaml name={self.folder.name}-replay trainer.steps={step} --replay "
            f"{self.folder}"
        )
        alternative = "go on without such updates with trainer.skip_bad_updates=true"
        if self.config.trainer.skip_bad_updates:
            most = self.config.trainer.max_skipped_updates
            alternative = (
                "go on from the last checkpoint with a lower trainer.learning_rate: "
                f"trainer.max_skipped_updates={most} were left out in a row"
            )
        return f"step {step}: {message}; see it again with `{again}`, or {alternative}"

    def _snapshot(self) -> RunState:
        """Return the resume state except the weights, as of the last complete step."""
        return RunState(self.step, self.version, self.controller.position(), self.fingerprints)

    def _save(self, state: RunState, wait: bool = False) -> None:
        """Start to write the checkpoint of a step, unless it is written; with `wait` until it is complete."""
        if self.saved_step != state.step:
            position = state.position._replace(started=self.controller.started_ahead())
            self.checkpoints.save(replace(state, position=position), self.backend, self.scores.best_of_step)
            self.saved_step, self.scores.best_of_step = state.step, None
        if wait:
            self.checkpoints.wait()
            if self.checkpoints.is_lost:
                self.saved_step = None
                self._save(state, wait)

    def _restore(self, folder: Path, state: RunState) -> None:
        self.step = self.saved_step = state.step
        self.version = state.version
        surplus = [self.backend.read(Surplus(path)) for path in state.position.surplus]
        self.controller.restore(state.position._replace(surplus=surplus))
        self.backend.load(folder, state.version)


def repair_budget(config: Config) -> RepairBudget:
    """Return the budget of repairs after the loss of an essential process."""
    return RepairBudget(config.trainer.max_restarts, "trainer.max_restarts")
