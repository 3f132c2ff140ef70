"""An RL algorithm as a plain loop: the methods of the flow's roles run immediately, or under hybrid return futures.

with Session(config) as session:
    for rows in session.batches():
        rows = session.actor.generate(rows)
        rows = session.reward.verify(rows)
        rows = session.advantage.group_normalized(rows)
        session.actor.update(rows, loss=loss.clip())
        print(session.metrics())

An update is made of two verbs, which a loop may call separately: accumulate several objectives, and step once.

        session.actor.forward_backward(rows, loss=loss.clip())
        session.actor.forward_backward(texts, loss="sft")
        session.actor.optim_step(learning_rate=1e-6)

Under hybrid the driver runs the loop; under distributed every rank of `torchrun` runs it, each with its rows.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.engines.deployment import MODES
from braidrl.errors import UserError, suggest
from braidrl.flow import Kind, Stage
from braidrl.flow.columns import read_names
from braidrl.flow.compute import dropped
from braidrl.flow.flow import is_optimized, policies_of
from braidrl.flow.roles import Role
from braidrl.flow.signatures import FAMILIES, ROLE_TYPES, log_probs_column
from braidrl.flow.stages import RegisteredNames
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.observe.trace import traced
from braidrl.runtimes.controller import SerialController
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.prepare.run_flow import resolve
from braidrl.runtimes.prepare.setup import set_up_torch
from braidrl.runtimes.row_store import Admission, RowText
from braidrl.runtimes.sizing import prepared_to_fit
from braidrl.runtimes.spmd.launch import joined_world
from braidrl.runtimes.start import start_backend
from braidrl.training.optimizer import CONFIGURED, StepOverrides

SessionTable = Any
"""A rank's shard of rows, which under eager are all rows; a handle to rows under hybrid."""


