"""4-bit weights under adapters and 8-bit moments have the right values, memory and exact resume."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from braidrl.config import LoraConfig, TrainerConfig
from braidrl.errors import UserError
from braidrl.runtimes.run import TrainingRun
from braidrl.training.backends import BackendSpec
from braidrl.training.lora import FourBitLinear
from braidrl.training.memory.footprint import model_shape, resident_bytes
from braidrl.training.optimizer import MasterOptimizer
from braidrl.training.optimizer_contract import train
from braidrl.training.roles.worker import RoleWorker
from tests.tiny import Workshop, metrics_without_times, recorded, weights_of
from tests.training.parallel.laid_out import config_of

LORA: dict[str, Any] = {"rank": 4, "alpha": 16, "base_dtype": "nf4"}
EIGHT_BIT: dict[str, Any] = {"optimizer": "adamw8bit", "optimizer_settings": {"min_8bit_size": 0}}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_quantised_layer_multiplies_with_its_decoded_weights(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(96, 40, dtype=dtype)
    layer = FourBitLinear(plain)
    assert layer.weight.dtype == dtype and layer.weight.shape == plain.weight.shape
    error = (layer.weight - plain.weight).abs().max() / plain.weight.abs().max()
    assert 0 < error < 0.2, "the nearest of sixteen unevenly spaced values"
    x = torch.randn(5, 96, dtype=dtype, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, nn.functional.linear(x, layer.weight, plain.bias))
    y.sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.ones_like(y) @ layer.weight)
    assert sum(buffer.nbytes for buffer in layer.buffers()) == 40 * 96 * (0.5 + 4 / 64)


def test_quantized_role_matches_counted_memory_and_exports_base_and_adapters(workshop: Workshop) -> None:
    config = config_of(str(workshop.model), None, "float32")
    lora = LoraConfig(**LORA)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"lora": lora})})
    worker = RoleWorker(BackendSpec("actor", config, train=True))
    held = sum(t.nbytes for t in (*worker.model.parameters(), *worker.model.buffers()) if t.dim() > 1 or t.numel() > 4)
    counted = resident_bytes(model_shape(workshop.model, torch.float32, lora=lora), trained=True)["weights"]
    assert counted == pytest.approx(held, rel=0.01)
    plain = model_shape(workshop.model, torch.float32, lora=lora.model_copy(update={"base_dtype": None}))
    assert counted < 0.6 * resident_bytes(plain, trained=True)["weights"]
    exported = worker.full_state_dict()
    layer: Any = worker.model.base_model.layers[0].mlp.up_proj
    torch.testing.assert_close(exported["model.layers.0.mlp.up_proj.weight"], layer.base_layer.weight)
    assert not any(name.endswith(("codes", "scales")) for name in exported)


def test_a_gated_layer_decodes_each_quantised_weight_once(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of(str(workshop.model), None, "float32")
    trainer = config.trainer.model_copy(update={"lora": LoraConfig(**LORA)})
    worker = RoleWorker(BackendSpec("actor", config.model_copy(update={"trainer": trainer}), train=True))
    decode, decoded = torch.ops.bitsandbytes.dequantize_4bit, list[int]()
    monkeypatch.setattr(
        torch.ops.bitsandbytes,
        "dequantize_4bit",
        lambda codes, *given: decoded.append(id(codes)) or decode(codes, *given),
    )
    layer: Any = worker.model.base_model.layers[0].mlp
    layer(torch.randn(3, worker.model.config.hidden_size))
    assert len(decoded) == len(set(decoded)) == 3


@pytest.mark.soak
def test_quantized_rollouts_use_trained_weights_and_runs_resume_exactly(workshop: Workshop) -> None:
    sections: dict[str, Any] = {
        "algorithm": {"old": "recompute"},
        "rollout": {"max_response_tokens": 3},
        "trainer": {
            "steps": 2,
            "prompts_per_step": 2,
            "checkpoint_every": 1,
            "learning_rate": 1e-2,
            "lora": LORA,
            **EIGHT_BIT,
        },
    }
    whole = workshop.run("whole", **sections)
    rows = recorded(whole, 2)
    assert float((rows["rollout_log_probs"].values - rows["old_log_probs"].values).abs().max()) < 1e-5
    stopped = workshop.run("stopped", **{**sections, "trainer": {**sections["trainer"], "steps": 1}})
    with TrainingRun(workshop.config("stopped", **sections), resume=stopped) as resumed:
        resumed.train()
    assert metrics_without_times(stopped) == metrics_without_times(whole)
    before, after = weights_of(whole), weights_of(stopped)
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def test_eight_bit_moments_train_like_float32_in_a_quarter_of_memory() -> None:
    generator = torch.Generator().manual_seed(5)
    start = torch.randn(64, 80, generator=generator)

    def trained(**settings: Any) -> tuple[torch.Tensor, int]:
        config = TrainerConfig(learning_rate=1e-2, max_grad_norm=None, **settings)
        optimizer = MasterOptimizer({"weight": nn.Parameter(start.clone())}, config, config.learning_rate)
        (weights,) = train(optimizer, range(1, 21))
        return weights, sum(tensor.nbytes for tensor in optimizer.tensors())

    (few, small), (many, large) = trained(optimizer="adamw8bit"), trained()
    assert (few - many).abs().mean() < 0.05 * (many - start).abs().mean()
    assert small < 0.36 * large, "codes of a byte, a scale for 256 of them, and two tables of 256 values"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dtype": "float64", "trainer": {"lora": LORA}}, r"trainer\.lora\.base_dtype=nf4: float64 weights"),
        (
            {"runtime": "distributed", "workers": 2, "trainer": {"lora": LORA, "layout": {"shard": "full"}}},
            r"trainer\.lora\.base_dtype=nf4: .*4-bit weights, .*trainer\.layout",
        ),
        (
            {
                "runtime": "distributed",
                "workers": 2,
                "trainer": {"layout": {"shard": "full"}, "optimizer": "adamw8bit"},
            },
            r"trainer\.optimizer=adamw8bit .*moments .*trainer\.layout divides actor",
        ),
    ],
)
def test_what_has_no_few_bits_is_refused(workshop: Workshop, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        TrainingRun(workshop.config(**sections))
