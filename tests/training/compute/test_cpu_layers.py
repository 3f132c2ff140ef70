"""Compiled layers and oneDNN's products match torch, forward and backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from braidrl.native import linear
from braidrl.native.linear import ProductLinear, add_weight_gradient, product, use_fast_products, weight_gradient
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.compute.cpu_layers import _Gate, _GateOfHalves, _Norm, compile_layers, norm_of, rotate
from braidrl.training.compute.cuda_layers import rotary
from tests.training.compute.test_attention import CONFIGS, LENGTHS, SIZES, models

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama", "qwen3-moe"])
def test_compiled_layers_match_plain_outputs_and_gradients(name: str, dtype: torch.dtype) -> None:
    tokens, sequences = torch.randint(0, SIZES["vocab_size"], (1, sum(LENGTHS))), PackedSequences.of(LENGTHS)
    result = []
    for expected in (False, True):
        model = models(name, dtype)[0]
        if expected:
            compile_layers(model)
            assert type(model.model.norm).forward is norm_of
        hidden = model.model(
            input_ids=tokens, position_ids=sequences.position_ids(), use_cache=False, sequences=sequences
        ).last_hidden_state
        (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
        result.append((hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}))
    (plain, gradients), (compiled, compiled_gradients) = result
    assert gradients.keys() == compiled_gradients.keys()
    torch.testing.assert_close(compiled, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for parameter, gradient in gradients.items():
        close = float((compiled_gradients[parameter] - gradient).norm() / gradient.norm())
        assert close < TOLERANCE[dtype], parameter


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_a_row_has_the_same_bits_alone_and_among_others(dtype: torch.dtype) -> None:
    gate, up, weight = torch.randn(37, 50).to(dtype), torch.randn(37, 50).to(dtype), torch.randn(50).to(dtype)
    gated, normed = _Gate.apply(gate, up), _Norm.apply(gate, weight, 1e-6)
    for row in (0, 11, 36):
        part = slice(row, row + 1)
        assert torch.equal(_Gate.apply(gate[part], up[part]), gated[part])
        assert torch.equal(_Norm.apply(gate[part], weight, 1e-6), normed[part])


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_the_gate_of_experts_has_the_bits_of_the_gate_of_its_halves(dtype: torch.dtype) -> None:
    both = torch.randn(37, 100).to(dtype).requires_grad_()
    results = [_GateOfHalves.apply(both), _Gate.apply(*both.chunk(2, -1))]
    assert torch.equal(*results)
    gradients = [torch.autograd.grad(result.float().square().sum(), both)[0] for result in results]
    assert torch.equal(*gradients)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_rotations_and_their_gradients_are_the_formulas(dtype: torch.dtype) -> None:
    shapes = (2, 4, 7, 6), (2, 2, 7, 6)
    states = [torch.randn(shape).to(dtype).transpose(1, 2).contiguous().transpose(1, 2) for shape in shapes]
    angles = torch.randn(2, 7, 6).to(dtype)
    results = []
    for turn in (partial(rotate, None), rotary):
        inputs = [tensor.clone().requires_grad_() for tensor in states]
        outputs = turn(*inputs, angles.cos(), angles.sin())
        total = sum((out.float() * torch.linspace(-1, 1, 6)).square().sum() for out in outputs)
        results.append([*outputs, *torch.autograd.grad(total, inputs)])
    for mine, formula in zip(*results, strict=True):
        torch.testing.assert_close(mine, formula, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_layers_in_float64_compute_as_before() -> None:
    model, _ = models("qwen3")
    x = torch.randn(3, CONFIGS["qwen3"].hidden_size, dtype=torch.float64)
    before = model.model.layers[0].mlp(x)
    compile_layers(model)
    assert torch.equal(model.model.layers[0].mlp(x), before)


@pytest.mark.parametrize("rows", [1, 16, 700, 1300])
@pytest.mark.parametrize("out", [16, 40])
def test_products_and_their_gradients_are_torchs(rows: int, out: int) -> None:
    layer = nn.Linear(24, out)
    x = torch.randn(2, rows, 24, requires_grad=True)
    expected = layer(x)
    weights = torch.randn_like(expected)
    expected_values = torch.autograd.grad((expected * weights).sum(), [x, layer.weight, layer.bias])
    result = product(x, layer.weight, layer.bias)
    torch.testing.assert_close(result, expected, rtol=0, atol=1e-5)
    for mine, theirs in zip(
        torch.autograd.grad((result * weights).sum(), [x, layer.weight, layer.bias]), expected_values, strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("by_onednn", [False, True])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 80), (80, 48)])
def test_both_libraries_sum_the_outer_products_of_all_rows(
    by_onednn: bool, outputs: int, inputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "gradients_by_onednn", lambda: by_onednn)
    torch.manual_seed(3)
    grads, x = torch.randn(700, outputs), torch.randn(700, inputs)
    expected = sum(torch.outer(grad, row) for grad, row in zip(grads.double(), x.double(), strict=True))
    total = linear.zero_gradient(torch.empty(outputs, inputs), torch.float32)
    assert total.shape == (outputs, inputs) and not total.any()
    assert total.is_contiguous() != (by_onednn and outputs > inputs)
    total += 1
    add_weight_gradient(total, grads, x)
    torch.testing.assert_close(weight_gradient(grads, x).double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(total.double(), 1 + expected, rtol=1e-4, atol=1e-4)


def test_linear_layers_stay_linear_layers() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    use_fast_products(model)
    assert type(model[0]) in (nn.Linear, ProductLinear)
    assert isinstance(model[0], nn.Linear)
