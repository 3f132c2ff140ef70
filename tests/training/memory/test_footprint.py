"""Memory counted without storage equals that of a model with storage."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config

from braidrl.config import TrainerConfig
from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError
from braidrl.training.compute.attention import PackedSequences
from braidrl.training.compute.slots import SlotCache
from braidrl.training.loading import load_decoder
from braidrl.training.memory.footprint import (
    activation_bytes,
    cache_bytes,
    model_shape,
    resident_bytes,
    working_bytes,
)
from braidrl.training.optimizer import MasterOptimizer
from tests.tiny import MIXTURE
from tests.training.activations import kept_bytes

TOKENS = 96
MESSAGES = "messages between pipeline ranks"


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_resident_bytes_are_those_of_a_model_that_trains(
    tiny_models: dict[str, Path], name: str, dtype: torch.dtype
) -> None:
    model = load_decoder(tiny_models[name], dtype)
    optimizer = MasterOptimizer(dict(model.named_parameters()), TrainerConfig(learning_rate=1e-3), 1e-3)
    hidden = model.base_model(
        input_ids=torch.arange(8)[None],
        position_ids=torch.arange(8)[None],
        use_cache=False,
        sequences=PackedSequences.of([8]),
    ).last_hidden_state
    optimizer.collect("rows")
    (hidden.sum() + model.get_output_embeddings().weight.sum()).backward()
    gradients = [part for part in optimizer.sums["rows"] if part is not None]
    result = {"weights": size(list(model.parameters())), "gradients": size(gradients)}
    optimizer.step({"rows": 1.0}, 1)
    state = optimizer.state()
    if dtype is torch.bfloat16:
        result["master weights"] = size([t for name, t in state.items() if name.endswith("master")])
    result["AdamW moments"] = size([t for name, t in state.items() if "exp_avg" in name])
    assert resident_bytes(model_shape(tiny_models[name], dtype), trained=True) == result


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "llama"])
def test_counted_activations_equal_autograds_saved_tensors(tiny_models: dict[str, Path], name: str) -> None:
    model = load_decoder(tiny_models[name])
    real = kept_bytes(model, TOKENS)
    counted = activation_bytes(model_shape(tiny_models[name], torch.float32), TOKENS, checkpointing=False)
    assert counted == pytest.approx(real, rel=0.1), "CPU kernels save a little more, such as sums of scores"


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer_whole(tiny_models: dict[str, Path]) -> None:
    measured = model_shape(tiny_models["qwen3"], torch.float32)
    shape = replace(measured, config=deepcopy(measured.config))
    shape.config.num_hidden_layers = 32
    whole, checkpointed = (activation_bytes(shape, TOKENS, checkpointing) for checkpointing in (False, True))
    assert checkpointed < whole / 5
    more = activation_bytes(shape, 2 * TOKENS, checkpointing=True)
    assert more == pytest.approx(2 * checkpointed, rel=0.05)


def test_the_cache_is_counted_as_it_is_reserved(tiny_models: dict[str, Path]) -> None:
    shape = model_shape(tiny_models["qwen3"], torch.float32)
    cache = SlotCache(16, torch.float32, torch.device("cpu"))
    cache.reserve(64)
    for number in range(shape.config.num_hidden_layers):
        cache.layer(number, shape.config.num_key_value_heads, (shape.config.head_dim, shape.config.head_dim))
    counted = cache_bytes(shape.cached_elements, 4, 16, 64)
    assert counted == sum(tensor.untyped_storage().nbytes() for tensor in cache.tensors())


def test_no_weights_are_needed_but_a_configuration_is(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((tiny_models["qwen3"] / "config.json").read_bytes())
    assert (
        model_shape(tmp_path, torch.float32).parameters == model_shape(tiny_models["qwen3"], torch.float32).parameters
    )
    with pytest.raises(UserError, match=r"no config\.json"):
        model_shape(tmp_path.parent, torch.float32)


def size(tensors: list[torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in {id(t): t for t in tensors}.values())


def test_counted_memory_is_sharded_by_the_layouts_axes(tiny_models: dict[str, Path]) -> None:
    shape = model_shape(tiny_models["qwen3"], torch.bfloat16)
    whole = resident_bytes(shape, trained=True)
    for shard in ("full", "optimizer"):
        sharded = resident_bytes(shape, True, ParallelLayout(data=4, tensor=2, shard=shard))
        assert sharded == {part: pytest.approx(size / 8, abs=8) for part, size in whole.items()}
    assert resident_bytes(shape, True, ParallelLayout(data=4, tensor=2)) == {p: size // 2 for p, size in whole.items()}
    layouts = [ParallelLayout(data=4), ParallelLayout(data=4, shard="full"), ParallelLayout(data=4, shard="optimizer")]
    deeper = replace(shape, config=deepcopy(shape.config), parameters=shape.parameters + 6 * shape.layer_parameters)
    deeper.config.num_hidden_layers += 6
    needed = [working_bytes(deeper, layout, TOKENS, False) for layout in layouts]
    assert "weights gathered" not in needed[0]
    assert 0 < needed[1]["weights gathered"] < needed[2]["weights gathered"]
    hybrid = resident_bytes(shape, True, ParallelLayout(data=4, nodes=2, shard="full"))
    assert hybrid == {part: pytest.approx(size / 2, abs=8) for part, size in whole.items()}
    stages = ParallelLayout(data=1, pipeline=4)
    # Two of eight layers, and one of embedding and head.
    own = 2 * shape.layer_parameters + deeper.config.vocab_size * deeper.config.hidden_size + deeper.config.hidden_size
    assert resident_bytes(deeper, False, stages) == {"weights": 2 * own}
    sharded = ParallelLayout(data=2, pipeline=4, shard="full")
    assert resident_bytes(deeper, False, sharded) == {"weights": own}
    assert working_bytes(deeper, sharded, TOKENS, False)["weights gathered"] == 2 * own
    trained, inferring = (working_bytes(deeper, stages, TOKENS, how)[MESSAGES] for how in (True, False))
    assert trained == 2 * inferring > 0
    assert MESSAGES not in working_bytes(deeper, ParallelLayout(data=4), TOKENS, True)
    alone, divided = (activation_bytes(shape, TOKENS, False, ParallelLayout(data=1, tensor=n)) for n in (1, 2))
    assert alone / 2 < divided < alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_activations_of_experts_are_counted_in_every_dtype_and_for_dense_layers_among_them(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    def counted(name: str, **settings: Any) -> int:
        MIXTURE.__class__(**{**MIXTURE.to_dict(), "num_hidden_layers": 4, **settings}).save_pretrained(tmp_path / name)
        return activation_bytes(model_shape(tmp_path / name, dtype), TOKENS, False)

    every, half, one = (
        counted("every"),
        counted("half", decoder_sparse_step=2),
        counted("one", mlp_only_layers=[1, 2, 3]),
    )
    assert half - one == pytest.approx((every - one) / 3, rel=1e-3) != 0


def test_ranks_of_the_expert_axis_hold_their_experts_alone(tmp_path: Path) -> None:
    MIXTURE.save_pretrained(tmp_path)
    shape = model_shape(tmp_path, torch.float32)
    experts = 4 * 3 * 8 * MIXTURE.hidden_size * MIXTURE.moe_intermediate_size
    assert (shape.experts, shape.idle, shape.num_experts) == (experts, experts * 6 // 8, 8)

    def stored(**axes: Any) -> int:
        return resident_bytes(shape, False, ParallelLayout(**axes))["weights"] // 4

    assert stored(data=4) - stored(data=4, expert=2) == experts // 2
    assert stored(data=4, shard="full", expert=4) == pytest.approx(stored(data=4, shard="full"), abs=4)
    full = ParallelLayout(data=4, shard="full")
    plain, by_experts = (
        working_bytes(shape, layout, TOKENS, True) for layout in (full, full.model_copy(update={"expert": 4}))
    )
    assert plain["weights gathered"] - by_experts["weights gathered"] == 4 * experts * 2 // 4 * 3 // 4
    assert by_experts["rows of experts"] == 2 * TOKENS * 2 * MIXTURE.hidden_size * 4


def test_dense_layers_before_a_mixture_do_not_make_a_pipeline_rank_too_large(tmp_path: Path) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8}
    DeepseekV3Config(
        **sizes, **heads, num_hidden_layers=4, first_k_dense_replace=1, n_routed_experts=16
    ).save_pretrained(tmp_path)
    shape = model_shape(tmp_path, torch.float32)
    stored = resident_bytes(shape, False, ParallelLayout(data=1, pipeline=2))["weights"]
    assert stored < 4 * 0.6 * shape.parameters