class Session(AbstractContextManager["Session"]):
    """The models, data and processes of a configuration, without its loop.

    The flow defines the roles, and which are trained.
    """

    def __init__(self, config: Config, world: World | None = None) -> None:
        """Start everything; a distributed session joins the ranks of `torchrun`.

        Raises UserError if the configuration cannot run.
        """
        mode = MODES[config.runtime]
        if mode.concurrent:
            raise UserError("a session is one loop, and runtime=streaming has one for each stage; write runtime=hybrid")
        if (tokens := config.rollout.tokens_per_iteration) is not None:
            raise UserError(
                f"rollout.tokens_per_iteration={tokens} suspends responses, and a session resumes none; remove it, "
                "or use `braid train`"
            )
        self.joined = joined_world(config) if mode.chained and world is None else None
        self.world = world or self.joined or World()
        config = with_fetched(config)
        self.prepared, chosen = prepared_to_fit(config, self.world)
        self.config = config = self.prepared.config
        set_up_torch(config)
        self.progress = Progress(shown=self.world.first)
        for line in chosen:
            self.progress.print(line)
        self.backend = start_backend(self.prepared, self.progress, world=self.world, any_stage=True)
        self.controller = SerialController(config, self.prepared.flow, self.backend)
        self.iteration = self.version = 0
        self.sums = Sums()
        self.trained = self.closed = False
        self.accumulated: set[str] = set()
        """The roles with gradients that wait for an optimizer step."""

    def __getattr__(self, role: str) -> "SessionRole":
        """Return a role or family: `session.actor`, `session.critic`, `session.advantage`. Raises AttributeError."""
        roles = {stage.role for stage in self.prepared.flow.stages} | set(self.prepared.deployment.roles)
        if role not in FAMILIES and role not in roles:
            raise AttributeError(f"no role is called {role!r} among {', '.join(sorted(filter(None, roles)))}")
        return SessionRole(self, role)

    def batches(self) -> Iterator[SessionTable]:
        """Yield the prompts of each of `trainer.steps` iterations."""
        for _ in range(self.config.trainer.steps):
            yield self.prompts()

    def prompts(self, groups: int | None = None) -> SessionTable:
        """Return the next prompts as rows, one per sample, by default `trainer.prompts_per_step`.

        Begins an iteration. Raises UserError if a curriculum chooses them and `measure` was not called in the last one.
        """
        self._check_open()
        loader = self.controller.loader
        if not loader.is_ready(self.iteration + 1):
            raise UserError(
                "data.curriculum chooses prompts by their success so far; call session.measure(rows) once in each "
                "iteration, with scored rows"
            )
        self.publish()
        self.iteration += 1
        self.sums = Sums()
        self.progress.step = self.iteration
        loader.begin(self.iteration)
        numbers = loader.advance(groups or self.config.trainer.prompts_per_step)
        return self.backend.read(Admission(numbers, loader.examples(numbers)))

    def measure(self, rows: SessionTable) -> dict[str, float]:
        """Pass the scores of an iteration's rows to the curriculum, for the next prompts; return its metrics."""
        return self.controller.loader.measure(self.iteration, self.index(rows))

    def run(self, stage: Stage, rows: SessionTable) -> SessionTable:
        """Run one stage, which need not be in the flow; return the rows with new columns, after `select` the kept rows.

        An update computes old log-probs that it needs if the loop has not. Raises UserError if the stage cannot run on
        these rows.
        """
        stage = resolve(stage, self.config)
        if stage.kind is Kind.TRAIN:
            table = self._trainable(stage, rows)
            self.backend.train(stage, table, self.controller.updates(table, self.iteration), self.iteration, self.sums)
            self.trained = True
            return rows
        self._check(stage, rows)
        if stage.kind is not Kind.SELECT:
            self.controller.states.setdefault(stage.name, dict(stage.state))
            rows, state = self.controller.run_with_state(stage, rows, self.iteration, self.sums)
            self.controller.states[stage.name] = state
            return rows
        index = self.index(rows)
        with traced(self.backend.trace, "compute", stage.name, self.iteration, rows=len(index)):
            reasons = dropped(stage, index)
        return rows.take([i for i, group in enumerate(index["group"].tolist()) if group not in reasons])

    def forward_backward(self, stage: Stage, rows: SessionTable) -> SessionTable:
        """Accumulate the gradients of an update's objective over rows, which hold complete groups; return the rows.

        Several objectives may be accumulated before `optim_step`. Each is divided by the counts of its own rows: their
        gradients add up as their losses would.
        """
        stage = resolve(stage, self.config)
        self.backend.forward_backward(stage, self._trainable(stage, rows), self.iteration, self.sums)
        self.accumulated.add(str(stage.role))
        return rows

    def optim_step(self, role: str, overrides: StepOverrides = CONFIGURED) -> None:
        """Make one optimizer step of the gradients that `forward_backward` has accumulated for a role.

        Raises UserError if there are none.
        """
        self._check_open()
        if role not in self.accumulated:
            raise UserError(
                f"{role}.optim_step: nothing was accumulated; call session.{role}.forward_backward(rows, loss=...) "
                "before it"
            )
        self.accumulated.remove(role)
        self.backend.optim_step(role, self.iteration, self.sums, overrides)
        self.trained = True

    def _trainable(self, stage: Stage, rows: SessionTable) -> SessionTable:
        """Return rows in the order of training, with old log-probs if the stage needs them.

        Raises UserError if the stage cannot train on them.
        """
        table = rows
        old = log_probs_column(str(stage.role))
        if old in stage.reads and not self.closed and len(rows):
            # A batch of several updates, or of stale rows, is compared with the weights before its first update.
            columns = set(rows)
            # A rank without rows has no columns to check, but still participates.
            if any(self.world.gather("lacking columns", "tokens" in columns and old not in columns)):
                table = self.run(Role(str(stage.role)).log_probs(), rows)
        self._check(stage, table)
        return self.controller.ordered(table)

    def _check(self, stage: Stage, rows: SessionTable) -> None:
        """Raise UserError for a stage that cannot run on these rows."""
        self._check_open()
        if not len(rows):
            raise UserError(f"{stage.name} got no rows: a selection dropped all; go on with `session.prompts()`")
        flow, modelled = self.prepared.flow, self.prepared.deployment.roles
        if stage.kind in (Kind.GENERATE, Kind.INFER, Kind.TRAIN) and stage.role not in modelled:
            raise UserError(f"{stage.name}: {stage.role} has no model in flow {flow.name}; use {', '.join(modelled)}")
        for role in policies_of(stage):
            if role not in self.prepared.deployment.generating:
                raise UserError(
                    f"{stage.name}: no stage of flow {flow.name} generates with {role}, so it has no engine"
                )
        if is_optimized(stage) and stage.role not in flow.trained_roles:
            raise UserError(f"{stage.role} has no optimizer: the flow {flow.name} does not train it")
        if columns := list(rows):
            read_names(stage, dict.fromkeys(columns, "session"), ())

    def _check_open(self) -> None:
        if self.closed:
            raise UserError("the session is closed; write what runs stages inside `with Session(config) as session:`")

    def call(self, role: str, method: str, *arguments: Any) -> Any:
        """Call a method of the class that `roles.ROLE.methods` names; return what its transfer protocol collects."""
        if not self.prepared.deployment.mode.placed:
            raise UserError(f"{role}.{method} is called on workers; write runtime=hybrid")
        return cast(Any, self.backend).call(role, method, arguments, self.iteration, self.sums)

    def publish(self) -> None:
        """Wait for all updates and load the new weights into the engines."""
        if self.trained:
            self.version += 1
            self.trained = False
            self.backend.publish(self.version)

    def metrics(self) -> dict[str, float]:
        """Return the means counted by this iteration's stages, after its updates."""
        self.publish()
        return {name: value for name, value in self.sums.means().items() if not name.startswith("time/")}

    def index(self, rows: SessionTable) -> Rows:
        """Wait for the index columns (rewards, lengths, ...) and return them."""
        self._check_open()
        return self.backend.index(rows)

    def texts(self, rows: SessionTable) -> list[RowText]:
        """Return each row's `prompt` and `response` as text, in order; under distributed for the rank's rows."""
        self._check_open()
        return self.backend.texts(rows)

    def save(self, folder: Path) -> None:
        """Write every trained role as a Hugging Face directory."""
        self.publish()
        self.backend.save(folder)

    def close(self) -> None:
        self.closed = True
        self.backend.close()
        if self.joined is not None:
            self.joined.close()

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class SessionRole:
    """A role with the methods of `braidrl.flow.roles.Role` and the user's methods, or a family such as `advantage`."""

    session: Session
    name: str

    def forward_backward(self, rows: SessionTable, **objective: Any) -> SessionTable:
        """Accumulate gradients of an objective, with the settings of `update`: `loss`, `aggregate`, `kl`, ..."""
        return self.session.forward_backward(Role(self.name).update(**objective), rows)

    def optim_step(
        self,
        learning_rate: float | None = None,
        betas: tuple[float, float] | None = None,
        epsilon: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> None:
        """Make one optimizer step; a setting replaces the one of `trainer` in this step."""
        overrides = StepOverrides(learning_rate, betas, epsilon, weight_decay, max_grad_norm)
        self.session.optim_step(self.name, overrides)

    def __getattr__(self, method: str) -> Callable[..., Any]:
        """Return a function that makes and runs the stage of that name, or calls the user's method of that name."""
        family = FAMILIES.get(self.name)
        stages = Role(self.name) if family is None else RegisteredNames(family, self.name)
        make = getattr(stages, method, None)
        if make is None:
            role_config = self.session.config.roles.get(self.name)
            if role_config is None or role_config.methods is None:
                raise UserError(
                    f"{self.name} has no stage {method!r}. {suggest(method, ROLE_TYPES)} For a method of your own "
                    f"write roles.{self.name}.methods=file.py:Class"
                )
            return partial(self.session.call, self.name, method)
        return lambda rows, **settings: self.session.run(make(**settings), rows)
