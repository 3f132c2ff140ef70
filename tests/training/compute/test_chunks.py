"""Kernels for a chunk's log-probs match the plain formula, forward and backward, with each compiler."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braidrl.native.kernels import gradient, has_kernels, statistics
from braidrl.native.linear import add_weight_gradient
from braidrl.training.compute.log_probs import (
    ChunkKernels,
    Vocabulary,
    _LinearLogProbs,
    chunk_gradient,
    chunk_kernels,
    chunk_statistics,
    chunks,
)

TOKENS, WIDTH, VOCABULARY, TEMPERATURE = 50, 24, 1297, 0.7
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
CPU = ChunkKernels(statistics, gradient)
KERNELS = {"formulas that torch compiles": ChunkKernels(chunk_statistics, chunk_gradient), "kernels for a CPU": CPU}


def drawn(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(TOKENS, WIDTH).to(dtype), torch.randn(VOCABULARY, WIDTH).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, VOCABULARY, (TOKENS,))


def found_with(kernels: ChunkKernels | Vocabulary, dtype: torch.dtype, with_entropy_grad: bool) -> list[Tensor]:
    """Return log-probs, entropies, and the gradients of their weighted sum."""
    hidden, weight, targets = drawn(dtype)
    parts = chunks(TOKENS, VOCABULARY, VOCABULARY * 17)
    log_probs, entropy = _LinearLogProbs.apply(
        hidden, weight, targets, TEMPERATURE, with_entropy_grad, parts, kernels, None
    )
    factors = torch.linspace(-1, 2, TOKENS)
    loss = (log_probs * factors).sum()
    (loss + (entropy * factors.flip(0)).sum() if with_entropy_grad else loss).backward()
    assert hidden.grad is not None and weight.grad is not None
    return [log_probs.detach(), entropy.detach(), hidden.grad, weight.grad]


@pytest.mark.parametrize("with_entropy_grad", [False, True])
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("name", KERNELS)
def test_log_probs_and_gradients_are_those_of_the_plain_way(
    name: str, dtype: torch.dtype, with_entropy_grad: bool
) -> None:
    plain, fused = (found_with(kernels, dtype, with_entropy_grad) for kernels in (Vocabulary(), KERNELS[name]))
    for theirs, mine in zip(plain, fused, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=CLOSE[dtype], atol=10 * CLOSE[dtype])


@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_cpu_kernels_match_the_formula_for_peaked_distributions(scale: float) -> None:
    torch.manual_seed(1)
    logits, targets = scale * torch.randn(8, VOCABULARY), torch.randint(0, VOCABULARY, (8,))
    targets[0] = logits[0].argmax()
    own, of_entropy = torch.randn(8), torch.randn(8)
    exact = logits.double().requires_grad_()
    log_softmax = (exact / TEMPERATURE).log_softmax(-1)
    expected, expected_entropy = (
        log_softmax.gather(-1, targets[:, None])[:, 0],
        -(log_softmax.exp() * log_softmax).sum(-1),
    )
    (expected * own + expected_entropy * of_entropy).sum().backward()
    log_probs, log_sums, entropies = statistics(logits, targets, TEMPERATURE)
    torch.testing.assert_close(log_probs, expected.detach().float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropies, expected_entropy.detach().float(), rtol=1e-4, atol=1e-5)
    gradients = gradient(logits, targets, TEMPERATURE, log_sums, entropies, own, of_entropy)
    assert exact.grad is not None
    torch.testing.assert_close(gradients, exact.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", CLOSE)
def test_a_token_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    logits, targets = torch.randn(9, VOCABULARY).to(dtype), torch.randint(0, VOCABULARY, (9,))
    together = statistics(logits, targets, TEMPERATURE)
    for token in (0, 8):
        part = slice(token, token + 1)
        for one, all_of_them in zip(statistics(logits[part], targets[part], TEMPERATURE), together, strict=True):
            assert torch.equal(one, all_of_them[part])


def test_a_gradient_in_bfloat16_is_added_in_float32() -> None:
    torch.manual_seed(2)
    grads, x, total = torch.randn(40, 300).bfloat16(), torch.randn(40, 20).bfloat16(), torch.randn(300, 20)
    expected = total + (grads.t() @ x).float()
    add_weight_gradient(total, grads, x)
    assert torch.equal(total, expected)


def test_kernels_are_used_if_wanted_and_supported_for_the_dtype() -> None:
    weight = torch.randn(VOCABULARY, WIDTH)
    assert has_kernels(weight) and chunk_kernels(weight, allowed=True) == CPU
    assert chunk_kernels(weight, allowed=False) is None and chunk_kernels(weight.double(), allowed=True) is None


@pytest.mark.parametrize("target", [-1, VOCABULARY])
def test_a_target_outside_of_the_vocabulary_is_refused(target: int) -> None:
    targets = torch.tensor([3, target])
    with pytest.raises(IndexError, match=f"{VOCABULARY} tokens"):
        statistics(torch.randn(2, VOCABULARY), targets, TEMPERATURE)


def test_nan_logit_affects_only_its_own_tokens_log_prob() -> None:
    logits = torch.randn(3, VOCABULARY)
    logits[1, 700] = float("nan")
    log_probs, log_sums, entropies = statistics(logits, torch.tensor([0, 1, 2]), TEMPERATURE)
    for result in (log_probs, log_sums, entropies):
        assert result.isnan().tolist() == [False, True, False]


def test_no_tokens_have_no_log_probs() -> None:
    result = statistics(torch.empty(0, VOCABULARY), torch.empty(0, dtype=torch.int64), TEMPERATURE)
    assert [len(part) for part in result] == [0, 0, 0]
