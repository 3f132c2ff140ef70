"""Operation counts match a loop over tokens, keys and decode steps, and torch's count of a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Rows
from braidrl.training.memory.footprint import ModelSizes, model_shape
from braidrl.training.operations import (
    MatrixSizes,
    TokenCounts,
    decoding,
    decoding_bytes,
    forward_operations,
)

LAYERS, WIDTH, INNER, HEADS, KEY_HEADS, HEAD, VOCABULARY = 2, 8, 12, 2, 1, 4, 16
MATRICES = [
    (WIDTH, HEADS * HEAD),
    (WIDTH, KEY_HEADS * HEAD),
    (WIDTH, KEY_HEADS * HEAD),
    (HEADS * HEAD, WIDTH),
    (WIDTH, INNER),
    (WIDTH, INNER),
    (INNER, WIDTH),
]
BODY = LAYERS * sum(a * b for a, b in MATRICES)
SIZES = ModelSizes(LAYERS, WIDTH, VOCABULARY, HEADS, KEY_HEADS, HEAD, True)
OURS = MatrixSizes.of(SIZES, BODY + VOCABULARY * WIDTH, False)


def counted(rows: list[tuple[int, int]]) -> int:
    """Return the multiply-adds of a forward pass over rows of (prompt, response) tokens, token by token."""
    operations = 0
    for prompt, response in rows:
        for place in range(prompt + response):
            for rows_of, columns in MATRICES * LAYERS:
                operations += 2 * rows_of * columns
            for _ in range(LAYERS * HEADS):
                for _ in range(place + 1):
                    operations += 2 * HEAD  # The key's score.
                    operations += 2 * HEAD  # The value, weighted.
            # A token is predicted from the previous one.
            operations += 2 * WIDTH * VOCABULARY * (prompt <= place + 1 < prompt + response)
    return operations


def as_rows(rows: list[tuple[int, int]], groups: list[int] | None = None) -> Rows:
    lengths = [p + r for p, r in rows]
    tokens = Ragged.from_rows([[7] * n for n in lengths], torch.int64)
    mask = torch.cat([torch.arange(p + r) >= p for p, r in rows])
    return Rows(
        {
            "group": torch.tensor(groups or list(range(len(rows)))),
            "tokens": tokens,
            "action_mask": tokens.with_values(mask),
            "sequence_lengths": Ragged(tokens.lengths, torch.arange(len(rows) + 1)),
        }
    )


LENGTHS = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5)


@given(LENGTHS)
def test_operations_are_those_of_a_loop_over_tokens_and_keys(rows: list[tuple[int, int]]) -> None:
    counts = TokenCounts.of(as_rows(rows))
    assert forward_operations(OURS, counts) == counted(rows)


@given(st.integers(1, 6), st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_a_shared_prompt_counts_once(prompt: int, responses: list[int]) -> None:
    rows = [(prompt, n) for n in responses]
    saved = (len(rows) - 1) * counted([(prompt, 0)])
    shared = TokenCounts.of(as_rows(rows, [0] * len(rows)), shared_prompts=True)
    assert forward_operations(OURS, shared) == counted(rows) - saved


@given(LENGTHS, st.integers(1, 4))
def test_bytes_are_those_of_a_loop_over_decode_steps(rows: list[tuple[int, int]], slots: int) -> None:
    waiting, active, read, steps = list(rows), [], 0, 0
    while waiting or active:
        while waiting and len(active) < slots:
            prompt, response = waiting.pop(0)
            active.append([prompt, response])
        steps, read = steps + 1, read + 2 * (BODY + VOCABULARY * WIDTH)
        for row in active:
            read += 2 * row[0] * 2 * LAYERS * KEY_HEADS * HEAD
            row[0], row[1] = row[0] + 1, row[1] - 1
        active = [row for row in active if row[1]]
    assert decoding(torch.tensor([n for _, n in rows]).numpy(), slots).steps == steps
    assert decoding_bytes(OURS, 2, steps, sum(n * p + n * (n - 1) // 2 for p, n in rows)) == read


@pytest.mark.parametrize("tied", [True, False])
def test_operations_are_those_that_torch_counts_of_a_model(tied: bool) -> None:
    tokens, config = (
        24,
        Qwen3Config(
            vocab_size=96,
            hidden_size=64,
            intermediate_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            tie_word_embeddings=tied,
            attn_implementation="eager",
        ),
    )
    model = Qwen3ForCausalLM(config)
    sizes = MatrixSizes.of(ModelSizes.of(config), sum(p.numel() for p in model.parameters()), False)
    # Plain attention also computes the pairs that the mask hides.
    counts = TokenCounts(tokens, tokens, tokens * tokens)
    with FlopCounterMode(display=False) as forward:
        loss = model(torch.arange(tokens)[None], use_cache=False).logits.sum()
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    # Norms are not matrices, and rotary angles do not belong to the model.
    assert forward.get_total_flops() == pytest.approx(forward_operations(sizes, counts), rel=0.02)
    assert backward.get_total_flops() == pytest.approx(2 * forward_operations(sizes, counts), rel=0.02)


def test_operations_of_a_mixture_are_those_of_the_experts_that_each_token_uses(tmp_path: Path) -> None:
    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=160,
        moe_intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
    )
    config.save_pretrained(tmp_path)
    shape = model_shape(tmp_path, torch.float32)
    assert shape.idle == 2 * 6 * 3 * 64 * 48, "layers, experts not chosen, and three matrices of each"
    sizes, counts = MatrixSizes.of(shape.sizes, shape.parameters, False, shape.idle), TokenCounts(10, 10, 55)
    attention, router, experts = 64 * 16 * (4 + 2 + 2 + 4), 64 * 8, 2 * 3 * 64 * 48
    norms = 2 * 64 + 2 * 16
    products = 2 * (attention + router + experts + norms) + 64 + 96 * 64
    assert forward_operations(sizes, counts) == 2 * 10 * products + 4 * 2 * 4 * 16 * 55
