"""What a run needs before its first step, checked in the order of cost: flow, tokenizer, data, verifiers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from braidrl.cluster.world import LostPeers, World
from braidrl.config import Config, VerifierConfig
from braidrl.data.prompts import LoadedSource, load_eval, load_train
from braidrl.errors import UserError
from braidrl.flow import Flow
from braidrl.flow.planner import serial_chain
from braidrl.models.loading import load_tokenizer
from braidrl.rewards.verify import RuleRewards
from braidrl.runtimes.building import build_flow
from braidrl.runtimes.evaluation import evaluation_flow
from braidrl.runtimes.row_store import RowStore


@dataclass(frozen=True)
class Prepared:
    """A checked configuration with everything but the models."""

    config: Config
    flow: Flow
    evaluation: Flow
    tokenizer: PreTrainedTokenizerBase
    sources: list[LoadedSource]
    eval_sources: dict[str, LoadedSource]

    @property
    def generating(self) -> tuple[str, ...]:
        """Roles that need an engine."""
        stages = [*self.flow.stages, *(self.evaluation.stages if self.eval_sources else ())]
        return tuple(dict.fromkeys(s.role for s in stages if s.type == "generate" and s.role))

    def roles(self, train: bool = True) -> tuple[str, ...]:
        """Roles that need a model: in training those of the flow too."""
        return tuple(dict.fromkeys([*(self.flow.roles if train else ()), *self.generating]))

    def store(self) -> RowStore:
        """Where the run's rows come from and go to."""
        return RowStore(self.config, self.tokenizer, self.sources, self.eval_sources)

    def rewards(self) -> RuleRewards | None:
        """The verifiers of the run, or None where nothing is verified. Evaluation sets are numbered after the sources."""
        checks = [s for s in self.flow.stages if s.type == "verify"]
        if not checks and not self.eval_sources:
            return None
        scores = checks[0].params if checks else {"correct_score": 1.0, "wrong_score": 0.0}
        sources = [*self.config.data.train, *self.config.data.eval.values()]
        own: dict[int, list[VerifierConfig]] = {i: s.verify for i, s in enumerate(sources) if s.verify is not None}
        names = {i: source.path.stem for i, source in enumerate(sources)}
        return RuleRewards(
            self.config.reward, own, scores["correct_score"], scores["wrong_score"], self.tokenizer, names
        )


def prepare_together(config: Config, world: World, train: bool = True) -> Prepared:
    """As `prepare`; one rank tokenises every prompt to see which are short enough, the others then only those that they draw."""
    if world.first:
        try:
            prepared = prepare(config, train)
        except UserError as error:
            world.share("data", {"refused": str(error)})
            raise
        evaluation = {name: source.kept for name, source in prepared.eval_sources.items()}
        world.share("data", {"train": [source.kept for source in prepared.sources], "eval": evaluation})
        return prepared
    kept = world.share("data", None)
    if "refused" in kept:
        raise LostPeers(f"rank 0 refused the configuration: {kept['refused']}")
    return prepare(config, train, kept)


def prepare(config: Config, train: bool = True, kept: Mapping[str, Any] | None = None) -> Prepared:
    """Raises UserError for the first thing that could not run; without `train` only evaluation data is read.

    `kept` says of the sources of `train` and `eval` which examples another process has kept of them.
    """
    flow = build_flow(config)
    if config.runtime == "distributed":
        # One model is active at a time, and every rank switches at the same places.
        flow = Flow(flow.name, serial_chain(flow))
    tokenizer = load_tokenizer(config.model)
    responses = "response" in flow.needs_from_data()
    of_train, of_eval = (kept["train"], kept["eval"]) if kept else (None, None)
    sources = load_train(config.data, tokenizer, responses=responses, kept=of_train) if train else []
    held_out = load_eval(config.data, tokenizer, of_eval)
    return Prepared(config, flow, evaluation_flow(config, flow), tokenizer, sources, held_out)


def set_up_torch(config: Config) -> None:
    """Threads, seeds and determinism of this process."""
    transformers_logging.disable_progress_bar()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
