"""Executes stages on rows in this process: the one piece that every runtime shares. Runtimes only decide who calls it.

rows ──execute(stage)──▶ columns            generate, infer, verify, compute of scope row or group
rows ──sums(stage)──▶ reduced over everybody ──apply(stage)──▶ columns            compute of scope batch
rows ──select(stage)──▶ dropped groups
rows ──accumulate(stage)──▶ loss sums ──reduced──▶ step(stage, denominators)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.config import Config, VerifierConfig
from braidrl.data.rows import Column, Rows
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.stages import compute_entry
from braidrl.models.checkpoint import load_worker, save_worker
from braidrl.models.objective import Objective
from braidrl.models.worker import DecoderWorker
from braidrl.observe.metrics import Sums
from braidrl.observe.progress import Progress
from braidrl.rewards.verify import Pending, RuleRewards
from braidrl.rollout.embedded import EmbeddedEngine
from braidrl.rollout.requests import Finished, requests_for, to_columns

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
        progress: Progress,
    ) -> None:
        self.config, self.flow, self.tokenizer, self.progress = config, flow, tokenizer, progress
        self.workers = {role: DecoderWorker(role, config, role in flow.trained_roles) for role in roles}
        self.engines = {
            role: EmbeddedEngine(
                self.workers[role].model, tokenizer, config.rollout.slots,
                config.data.max_prompt_tokens + config.rollout.max_response_tokens, config.seed,
            )
            for role in roles
            if any(s.kind is Kind.GENERATE and s.role == role for s in flow.stages)
        }  # fmt: skip
        self.objectives = {
            s.name: Objective.of(s.params) for s in flow.stages if s.kind is Kind.TRAIN and "loss" in s.params
        }
        self.rewards = {s.type: RuleRewards for s in flow.stages if s.type == "verify"}
        self.pending: dict[str, list[Pending]] = {}

    def close(self) -> None:
        """Ends the reward processes."""
