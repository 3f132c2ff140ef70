"""Tokens have the model's frequencies, with and without cuts, in every dtype; log-probs ignore the cuts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import TopKLogitsWarper, TopPLogitsWarper

from braidrl.algorithms.random import uniform
from braidrl.data.rows import FinishReason
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, SamplingParams
from braidrl.engines.sampling import BLOCK, BatchSampling, inverse_cdf, sample
from tests.cases import soak_but
from tests.engines.tiny import make_model, make_tokenizer, response_of, training_log_probs

ROWS = 10_000
NO_IDS = torch.zeros(1, 1, dtype=torch.int64)


def per_row(value: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.full((ROWS,), value, dtype=dtype)


def assert_frequencies_match(tokens: Tensor, probabilities: Tensor) -> None:
    """Return Pearson's chi-square over the tokens that are expected at least 5 times, with the others pooled."""
    expected = probabilities.double() * len(tokens)
    counts = tokens.bincount(minlength=len(probabilities)).double()
    assert not counts[probabilities == 0].any()
    common = expected >= 5
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    terms = (counts - expected) ** 2 / expected.clamp(min=1e-300)
    freedom = int(common.sum())
    # Mean `freedom`, standard deviation sqrt(2 freedom): a bound of five standard deviations.
    assert terms[expected > 0].sum() < freedom + 5 * (2 * freedom) ** 0.5 + 5


def reference(logits: Tensor, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return probabilities (V,) after transformers' own cuts."""
    scores = logits[None].double() / temperature
    if top_k:
        scores = TopKLogitsWarper(top_k)(NO_IDS, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(NO_IDS, scores)
    return scores.softmax(-1)[0]


CUTS = [(0, 1.0), (9, 1.0), (0, 0.6), (9, 0.6), (0, 0.97)]
CASES = [
    (dtype, vocabulary, *cut)
    for dtype in (torch.float64, torch.float32, torch.bfloat16)
    for vocabulary in (12, 8 * BLOCK, 8 * BLOCK + 37)
    for cut in CUTS
    # bfloat16 has ties among so many logits; the cuts here keep or drop ties together, transformers' cuts do not.
    if dtype != torch.bfloat16 or vocabulary == 12 or cut == (0, 1.0)
]


@pytest.mark.parametrize(
    ("dtype", "vocabulary", "top_k", "top_p"), soak_but([case for case in CASES if case[0] is torch.float32], CASES)
)
def test_sampled_tokens_have_the_models_frequencies(
    dtype: torch.dtype, vocabulary: int, top_k: int, top_p: float
) -> None:
    torch.manual_seed(vocabulary)
    logits = torch.linspace(-6, 6, 12) if vocabulary == 12 else 2 * torch.randn(vocabulary)
    logits = logits.to(dtype)
    choice = BatchSampling(
        temperature=per_row(0.7),
        top_k=per_row(top_k, torch.int64) if top_k else None,
        top_p=per_row(top_p) if top_p < 1 else None,
        most=top_k,
    )
    uniforms = uniform(7, vocabulary, torch.arange(ROWS))
    tokens, log_probs = sample(logits.expand(ROWS, -1).clone(), choice, uniforms)
    assert_frequencies_match(tokens, reference(logits, 0.7, top_k, top_p))
    expected = (logits.to(log_probs.dtype) / 0.7).log_softmax(-1)[tokens]
    torch.testing.assert_close(log_probs, expected, rtol=0, atol=1e-5)


def test_each_row_has_its_own_temperature_and_cuts_and_may_be_greedy() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 50)
    choice = BatchSampling(
        temperature=torch.tensor([1.0, 0.5, 1.0, 1.0, 1.0, 2.0]),
        greedy=torch.tensor([False, False, True, False, False, False]),
        top_k=torch.tensor([0, 0, 0, 1, 0, 3]),
        top_p=torch.tensor([1.0, 1.0, 1.0, 1.0, 1e-6, 0.5]),
        most=3,
    )
    draws = torch.stack([sample(logits.clone(), choice, uniform(n, torch.arange(6)))[0] for n in range(200)])
    likeliest = logits.argmax(-1)
    for row in (2, 3, 4):
        assert (draws[:, row] == likeliest[row]).all()
    assert len(draws[:, 0].unique()) > len(draws[:, 1].unique()) > 3
    assert 1 <= len(draws[:, 5].unique()) <= 3
    alone = sample(
        logits[5:].clone(),
        BatchSampling(choice.temperature[5:], None, choice.top_k[5:], choice.top_p[5:], 3),
        uniform(3, torch.arange(6))[5:],
    )
    together = sample(logits.clone(), choice, uniform(3, torch.arange(6)))
    assert torch.equal(alone[0][0], together[0][5]) and torch.equal(alone[1][0], together[1][5])


@given(
    st.lists(st.sampled_from([0.0, 0.0, 1e-30, 1e-8, 0.3, 1.0]), min_size=1, max_size=12),
    st.sampled_from([0.0, 0.1, 0.5, 1 - 2**-24, 1 - 2**-53]),
    st.integers(0, 20),
)
def test_no_token_without_weight_is_ever_drawn(weights: list[float], part: float, repeats: int) -> None:
    row = torch.tensor(weights * (1 + repeats * BLOCK // 8), dtype=torch.float32)[None]
    if float(row.sum()) == 0:
        row[0, -1] = 1.0
    token = inverse_cdf(row, torch.tensor([part], dtype=torch.float64))
    assert row[0, token] > 0


def test_a_flat_tail_is_sampled_by_its_weight() -> None:
    weights = torch.full((1, 40_064), 1e-8)
    weights[0, 0] = 1.0
    # The tail holds 0.0004 of the total, half of the examined range.
    drawn = inverse_cdf(weights.expand(500, -1), 0.9992 + uniform(0, torch.arange(500)) * 0.0008)
    assert 0.4 < (drawn > 0).double().mean() < 0.6
    assert len(drawn.unique()) > 200


def test_the_engines_first_tokens_have_the_models_frequencies() -> None:
    model = make_model()
    prompt = torch.tensor([5, 99, 31])
    requests = [
        Request((0, 0, sample), prompt, SamplingParams(max_tokens=1, temperature=0.5)) for sample in range(4000)
    ]
    finished = EmbeddedEngine(model, make_tokenizer(), Decoding(256, 16)).generate(requests)
    every = [Request((0, 0, 0), prompt, SamplingParams(temperature=0.5))] * 260
    answers = [response_of((0, 0, 0), torch.tensor([t]), FinishReason.LENGTH) for t in range(260)]
    probabilities = torch.cat(training_log_probs(model, every, answers)).exp()
    assert_frequencies_match(torch.cat([row.tokens for row in finished]), probabilities)
