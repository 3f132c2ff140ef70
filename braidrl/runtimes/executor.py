"""Executes stages on rows in this process: the one piece that every runtime shares. Runtimes only decide who calls it.

rows ──execute(stage)──▶ columns            generate, infer, verify, compute of scope row or group
rows ──sums(stage)──▶ reduced over everybody ──apply(stage)──▶ columns            compute of scope batch
rows ──select(stage)──▶ dropped groups
rows ──accumulate(stage)──▶ loss sums ──reduced──▶ step(stage, denominators)
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.algorithms.metrics import reflection_counts
from braidrl.config import Config
from braidrl.data.rows import IDENTITY, Column, Rows
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.signatures import SUMMED, in_namespace, is_reward
from braidrl.flow.stage_state import keywords
from braidrl.flow.stages import compute_entry
from braidrl.models.checkpoint import load_worker, save_worker, whole_weights
from braidrl.models.data_parallel import DataParallel
from braidrl.models.loading import load_decoder
from braidrl.models.objective import Objective, denominators
from braidrl.models.role_worker import DTYPES, RoleWorker
from braidrl.models.scalar_worker import ScalarWorker
from braidrl.models.worker import DecoderWorker
from braidrl.models.workers import make_worker
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Bar, Progress
from braidrl.rewards.verify import Failure, Pending, RuleRewards
from braidrl.rollout.embedded import EmbeddedEngine
from braidrl.rollout.engine import Weights
from braidrl.rollout.requests import Finished, Request, Sampling, Uid
from braidrl.rollout.trajectories import to_rows
from braidrl.runtimes.playing import play

VERIFY_CHUNK = 8
"""Finished rows handed to the reward processes at once while others are still being generated."""


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
        self.rewards, self.progress = rewards, progress
        self.workers: dict[str, RoleWorker] = {role: make_worker(role, config, flow, ranks, training) for role in roles}
        self.engines = {role: self._engine(role) for role in roles if role in generating}
        self.objectives: dict[str, tuple[Stage, Objective]] = {}
        self.pending: dict[str, list[tuple[Rows, Pending]]] = {}
        self.told: set[tuple[str, str]] = set()

    def _engine(self, role: str) -> EmbeddedEngine:
        rollout, worker = self.config.rollout, self.workers[role]
        model, dtype = worker.model, DTYPES[rollout.dtype] if rollout.dtype else None
        if worker.ranks.divided:
            # Decoding needs all weights on each rank: a frozen copy, brought up to date at each publication.
            model = load_decoder(worker.path, dtype or worker.dtype, worker.device).requires_grad_(False).eval()
        longest = self.config.max_sequence_tokens
        longest = min(longest, getattr(model.config, "max_position_embeddings", None) or longest)
        return EmbeddedEngine(model, self.tokenizer, rollout.slots, longest, seed=self.config.seed, dtype=dtype)

    def execute(self, stage: Stage, rows: Rows, sums: Sums, beside: Sequence[Stage] = ()) -> Mapping[str, Column]:
        """The columns that a generate, infer or compute stage writes, in the order of `rows`.

        `beside` are verify stages that may start on finished rows while the rest is being generated.
        """
        if stage.type == "generate" and "environment" in stage.params:
            return self._play(stage, rows, sums)
        if stage.type == "generate":
            return self._generate(stage, rows, sums, beside)
        if stage.type == "verify":
            return self._verify(stage, rows, sums)
        if stage.kind is Kind.INFER:
            with self.progress.stage(stage.name, len(rows)) as bar:
                return self._infer(stage, rows, bar)
        return self._compute(stage, rows)

    def _infer(self, stage: Stage, rows: Rows, bar: Bar) -> Mapping[str, Column]:
        worker = self.workers[str(stage.role)]
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

    def _generate(self, stage: Stage, rows: Rows, sums: Sums, beside: Sequence[Stage]) -> Mapping[str, Column]:
        assert stage.role
        engine, requests = self.engines[stage.role], requests_of(stage, rows, self.config)
        place = {uid: i for i, uid in enumerate(rows.uids())}
        # The likeliest tokens of a prompt are the same for all of its samples: one of them is generated for all.
        greedy = sampling_of(stage, self.config).takes_likeliest
        first = leaders(list(place)) if greedy else {uid: uid for uid in place}
        requests = [request for request in requests if first[request.uid] == request.uid]
        with self.progress.stage(stage.name, len(rows)) as bar:
            early = EarlyChecks(self, stage, rows, place, beside, bar)
            done = {finished.uid: finished for finished in engine.generate(requests, early.add)}
            finished = [done[uid] if uid in done else replace(done[leader], uid=uid) for uid, leader in first.items()]
            for copy in finished:
                if copy.uid not in done:
                    early.add(copy)
            early.flush()
        return self.generated(stage, rows, finished, sums)

    def generated(self, stage: Stage, rows: Rows, finished: Sequence[Finished], sums: Sums) -> Mapping[str, Column]:
        """The columns that a generate stage writes, in the order of `rows`."""
        into = stage.params.get("into")
        if into is None:
            self._count_reflections(finished, sums)
        return {f"{into}.{n}" if into else n: column for n, column in to_rows(rows, finished).items()}

    def _play(self, stage: Stage, rows: Rows, sums: Sums) -> Mapping[str, Column]:
        """Episodes in the stage's environment; failures of environments are counted and the first is shown."""
        assert stage.role
        with self.progress.stage(stage.name, len(rows)) as bar:
            columns, failures = play(
                self.engines[stage.role], stage, rows, self.config, self.tokenizer, sampling_of(stage, self.config),
                sums, bar,
            )  # fmt: skip
        for line in failures:
            self.progress.print(f"{stage.name}: {line}")
        into = stage.params.get("into")
        return {f"{into}.{n}" if into else n: column for n, column in columns.items()}

    def _count_reflections(self, finished: Sequence[Finished], sums: Sums) -> None:
        """How often responses reconsider themselves, to be averaged over rows."""
        if phrases := self.config.rollout.reflection_phrases:
            texts = self.tokenizer.batch_decode([row.tokens for row in finished], skip_special_tokens=True)
            sums.add("response/reflections", reflection_counts(texts, phrases).sum(), len(texts))

    def _verify(self, stage: Stage, rows: Rows, sums: Sums) -> Mapping[str, Column]:
        """Waits for the checks that were begun beside generation, or begins them now."""
        assert self.rewards is not None
        begun = self.pending.pop(stage.name, None) or [(rows, self.rewards.submit(rows, stage.params.get("of")))]
        with self.progress.stage(stage.name, len(rows)) as bar:
            parts = []
            for part, pending in begun:
                parts.append(part.only(IDENTITY).with_columns(pending.result()))
                bar.update(len(part))
                for name, count in pending.failure_counts().items():
                    sums.add(f"reward/failures/{name}", count)
                for failure in pending.failures():
                    self._tell_once(failure)
        checked = Rows.cat(parts)
        place = {uid: i for i, uid in enumerate(checked.uids())}
        checked = checked.take([place[uid] for uid in rows.uids()]).without(IDENTITY)
        found = checked[in_namespace(stage.params.get("of"), ("score",))[0]]
        return {**dict(checked.items()), **self._added(stage, rows, found, stage.params.get("weight"))}

    def _tell_once(self, failure: Failure) -> None:
        """Says why a check came to nothing, the first time that a verifier fails in this way; later ones are only counted."""
        kind = (failure.label, failure.reason)
        if kind not in self.told:
            self.told.add(kind)
            self.progress.print(
                f"verifier {failure.label}: {failure.reason}: {failure.detail}; its row counts as wrong"
            )

    def _added(self, stage: Stage, rows: Rows, scores: Tensor, weight: float | None) -> Mapping[str, Column]:
        """`score` and `reward` with these scores (B,), times their weight, on top of what earlier sources gave."""
        earlier = {column.name for column in self.flow.inputs.get(stage.name, ())}
        weighted = scores.float() * (1.0 if weight is None else weight)
        columns = in_namespace(stage.params.get("of"), SUMMED)
        return {name: rows[name] + weighted if name in earlier else weighted for name in columns}

    def _compute(self, stage: Stage, rows: Rows) -> Mapping[str, Column]:
        entry = compute_entry(stage.type)
        return named(entry.function(*arguments(stage, rows), **keywords(stage)), stage.writes)

    def sums(self, stage: Stage, rows: Rows) -> dict[str, Tensor]:
        """First half of a stage of scope batch, or what a stage's state follows: numbers to be added up over all rows."""
        entry = compute_entry(stage.type)
        assert entry.sums is not None
        totals: dict[str, Tensor] = entry.sums(*arguments(stage, rows), **stage.settings)
        return totals

    def apply(self, stage: Stage, rows: Rows, totals: Mapping[str, Tensor]) -> Mapping[str, Column]:
        """Second half of a stage of scope batch."""
        entry = compute_entry(stage.type)
        return named(entry.function(*arguments(stage, rows), **keywords(stage, totals)), stage.writes)

    def select(self, stage: Stage, index: Rows) -> dict[int, str]:
        """The groups that a select stage drops, with its reason."""
        dropped: dict[int, str] = compute_entry(stage.type).function(*arguments(stage, index), **stage.params)
        return dropped

    def optimize(
        self, stage: Stage, index: Rows, rows: Rows, iteration: int, sums: Sums, bar: Bar, counted: bool = True
    ) -> None:
        """One optimizer step on an update with the index columns `index`, of which `rows` are those that are here.

        Of the processes that share the update one alone has it `counted`; the sums of all together then say what happened.
        """
        losses, counts = self.accumulate(stage, rows, sums, bar), denominators(index)
        record_update(stage, losses, counts, sums, counted)
        norm = self.step(stage, counts, iteration)
        if norm is not None and counted:
            sums.add(f"{stage.role}/grad_norm", norm)

    def objective(self, stage: Stage) -> Objective:
        """What a train stage minimises; a session's stages need not be the flow's."""
        known = self.objectives.get(stage.name)
        if known is None or known[0] != stage:
            known = self.objectives[stage.name] = (stage, Objective.of(str(stage.role), stage.params))
        return known[1]

    def copy_weights(self, stage: Stage) -> None:
        """An update without a loss: the role's weights move towards those of another role, which is here too."""
        role, params = str(stage.role), stage.params
        self.workers[role].follow(self.workers[params["source"]], params.get("decay", 0.0))

    def accumulate(self, stage: Stage, rows: Rows, sums: Sums, bar: Bar) -> dict[str, float]:
        """Adds the gradient sums of `rows`; returns loss sums by denominator."""
        assert stage.role
        return self.workers[stage.role].accumulate(self.objective(stage), rows, sums, bar.update)

    def step(self, stage: Stage, denominators: Mapping[str, float], iteration: int) -> float | None:
        """One optimizer step by the global denominators; the gradient norm, or None when there was nothing to learn."""
        assert stage.role
        needed = self.objective(stage).denominators
        return self.workers[stage.role].step({name: denominators[name] for name in needed}, iteration)

    def meets(self, stage: Stage) -> bool:
        """True where a rank without rows takes part in an infer stage, because ranks compute it together."""
        return stage.kind is Kind.INFER and stage.role in self.workers and self.workers[stage.role].ranks.together

    def accompany(self, stage: Stage) -> None:
        """The part in an infer stage of a rank that has no rows."""
        names = {"score": "scores", "values": "values"}
        self.workers[str(stage.role)].infer(names.get(stage.type, "log_probs"), Rows({}))

    def publish(self, version: int) -> None:
        """The engines generate with the trained weights from now on."""
        for role, engine in self.engines.items():
            worker = self.workers[role]
            engine.publish(version, Weights(whole_weights(worker)) if worker.ranks.divided else None)

    def save(self, folder: Path, write: bool = True) -> None:
        """Every role that changes as a Hugging Face directory, with its optimizer if it has one.

        Of ranks that share the roles all call this, and one has to `write` what all of them have.
        """
        for role in self.flow.changed_roles:
            if role in self.workers and (write or self.workers[role].ranks.divided):
                save_worker(self.workers[role], folder / role, write)

    def load(self, folder: Path) -> None:
        for role in self.flow.changed_roles:
            if role in self.workers:
                load_worker(self.workers[role], folder / role)

    def close(self) -> None:
        if self.rewards is not None:
            self.rewards.close()


