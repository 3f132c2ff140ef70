"""Whole GRPO steps of `braid train` with each engine that is installed, on one device."""

from __future__ import annotations

import importlib.util
import os
import random
import statistics
import subprocess
import sys
from pathlib import Path
from string import ascii_letters
from typing import Any

import yaml
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import PreTrainedTokenizerFast

from benchmarks.gpu import models
from benchmarks.gpu.models import Shape
from benchmarks.gpu.tables import Sizes
from braidrl.observe.metrics import read_metrics

ROOT = Path(__file__).parents[2]
STEPS = 5
ENGINES: dict[str, dict[str, Any]] = {
    "embedded": {},
    "vLLM in place": {"engine": "vllm", "engines": 0},
    "vLLM in a process": {"engine": "vllm", "vllm": {"enable_sleep_mode": True}},
}


def even(response: str) -> float:
    """Return 1.0 for a response of an even number of characters."""
    return float(len(response) % 2 == 0)


def write_task(shape: Shape, folder: Path, sizes: Sizes) -> tuple[Path, Path]:
    """Write the model with a tokenizer of letters, and prompts of random letters."""
    model, data = models.write(shape, folder), folder / f"{shape.name}.jsonl"
    # transformers reads a Qwen2's tokenizer as bytes, whatever was saved: letters are theirs.
    letters = Tokenizer(tokenizer_models.BPE({"<end>": 0, **{c: n for n, c in enumerate(ascii_letters, 1)}}, []))
    letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<end>").save_pretrained(model)
    draw = random.Random(4)
    lines = ["".join(draw.choices(ascii_letters, k=sizes.prompt)) for _ in range(4 * sizes.step)]
    data.write_text("".join(f'{{"prompt": "{line}", "answer": ""}}\n' for line in lines))
    return model, data


def engines(device: str, folder: Path, shape: Shape, sizes: Sizes, known: dict[str, float]) -> list[dict[str, Any]]:
    """Return the seconds of a step and its parts, the median of the last three, for each engine that is installed."""
    model, data = write_task(shape, folder, sizes)
    found = []
    for name, rollout in ENGINES.items():
        if rollout.get("engine") == "vllm" and (device == "cpu" or importlib.util.find_spec("vllm") is None):
            continue
        run = folder / f"{shape.name}-{name.replace(' ', '-')}"
        drawn = {"samples_per_prompt": sizes.group, "max_response_tokens": sizes.response, "reproducible": False}
        tree = {
            "flow": "grpo",
            "model": str(model),
            "data": {"train": str(data)},
            "output": str(folder),
            "name": run.name,
            "device": device,
            "dtype": "bfloat16",
            "reward": {"verify": f"{__file__}:even", "processes": 0},
            "rollout": {**drawn, **rollout},
            "evaluation": {"every": 0},
            "trainer": {
                "steps": STEPS,
                "prompts_per_step": sizes.step // sizes.group,
                "checkpoint_every": 0,
                "max_tokens_per_device": 16384,
            },
        }
        run.with_suffix(".yaml").write_text(yaml.safe_dump(tree))
        command = [sys.executable, "-m", "braidrl.cli", "train", str(run.with_suffix(".yaml"))]
        path = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
        assert done.returncode == 0, (name, (done.stdout + done.stderr)[-3000:])
        lines = read_metrics(run)[-3:]
        parts = {
            key: statistics.median(line[key] for line in lines)
            for key in ("time/step", "time/actor.generate", "throughput/tokens_per_second")
        }
        gap = max(line["train/rollout_log_prob_gap"] or 0.0 for line in lines)
        found.append(
            {
                "model": shape.name,
                "engine": name,
                "rows": sizes.step,
                "seconds": parts["time/step"],
                "seconds_generating": parts["time/actor.generate"],
                "tokens_per_second": parts["throughput/tokens_per_second"],
                "gap": gap,
            }
        )
    return found
