"""What a run needs before its first step, checked in the order of cost: flow, tokenizer, data, verifiers."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from braidrl.config import Config, VerifierConfig
from braidrl.data.prompts import LoadedSource, load_eval, load_train
from braidrl.flow import Flow
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
        return rule_rewards(self.config, self.flow, self.tokenizer)


def rule_rewards(config: Config, flow: Flow, tokenizer: PreTrainedTokenizerBase) -> RuleRewards:
    """The verifiers of a run with the scores that its flow gives. Its processes start when something is first checked."""
    checks = [s for s in flow.stages if s.type == "verify"]
    scores = checks[0].params if checks else {"correct_score": 1.0, "wrong_score": 0.0}
    sources = [*config.data.train, *config.data.eval.values()]
    own: dict[int, list[VerifierConfig]] = {i: s.verify for i, s in enumerate(sources) if s.verify is not None}
    names = {i: source.path.stem for i, source in enumerate(sources)}
    return RuleRewards(config.reward, own, scores["correct_score"], scores["wrong_score"], tokenizer, names)


def prepare(config: Config, train: bool = True) -> Prepared:
    """Raises UserError for the first thing that could not run; without `train` only evaluation data is read."""
    flow = build_flow(config)
    tokenizer = load_tokenizer(config.model)
    responses = "response" in flow.needs_from_data()
    sources = load_train(config.data, tokenizer, responses=responses) if train else []
    return Prepared(config, flow, evaluation_flow(config, flow), tokenizer, sources, load_eval(config.data, tokenizer))


def set_up_torch(config: Config) -> None:
    """Threads, seeds and determinism of this process."""
    transformers_logging.disable_progress_bar()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    if config.trainer.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)
