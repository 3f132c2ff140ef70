"""A sharded engine samples the same tokens as an engine with the whole model, with the same bits on every rank."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from braidrl.cluster.ranks import run_ranks
from tests.engines.tiny import CONFIGS, SIZES

WAIT_S = 200.0
MODELS: dict[str, PreTrainedConfig] = {
    **CONFIGS,
    # Ranks with three and two of five experts.
    "mixtral": MixtralConfig(**SIZES, num_local_experts=5),
    # A vocabulary with an odd size, and biases that only one of the two ranks may add.
    "llama with biases": LlamaConfig(**{**SIZES, "vocab_size": 261}, attention_bias=True, mlp_bias=True),
}


def write(folder: Path, name: str) -> str:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(deepcopy(MODELS[name]))
    for own, parameter in model.named_parameters():
        if own.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder / name)
    return str(folder / name)


def test_two_ranks_sample_the_tokens_of_one_engine(tmp_path: Path) -> None:
    folders = {name: write(tmp_path, name) for name in MODELS}
    cases = {f"{name} in float32": (folder, "float32", True) for name, folder in folders.items()}
    doubles = ("qwen2-tied", "qwen3", "llama with biases", "qwen3-moe", "mixtral")
    cases |= {f"{name} in float64": (folders[name], "float64", False) for name in doubles}
    cases["qwen3 by torch"] = (folders["qwen3"], "float32", False)
    cases["qwen3 in bfloat16"] = (folders["qwen3"], "bfloat16", True)
    result: dict[str, dict[str, Any]] = run_ranks("tests.engines.embedded.parts:compare", {"cases": cases}, 2, WAIT_S)
    assert all(case["equal"] for case in result.values()) and result.keys() == cases.keys()
    exact = {name: case for name, case in result.items() if "bfloat16" not in name}
    print({name: f"{case['gap']:.1e}" for name, case in exact.items()})
    assert {name: case["rows"] for name, case in exact.items()} == dict.fromkeys(exact, 0)
    assert all(case["gap"] < (1e-12 if "float64" in name else 1e-5) for name, case in exact.items())


def test_each_rank_gets_its_own_rows_back_and_may_abort_them(tmp_path: Path) -> None:
    assert run_ranks("tests.engines.embedded.parts:together", {"path": write(tmp_path, "qwen3")}, 2, WAIT_S) == []
