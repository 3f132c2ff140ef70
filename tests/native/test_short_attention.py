"""The compiled attention kernel computes the formula, forward and backward, separately for each sequence."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from braidrl.native.building import library
from braidrl.native.kernels import LONGEST, attend_short
from braidrl.training.compute.attention import COMPILED, PackedSequences
from braidrl.training.compute.cpu_layers import compile_layers
from tests.training.compute.test_attention import models

SCALING = 0.3
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}

if library("attention", torch.float32) is None:
    pytest.skip("there is no C compiler", allow_module_level=True)


def states_of(lengths: list[int], heads: int, key_heads: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return queries, keys and values, (N, heads, D), laid out as in a model: head by head."""
    torch.manual_seed(0)
    return [
        torch.randn(count, sum(lengths), width).to(dtype).transpose(0, 1).requires_grad_()
        for count in (heads, key_heads, key_heads)
    ]


def offsets_of(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def by_a_loop(query: Tensor, key: Tensor, value: Tensor, lengths: list[int], window: int | None) -> Tensor:
    """Return softmax(q · k · scaling) v over the keys that each query sees, one query and head after the other."""
    rows, start = [], 0
    for length in lengths:
        for t in range(length):
            first = max(0, t - window + 1) if window else 0
            heads = []
            for head in range(query.shape[1]):
                seen, place = slice(start + first, start + t + 1), head // (query.shape[1] // key.shape[1])
                weights = (key[seen, place] @ query[start + t, head] * SCALING).softmax(0)
                heads.append(weights @ value[seen, place])
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("lengths", "heads", "key_heads", "width", "window"),
    [
        ([1, 7, 33, 64, 5], 4, 2, 16, None),
        ([70, 3], 3, 3, 40, None),
        ([50, 12, 13], 4, 1, 64, 7),
        ([6, 90], 2, 2, 8, 90),
    ],
)
def test_the_kernel_computes_the_formula_and_its_gradients(
    lengths: list[int], heads: int, key_heads: int, width: int, window: int | None, dtype: torch.dtype
) -> None:
    states = states_of(lengths, heads, key_heads, width, dtype)
    output = attend_short(*states, offsets_of(lengths), max(lengths), SCALING, window)
    weights = torch.randn_like(output)
    plain = [each.detach().double().requires_grad_() for each in states]
    expected = by_a_loop(*plain, lengths, window)
    expected_values = torch.autograd.grad(expected, plain, weights.double())
    gradients = torch.autograd.grad(output, states, weights)
    for mine, theirs in zip([output, *gradients], [expected, *expected_values], strict=True):
        assert mine.shape == theirs.shape
        scale = max(1.0, float(theirs.abs().max()))
        torch.testing.assert_close(mine.double() / scale, theirs / scale, rtol=0, atol=TOLERANCE[dtype])


def test_a_sequence_has_the_same_bits_alone_and_among_others() -> None:
    lengths = [40, 1, 77, 300, 40]
    states = states_of(lengths, 4, 2, 32, torch.float32)
    together = attend_short(*states, offsets_of(lengths), 300, SCALING, None)
    weights, start = torch.randn_like(together), 0
    gradients = torch.autograd.grad(together, states, weights)
    for length in lengths:
        part = slice(start, start + length)
        own = [each.detach()[part].requires_grad_() for each in states]
        alone = attend_short(*own, offsets_of([length]), length, SCALING, None)
        assert torch.equal(alone, together[part])
        for mine, among in zip(torch.autograd.grad(alone, own, weights[part]), gradients, strict=True):
            assert torch.equal(mine, among[part])
        start += length


FAMILIES = [[16, 30, 1, 77], [40], [7, 12, 13], [64, 5]]
"""Tokens of the prompt and of each response that continues it."""


def with_copies_of_prompts() -> tuple[Tensor, list[int]]:
    """Return the shared tokens, (N,), in the order in which each response follows a copy of its prompt; the lengths."""
    chosen, lengths, start = [], list[int](), 0
    for prompt, *responses in FAMILIES:
        chosen.append(torch.arange(start, start + prompt))
        lengths.append(prompt)
        begin = start + prompt
        for response in responses:
            chosen += [torch.arange(start, start + prompt), torch.arange(begin, begin + response)]
            lengths.append(prompt + response)
            begin += response
        start = begin
    return torch.cat(chosen), lengths


@pytest.mark.parametrize("window", [None, 20])
def test_responses_that_share_a_prompt_have_the_bits_of_those_with_copies(window: int | None) -> None:
    tokens, lengths = with_copies_of_prompts()
    states = states_of([length for family in FAMILIES for length in family], 4, 2, 32, torch.float32)
    offsets = offsets_of([length for family in FAMILIES for length in family])
    families = offsets_of([len(family) for family in FAMILIES])
    shared = attend_short(*states, offsets, max(lengths), SCALING, window, families)
    apart = attend_short(*(each[tokens] for each in states), offsets_of(lengths), max(lengths), SCALING, window)
    assert torch.equal(shared[tokens], apart)
    # Of a prompt's copies one has a gradient, since its outputs are read once.
    first = torch.zeros(len(tokens), dtype=torch.bool)
    first[[int((tokens == token).nonzero()[0]) for token in range(len(shared))]] = True
    weights = torch.randn_like(shared)
    expected = torch.autograd.grad(apart, states, weights[tokens] * first[:, None, None])
    for mine, theirs in zip(torch.autograd.grad(shared, states, weights), expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)


def test_the_number_of_threads_changes_no_bit() -> None:
    lengths, before = [40, 1, 77, 30], torch.get_num_threads()
    states = states_of(lengths, 4, 2, 32, torch.float32)
    result = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            result.append(attend_short(*states, offsets_of(lengths), 77, SCALING, None))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*result)


def test_what_the_kernel_does_not_compute_goes_to_torch() -> None:
    states = states_of([5], 2, 2, 8, torch.float32)
    offsets, with_doubles = offsets_of([5]), [each.double() for each in states]
    assert attend_short(*states, offsets, 5, SCALING, None) is not None
    assert attend_short(*states, offsets, LONGEST + 1, SCALING, None) is None
    for other in (
        with_doubles,
        [with_doubles[0], *states[1:]],
        [*states[:2], with_doubles[2]],
        [each.detach().transpose(1, 2) for each in states],
    ):
        assert attend_short(*other, offsets, 5, SCALING, None) is None


def test_a_compiled_model_attends_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = models("qwen3", torch.float32)[0], []
    monkeypatch.setattr(
        "braidrl.training.compute.attention.attend_short", lambda *given: calls.append(given[4]) or attend_short(*given)
    )
    sequences, tokens = PackedSequences.of([3, 4]), torch.zeros(1, 7, dtype=torch.int64)
    for compiled in (False, True):
        if compiled:
            compile_layers(model)
        assert hasattr(model.model.layers[0].self_attn, COMPILED) == compiled
        model.model(input_ids=tokens, position_ids=sequences.position_ids(), use_cache=False, sequences=sequences)
    assert calls == [4, 4]
