"""Experts one after the other: the values and gradients of transformers' loop over experts."""

from __future__ import annotations

from copy import deepcopy
from types import MethodType

import pytest
import torch
from torch import Tensor

from braidrl.training.compute.cpu_layers import gate_of_experts
from braidrl.training.compute.experts import EXPERTS, activation_gradients
from braidrl.training.parallel.experts import experts_of
from tests.training.decoders.families import family_config, tiny_model

TOKENS = 12


def experts(family: str) -> torch.nn.Module:
    model = tiny_model(deepcopy(family_config(family))).double()
    (module, *_) = [module for layer in model.model.layers for module in experts_of(layer)]
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def routed(module: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (T, D), and of each two experts with their weights (T, 2); no token has the last expert."""
    generator = torch.Generator().manual_seed(1)
    width = module.down_proj.shape[1 if not module.is_transposed else 2]
    states = torch.randn(TOKENS, width, dtype=torch.float64, generator=generator)
    scores = torch.rand(TOKENS, module.num_experts - 1, generator=generator)
    weights = torch.rand(TOKENS, 2, dtype=torch.float64, generator=generator)
    return states.requires_grad_(), scores.topk(2, -1).indices, weights.requires_grad_()


def computed(module: torch.nn.Module, implementation: str) -> list[Tensor]:
    """Return the sums, and the gradients of tokens, weights and parameters."""
    module.config._experts_implementation = implementation
    states, chosen, weights = routed(module)
    sums = module(states, chosen, weights)
    inputs = [states, weights, *module.parameters()]
    return [sums, *torch.autograd.grad((sums * sums.detach().cos()).sum(), inputs)]


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_values_and_gradients_are_those_of_a_loop_over_experts(family: str) -> None:
    module = experts(family)
    for ours, theirs in zip(computed(module, EXPERTS), computed(module, "eager"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


def test_frozen_experts_have_no_gradients_and_pass_that_of_their_tokens_on() -> None:
    module = experts("gpt_oss")
    states, chosen, weights = routed(module)
    module.config._experts_implementation = EXPERTS
    (expected,) = torch.autograd.grad(module(states, chosen, weights).sum(), [states])
    sums = module.requires_grad_(False)(states, chosen, weights.detach())
    (gradient,) = torch.autograd.grad(sums.sum(), [states])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_one_pass_over_gates_and_scales_computes_what_torch_computes(dtype: torch.dtype, tolerance: float) -> None:
    both, scales, gradient = (torch.randn(shape).to(dtype) for shape in ((37, 100), (37, 1), (37, 50)))

    def plain(states: Tensor) -> Tensor:
        gate, up = states.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    by_kernel = activation_gradients(MethodType(gate_of_experts, object()), both, scales, gradient)
    by_torch = activation_gradients(plain, both, scales, gradient)
    for kernels, torchs in zip(by_kernel, by_torch, strict=True):
        torch.testing.assert_close(kernels.float(), torchs.float(), rtol=tolerance, atol=3 * tolerance)
