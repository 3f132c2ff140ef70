"""A training step of Braid on random tokens at a long vocabulary; or `plain`, the same written without care for
memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.sides.shared_prompt_braid import made_rows
from benchmarks.sides.workers import worker_of
from benchmarks.turns import Turn, peak_mebibytes
from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.compute.packed import pack
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.worker import RoleWorker

PROMPT = 16


def prepare(case: Mapping[str, Any]) -> Turn:
    tokens = case["rows"] * case["tokens"]
    worker = worker_of(RoleWorker, case, max_tokens_per_device=tokens)
    objective = Objective.of("actor", {"loss": "clip"})
    rows = made_rows(case["rows"] // 8, 8, PROMPT, case["tokens"] - PROMPT, case["vocabulary"])

    def turn() -> dict[str, float]:
        before = peak_mebibytes()
        if case["way"] == "plain":
            plain(worker, objective, rows)
        else:
            worker.forward_backward(objective, rows, Sums())
        worker.optim_step(denominators(rows), 1)
        return {"tokens": tokens, "peak_mebibytes": peak_mebibytes(), "mebibytes_before": before}

    return turn


def plain(worker: RoleWorker, objective: Objective, rows: Rows) -> None:
    """Return log-probs by way of all logits, log_softmax and gather; not even an entropy."""
    assert worker.optimizer is not None
    packed = pack(rows, worker.device)
    logits = worker.model.lm_head(worker.hidden_states(packed)[packed.predictors])
    log_softmax = logits.log_softmax(-1)
    del logits
    log_probs = log_softmax.gather(-1, packed.targets[:, None])[:, 0]
    losses, _ = objective.sums(rows, packed.offsets, {"log_probs": log_probs, "entropy": torch.zeros_like(log_probs)})
    worker.optimizer.collect(objective.denominator)
    losses[objective.denominator].backward()
