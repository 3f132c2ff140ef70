"""Chunked log-probs and entropy have the values and gradients of the plain formula, and never create all logits at
once.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from braidrl.training.compute.log_probs import chunks, linear_log_probs

TOKENS, WIDTH, VOCABULARY = 70, 6, 11
ONE_CHUNK, MANY_CHUNKS = 1 << 20, 1


def inputs(dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (tokens,), generator=draw)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    log_softmax = (hidden @ weight.T / temperature).log_softmax(-1)
    return log_softmax.gather(-1, targets[:, None])[:, 0], -(log_softmax.exp() * log_softmax).sum(-1)


def test_several_chunks_cover_every_token_once() -> None:
    parts = chunks(TOKENS, VOCABULARY, MANY_CHUNKS)
    assert len(parts) == 5 and [i for part in parts for i in range(TOKENS)[part]] == list(range(TOKENS))
    assert chunks(0, VOCABULARY, MANY_CHUNKS) == []


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("chunk_elements", [ONE_CHUNK, MANY_CHUNKS])
@pytest.mark.parametrize("with_entropy_grad", [True, False])
def test_values_and_gradients_are_those_of_the_plain_formula(
    temperature: float, chunk_elements: int, with_entropy_grad: bool
) -> None:
    hidden, weight, targets = inputs()
    log_probs, entropy = linear_log_probs(hidden, weight, targets, temperature, with_entropy_grad, chunk_elements)
    expected, expected_entropy = plain(hidden, weight, targets, temperature)
    torch.testing.assert_close(log_probs, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(entropy, expected_entropy, rtol=1e-12, atol=1e-12)
    assert entropy.requires_grad == with_entropy_grad
    per_token = torch.linspace(-1, 2, TOKENS, dtype=torch.float64)
    bonus = 0.3 * per_token.flip(0) if with_entropy_grad else torch.zeros_like(per_token)
    gradients = torch.autograd.grad((per_token * log_probs + bonus * entropy).sum(), (hidden, weight))
    expected_values = torch.autograd.grad((per_token * expected + bonus * expected_entropy).sum(), (hidden, weight))
    for mine, theirs in zip(gradients, expected_values, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-11, atol=1e-12)


def test_gradients_are_finite_differences() -> None:
    hidden, weight, targets = inputs(tokens=20)
    assert torch.autograd.gradcheck(
        lambda h, w: linear_log_probs(h, w, targets, 0.8, True, MANY_CHUNKS), (hidden, weight), eps=1e-6, atol=1e-7
    )


def test_a_frozen_output_layer_gets_no_gradient_and_none_is_computed() -> None:
    hidden, weight, targets = inputs()
    log_probs, _ = linear_log_probs(hidden, weight.detach(), targets, chunk_elements=MANY_CHUNKS)
    log_probs.sum().backward()
    assert weight.grad is None and hidden.grad is not None


def test_bfloat16_weights_give_float32_log_probs_near_the_exact_ones() -> None:
    hidden, weight, targets = inputs(torch.bfloat16)
    log_probs, entropy = linear_log_probs(hidden, weight, targets, chunk_elements=MANY_CHUNKS)
    assert log_probs.dtype == entropy.dtype == torch.float32
    expected, _ = plain(hidden.double(), weight.double(), targets, 1.0)
    torch.testing.assert_close(log_probs.double(), expected, rtol=0, atol=0.05)
    log_probs.sum().backward()
    assert weight.grad is not None and weight.grad.dtype == torch.bfloat16


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor that any operation creates."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, list | tuple) else [result]:
            if isinstance(value, Tensor):
                self.elements = max(self.elements, value.untyped_storage().nbytes() // value.element_size())
        return result


def test_full_logits_never_exist_in_forward_or_backward() -> None:
    tokens, vocabulary, limit = 4096, 512, 1 << 16
    hidden = torch.randn(tokens, 8, requires_grad=True)
    weight = torch.randn(vocabulary, 8, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,))
    with LargestTensor() as made:
        log_probs, entropy = linear_log_probs(hidden, weight, targets, 0.9, True, limit)
        (log_probs.sum() + entropy.sum()).backward()
    assert limit == made.elements < tokens * vocabulary / 16
