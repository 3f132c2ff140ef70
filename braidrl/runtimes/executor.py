"""Executes stages on rows in this process. Shared by all runtimes, which only decide when to call it.

rows ─run(stage)──▶ columns            generate, infer, compute; of scope batch: sums ─▶ global sum ─▶ apply
rows ─train(stage)──▶ for each update: forward_backward ─▶ optim_step       or a copy of another role's weights
rows ─forward_backward(objective)─▶ loss sums       any number of objectives ─▶ optim_step(role, accumulated, overrides)
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.config import RoleConfig
from braidrl.data.rows import Column, Rows
from braidrl.data.templates import PromptTemplate, retokenized
from braidrl.data.token_columns import ROUTED_EXPERTS, of_all_tokens
from braidrl.errors import BadUpdate, users_errors
from braidrl.flow import Kind, Scope, Stage
from braidrl.flow.compute import checked, computed, of_namespace, summed
from braidrl.flow.flow import is_optimized
from braidrl.flow.signatures import class_and_method, in_namespace
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.runtimes.generating.generation import Generation
from braidrl.runtimes.generating.verification import EarlyStop, added_scores, verified
from braidrl.runtimes.memory.residency import Residency
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.training.backends import TrainingBackend
from braidrl.training.decoders.routing import with_free_layers
from braidrl.training.objective import Accumulated, Objective, UpdateCounts, with_group_tokens
from braidrl.training.optimizer import CONFIGURED, StepOverrides, learning_rate
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.pretrained import separate_tokenizer
from braidrl.training.role_settings import settings_of
from braidrl.training.roles.checkpoint import Write, copied
from braidrl.training.roles.copies import RoleCopy
from braidrl.training.roles.worker import make_worker, torch_worker
from braidrl.weights.shards import WeightPart

Totals = Mapping[str, Tensor]
MODELLED = (Kind.GENERATE, Kind.INFER, Kind.TRAIN)
"""The kinds of stages whose memory is a model's."""
ROUTING_GAP = "routing_log_prob_gap"
PREDICTED = {"score": "scores", "values": "values"}  # others call `log_probs`


