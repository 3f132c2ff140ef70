"""Tensor parallelism uses the model's own plan, and refuses in one line a model without a known plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braidrl.errors import UserError
from braidrl.training.loading import load_decoder
from braidrl.training.parallel.tensor import plan_of


@pytest.mark.parametrize(
    ("plan", "words"), [(None, "has none"), ({"layers.*.mlp.experts": "grouped_gemm"}, "uses grouped_gemm")]
)
def test_model_without_tensor_parallel_plan_is_refused_in_one_line(
    plan: Any, words: str, tiny_models: dict[str, Path]
) -> None:
    model = load_decoder(tiny_models["qwen3"])
    model.config.base_model_tp_plan = plan
    with pytest.raises(UserError, match=f"the tensor-parallel plan of Qwen3ForCausalLM {words}") as caught:
        plan_of(model)
    assert "\n" not in str(caught.value)
