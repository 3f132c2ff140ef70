"""vLLM on a CUDA device that it shares with the trainer; skipped where one of the two is missing."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

from braidrl.observe.metrics import read_metrics
from tests.recipes.tiny import SYMBOLS, make_tokenizer, write_data
from tests.tiny import ROOT

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM in this environment"),
    pytest.mark.timeout(280),
]
WAYS: dict[str, dict[str, Any]] = {
    "a process": {},
    "a process that sleeps": {"vllm": {"enable_sleep_mode": True}},
    "in place": {"engines": 0},
}
ADAPTERS: dict[str, Any] = {"trainer": {"lora": {"rank": 4}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("vllm")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(SYMBOLS),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(place / "model")
    make_tokenizer().save_pretrained(place / "model")
    write_data(place)
    return place


def run(folder: Path, output: Path, rollout: dict[str, Any], **sections: Any) -> list[dict[str, Any]]:
    """Train four steps of GRPO in a process of its own, which vLLM does not share with other runs; return the
    metrics.
    """
    trainer = {"steps": 4, "prompts_per_step": 4, "learning_rate": 1e-2, "checkpoint_every": 0}
    vllm = {"kv_cache_memory_bytes": 1 << 28, **rollout.get("vllm", {})}
    tree = {
        "flow": "grpo",
        "model": str(folder / "model"),
        "data": {"train": str(folder / "data.jsonl")},
        "output": str(output),
        "name": "run",
        "reward": {"verify": f"{ROOT}/tests/recipes/even.py:even", "processes": 0},
        "device": "cuda",
        "evaluation": {"every": 0},
        "algorithm": {"old": "recompute"},
        "rollout": {
            "engine": "vllm",
            "samples_per_prompt": 4,
            "max_response_tokens": 6,
            "slots": 16,
            **rollout,
            "vllm": vllm,
        },
        **sections,
        "trainer": {**trainer, **sections.get("trainer", {})},
    }
    output.mkdir(parents=True, exist_ok=True)
    file = output / "config.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(tree))))
    done = subprocess.run(
        [sys.executable, "-m", "braidrl.cli", "train", str(file)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "TOKENIZERS_PARALLELISM": "false"},
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    return read_metrics(output / "run")


@pytest.mark.parametrize("reproducible", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_vllm_draws_from_the_weights_that_were_trained(
    way: str, reproducible: bool, folder: Path, tmp_path: Path
) -> None:
    lines = run(folder, tmp_path, {**WAYS[way], "reproducible": reproducible})
    assert len(lines) == 4
    assert all(line["train/rollout_log_prob_gap"] < 0.05 for line in lines), [
        line["train/rollout_log_prob_gap"] for line in lines
    ]


@pytest.mark.parametrize("way", ["a process", "in place"])
def test_vllm_draws_with_the_adapters_that_were_trained(way: str, folder: Path, tmp_path: Path) -> None:
    lines = run(folder, tmp_path, WAYS[way], **ADAPTERS)
    assert all(line["train/rollout_log_prob_gap"] < 0.05 for line in lines), [
        line["train/rollout_log_prob_gap"] for line in lines
    ]
