"""Generates and checks answers in one process: holds the engines of its roles and the processes that check.

rows ──requests_of──▶ engine ──finished rows──▶ EarlyChecks, EarlyStop ──▶ columns
     ──play────────▶ episodes on the same engine ─────────────────────▶
trained weights ──publish──▶ engines

How a version of the weights comes to an engine, whatever the layout that it is trained in:

engine with the trainer's own weights    they are there
engine with a copy, whole or slices      box to box from the ranks that have divided them, adapters merged
engines in processes of their own        one file on each machine, which its ranks write side by side
servers                                  the same in a folder, which they read, or sent to them from there
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedTokenizerBase

from braidrl.algorithms.metrics import reflection_counts
from braidrl.algorithms.ragged import Ragged
from braidrl.config import Config
from braidrl.data.rows import Column, Rows
from braidrl.errors import UserError
from braidrl.flow import Flow, Stage
from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.roles.base import RoleWorker
from braidrl.models.weights.mirror import LayoutCopy, local_weight_parts
from braidrl.models.weights.transfer import weight_parts
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.rewards.verify import RuleRewards
from braidrl.rollout.divided.spmd import SpmdEngine
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.episodes.trajectory import response_columns
from braidrl.rollout.requests import Request, Response, SamplingParams, Uid
from braidrl.rollout.routing.service import EngineService
from braidrl.rollout.weights.joint_file import WeightWriter
from braidrl.runtimes.generating.early_stop import EarlyStop
from braidrl.runtimes.generating.engines import start_engine
from braidrl.runtimes.generating.episodes import play
from braidrl.runtimes.generating.verification import Checks, EarlyChecks, early_verify_stages, verified

Publish = Callable[[int], None]
"""Has an engine generate with the weights of now, under a version's number; all ranks that generate for the role call it together."""


class Generation:
    """The engines of roles that generate, by role, and the checks under way."""

    def __init__(
        self,
        config: Config,
        flow: Flow,
        tokenizer: PreTrainedTokenizerBase,
        rewards: RuleRewards | None,
        progress: Progress,
    ) -> None:
        self.config, self.flow, self.tokenizer, self.progress = config, flow, tokenizer, progress
        self.checks = Checks(rewards, progress)
        self.engines: dict[str, EmbeddedEngine | EngineService] = {}
        self.publications: dict[str, Publish] = {}

    def start_engine(self, worker: RoleWorker) -> None:
        """Start what generates with the weights of `worker`."""
        engine = self.engines[worker.role] = start_engine(worker, self.config, self.tokenizer)
        self.publications[worker.role] = publication(worker, engine, self.config)

    def generate(self, stage: Stage, rows: Rows, sums: Sums, stop: EarlyStop | None = None) -> Mapping[str, Column]:
        """Return the columns that a generate stage writes, in the order of `rows`; `stop` ends rows early.

        Without rows only the part of a rank is done that decodes together with others.
        """
        if "environment" in stage.params:
            return self._play(stage, rows, sums)
        engine = self.engines[str(stage.role)]
        if not len(rows):
            engine.generate([])
            return {}
        requests = requests_of(stage, rows, self.config)
        place = {uid: i for i, uid in enumerate(rows.uids())}
        # The likeliest tokens of a prompt are the same for all of its samples: one of them is generated for all.
        greedy = sampling_of(stage, self.config).takes_likeliest
        first = leaders(list(place)) if greedy else {uid: uid for uid in place}
        requests = [request for request in requests if first[request.uid] == request.uid]
        verify = early_verify_stages(self.flow, stage)
        with self.progress.stage(stage.name, len(rows)) as bar:
            early = EarlyChecks(self.checks, engine, rows, place, verify, bar, stop.add if stop else None)
            rows_to_end = (lambda: [uid for uid in stop.rows_to_end() if uid in place]) if stop else None
            done = {finished.uid: finished for finished in engine.generate(requests, early.add, rows_to_end)}
            finished = [done[uid] if uid in done else replace(done[leader], uid=uid) for uid, leader in first.items()]
            for copy in finished:
                if copy.uid not in done:
                    early.add(copy)
            early.flush()
            if stop is not None:
                stop.close()
        return self.columns(stage, rows, finished)

    def _play(self, stage: Stage, rows: Rows, sums: Sums) -> Mapping[str, Column]:
        """Play episodes in the stage's environment; failures of environments are counted and the first is shown."""
        engine = self.engines[str(stage.role)]
        if isinstance(engine, SpmdEngine):
            raise UserError(f"{stage.name}: an environment needs engines of their own; write rollout.engines=1")
        sampling = sampling_of(stage, self.config)
        with self.progress.stage(stage.name, len(rows)) as bar:
            columns, failures = play(engine, stage, rows, self.config, self.tokenizer, sampling, sums, bar)
        for line in failures:
            self.progress.print(f"{stage.name}: {line}")
        return self._named(stage, columns)

    def columns(self, stage: Stage, rows: Rows, finished: Sequence[Response]) -> Mapping[str, Column]:
        """Return the columns that a generate stage writes, in the order of `rows`, from the engine's responses."""
        return self._named(stage, response_columns(rows, finished))

    def _named(self, stage: Stage, columns: Mapping[str, Column]) -> Mapping[str, Column]:
        """Return what was generated, under the stage's names, and how often each row reconsiders itself."""
        into, tokens, mask = stage.params.get("into"), columns["tokens"], columns["action_mask"]
        assert isinstance(tokens, Ragged) and isinstance(mask, Ragged)
        reflections = torch.zeros(len(tokens), dtype=torch.int64)
        if phrases := self.config.rollout.reflection_phrases:
            responses = [tokens[row][mask[row]] for row in range(len(tokens))]
            reflections = reflection_counts(self.tokenizer.batch_decode(responses, skip_special_tokens=True), phrases)
        return {f"{into}.{n}" if into else n: c for n, c in {**columns, "reflections": reflections}.items()}

    def verify(self, stage: Stage, rows: Rows, sums: Sums) -> Mapping[str, Column]:
        """Wait for the checks that were begun during generation, or begin them now; return the stage's columns."""
        return verified(self.flow, stage, rows, dict(self.checks.results(stage, rows, sums).items()))

    def publish(self, version: int) -> None:
        """Generate with the trained weights from now on, under this version's number."""
        for publish in self.publications.values():
            publish(version)

    def close(self) -> None:
        """End the engines' processes and those that check answers."""
        for engine in self.engines.values():
            if isinstance(engine, EngineService):
                engine.close()
        self.checks.close()


