"""The MLP of a decoder layer as Braid trains it: a mixture of experts, or a dense one with as many operations."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from benchmarks.turns import Turn, peak_mebibytes
from braidrl.training.compute.cpu_layers import compile_layers
from braidrl.training.loading import load_decoder

PASSES = 3


def prepare(case: Mapping[str, Any]) -> Turn:
    """Return a turn of a few forward and backward passes over the same tokens."""
    torch.set_num_threads(case["threads"])
    torch.manual_seed(0)
    mlp = layer(case)
    states = torch.randn(1, case["tokens"], case["width"], requires_grad=True)
    gradient = torch.randn_like(states)

    def turn() -> dict[str, float]:
        for _ in range(PASSES):
            found = mlp(states)
            (found[0] if isinstance(found, tuple) else found).backward(gradient)
            mlp.zero_grad()
        return {"tokens": PASSES * case["tokens"], "peak_mebibytes": peak_mebibytes()}

    turn()
    return turn


def layer(case: Mapping[str, Any]) -> Any:
    """Return the MLP of the only layer of a model that is prepared for training."""
    sizes: dict[str, Any] = {
        "vocab_size": 8,
        "hidden_size": case["width"],
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": case["inner"] * case["active"],
    }
    if case["kind"] == "mixture":
        config: Any = Qwen3MoeConfig(
            **sizes,
            moe_intermediate_size=case["inner"],
            num_experts=case["experts"],
            num_experts_per_tok=case["active"],
        )
    else:
        config = Qwen3Config(**sizes)
    with TemporaryDirectory() as folder:
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
        model = load_decoder(Path(folder), torch.float32)
    compile_layers(model)
    return model.model.layers[0].mlp
