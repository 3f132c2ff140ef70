"""Invariant 4: the same loss, gradients, norm and weights for any packing, micro-batching, order and portioning of
rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from braidrl.algorithms.ragged import Ragged
from braidrl.config import Config, parse_config
from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.training.backends import BackendSpec
from braidrl.training.objective import Objective, denominators, with_group_tokens
from braidrl.training.roles.worker import RoleWorker
from tests.tiny import MODELS, TOKENIZER, settings

EXACT = {"rtol": 1e-9, "atol": 1e-12}
OBJECTIVES: dict[str, dict[str, Any]] = {
    "dapo": {"loss": {"name": "clip", "low": 0.2, "high": 0.28}, "aggregate": "token-mean"},
    "grpo": {
        "loss": {"name": "clip", "dual": 3.0},
        "aggregate": "seq-mean-token-mean",
        "kl": {"name": "k3", "coef": 0.04},
    },
    "entropy": {"loss": "clip", "aggregate": "prompt-mean", "entropy_coef": 0.01},
    "corrected": {
        "loss": "clip",
        "aggregate": {"name": "token-sum-norm", "max_tokens": 9},
        "correction": {"name": "truncated", "cap": 1.05},
    },
    "gspo": {"loss": {"name": "gspo", "low": 0.1, "high": 0.1}, "aggregate": "seq-mean-token-mean"},
    "gmpo": {"loss": "gmpo", "aggregate": "seq-mean-token-mean"},
    "cispo": {"loss": "cispo", "aggregate": "seq-mean-token-sum"},
    "on-policy": {"loss": "clip", "aggregate": "token-mean", "old": "self"},
    "sft": {"loss": "sft", "aggregate": "token-mean"},
}


@dataclass
class Result:
    losses: dict[str, float]
    gradients: list[Tensor]
    norm: float
    weights: list[Tensor]
    metrics: dict[str, float]


def make_rows(groups: int = 5, samples: int = 3) -> Rows:
    """Return rows of 2 to 21 tokens; one has no action and one is masked out of the loss."""
    draw = torch.Generator().manual_seed(3)

    def numbers(count: int, around: float = 0.0, spread: float = 0.3) -> Tensor:
        return around + spread * torch.randn(count, generator=draw, dtype=torch.float64)

    count = groups * samples
    prompts = torch.randint(1, 8, (count,), generator=draw)
    actions = torch.randint(1, 14, (count,), generator=draw)
    actions[4] = 0
    lengths = prompts + actions
    tokens = torch.randint(0, len(TOKENIZER), (int(lengths.sum()),), generator=draw)
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompts.tolist(), strict=True)])
    loss_mask = torch.ones(count, dtype=torch.int64)
    loss_mask[7] = 0
    total = int(actions.sum())
    rows = Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64),
            "group": torch.arange(count) // samples,
            "sample": torch.arange(count) % samples,
            "length": lengths,
            "action_tokens": actions,
            "advantage": numbers(count, spread=1.0),
            "loss_mask": loss_mask,
            "tokens": Ragged.from_lengths(tokens, lengths),
            "action_mask": Ragged.from_lengths(mask, lengths),
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
            **{
                name: Ragged.from_lengths(numbers(total, around=-2.5), actions)
                for name in ("old_log_probs", "rollout_log_probs", "ref_log_probs")
            },
        }
    )
    return with_group_tokens(rows, rows)


def config_of(folder: Path, model: Path, max_tokens: int, **trainer: Any) -> Config:
    trainer = {"max_tokens_per_device": max_tokens, "max_grad_norm": 0.5, **trainer}
    return parse_config(settings(folder, model, folder / "none.jsonl", dtype="float64", trainer=trainer))


def update(config: Config, params: dict[str, Any], portions: list[Rows]) -> Result:
    """Take one optimizer step whose rows are fed in portions."""
    worker = RoleWorker(BackendSpec("actor", config, train=True))
    assert worker.optimizer is not None
    objective, sums, losses = Objective.of("actor", params), Sums(), dict[str, float]()
    for rows in portions:
        for name, loss in worker.forward_backward(objective, rows, sums).items():
            losses[name] = losses.get(name, 0.0) + loss
    counts = denominators(Rows.cat(portions))
    gradients = [g.clone() for g in worker.optimizer.sums[objective.denominator] if g is not None]
    norm = worker.optim_step({objective.denominator: counts[objective.denominator]}, 1)
    assert norm is not None
    weights = [p.detach().clone() for p in worker.model.parameters()]
    return Result(losses, gradients, norm, weights, sums.means())


def assert_same(found: Result, expected: Result) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-9, abs=1e-12)
    assert found.norm == pytest.approx(expected.norm, rel=1e-9)
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-9, abs=1e-12)
    for mine, theirs in zip(found.gradients, expected.gradients, strict=True):
        torch.testing.assert_close(mine, theirs, **EXACT)
    for mine, theirs in zip(found.weights, expected.weights, strict=True):
        # Adam's first step is a sign: where a gradient is almost zero, rounding decides it.
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "objective"),
    [
        pytest.param(name, objective, marks=() if name == "qwen2" else pytest.mark.soak)
        for name in MODELS
        for objective in OBJECTIVES
    ],
)
def test_packing_micro_batches_order_and_portions_change_nothing(
    name: str, objective: str, tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    rows, params = make_rows(), OBJECTIVES[objective]
    whole = update(config_of(tmp_path, tiny_models[name], 10_000), params, [rows])
    assert len(whole.gradients) == len(whole.weights) and whole.norm > 0
    assert any(float(gradient.abs().max()) > 1e-3 for gradient in whole.gradients)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))
    for max_tokens, portions in (
        (int(rows["length"].max()), [rows]),
        (40, [rows.take(order)]),
        (60, [rows.take([7, 4]), rows.take([0]), rows.take([i for i in range(len(rows)) if i not in (0, 4, 7)])]),
        (10_000, [rows.take([i]) for i in range(len(rows))]),
    ):
        assert_same(update(config_of(tmp_path, tiny_models[name], max_tokens), params, portions), whole)


@pytest.mark.parametrize("name", MODELS)
def test_activation_checkpointing_changes_no_gradient(name: str, tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    rows, params = make_rows(), OBJECTIVES["grpo"]
    plain = update(config_of(tmp_path, tiny_models[name], 60), params, [rows])
    saving = update(config_of(tmp_path, tiny_models[name], 60, activation_checkpointing=True), params, [rows])
    assert_same(saving, plain)


def test_the_result_is_that_of_transformers_own_forward_row_by_row(
    tmp_path: Path, tiny_models: dict[str, Path]
) -> None:
    rows = make_rows()
    result = update(
        config_of(tmp_path, tiny_models["qwen3"], 40), {"loss": "reinforce", "aggregate": "token-mean"}, [rows]
    )
    model = AutoModelForCausalLM.from_pretrained(tiny_models["qwen3"], dtype=torch.float64)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    for row in range(len(rows)):
        if rows["loss_mask"][row] == 0 or rows["action_tokens"][row] == 0:
            continue
        ids, actions = rows["tokens"][row], rows["action_mask"][row]
        log_probs = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0][actions[1:]]
        total, tokens = total - (rows["advantage"][row] * log_probs).sum(), tokens + len(log_probs)
    gradients = torch.autograd.grad(total / tokens, list(model.parameters()))
    # Its norms and rotary embeddings always compute in float32, so the rounding differs.
    assert result.losses["tokens"] == pytest.approx(float(total.detach()), rel=1e-6)
    assert result.norm == pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-6)
    for mine, theirs in zip(result.gradients, gradients, strict=True):
        torch.testing.assert_close(mine / tokens, theirs, rtol=1e-6, atol=1e-6)


def test_sft_is_reinforce_with_every_advantage_one(tmp_path: Path, tiny_models: dict[str, Path]) -> None:
    rows = make_rows()
    ones = rows.with_columns({"advantage": torch.ones(len(rows), dtype=torch.float64)})
    config = config_of(tmp_path, tiny_models["qwen2"], 60)
    sft = update(config, {"loss": "sft", "aggregate": "token-mean"}, [rows])
    reinforce = update(config, {"loss": "reinforce", "aggregate": "token-mean"}, [ones])
    assert_same(sft, reinforce)