class EarlyChecks:
    """Hands finished rows to the reward processes while the engine goes on with the others."""

    def __init__(
        self,
        executor: StageExecutor,
        stage: Stage,
        rows: Rows,
        place: Mapping[Any, int],
        beside: Sequence[Stage],
        bar: Bar,
    ) -> None:
        self.executor, self.stage, self.rows, self.place = executor, stage, rows, place
        self.beside, self.bar = beside, bar
        self.waiting: list[Finished] = []

    def add(self, finished: Finished) -> None:
        """Called by the engine for each row, in the order in which they end."""
        engine = self.executor.engines[str(self.stage.role)]
        self.bar.update(1, len(finished.tokens), engine.in_flight)
        if self.beside:
            self.waiting.append(finished)
            if len(self.waiting) >= VERIFY_CHUNK:
                self.flush()

    def flush(self) -> None:
        """Begins the checks of all rows that are waiting."""
        if not self.waiting or self.executor.rewards is None:
            return
        part = self.rows.take([self.place[row.uid] for row in self.waiting])
        part = part.with_columns(to_rows(part, self.waiting))
        self.waiting = []
        for stage in self.beside:
            self.executor.pending.setdefault(stage.name, []).append((part, self.executor.rewards.submit(part)))


def record_update(
    stage: Stage, losses: Mapping[str, float], counts: Mapping[str, float], sums: Sums, counted: bool = True
) -> None:
    """Adds one optimizer step's loss: sums over global counts. A part of it that is not `counted` adds to the loss alone."""
    if any(count > 0 for count in counts.values()):
        total = sum(loss / counts[name] for name, loss in losses.items() if counts[name] > 0)
        sums.add(f"loss/{stage.role}", total, int(counted))


