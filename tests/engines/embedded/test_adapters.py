"""Several policies on one model draw what each draws with a model of its own."""

from __future__ import annotations

from dataclasses import replace

import torch

from braidrl.config import LoraConfig
from braidrl.engines.embedded.adapters import PolicyAdapters, share_weights
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.requests import Response, SamplingParams
from braidrl.training.lora import add_adapters
from tests.engines.tiny import make_model, make_requests, make_tokenizer

LORA = LoraConfig(rank=4, alpha=16)
ROLES = ("actor", "rival")


def trained(seed: int) -> torch.nn.Module:
    """Return a model whose adapters have an effect, on the base that all of them have."""
    model = make_model(dtype=torch.float64)
    add_adapters(model, LORA, seed)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".lora_B" in name:
            parameter.data.normal_(std=0.3, generator=generator)
    return model.eval()


def test_two_adapters_on_one_engine_equal_two_models_in_mixed_batches() -> None:
    models = dict(zip(ROLES, (trained(1), trained(2)), strict=True))
    requests = make_requests(5, 3, SamplingParams(max_tokens=12), shortest=2)
    alone = dict[str, list[Response]]()
    for role, model in models.items():
        engine = EmbeddedEngine(model, make_tokenizer(), 16, 64, compile=False)  # type: ignore[arg-type]
        alone[role] = engine.generate(requests)
    base = make_model(dtype=torch.float64).requires_grad_(False).eval()
    adapters = PolicyAdapters(base)
    for role, model in models.items():
        share_weights(model, base)
        adapters.add(role, model)
    engine = EmbeddedEngine(base, make_tokenizer(), 16, 64, adapters=adapters)
    # Rows of both policies alternate, also among those of one prompt; one slot of three is free.
    mixed = [replace(one, policy=ROLES[number % 2]) for number, one in enumerate(requests)]
    together = engine.generate(mixed)
    assert any(a.tokens.tolist() != b.tokens.tolist() for a, b in zip(*alone.values(), strict=True))
    for number, response in enumerate(together):
        own = alone[ROLES[number % 2]][number]
        assert response.tokens.tolist() == own.tokens.tolist()
        torch.testing.assert_close(response.log_probs, own.log_probs, atol=1e-12, rtol=0)
    others = [replace(one, policy=ROLES[1 - number % 2]) for number, one in enumerate(requests[:4])]
    assert [one.tokens.tolist() for one in engine.generate(others)] == [
        alone[ROLES[1 - number % 2]][number].tokens.tolist() for number in range(4)
    ], "a prompt is computed once for each policy"
    stored = {parameter.data_ptr() for parameter in base.parameters()}
    frozen = [p for model in models.values() for p in model.parameters() if not p.requires_grad]
    assert frozen and {parameter.data_ptr() for parameter in frozen} <= stored
