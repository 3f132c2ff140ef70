"""Uncompiled CUDA kernels match transformers' modules and plain log-probs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from braidrl.training.compute import cuda_layers
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.compute.cuda_layers import LayerKernels, rms_norm, rotary, silu_gate, use_kernels
from braidrl.training.compute.log_probs import chunk_gradient, chunk_statistics
from tests.training.compute.test_attention import CONFIGS, LENGTHS, models

PLAIN = LayerKernels("cpu", rms_norm, silu_gate, rotary)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    ("triton", "liger", "chosen"),
    [(True, True, "liger"), (True, False, "compiled"), (False, True, None), (False, False, None)],
)
def test_liger_is_used_if_installed_and_no_kernel_without_triton(
    triton: bool, liger: bool, chosen: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_layers, "has_triton", lambda: triton)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: "found" if liger else None)
    monkeypatch.setattr(cuda_layers, "kernels_by", lambda kind: kind)
    assert cuda_layers.layer_kernels.__wrapped__() == chosen
    assert ("torch computes" in caplog.text) == (chosen is None)


def outputs(name: str, dtype: torch.dtype, kernels: LayerKernels | None) -> tuple[Tensor, dict[str, Tensor]]:
    model = models(name, dtype)[0]
    if kernels:
        use_kernels(model, kernels)
    torch.manual_seed(3)
    tokens, sequences = torch.randint(0, CONFIGS[name].vocab_size, (1, sum(LENGTHS))), PackedSequences.of(LENGTHS)
    hidden = model.model(
        input_ids=tokens, position_ids=sequences.position_ids(), use_cache=False, sequences=sequences
    ).last_hidden_state
    (hidden.float() * torch.linspace(-1, 1, hidden.shape[-1])).sum().backward()
    return hidden.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_fused_layers_match_plain_outputs_and_gradients(name: str, dtype: torch.dtype) -> None:
    called: set[str] = set()

    def counted(part: str) -> object:
        def compute(*given: object) -> object:
            called.add(part)
            return getattr(PLAIN, part)(*given)

        return compute

    seen = LayerKernels("cpu", counted("norm"), counted("gate"), counted("rotate"))  # type: ignore[arg-type]
    (plain, gradients), (fused, fused_gradients) = outputs(name, dtype, None), outputs(name, dtype, seen)
    assert called == {"norm", "gate", "rotate"} and gradients.keys() == fused_gradients.keys()
    torch.testing.assert_close(fused, plain, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    for parameter, gradient in gradients.items():
        close = float((fused_gradients[parameter] - gradient).norm() / gradient.norm())
        assert close < TOLERANCE[dtype], parameter


@pytest.mark.parametrize(("dtype", "device"), [(torch.float64, "cpu"), (torch.float32, "cuda")])
def test_kernels_leave_unsupported_layers_to_the_modules(dtype: torch.dtype, device: str) -> None:
    def never(*_: object) -> None:
        raise AssertionError("the kernels were asked")

    plain, _ = outputs("qwen3", dtype, None)
    result, _ = outputs("qwen3", dtype, LayerKernels(device, never, never, never))  # type: ignore[arg-type]
    assert torch.equal(result, plain)


@pytest.mark.soak
def test_torch_compiles_all_of_them_for_any_number_of_tokens() -> None:
    compiled = LayerKernels("cpu", *(torch.compile(function, dynamic=True) for function in PLAIN[1:]))
    (plain, gradients), (fused, fused_gradients) = (outputs("qwen3", torch.float32, k) for k in (None, compiled))
    torch.testing.assert_close(fused, plain, rtol=1e-5, atol=1e-5)
    for parameter, gradient in gradients.items():
        torch.testing.assert_close(fused_gradients[parameter], gradient, rtol=1e-3, atol=1e-4)
    statistics, gradient_of = (torch.compile(function, dynamic=True) for function in (chunk_statistics, chunk_gradient))
    for count in (17, 33):
        logits, targets, given = torch.randn(count, 97), torch.randint(0, 97, (count,)), torch.randn(count)
        log_probs, log_sum, entropy = statistics(logits, targets, 0.7)
        for mine, theirs in zip((log_probs, log_sum, entropy), chunk_statistics(logits, targets, 0.7), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
        for entropy_grad in (None, given):
            mine = gradient_of(logits, targets, 0.7, log_sum, entropy, given, entropy_grad)
            torch.testing.assert_close(
                mine, chunk_gradient(logits, targets, 0.7, log_sum, entropy, given, entropy_grad)
            )
