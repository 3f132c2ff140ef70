"""Executes stages on rows in this process: the one piece that every runtime shares. Runtimes only decide who calls it.

rows ──execute(stage)──▶ columns            generate, infer, verify, compute
rows ──accumulate(stage)──▶ loss sums       then `step(stage)` with the global denominators
rows ──select(stage)──▶ dropped groups
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.config import Config
from braidrl.data.rows import Column, Rows
from braidrl.flow import Flow, Kind, Scope, Stage
from braidrl.flow.flow import ADMISSION
from braidrl.flow.stages import compute_entry
from braidrl.models.checkpoint import load_worker, save_worker
from braidrl.models.objective import Objective
from braidrl.models.worker import DecoderWorker
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.rewards.verify import Pending, RuleRewards
from braidrl.rollout.generation import Generator, Purpose, SamplingSettings

VERIFY_CHUNK = 8
"""Finished rows handed to the reward processes at once while others are still being generated."""


@dataclass(frozen=True)
class Sampled:
    """How a generate stage samples: training's settings or an evaluation's."""

    purpose: Purpose
    settings: SamplingSettings


class StageExecutor:
    """Holds the workers of some roles, the engine of each actor among them, and the reward processes."""

    def __init__(self, config: Config, flow: Flow, tokenizer: PreTrainedTokenizerBase, progress: Progress) -> None:
        self.config, self.flow, self.progress = config, flow, progress
        self.workers = {role: DecoderWorker(role, config, role in flow.trained_roles) for role in flow.roles}
        generating = {s.role for s in flow.stages if s.kind is Kind.GENERATE and s.role}
        self.generators = {
            role: Generator(self.workers[role].model, tokenizer, config) for role in sorted(generating)
        }
        self.objectives = {
            s.name: Objective.of(s.params) for s in flow.stages if s.kind is Kind.TRAIN and "loss" in s.params
        }
        self.rewards = {
            s.name: RuleRewards.of(config, s.params, tokenizer) for s in flow.stages if s.type == "verify"
        }
        self.pending: dict[str, list[tuple[Rows, Pending]]] = {}
        self.states: dict[str, dict[str, Any]] = {}

    def execute(self, stage: Stage, rows: Rows, sampled: Sampled, sums: Sums) -> Mapping[str, Column]:
        """The columns that a generate, infer or compute stage writes, in the order of `rows`."""
        if stage.type == "generate":
            return self.generate(stage, rows, sampled)
        if stage.type == "verify":
            return self.verify(stage, rows, sums)
        if stage.type == "log_probs":
            assert stage.role
            with self.progress.stage(stage.name, len(rows)) as bar:
                return {stage.writes[0]: self.workers[stage.role].log_probs(rows, bar.advance)}
        return self.compute(stage, rows)
