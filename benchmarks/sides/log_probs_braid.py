"""Log-probs of rows of random tokens, in chunks as Braid computes them, or from all logits at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.sides.packing_braid import rows_of
from benchmarks.sides.workers import worker_of
from benchmarks.turns import Turn, peak_mebibytes
from braidrl.training.compute.packed import pack
from braidrl.training.roles.worker import RoleWorker


def prepare(case: Mapping[str, Any]) -> Turn:
    tokens = case["rows"] * case["tokens"]
    worker = worker_of(RoleWorker, case, train=False, max_tokens_per_device=tokens)
    rows = rows_of([case["tokens"]] * case["rows"], case["vocabulary"])

    @torch.no_grad()
    def turn() -> dict[str, float]:
        before = peak_mebibytes()
        if case["way"] == "plain":
            packed = pack(rows, worker.device)
            logits = worker.model.lm_head(worker.hidden_states(packed)[packed.predictors])
            logits.log_softmax(-1).gather(-1, packed.targets[:, None])
        else:
            worker.forward("log_probs", rows)
        return {"tokens": tokens, "peak_mebibytes": peak_mebibytes(), "mebibytes_before": before}

    return turn
