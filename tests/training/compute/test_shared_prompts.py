"""Sharing a prompt saves computation and changes no result."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Rows
from braidrl.errors import UserError
from braidrl.training.backends import BackendSpec
from braidrl.training.compute.log_probs import linear_log_probs
from braidrl.training.compute.packed import Packed, families_of, pack, plan_shared, saves_enough
from braidrl.training.roles.worker import RoleWorker
from tests.recipes.tiny import make_config, write_decoder
from tests.training.compute.test_attention import CONFIGS, models

CPU = torch.device("cpu")
# Prompt length and response lengths of each group; responses that are longer than the prompt need one call each.
GROUPS = [(6, [2, 3, 1, 4]), (1, [5, 1]), (3, [7, 2, 2]), (4, [1])]


def rows_of(groups: list[tuple[int, list[int]]] = GROUPS) -> Rows:
    """Return rows in an order in which groups are not contiguous."""
    generator = torch.Generator().manual_seed(0)
    tokens, masks, groups_, samples = [], [], [], []
    for group, (prompt, responses) in enumerate(groups):
        ids = torch.randint(0, 40, (prompt,), generator=generator)
        for sample, length in enumerate(responses):
            tokens.append(torch.cat([ids, torch.randint(0, 40, (length,), generator=generator)]))
            masks.append(torch.arange(prompt + length) >= prompt)
            # An observed token that was not sampled, as after a tool's answer.
            masks[-1][prompt + 2 : prompt + 3] = False
            groups_.append(group)
            samples.append(sample)
    order = torch.randperm(len(tokens), generator=generator)
    lengths = torch.tensor([len(row) for row in tokens])
    return Rows(
        {
            "source": torch.zeros(len(tokens), dtype=torch.int64),
            "group": torch.tensor(groups_),
            "sample": torch.tensor(samples),
            "tokens": Ragged.from_rows(tokens, torch.int64),
            "action_mask": Ragged.from_rows(masks, torch.bool),
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
        }
    ).take(order)


def log_probs(model: PreTrainedModel, packed: Packed) -> torch.Tensor:
    hidden = model.base_model(
        input_ids=packed.input_ids[None],
        position_ids=packed.position_ids[None],
        use_cache=False,
        sequences=packed.attention(),
    ).last_hidden_state[0]
    return linear_log_probs(hidden[packed.predictors], model.lm_head.weight, packed.targets)[0]


def in_float64(model: PreTrainedModel) -> PreTrainedModel:
    """Compute norms in the model's dtype: transformers' float32 norms would hide the difference behind their
    rounding.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            weight, epsilon = module.weight, module.variance_epsilon
            module.forward = lambda x, w=weight, e=epsilon: w * x * (x.square().mean(-1, keepdim=True) + e).rsqrt()
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_log_probs_and_gradients_are_those_of_the_rows_apart(name: str) -> None:
    rows, model = rows_of(), in_float64(models(name)[0])
    weights = torch.randn(int(rows["action_mask"].values.sum()), dtype=torch.float64)
    result = []
    for packed in (pack(rows, CPU), pack(rows, CPU, share_prompts=True)):
        values = log_probs(model, packed)
        model.zero_grad()
        (values * weights).sum().backward()
        result.append((values.detach(), {n: p.grad for n, p in model.named_parameters()}))
    (apart, gradients), (shared, shared_gradients) = result
    torch.testing.assert_close(shared, apart, rtol=0, atol=1e-9)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(shared_gradients[parameter], gradient, rtol=0, atol=1e-9)


def test_each_prompt_is_computed_once() -> None:
    packed = pack(rows_of(), CPU, share_prompts=True)
    assert len(packed.input_ids) == sum(prompt + sum(responses) for prompt, responses in GROUPS)


def test_a_rows_last_token_keeps_its_place() -> None:
    rows = rows_of()
    packed = pack(rows, CPU, share_prompts=True)
    last = [rows["tokens"][i][-1].item() for i in range(len(rows))]
    assert packed.input_ids[packed.row_ends].tolist() == last


@pytest.mark.parametrize("limit", [10, 12, 17, 60])
def test_plan_contains_every_row_once_within_the_token_limit(limit: int) -> None:
    rows = rows_of()
    plan = plan_shared(rows, limit)
    assert sorted(row for part in plan for row in part) == list(range(len(rows)))
    for part in plan:
        families = families_of(rows.take(part))
        assert families is not None and sum(family.tokens for family in families) <= limit


def test_no_micro_batch_is_over_the_limit_if_some_groups_save_little(tmp_path: Path) -> None:
    rows = rows_of([(50, [2] * 6), (10, [40, 40])])
    config = make_config(tmp_path, "grpo", trainer__share_prompts=True, trainer__max_tokens_per_device=95)
    write_decoder(tmp_path / "model")
    worker = RoleWorker(BackendSpec("actor", config, train=False))
    assert max(len(batch.packed.input_ids) for batch in worker.micro_batches(rows)) <= 95


def test_a_row_over_the_limit_is_named() -> None:
    with pytest.raises(UserError, match=r"row \(0, 2, 0\) .*10 tokens"):
        plan_shared(rows_of(), 9)


def test_it_pays_where_prompts_are_long_and_shared() -> None:
    assert saves_enough(rows_of([(20, [4, 4, 4, 4])]))
    assert not saves_enough(rows_of([(2, [20, 20, 20])]))
    assert saves_enough(rows_of([(2, [20, 20, 20])]), compiled=True)
    assert not saves_enough(rows_of([(1, [20, 20, 20])]), compiled=True)
    assert not saves_enough(rows_of([(150, [1000, 1000, 1000])]), compiled=True), "attention is not compiled for these"
    assert not saves_enough(rows_of([(20, [4]), (20, [4])]))
    several = rows_of([(20, [4, 4])])
    halves = several.with_columns(
        {"sequence_lengths": Ragged.from_lengths(torch.tensor([12, 12] * 2), torch.tensor([2, 2]))}
    )
    assert not saves_enough(halves), "rows of several sequences have no single prompt"


def test_a_column_of_all_tokens_follows_them_through_sharing_padding_and_sharding() -> None:
    rows = rows_of()
    plain = pack(rows, CPU)
    ids = plain.input_ids
    plain = replace(plain, per_token={**plain.per_token, "routes": torch.stack([ids, -ids], 1)[:, None]})
    count = len(ids)
    filled = plain.padded(count + 70)
    parts = [filled.select(torch.arange(start, start + (count + 70) // 2)) for start in (0, (count + 70) // 2)]
    for packed in (filled, *parts):
        assert torch.equal(packed.per_token["routes"][:, 0, 0], packed.input_ids)
        assert torch.equal(packed.per_token["routes"][:, 0, 1], -packed.input_ids)
    assert torch.equal(filled.input_ids[:count], ids) and not bool(filled.input_ids[count:].any())
    assert torch.equal(torch.cat([part.targets for part in parts]), plain.targets)
    ends = [part.predictors + number * (count + 70) // 2 for number, part in enumerate(parts)]
    assert torch.equal(torch.cat(ends), plain.predictors)
