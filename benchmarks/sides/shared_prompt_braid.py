"""One optimizer step of Braid's trainer on given rows, with the groups' prompts shared or apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from benchmarks.sides.workers import worker_of
from benchmarks.turns import Turn, peak_mebibytes
from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.worker import RoleWorker


def prepare(case: Mapping[str, Any]) -> Turn:
    worker = worker_of(RoleWorker, case, share_prompts=case["shared"], max_tokens_per_device=8192)
    objective = Objective.of("actor", {"loss": "clip"})
    rows = made_rows(case["groups"], case["samples"], case["prompt"], case["response"], case["vocabulary"])
    tokens = len(rows) * (case["prompt"] + case["response"])

    def turn() -> dict[str, float]:
        worker.forward_backward(objective, rows, Sums())
        worker.optim_step(denominators(rows), 1)
        return {"tokens": tokens, "peak_mebibytes": peak_mebibytes()}

    turn()
    return turn


def made_rows(groups: int, samples: int, prompt: int, response: int, vocabulary: int) -> Rows:
    """Return rows with one random prompt per group, random responses, and advantages of both signs."""
    generator = torch.Generator().manual_seed(1)
    count = groups * samples
    prompts = torch.randint(1, vocabulary, (groups, prompt), generator=generator).repeat_interleave(samples, 0)
    tokens = torch.cat([prompts, torch.randint(1, vocabulary, (count, response), generator=generator)], 1)
    lengths = torch.full((count,), prompt + response)
    mask = (torch.arange(prompt + response) >= prompt).repeat(count)
    return Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64),
            "group": torch.arange(groups).repeat_interleave(samples),
            "sample": torch.arange(samples).repeat(groups),
            "length": lengths,
            "action_tokens": torch.full((count,), response),
            "advantage": torch.randn(count, generator=generator),
            "tokens": Ragged.from_lengths(tokens.flatten(), lengths),
            "action_mask": Ragged.from_lengths(mask, lengths),
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
        }
    )
