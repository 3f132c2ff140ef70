"""Executes stages on rows in this process: the one piece that every runtime shares. Runtimes only decide who calls it.

rows ──execute(stage)──▶ columns            generate, infer, verify, compute of scope row or group
rows ──sums(stage)──▶ reduced over everybody ──apply(stage)──▶ columns            compute of scope batch
rows ──select(stage)──▶ dropped groups
rows ──forward_backward(stage)──▶ loss sums ──reduced──▶ optim_step(stage, denominators)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.algorithms.metrics import reflection_counts
from braidrl.algorithms.ragged import Ragged
from braidrl.config import Config
from braidrl.data.rows import Column, Rows
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.signatures import SUMMED, in_namespace, is_reward
from braidrl.models.checkpoint import Write, saving_tasks
from braidrl.models.objective import Objective, denominators
from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.role_settings import inference_layouts, with_layout
from braidrl.models.roles.base import RoleWorker
from braidrl.models.roles.decoder import DecoderWorker
from braidrl.models.roles.make import make_worker
from braidrl.models.roles.scalar import ScalarWorker
from braidrl.models.weights.following import Following, move_towards
from braidrl.models.weights.mirror import InferenceCopy
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.rewards.verify import RuleRewards
from braidrl.rollout.divided.pooled import PooledEngine
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.requests import Response
from braidrl.rollout.routing.service import EngineService
from braidrl.rollout.trajectories import to_rows
from braidrl.runtimes.functions import computed, dropped, summed
from braidrl.runtimes.generating.early_stop import EarlyStop
from braidrl.runtimes.generating.engines import start_engine
from braidrl.runtimes.generating.episodes import play
from braidrl.runtimes.generating.publishing import Publish, publication
from braidrl.runtimes.generating.requests import leaders, requests_of, sampling_of
from braidrl.runtimes.generating.residency import Residency
from braidrl.runtimes.generating.verification import Checks, EarlyChecks


class StageExecutor:
    """Holds the workers of some roles, the engines of those that generate, and the processes that check answers."""

    def __init__(
        self,
        config: Config,
        flow: Flow,
        roles: Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        rewards: RuleRewards | None,
        progress: Progress,
        generating: Collection[str] = (),
        ranks: DataParallel | None = None,
        training: bool = True,
    ) -> None:
        """`generating` are the roles that need an engine; `ranks` the other processes that hold the same roles.

        Without `training` even trained roles are copies without an optimizer, whose weights come from elsewhere.
        """
        self.config, self.flow, self.tokenizer = config, flow, tokenizer
        self.progress, self.checks = progress, Checks(rewards, progress)
        self.workers: dict[str, RoleWorker] = {}
        self.engines: dict[str, EmbeddedEngine | EngineService] = {}
        self.publications: dict[str, Publish] = {}
        self.followings: dict[tuple[str, str], Following] = {}
        self.copies: dict[str, InferenceCopy] = {}
        """Of roles that infer in another layout than they train in."""
        self.residency = Residency(config, flow)
        self.objectives: dict[str, tuple[Stage, Objective]] = {}
        inferring = inference_layouts(config, flow)
        for role in roles:
            worker = self.workers[role] = make_worker(role, config, flow, ranks, training)
            if role in generating:
                engine = self.engines[role] = start_engine(worker, config, tokenizer)
                self.publications[role] = publication(worker, engine, config)
            frozen = None
            if training and role in inferring:
                frozen = make_worker(role, with_layout(role, config, inferring[role]), flow, ranks, training=False)
                self.copies[role] = InferenceCopy(worker, frozen)
            self.residency.add(worker, self.engines.get(role), frozen)
        self.residency.begin()

    def execute(
        self, stage: Stage, rows: Rows, sums: Sums, beside: Sequence[Stage] = (), stop: EarlyStop | None = None
    ) -> Mapping[str, Column]:
        """The columns that a generate, infer or compute stage writes, in the order of `rows`.

        `beside` are verify stages that may start on finished rows while the rest is being generated; `stop` ends rows early.
        """
        self.residency.before(stage)
        if stage.type == "generate" and "environment" in stage.params:
            return self._play(stage, rows, sums)
        if stage.type == "generate":
            return self._generate(stage, rows, sums, beside, stop)
        if stage.type == "verify":
            return self._verify(stage, rows, sums)
        if stage.kind is Kind.INFER:
            with self.progress.stage(stage.name, len(rows)) as bar:
                return self._infer(stage, rows, bar)
        return computed(stage, rows)

    def _infer(self, stage: Stage, rows: Rows, bar: Bar) -> Mapping[str, Column]:
        worker = self._inferring(str(stage.role))
        if stage.type == "score":
            assert isinstance(worker, ScalarWorker)
            of = stage.params.get("of")
            own, *_ = stage.writes
            scores = worker.scores(of_namespace(rows, of), bar.update)
            weight = stage.params.get("weight")
            summed = self._added(stage, rows, scores, weight) if is_reward(worker.role, weight) else {}
            return {own: scores, **summed}
        if stage.type == "values":
            assert isinstance(worker, ScalarWorker)
            return {stage.writes[0]: worker.values(rows, bar.update)}
        assert isinstance(worker, DecoderWorker)
        return {stage.writes[0]: worker.log_probs(rows, bar.update)}

    def _inferring(self, role: str) -> RoleWorker:
        """The worker that infers for a role, with its weights of now."""
        return self.copies[role].current() if role in self.copies else self.workers[role]

    def _generate(
        self, stage: Stage, rows: Rows, sums: Sums, beside: Sequence[Stage], stop: EarlyStop | None
    ) -> Mapping[str, Column]:
        assert stage.role
        engine, requests = self.engines[stage.role], requests_of(stage, rows, self.config)
        place = {uid: i for i, uid in enumerate(rows.uids())}
        # The likeliest tokens of a prompt are the same for all of its samples: one of them is generated for all.
        greedy = sampling_of(stage, self.config).takes_likeliest
        first = leaders(list(place)) if greedy else {uid: uid for uid in place}
        requests = [request for request in requests if first[request.uid] == request.uid]
        with self.progress.stage(stage.name, len(rows)) as bar:
            early = EarlyChecks(self.checks, engine, rows, place, beside, bar, stop.add if stop else None)
            to_end = (lambda: [uid for uid in stop.rows_to_end() if uid in place]) if stop else None
            done = {finished.uid: finished for finished in engine.generate(requests, early.add, to_end)}
            finished = [done[uid] if uid in done else replace(done[leader], uid=uid) for uid, leader in first.items()]
            for copy in finished:
                if copy.uid not in done:
                    early.add(copy)
            early.flush()
            if stop is not None:
                stop.close()
        return self.generated(stage, rows, finished)

    def generated(self, stage: Stage, rows: Rows, finished: Sequence[Response]) -> Mapping[str, Column]:
        """The columns that a generate stage writes, in the order of `rows`."""
        return self._named(stage, to_rows(rows, finished))

    def _play(self, stage: Stage, rows: Rows, sums: Sums) -> Mapping[str, Column]:
        """Episodes in the stage's environment; failures of environments are counted and the first is shown."""
        assert stage.role
        engine = self.engines[stage.role]
        if isinstance(engine, PooledEngine):
            raise UserError(f"{stage.name}: an environment needs engines of their own; write rollout.engines=1")
        with self.progress.stage(stage.name, len(rows)) as bar:
            columns, failures = play(
                engine, stage, rows, self.config, self.tokenizer, sampling_of(stage, self.config),
                sums, bar,
            )  # fmt: skip
        for line in failures:
            self.progress.print(f"{stage.name}: {line}")
        return self._named(stage, columns)

    def _named(self, stage: Stage, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        """What was generated, under the stage's names, and how often each row reconsiders itself."""
        into, tokens, mask = stage.params.get("into"), columns["tokens"], columns["action_mask"]
        assert isinstance(tokens, Ragged) and isinstance(mask, Ragged)
        reflections = torch.zeros(len(tokens), dtype=torch.int64)
        if phrases := self.config.rollout.reflection_phrases:
            responses = [tokens[row][mask[row]] for row in range(len(tokens))]
            reflections = reflection_counts(self.tokenizer.batch_decode(responses, skip_special_tokens=True), phrases)
        return {f"{into}.{n}" if into else n: c for n, c in {**columns, "reflections": reflections}.items()}

    def _verify(self, stage: Stage, rows: Rows, sums: Sums) -> Mapping[str, Column]:
        """Waits for the checks that were begun beside generation, or begins them now."""
        return self.verified(stage, rows, dict(self.checks.results(stage, rows, sums).items()))

    def verified(self, stage: Stage, rows: Rows, checked: Mapping[str, Column]) -> Mapping[str, Column]:
        """The columns that a verify stage writes, from what its checks found."""
        found = checked[in_namespace(stage.params.get("of"), ("score",))[0]]
        assert isinstance(found, Tensor)
        return {**checked, **self._added(stage, rows, found, stage.params.get("weight"))}

    def _added(self, stage: Stage, rows: Rows, scores: Tensor, weight: float | None) -> Mapping[str, Column]:
        """`score` and `reward` with these scores (B,), times their weight, on top of what earlier sources gave."""
        earlier = {column.name for column in self.flow.inputs.get(stage.name, ())}
        weighted = scores.float() * (1.0 if weight is None else weight)
        columns = in_namespace(stage.params.get("of"), SUMMED)
        return {name: rows[name] + weighted if name in earlier else weighted for name in columns}

    def sums(self, stage: Stage, rows: Rows) -> dict[str, Tensor]:
        """First half of a stage of scope batch, or what a stage's state follows: numbers to be added up over all rows."""
        return summed(stage, rows)

    def apply(self, stage: Stage, rows: Rows, totals: Mapping[str, Tensor]) -> Mapping[str, Column]:
        """Second half of a stage of scope batch."""
        return computed(stage, rows, totals)

    def select(self, stage: Stage, index: Rows) -> dict[int, str]:
        """The groups that a select stage drops, with its reason."""
        return dropped(stage, index)

    def optimize(
        self, stage: Stage, index: Rows, rows: Rows, iteration: int, sums: Sums, bar: Bar, counted: bool = True
    ) -> None:
        """One optimizer step on an update with the index columns `index`, of which `rows` are those that are here.

        Of the processes that share the update one alone has it `counted`; the sums of all together then say what happened.
        """
        self.residency.before(stage)
        losses, counts = self.forward_backward(stage, rows, sums, bar), denominators(index)
        record_update(stage, losses, counts, sums, counted)
        norm = self.optim_step(stage, counts, iteration)
        if norm is not None and counted:
            sums.add(f"{stage.role}/grad_norm", norm)

    def objective(self, stage: Stage) -> Objective:
        """What a train stage minimises; a session's stages need not be the flow's."""
        known = self.objectives.get(stage.name)
        if known is None or known[0] != stage:
            known = self.objectives[stage.name] = (stage, Objective.of(str(stage.role), stage.params))
        return known[1]

    def copy_weights(self, stage: Stage, weights: Mapping[str, Tensor] | None = None) -> None:
        """An update without a loss: the role's weights move towards those of another role, which is here too or gave `weights`."""
        self.residency.before(stage)
        worker, source, decay = self.workers[str(stage.role)], stage.params["source"], stage.params.get("decay", 0.0)
        if weights is None:
            self._following(worker, source).move(decay)
        else:
            move_towards(worker, weights, source, decay)

    def _following(self, worker: RoleWorker, source: str) -> Following:
        """Made once for two roles: ranks have to agree on every move."""
        found = self.followings.get((worker.role, source))
        if found is None:
            found = self.followings[worker.role, source] = Following(worker, self.workers[source])
        return found

    def forward_backward(self, stage: Stage, rows: Rows, sums: Sums, bar: Bar) -> dict[str, float]:
        """Adds the gradient sums of `rows`; returns loss sums by denominator."""
        assert stage.role
        return self.workers[stage.role].forward_backward(self.objective(stage), rows, sums, bar.update)

    def optim_step(self, stage: Stage, denominators: Mapping[str, float], iteration: int) -> float | None:
        """One optimizer step by the global denominators; the gradient norm, or None when there was nothing to learn."""
        assert stage.role
        needed = self.objective(stage).denominators
        return self.workers[stage.role].optim_step({name: denominators[name] for name in needed}, iteration)

    def meets(self, stage: Stage) -> bool:
        """True where a rank without rows takes part in a stage, because ranks infer or generate together."""
        if stage.kind is Kind.GENERATE:
            return isinstance(self.engines.get(str(stage.role)), PooledEngine)
        if stage.kind is not Kind.INFER or stage.role not in self.workers:
            return False
        copy = self.copies.get(stage.role)
        return self.workers[stage.role].ranks.together or (copy is not None and copy.frozen.ranks.together)

    def join_collectives(self, stage: Stage) -> None:
        """The part of a rank that has no rows in a stage that ranks compute together."""
        self.residency.before(stage)
        if stage.kind is Kind.GENERATE:
            self.engines[str(stage.role)].generate([])
            return
        names = {"score": "scores", "values": "values"}
        self._inferring(str(stage.role)).forward(names.get(stage.type, "log_probs"), Rows({}))

    def publish(self, version: int) -> None:
        """The engines generate with the trained weights from now on."""
        self.residency.before_publishing()
        for publish in self.publications.values():
            publish(version)

    def save(self, folder: Path, write: bool = True) -> None:
        """Every role that changes as a Hugging Face directory, with its optimizer if it has one.

        Of ranks that share the roles all call this, and one has to `write` what all of them have.
        """
        for role in self.flow.changed_roles:
            if role in self.workers and (write or self.workers[role].ranks.divided):
                with self.residency.all_of(role):
                    self.workers[role].export(folder / role, write)

    def copy_for_saving(self, folder: Path, write: bool = True) -> list[Write]:
        """What `save` does, from copies in host memory: calls that a thread can make while the roles train on."""
        parts: list[Write] = []
        for role in self.flow.changed_roles:
            if role in self.workers and (write or self.workers[role].ranks.divided):
                with self.residency.all_of(role):
                    parts += saving_tasks(self.workers[role], folder / role, write, beside=True)
        return parts

    def load(self, folder: Path) -> None:
        for role in self.flow.changed_roles:
            if role in self.workers:
                with self.residency.all_of(role):
                    self.workers[role].load(folder / role)

    def close(self) -> None:
        for engine in self.engines.values():
            if isinstance(engine, EngineService):
                engine.close()
        self.checks.close()


def record_update(
    stage: Stage, losses: Mapping[str, float], counts: Mapping[str, float], sums: Sums, counted: bool = True
) -> None:
    """Adds one optimizer step's loss: sums over global counts. A part of it that is not `counted` adds to the loss alone."""
    if any(count > 0 for count in counts.values()):
        total = sum(loss / counts[name] for name, loss in losses.items() if counts[name] > 0)
        sums.add(f"loss/{stage.role}", total, int(counted))


def of_namespace(rows: Rows, namespace: str | None) -> Rows:
    """The rows with a namespace's columns under their plain names: the second response in place of the first."""
    if namespace is None:
        return rows
    prefix = f"{namespace}."
    return rows.with_columns({n.removeprefix(prefix): column for n, column in rows.items() if n.startswith(prefix)})
