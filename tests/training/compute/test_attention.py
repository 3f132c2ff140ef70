"""Packed attention gives each sequence the values and gradients that it gets alone, for every model family."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from braidrl.training.compute.attention import ATTENTION, PackedSequences, Scores, attend_equal

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2-window": Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=3, max_window_layers=1),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "llama": LlamaConfig(**SIZES),
    "mistral-window": MistralConfig(**SIZES, sliding_window=4),
}
MIXTURE = Qwen3MoeConfig(
    **SIZES, head_dim=16, num_experts=2, num_experts_per_tok=2, moe_intermediate_size=16, mlp_only_layers=[1]
)
"""Each token has all experts, so that rounding chooses no others; routers compute in float32."""
LENGTHS = [5, 3, 9, 5, 1, 3]


def models(name: str, dtype: torch.dtype = torch.float64) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return models of CONFIGS, or mixtures, with equal weights: with Braid's attention and with transformers'."""
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(
        deepcopy(CONFIGS.get(name, MIXTURE)), dtype=dtype, attn_implementation=ATTENTION
    )
    theirs = AutoModelForCausalLM.from_config(
        deepcopy(CONFIGS.get(name, MIXTURE)), dtype=dtype, attn_implementation="sdpa"
    )
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def packed_hidden(model: PreTrainedModel, tokens: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    sequences = PackedSequences.of(lengths)
    return model.model(
        input_ids=tokens[None], position_ids=sequences.position_ids(), use_cache=False, sequences=sequences
    ).last_hidden_state[0]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_packed_sequences_equal_each_sequence_alone_in_values_and_gradients(name: str, checkpointed: bool) -> None:
    ours, theirs = models(name)
    if checkpointed:
        ours.gradient_checkpointing_enable()
        ours.train()
    tokens = torch.randint(0, 40, (sum(LENGTHS),))
    weights = torch.randn(sum(LENGTHS), 32, dtype=torch.float64)
    packed = packed_hidden(ours, tokens, LENGTHS)
    (packed * weights).sum().backward()
    alone = torch.cat([theirs.model(input_ids=part[None]).last_hidden_state[0] for part in tokens.split(LENGTHS)])
    (alone * weights).sum().backward()
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-10)
    for (parameter_name, mine), theirs_parameter in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if mine.grad is None or theirs_parameter.grad is None:
            assert parameter_name == "lm_head.weight"
        else:
            torch.testing.assert_close(mine.grad, theirs_parameter.grad, rtol=0, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packing_agrees_in_lower_precision(dtype: torch.dtype) -> None:
    ours, theirs = models("qwen3", dtype)
    tokens = torch.randint(0, 40, (sum(LENGTHS),))
    alone = torch.cat([theirs.model(input_ids=part[None]).last_hidden_state[0] for part in tokens.split(LENGTHS)])
    tolerance = 1e-5 if dtype == torch.float32 else 0.1
    torch.testing.assert_close(packed_hidden(ours, tokens, LENGTHS), alone, rtol=0, atol=tolerance)


def test_order_of_sequences_moves_their_values_and_nothing_else() -> None:
    ours, _ = models("llama")
    parts = torch.randint(0, 40, (sum(LENGTHS),)).split(LENGTHS)
    order = [3, 0, 5, 2, 4, 1]
    straight = packed_hidden(ours, torch.cat(parts), LENGTHS).split(LENGTHS)
    shuffled = packed_hidden(ours, torch.cat([parts[i] for i in order]), [LENGTHS[i] for i in order])
    torch.testing.assert_close(shuffled, torch.cat([straight[i] for i in order]), rtol=0, atol=1e-12)


def test_positions_begin_anew_with_each_sequence() -> None:
    assert PackedSequences.of([3, 1, 2]).position_ids().tolist() == [[0, 1, 2, 0, 0, 1]]
    assert PackedSequences.of([]).position_ids().shape == (1, 0)


def test_a_forward_without_sequences_is_refused() -> None:
    ours, _ = models("llama")
    with pytest.raises(ValueError, match="called with sequences="):
        ours.model(input_ids=torch.zeros(1, 4, dtype=torch.int64))


def test_lengths_that_do_not_fill_the_row_are_refused() -> None:
    ours, _ = models("llama")
    with pytest.raises(ValueError, match="sequences of 7 tokens"):
        ours.model(
            input_ids=torch.zeros(1, 4, dtype=torch.int64), use_cache=False, sequences=PackedSequences.of([3, 4])
        )


@pytest.mark.parametrize("length", [5, 100, 300])
def test_a_sequence_has_the_same_bits_alone_and_among_others(length: int) -> None:
    query, key, value = (torch.randn(16, length, heads, 8) for heads in (4, 2, 2))
    together = attend_equal(query, key, value, Scores(0.3)).unflatten(0, (16, length))
    for number in (0, 9):
        part = slice(number, number + 1)
        assert torch.equal(attend_equal(query[part], key[part], value[part], Scores(0.3)), together[number])


@pytest.mark.parametrize(("length", "window"), [(5, None), (40, 7), (256, None)])
def test_kept_scores_give_the_blocked_kernels_outputs_and_gradients(length: int, window: int | None) -> None:
    states = [torch.randn(3, length, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2)]
    weights, result = torch.randn(3 * length, 4, 8, dtype=torch.float64), []
    for keep in (True, False):
        output = attend_equal(*states, Scores(0.3, window), keep)
        result.append([output.detach(), *torch.autograd.grad((output * weights).sum(), states)])
    for kept, blocked in zip(*result, strict=True):
        torch.testing.assert_close(kept, blocked, rtol=0, atol=1e-12)