def checked_beside(flow: Flow, stage: Stage) -> list[Stage]:
    """The verify stages that need nothing but what `stage` and admission write."""
    return [
        later
        for later in flow.stages
        if later.type == "verify"
        and "of" not in later.params
        and any(c.writer == stage.name for c in flow.inputs[later.name])
        and all(c.writer in (stage.name, "admission") for c in flow.inputs[later.name])
    ]


def requests_of(stage: Stage, rows: Rows, config: Config) -> list[Request]:
    """What a generate stage asks of its engine, one request per row."""
    sampling, purpose, prompts = sampling_of(stage, config), str(stage.params.get("purpose", "train")), rows["prompt"]
    return [Request(uid, prompts[i], sampling, purpose, stage.name) for i, uid in enumerate(rows.uids())]


def sampling_of(stage: Stage, config: Config) -> Sampling:
    """How a generate stage samples: the configuration's `rollout`, where the stage does not say otherwise."""
    rollout, params = config.rollout, stage.params
    return Sampling(
        temperature=params.get("temperature", rollout.temperature),
        top_p=params.get("top_p", rollout.top_p),
        top_k=params.get("top_k", rollout.top_k),
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(rollout.stop_token_ids),
        stop=tuple(rollout.stop),
        greedy=bool(params.get("greedy", False)),
    )


