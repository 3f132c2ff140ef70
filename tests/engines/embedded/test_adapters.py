"""Several policies on one model draw what each draws with a model of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from braidrl.config import LoraConfig
from braidrl.engines.embedded.adapters import PolicyAdapters, share_weights
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Response, SamplingParams
from braidrl.training.lora import add_adapters
from tests.engines.tiny import make_model, make_requests, make_tokenizer

LORA = LoraConfig(rank=4, alpha=16)
ROLES = ("actor", "rival")


def trained(seed: int, dtype: torch.dtype) -> torch.nn.Module:
    """Return a model whose adapters have an effect, on the base that all of them have."""
    model = make_model(dtype=dtype)
    add_adapters(model, LORA, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    return model.eval()


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_two_adapters_on_one_engine_equal_two_models_in_mixed_batches(dtype: torch.dtype, limit: float) -> None:
    """In float32 compiled kernels decode."""
    models = dict(zip(ROLES, (trained(1, dtype), trained(2, dtype)), strict=True))
    requests = make_requests(5, 3, SamplingParams(max_tokens=12), shortest=2)
    alone = dict[str, list[Response]]()
    for role, model in models.items():
        engine = EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64, compile=False))  # type: ignore[arg-type]
        alone[role] = engine.generate(requests)
    base = make_model(dtype=dtype).requires_grad_(False).eval()
    adapters = PolicyAdapters(base)
    engine = EmbeddedEngine(base, make_tokenizer(), Decoding(16, 64), adapters=adapters)
    assert (engine._native is not None) == (dtype == torch.float32)
    for role, model in models.items():
        share_weights(model, base)
        adapters.add(role, model)
    # Rows of both policies alternate, also among those of one prompt; one slot of three is free.
    mixed = [replace(one, policy=ROLES[number % 2]) for number, one in enumerate(requests)]
    together = engine.generate(mixed)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(*alone.values(), strict=True))
    for number, response in enumerate(together):
        own = alone[ROLES[number % 2]][number]
        assert response.tokens.tolist() == own.tokens.tolist()
        torch.testing.assert_close(response.log_probs, own.log_probs, atol=limit, rtol=0)
    others = [replace(one, policy=ROLES[1 - number % 2]) for number, one in enumerate(requests[:4])]
    assert [one.tokens.tolist() for one in engine.generate(others)] == [
        alone[ROLES[1 - number % 2]][number].tokens.tolist() for number in range(4)
    ], "a prompt is computed once for each policy"
    stored = {parameter.data_ptr() for parameter in base.parameters()}
    frozen = [p for model in models.values() for p in model.parameters() if not p.requires_grad]
    assert frozen and {parameter.data_ptr() for parameter in frozen} <= stored

    # A row has the same bits alone, and after new values of the other policy's adapters.
    before = engine.generate(mixed[:1])[0]
    assert torch.equal(before.log_probs, together[0].log_probs)
    with torch.no_grad():
        for factors in adapters.of_layer.values():
            factors[1].up.mul_(2.0)
    engine.publish(1)
    again = engine.generate(mixed)
    assert torch.equal(again[0].log_probs, before.log_probs)
    assert not torch.equal(again[1].log_probs[:1], together[1].log_probs[:1])