class StageExecutor:
    """Holds the workers of some roles, the engines of generating roles, and the reward processes."""

    def __init__(
        self,
        prepared: Prepared,
        roles: Sequence[str],
        progress: Progress,
        generating: Collection[str],
        ranks: DataParallel,
        training: bool = True,
        checks: bool = True,
    ) -> None:
        """Load the models of `roles`, with engines for those `generating`; `ranks` are the processes that hold the same
        roles.

        A generating role outside `roles` gets its weights from other processes, after `Generation.exchange_weights`.
        Without `training` even trained roles are copies without an optimizer, whose weights come from elsewhere.
        Without `checks` this process verifies no answers.
        """
        config, flow, tokenizer = prepared.config, prepared.deployment.flow, prepared.tokenizer
        self.config, self.flow, self.progress = config, flow, progress
        self.deployment = prepared.deployment
        self.generation = Generation(prepared, progress, ranks, checks)
        self.engines, self.usage = self.generation.engines, self.generation.usage
        self.workers: dict[str, TrainingBackend] = {}
        self.role_copies: dict[tuple[str, str], RoleCopy] = {}
        self.copies: dict[str, RoleCopy] = {}  # roles whose inference layout differs from their training layout
        self.tokenizer = tokenizer
        self.own_templates: dict[str, PromptTemplate] = {}  # tokenizers of reward models that differ from the policy's
        self.methods: dict[tuple[str, Any], Any] = {}
        self.residency = Residency(self.deployment, self.generation.moves)
        self.objectives: dict[str, tuple[Stage, Objective]] = {}
        self.skipped: Counter[str] = Counter()
        """Skipped optimizer steps in a row, by train stage."""
        inferring = self.deployment.inference_layouts
        for role in roles:
            worker = self.workers[role] = make_worker(role, config, flow, ranks, training)
            if (role_tokenizer := separate_tokenizer(role, config, tokenizer)) is not None:
                self.own_templates[role] = PromptTemplate.of(role_tokenizer, config.data)
            if role in generating:
                self.generation.start_engine(role, worker)
            frozen = None
            if training and role in inferring:
                role_config = (config.roles.get(role) or RoleConfig()).model_copy(update={"layout": inferring[role]})
                settings = config.model_copy(update={"roles": {**config.roles, role: role_config}})
                frozen = torch_worker(make_worker(role, settings, flow, ranks, training=False))
                self.copies[role] = RoleCopy(frozen, torch_worker(worker))
            self.residency.add(worker, self.engines.get(role), frozen)
        for role in generating:
            if role not in roles:
                self.generation.start_engine(role, None)
        self.residency.begin()

    def run(
        self,
        stage: Stage,
        rows: Rows,
        sums: Sums,
        stop: EarlyStop | None = None,
        reduce: Callable[[Totals], Totals] = lambda totals: totals,
    ) -> Mapping[str, Column]:
        """Return the columns that a generate, infer or compute stage writes, in the order of the local `rows`.

        Without rows only collective work is done. `stop` ends rows early that selection does not need; `reduce` sums
        the totals of a batch-scope stage over all processes with rows.
        """
        with self.usage.memory_of(stage.name if stage.kind in MODELLED else None, sums):
            self.residency.before(stage)
            # Weight transfers since the last stage.
            sums.merge(self.generation.moves.sums)
            self.generation.moves.sums = Sums()
            if stage.scope is Scope.BATCH:
                totals = reduce(summed(stage, rows) if len(rows) else {})
                return computed(stage, rows, totals) if len(rows) else {}
            if not len(rows) and not self.needs_all(stage):
                return {}
            if stage.kind is Kind.GENERATE:
                return self.generation.generate(stage, rows, sums, stop)
            if stage.role is not None and ":" in stage.type:
                return checked(stage, self.user_method(stage)(rows, **stage.settings), len(rows))
            if stage.type == "verify":
                results = self.generation.checks.results(stage, rows, sums)
                return verified(self.flow, stage, rows, dict(results.items()))
            if stage.kind is not Kind.INFER:
                return computed(stage, rows)
            inputs, role = of_namespace(rows, stage.params.get("of")), str(stage.role)
            read, worker = inputs, self.workers[role]
            if role in self.own_templates and len(rows):
                read = retokenized(inputs, self.tokenizer, self.own_templates[role])
            if role in self.copies:
                worker = self.copies[role].worker
                self.generation.moves.note(role, self.copies[role].refresh())
            with (
                self.progress.stage(stage.name, len(read)) as bar,
                self.usage.computing(stage.name, worker, sums, read),
            ):
                # A model would replay routes that another stage reads.
                of = stage.params.get("of")
                read = read.without(
                    [name for name in of_all_tokens() if in_namespace(of, [name])[0] not in stage.reads]
                )
                if stage.params.get("replay") == "training":
                    both = torch_worker(worker).forward_with_routes(read, bar.update)
                    return dict(zip(stage.writes, both, strict=True)) if len(rows) else {}
                values = worker.forward(PREDICTED.get(stage.type, "log_probs"), read, bar.update)
                balance = self.config.trainer.balance
                if balance is not None and balance.routing_gap and stage.params.get("replay") == "inference":
                    sums.add_per_token(role, routing_gaps(worker, read, values))
            if not len(rows) or stage.type != "score":
                return {stage.writes[0]: values} if len(rows) else {}
            rewarding = role == "reward" or "weight" in stage.params
            added = added_scores(self.flow, stage, inputs, values.values) if rewarding else {}
            return {stage.writes[0]: values.values, **added}

    def user_method(self, stage: Stage) -> Callable[..., Any]:
        """Return a user's method that a stage names, bound to the role's worker."""
        owner, method = class_and_method(stage.type)
        role = str(stage.role)
        if (role, owner) not in self.methods:
            self.methods[role, owner] = owner(self.workers[role])
        function = getattr(self.methods[role, owner], method)

        def call(*arguments: Any, **settings: Any) -> Any:
            with users_errors(stage.name, function):
                return function(*arguments, **settings)

        return call

    def needs_all(self, stage: Stage) -> bool:
        """Return True if ranks without rows participate in a stage: it is collective, or generates others' rows."""
        return self.is_collective(stage) or (stage.type == "generate" and self.generation.ranks.size > 1)

    def is_collective(self, stage: Stage) -> bool:
        """Return True if a rank without rows participates in a stage, because ranks sum, infer or generate together."""
        if stage.kind is Kind.GENERATE:
            return stage.role in self.engines and self.engines[stage.role].is_collective
        if stage.kind is not Kind.INFER or stage.role not in self.workers:
            return stage.scope is Scope.BATCH
        copy = self.copies.get(stage.role)
        return self.workers[stage.role].ranks.forward_is_collective or (
            copy is not None and copy.worker.ranks.forward_is_collective
        )

    def train(
        self,
        stage: Stage,
        updates: Iterable[AbstractContextManager[tuple[UpdateCounts, Rows]]],
        iteration: int,
        sums: Sums,
        total: int | None = None,
        counted: bool = True,
    ) -> None:
        """Make one optimizer step per result of `update`, or copy another role's weights if the stage has no loss.

        `total` is the number of local rows, for the progress bar. `counted` is true in exactly one of the processes
        that share the updates, so that global sums count them once.
        """
        if not is_optimized(stage):
            self.copy_weights(stage)
            return
        objective = self.objective(stage)
        with self.progress.stage(stage.name, total) as bar:
            for update in updates:
                with update as (counts, rows):
                    losses = self.forward_backward(objective, rows, sums, bar)
                    accumulated = Accumulated().add(objective, losses, counts)
                    self.optim_step(objective.role, accumulated, iteration, sums, counted)

    def update(self, objective: Objective, index: Rows, rows: Rows) -> tuple[UpdateCounts, Rows]:
        """Return an objective's input: the counts of all rows (`index`), and the local rows with columns derived from
        other rows.
        """
        needs = "group_tokens" in objective.aggregation.reads and len(rows)
        index = of_namespace(index, objective.namespace)
        return UpdateCounts.of(index), with_group_tokens(rows, index) if needs else rows

    def forward_backward(self, objective: Objective, rows: Rows, sums: Sums, bar: Bar) -> dict[str, float]:
        """Accumulate the gradients of rows for the role's next optimizer step; return loss sums by denominator."""
        worker, rows = self.workers[objective.role], of_namespace(rows, objective.namespace)
        self.residency.before_training(objective.role)
        # One forward pass for the loss, and one for each auxiliary term.
        passes = [objective.select(rows), *(term.select(rows) for term in objective.auxiliary)] if len(rows) else []
        with (
            self.usage.memory_of(objective.name, sums),
            self.usage.computing(objective.name, worker, sums, *passes, trains=True),
        ):
            return worker.forward_backward(objective, rows, sums, bar.update)

    def optim_step(
        self,
        role: str,
        accumulated: Accumulated,
        iteration: int,
        sums: Sums,
        counted: bool = True,
        overrides: StepOverrides = CONFIGURED,
    ) -> None:
        """Make one optimizer step of the accumulated objectives, and add its loss and gradient norm to `sums`.

        `overrides` replace the configured settings in this step.
        """
        worker, counts, name = self.workers[role], accumulated.counts, accumulated.objectives[0].name
        self.residency.before_training(role)
        with self.usage.memory_of(name, sums), self.usage.computing(name, worker, sums):
            norm = worker.optim_step(counts, iteration, overrides)
        if norm is not None and not math.isfinite(norm):
            self.skipped[name] += 1
            most = self.config.trainer.max_skipped_updates
            if not self.config.trainer.skip_bad_updates or self.skipped[name] == most:
                cause = (
                    "; ".join(getattr(worker, "nonfinite", ()))
                    or f"the losses are finite, and the update was made{accumulated.rows}"
                )
                raise BadUpdate(f"{name}: the gradient's norm is {norm}, nothing was updated: {cause}")
            sums.add(f"{role}/skipped_updates", int(counted))
            return
        self.skipped[name] = 0
        if any(count > 0 for count in counts.values()):
            loss = sum(part / counts[key] for key, part in accumulated.losses.items() if counts[key] > 0)
            sums.add(f"loss/{role}", loss, int(counted))
        if norm is not None and counted:
            sums.add(f"{role}/grad_norm", norm)
            for metric, value in getattr(worker, "step_metrics", {}).items():
                sums.add(f"{role}/{metric}", value)
        if counted:
            peak, override = settings_of(role, self.config).learning_rate, overrides.learning_rate
            rate = learning_rate(iteration, self.config.trainer, peak) if override is None else override
            sums.add(f"{role}/learning_rate", rate)

    def objective(self, stage: Stage) -> Objective:
        """Return the objective of a train stage; a session's stages need not be in the flow."""
        cached = self.objectives.get(stage.name)
        if cached is None or cached[0] != stage:
            built = Objective.of(str(stage.role), stage.params, stage.name)
            cached = self.objectives[stage.name] = (stage, built)
        return cached[1]

    def copy_weights(self, stage: Stage) -> None:
        """Move the role's weights towards those of another local role (EMA or copy)."""
        self.residency.before(stage)
        worker, source = torch_worker(self.workers[str(stage.role)]), stage.params["source"]
        if (worker.role, source) not in self.role_copies:  # once: ranks must agree on every move
            self.role_copies[worker.role, source] = RoleCopy(worker, torch_worker(self.workers[source]))
        volume = self.role_copies[worker.role, source].move(stage.params.get("decay", 0.0))
        self.generation.moves.sums.add(f"weights/{worker.role}/copied", volume.received + volume.stayed)

    def publish(self, version: int) -> None:
        self.residency.before_publication()
        self.generation.publish(version)

    def save(self, folder: Path, write: bool = True, copy: bool = False) -> list[Write]:
        """Write every trained or copied role as a Hugging Face directory, with its optimizer if it has one.

        All ranks of the roles call this; one of them passes `write` and writes the replicated parts. With `copy` the
        data is copied to host memory, and the calls are returned that write it in a thread while training continues.
        """
        calls: list[Write] = []
        for worker in self._changed(write):
            with self.residency.all_of(worker.role):
                if copy:
                    calls += torch_worker(worker).saving_tasks(folder / worker.role, write, copy=True)
                else:
                    worker.export(folder / worker.role, write)
        return calls

    def load(self, folder: Path) -> None:
        for worker in self._changed():
            with self.residency.all_of(worker.role):
                worker.load(folder / worker.role)

    def changing_parts(self) -> dict[str, WeightPart]:
        """Return this rank's parts of all tensors that training changes, by role and name.

        Under a memory budget their values may be offloaded.
        """
        return of_roles({worker.role: torch_worker(worker).changing_parts() for worker in self._changed()})

    def empty_changing(self, tensors: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
        """Return uninitialised host memory for this rank's parts of `tensors`, which training changes.

        Raises LookupError if some are missing.
        """
        return of_roles(
            {worker.role: torch_worker(worker).empty_parts(of_role(worker.role, tensors)) for worker in self._changed()}
        )

    def copy_changing(self) -> dict[str, WeightPart]:
        """Return copies, in host memory, of all tensors that training changes, by role and name."""
        copies = {}
        for worker in self._changed():
            with self.residency.all_of(worker.role):
                copies[worker.role] = copied(torch_worker(worker).changing_parts())
        return of_roles(copies)

    def restore_changing(self, copies: Mapping[str, WeightPart]) -> None:
        """Restore the state copied by `copy_changing`; the count of skipped steps restarts."""
        for worker in self._changed():
            with self.residency.all_of(worker.role):
                torch_worker(worker).restore(of_role(worker.role, copies))
        self.skipped.clear()

    def regroup(self) -> None:
        """Plan weight transfers again after the ranks have changed; all ranks call this together."""
        self.generation.regroup(self.workers)
        self.generation.checks.pending.clear()

    def _changed(self, write: bool = True) -> list[TrainingBackend]:
        """Return the local roles that change; without `write` only the sharded ones."""
        changed = [self.workers[role] for role in self.flow.changed_roles if role in self.workers]
        return changed if write else [worker for worker in changed if worker.ranks.is_sharded]

    def close(self) -> None:
        self.generation.close()


def routing_gaps(worker: TrainingBackend, rows: Rows, log_probs: Ragged) -> dict[str, Tensor]:
    """Return the gaps of log-probs that routing alone causes, (A,) numbers without a replay, and by layer those where
    it alone is not replayed. Layers take turns by group, so that all together cost one forward pass.
    """
    free = worker.forward("log_probs", rows.without([ROUTED_EXPERTS]))
    if not len(rows):
        worker.forward("log_probs", rows)
        return {}
    routes = rows[ROUTED_EXPERTS]
    layers = rows["group"] % routes.values.shape[1]
    turns = worker.forward("log_probs", rows.with_columns({ROUTED_EXPERTS: with_free_layers(routes, layers)}))
    gaps, of_turns = (log_probs.values - free.values).abs(), (log_probs.values - turns.values).abs()
    of_actions = layers.repeat_interleave(log_probs.lengths)
    by_layer = {f"{ROUTING_GAP}/{layer}": of_turns[of_actions == layer] for layer in sorted(set(layers.tolist()))}
    return {ROUTING_GAP: gaps, **by_layer}


def of_roles(parts: Mapping[str, Mapping[str, WeightPart]]) -> dict[str, WeightPart]:
    """Return parts of roles under names that begin with the role's."""
    return {
        f"{role}/{name}": replace(part, names=[f"{role}/{name}"])
        for role, named in parts.items()
        for name, part in named.items()
    }


def of_role(role: str, parts: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
    """Return the parts of one role among those of several."""
    return {name.removeprefix(f"{role}/"): part for name, part in parts.items() if name.startswith(f"{role}/")}