def leaders(uids: Sequence[Uid]) -> dict[Uid, Uid]:
    """For each row the first one of its prompt."""
    first: dict[tuple[int, int], Uid] = {}
    return {uid: first.setdefault(uid[:2], uid) for uid in uids}


def of_namespace(rows: Rows, namespace: str | None) -> Rows:
    """The rows with a namespace's columns under their plain names: the second response in place of the first."""
    if namespace is None:
        return rows
    prefix = f"{namespace}."
    return rows.with_columns({n.removeprefix(prefix): column for n, column in rows.items() if n.startswith(prefix)})


def arguments(stage: Stage, rows: Rows) -> list[Any]:
    """The columns that a registered function asks for, in its order."""
    entry = compute_entry(stage.type)
    required = [rows[entry.column(parameter)] for parameter in entry.reads]
    return required + [rows.get(entry.column(parameter)) for parameter in entry.optional]


def named(result: Any, writes: Sequence[str]) -> dict[str, Column]:
    """A function's result under the names of the columns that it writes. Raises ValueError when their numbers differ."""
    columns = result if isinstance(result, tuple) else (result,)
    if len(columns) != len(writes):
        raise ValueError(f"{len(writes)} columns are declared ({', '.join(writes)}) but {len(columns)} were returned")
    return dict(zip(writes, columns, strict=True))
