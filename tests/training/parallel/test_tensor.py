"""Tensor parallelism follows the model's own plan; a model without one, or that cannot decode by it, is refused in one
line.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from braidrl.errors import UserError
from braidrl.training.loading import load_decoder
from braidrl.training.parallel.tensor import LayerBlock, blocks_of, full_plan_of, plan_of

MIXED = {
    "layers.*.self_attn.q_proj": "colwise_gather_output",
    "layers.*.self_attn.o_proj": "rowwise_split_input",
    "layers.*.mlp.experts": "moe_tp_experts",
}


def test_model_without_tensor_parallel_plan_is_refused_in_one_line(tiny_models: dict[str, Path]) -> None:
    model = load_decoder(tiny_models["qwen3"])
    model.config.base_model_tp_plan = None
    with pytest.raises(UserError, match="tensor-parallel plan of Qwen3ForCausalLM; write tensor=1") as caught:
        plan_of(model)
    assert "\n" not in str(caught.value)


def test_plan_with_gathered_columns_is_refused_for_decoding_in_one_line(tiny_models: dict[str, Path]) -> None:
    model = load_decoder(tiny_models["qwen3"])
    model.config.base_model_tp_plan = MIXED
    with pytest.raises(UserError, match="uses colwise_gather_output, moe_tp_experts, rowwise_split_input") as caught:
        full_plan_of(model, "rollout.tensor", "rollout.tensor=1")
    assert "\n" not in str(caught.value)


def test_attention_without_plan_gathers_tokens_and_scatters_its_output(tiny_models: dict[str, Path]) -> None:
    layer = load_decoder(tiny_models["qwen3"]).model.layers[0]
    plan = {"layers.*.mlp.gate_proj": "colwise", "layers.*.mlp.up_proj": "colwise", "layers.*.mlp.down_proj": "rowwise"}
    products = {name.removeprefix("layers.*."): style for name, style in plan.items()}
    attention, mlp = LayerBlock("self_attn", {}, {"self_attn": True}), LayerBlock("mlp", products, {"mlp": False})
    assert blocks_of(layer, plan) == [attention, mlp]
    # An unknown style leaves the products whole, and each rank computes its own tokens.
    assert blocks_of(layer, {**plan, "layers.*.mlp.act_fn": "moe_tp_experts"}) == [attention, LayerBlock("mlp", {}, {})]