def requests_of(stage: Stage, rows: Rows, config: Config) -> list[Request]:
    """Return what a generate stage asks of its engine, one request per row."""
    sampling, purpose, prompts = sampling_of(stage, config), str(stage.params.get("purpose", "train")), rows["prompt"]
    return [Request(uid, prompts[i], sampling, purpose, stage.name) for i, uid in enumerate(rows.uids())]


def sampling_of(stage: Stage, config: Config) -> SamplingParams:
    """Return how a generate stage samples: by the configuration's `rollout`, where the stage does not say otherwise."""
    rollout, params = config.rollout, stage.params
    return SamplingParams(
        temperature=params.get("temperature", rollout.temperature),
        top_p=params.get("top_p", rollout.top_p),
        top_k=params.get("top_k", rollout.top_k),
        max_tokens=rollout.max_response_tokens,
        stop_token_ids=tuple(rollout.stop_token_ids),
        stop=tuple(rollout.stop),
        greedy=bool(params.get("greedy", False)),
    )


def leaders(uids: Sequence[Uid]) -> dict[Uid, Uid]:
    """Return for each row the first one of its prompt."""
    first: dict[tuple[int, int], Uid] = {}
    return {uid: first.setdefault(uid[:2], uid) for uid in uids}


def publication(worker: RoleWorker, engine: EmbeddedEngine | EngineService, config: Config) -> Publish:
    """Return how one engine gets new weights; all ranks that generate for the role call this at the same time."""
    if isinstance(engine, EmbeddedEngine):
        pooled = isinstance(engine, SpmdEngine)
        return into_copy(worker, engine) if pooled or not worker.has_full_weights else engine.publish
    return through_file(worker, engine, config)


def into_copy(worker: RoleWorker, engine: EmbeddedEngine) -> Publish:
    """Return the call that copies the worker's weights into the engine's own, a bounded number of bytes at a time."""
    slices = engine.slices if isinstance(engine, SpmdEngine) else None
    copy = LayoutCopy(worker, lambda: weight_parts(engine.model, slices), divided=slices is not None)

    def publish(version: int) -> None:
        copy.refresh()
        engine.publish(version)

    return publish


def through_file(worker: RoleWorker, engine: EngineService, config: Config) -> Publish:
    """Return the call that writes the weights to a file, which processes of engines, and servers, read."""
    own = config.roles.get(worker.role)
    # Of ranks that each have everything some may generate alone: those do not wait for the others.
    all_ranks = worker.ranks.is_sharded or own is None or own.generate_workers is None
    ranks, rollout = worker.ranks if all_ranks else DataParallel(), config.rollout
    asks = rollout.engine == "http"
    in_folder = asks and rollout.servers.weights == "folder"
    # What servers are sent is checked on its way.
    writer = WeightWriter(local_weight_parts(worker), ranks, rollout.check_weights and not asks, repeat=in_folder)

    def publish(version: int) -> None:
        parts = local_weight_parts(worker)
        folder = rollout.servers.folder
        engine.publish(version, writer.in_folder(parts, folder) if in_folder else writer.in_memory(parts))

    return publish
