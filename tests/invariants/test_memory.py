"""Generation and training never copy the weights if engine and trainer share one process and one dtype."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from braidrl.config import parse_config
from tests.tiny import ROOT, SIZES, TOKENIZER, eager_backend, settings

# Weights dominate: 30 million parameters, and four rows of at most a dozen tokens.
MEASURE = """
import json, sys, threading, time
import psutil, torch
from braidrl.config import parse_config
from braidrl.runtimes.run import TrainingRun

process, peak = psutil.Process(), [0]

def watch():
    while True:
        peak[0] = max(peak[0], process.memory_info().rss)
        time.sleep(0.002)

# A small run first takes the libraries' own memory; the measured one then brings weights and little else.
with TrainingRun(parse_config(json.loads(sys.argv[1]))) as run:
    run.train()
del run
before = process.memory_info().rss
threading.Thread(target=watch, daemon=True).start()
with TrainingRun(parse_config(json.loads(sys.argv[2]))) as run:
    run.train()
    model = run.backend.executor.workers["actor"].model
    print(json.dumps({"parameters": sum(p.numel() for p in model.parameters()), "peak": peak[0] - before}))
"""


def big_model(folder: Path) -> Path:
    """Return a Qwen3 of 30 million parameters with the tiny tokenizer."""
    config = Qwen3Config(
        **{**SIZES, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def test_engine_and_trainer_hold_the_same_tensors(
    tmp_path: Path, tiny_models: dict[str, Path], sums_file: Path
) -> None:
    backend = eager_backend(parse_config(settings(tmp_path, tiny_models["qwen2"], sums_file, flow="dapo")))
    worker, engine = backend.executor.workers["actor"], backend.executor.engines["actor"]
    assert worker.optimizer is not None
    trained = {p.data_ptr() for p in worker.model.parameters()}
    assert {p.data_ptr() for p in engine.model.parameters()} == trained
    assert {master.data_ptr() for master in worker.optimizer.masters} == trained, (
        "float32 weights are their own masters"
    )


@pytest.mark.soak
def test_peak_memory_is_one_copy_of_weights_gradients_and_optimizer_state(
    tmp_path: Path, tiny_models: dict[str, Path], sums_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"rollout": {"samples_per_prompt": 2, "max_response_tokens": 4, "slots": 16}}
    sizes["trainer"] = {"prompts_per_step": 2, "rows_per_update": 2, "max_tokens_per_device": 32}
    trees = [
        settings(tmp_path, model, sums_file, name=name, algorithm={"kl_coef": 0}, **sizes)
        for name, model in (("small-run", tiny_models["qwen3"]), ("big-run", big_model(tmp_path / "big")))
    ]
    # Return freed blocks at once: glibc would otherwise keep holes, which would be counted.
    environment = {"PATH": "", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, "-c", MEASURE, *map(json.dumps, trees)],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment,
    )
    assert run.returncode == 0, run.stderr
    content = json.loads(run.stdout.splitlines()[-1])
    one_copy = content["parameters"] * 4
    # Weights (their own masters in float32), gradients, and the two moments of AdamW.
    expected = 4 * one_copy
    with capsys.disabled():
        print(
            f"\npeak memory {content['peak'] / 2**20:.0f} MiB for {content['parameters'] / 1e6:.1f}M parameters: "
            f"{content['peak'] / one_copy:.2f} copies of the weights; weights, gradients and AdamW's moments are 4"
        )
    assert content["peak"] > 0.9 * expected, "the measurement must have seen the optimizer's state"
    assert content["peak"] < expected + 0.75 * one_copy, "there is another copy of the weights"
