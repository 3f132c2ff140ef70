"""A training run: its folder, the loop over iterations, evaluation, checkpoints, resume and what is written down.

configuration ──check──▶ flow, data, models ──▶ for each step: walk the flow ─▶ metrics ─▶ evaluate? ─▶ checkpoint?
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from braidrl.config import Config
from braidrl.data.admission import eval_rows
from braidrl.data.codec import decode_buffer, encode_buffer
from braidrl.data.loader import PromptLoader
from braidrl.data.prompts import load_eval, load_train
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.models.loading import load_tokenizer
from braidrl.observe.metrics import MetricsWriter, Sums
from braidrl.observe.progress import Progress
from braidrl.observe.report import write_report
from braidrl.observe.rollouts import write_rollouts
from braidrl.rewards.verify import RuleRewards, responses
from braidrl.runtimes.building import build_flow
from braidrl.runtimes.eager import EagerCrew
from braidrl.runtimes.evaluation import evaluation_flow, evaluation_metrics
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.folders import (
    checkpoint_folder,
    finish_checkpoint,
    latest_checkpoint,
    new_run_folder,
    read_state,
    whole_folder,
    write_whole,
)
from braidrl.runtimes.iteration import IterationResult, Walk
from braidrl.runtimes.step_metrics import step_metrics, summary


class TrainingRun:
    """Use as a context: leaving it, by whatever way, closes files and ends processes."""

    def __init__(
        self, config: Config, *, resume: Path | None = None, replay: Path | None = None, rollout_only: bool = False
    ) -> None:
        """Checks everything that can be checked before a model loads. Raises UserError for what could not run."""
        self.config, self.replay, self.rollout_only = config, replay, rollout_only
        self.flow = build_flow(config)
        self.tokenizer = load_tokenizer(config.model)
        self.evaluation = evaluation_flow(config, self.flow)
        sources = load_train(config.data, self.tokenizer, responses="response" in self.flow.needs_from_data())
        self.eval_sources = load_eval(config.data, self.tokenizer)
        self.rewards = self._rewards(len(sources))
        self.step = self.version = 0
        self.checkpoint = latest_checkpoint(resume) if resume else None
        self.folder = resume or new_run_folder(config)
        self.progress = Progress(config.trainer.steps)
        self.progress.print(str(self.folder))
        for source in sources:
            self.progress.print(source.report())
        set_up_torch(config)
        self.loader = PromptLoader(sources, config.seed, config.data.shuffle)
        self.crew = EagerCrew(config, self.flow, self.loader, self._executor())
        self.walk: Walk[Rows] = Walk(config, self.flow, self.crew, self.loader.epoch_size)
        if self.checkpoint is not None:
            self._restore(self.checkpoint)
        self.metrics = MetricsWriter(self.folder, self.step if resume else None)

    def _executor(self) -> StageExecutor:
        generating = self.flow if self.eval_sources == {} else self.evaluation
        return StageExecutor(
            self.config, self.flow, self.flow.roles, self.tokenizer, self.rewards, self.progress, generating.roles
        )
