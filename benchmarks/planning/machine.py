"""Predict runs on this machine from other runs: rates are fitted to the first list of runs, and the second list is
predicted.

    python -m benchmarks.planning.machine make FOLDER [RUNTIME...]    train the runs of all or some runtimes, one after
                                                                      the other
    python -m benchmarks.planning.machine compare FOLDER              fit, predict, write
                                                                      benchmarks/results/plan_machine.json

A run's seconds are the median of its steps after the first ones, measured and predicted alike; predictions use each
step's row lengths. Run nothing else meanwhile. It takes about eight minutes on two cores.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.machine import describe
from braidrl.cli.plan_command import calibrated, observe
from braidrl.cluster.device_kinds import read_cluster
from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.plan.calibration import WARM_UP
from braidrl.plan.configured import predicted
from braidrl.plan.rates import read_rates
from braidrl.runtimes.run import TrainingRun
from tests.tiny import TOKENIZER, sums, write_jsonl

RESULTS = Path(__file__).parent.parent / "results"
STEPS = 8
SHAPES = {"a": (128, 4), "b": (256, 6), "c": (384, 6), "d": (192, 5), "e": (320, 4), "f": (160, 8)}
"""Width and layers of each model."""


@dataclass(frozen=True)
class Case:
    """A run: its model, rows, flow and where it runs."""

    name: str
    shape: str
    prompts: int
    response: int = 32
    flow: str = "grpo"
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def runtime(self) -> str:
        return str(self.settings.get("runtime", "eager"))


def distributed(**layout: Any) -> dict[str, Any]:
    return {"runtime": "distributed", "workers": 2, "trainer": {"layout": layout}}


def hybrid(placement: Any, workers: int = 1) -> dict[str, Any]:
    return {"runtime": "hybrid", "placement": placement, "workers": workers, "cluster": {"cpus": 2}}


def streaming(staleness: int = 0) -> dict[str, Any]:
    # Without a reference: one worker generates and one trains, so two cores are enough.
    return {"runtime": "streaming", "trainer": {"max_staleness": staleness}, "algorithm": {"kl_coef": 0.0}}


SPLIT = [["actor"], ["reference", "critic"]]
FITTED = [
    Case("eager-a", "a", 12),
    Case("eager-b", "b", 6),
    Case("eager-c", "c", 4),
    Case("eager-b-long", "b", 4, 96),
    Case("eager-a-ppo", "a", 10, flow="ppo"),
    Case("eager-c-ppo", "c", 3, flow="ppo"),
    Case("distributed-a", "a", 32, settings=distributed()),
    Case("distributed-c", "c", 8, settings=distributed()),
    Case("distributed-b-sharded", "b", 12, settings=distributed(shard="full")),
    Case("hybrid-a", "a", 24, settings=hybrid("colocate", 2)),
    Case("hybrid-c-ppo", "c", 6, flow="ppo", settings=hybrid("colocate", 2)),
    Case("streaming-a", "a", 16, settings=streaming()),
    Case("streaming-c", "c", 6, settings=streaming()),
]
PREDICTED = [
    Case("eager-d", "d", 8),
    Case("eager-e", "e", 6),
    Case("eager-f", "f", 8),
    Case("eager-d-long", "d", 6, 96),
    Case("eager-e-ppo", "e", 4, flow="ppo"),
    Case("eager-a-rows", "a", 28),
    Case("eager-f-ppo", "f", 4, flow="ppo"),
    Case("eager-b-rows", "b", 10),
    Case("distributed-d", "d", 24, settings=distributed()),
    Case("distributed-e", "e", 12, settings=distributed()),
    Case("distributed-d-ppo", "d", 12, flow="ppo", settings=distributed()),
    Case("distributed-f-sharded", "f", 16, settings=distributed(shard="full")),
    Case("hybrid-d", "d", 20, settings=hybrid("colocate", 2)),
    Case("hybrid-e-ppo", "e", 8, flow="ppo", settings=hybrid("colocate", 2)),
    Case("hybrid-d-split", "d", 12, flow="ppo", settings=hybrid(SPLIT)),
    Case("streaming-d", "d", 14, settings=streaming()),
    Case("streaming-e", "e", 8, settings=streaming()),
    Case("streaming-d-late", "d", 14, settings=streaming(1)),
    Case("streaming-b-late", "b", 8, settings=streaming(1)),
]


def write_model(folder: Path, shape: str) -> Path:
    """Write a random model of a shape as a Hugging Face directory."""
    width, layers = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        num_key_value_heads=width // 32,
        head_dim=32,
        max_position_embeddings=256,
        eos_token_id=TOKENIZER.eos_token_id,
        pad_token_id=TOKENIZER.pad_token_id,
        tie_word_embeddings=False,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def configuration(case: Case, root: Path) -> dict[str, Any]:
    """Return a case's configuration."""
    tree: dict[str, Any] = {
        "flow": case.flow,
        "model": str(root / f"model-{case.shape}"),
        "output": str(root),
        "name": case.name,
        "threads": 1,
        "device": "cpu",
        "data": {"train": str(root / "sums.jsonl"), "max_prompt_tokens": 16},
        "algorithm": {"kl_coef": 0.1, "reward": "verify"},
        "reward": {"verify": "gsm8k"},
        "rollout": {"samples_per_prompt": 8, "max_response_tokens": case.response, "slots": 64},
        "trainer": {
            "steps": STEPS,
            "prompts_per_step": case.prompts,
            "learning_rate": 1e-5,
            "checkpoint_every": 0,
            "max_tokens_per_device": 2048,
        },
        "evaluation": {"every": 0},
    }
    for key, value in case.settings.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return tree


def make(root: Path, runtimes: Sequence[str]) -> None:
    """Train every case of the given runtimes whose folder does not exist yet, one after the other."""
    root.mkdir(parents=True, exist_ok=True)
    write_jsonl(root / "sums.jsonl", sums(80))
    for shape in SHAPES:
        if not (root / f"model-{shape}").exists():
            write_model(root / f"model-{shape}", shape)
    for case in (*FITTED, *PREDICTED):
        if case.runtime not in runtimes or (root / case.name / "report.html").exists():
            continue
        path = root / f"{case.name}.yaml"
        path.write_text(json.dumps(configuration(case, root)))
        (train_here if case.runtime == "eager" else train_apart)(path)
        print(f"{case.name}: {measured(root / case.name):.3f} s a step", flush=True)


def train_here(path: Path) -> None:
    """Train in this process."""
    with TrainingRun(load_config(path)) as run, redirect_stdout(StringIO()):
        run.train()


def train_apart(path: Path, *changed: str) -> None:
    """Train in separate processes; `changed` are overrides of the configuration."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, "-m", "braidrl.cli", "train", str(path), *changed]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)


def measured(run: Path) -> float:
    """Return the median seconds of a run's steps after the first ones."""
    return median(line["time/step"] for line in read_metrics(run) if line["step"] > WARM_UP)


def compare(root: Path) -> dict[str, Any]:
    """Fit, predict, and return the table."""
    file = root / "rates.yaml"
    file.unlink(missing_ok=True)
    calibrated([root / case.name for case in FITTED], "cpu", file)
    rates, cluster = read_rates(file), read_cluster("cpu")
    lines = []
    for case in (*FITTED, *PREDICTED):
        steps = [problem for _, problem in observe(root / case.name, cluster).steps()]
        seconds = float(median(predicted(replace(problem, rates=rates)).seconds for problem in steps))
        real = measured(root / case.name)
        lines.append(
            {
                "run": case.name,
                "fitted": case in FITTED,
                "measured_s": round(real, 4),
                "predicted_s": round(seconds, 4),
                "error": round(seconds / real - 1, 3),
            }
        )
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": describe(1),
        "cores": os.cpu_count(),
        **agreement([line for line in lines if not line["fitted"]]),
        "runs": lines,
        "rates": rates["cpu"].model_dump(mode="json"),
    }


def agreement(lines: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the errors of predictions, and the share of correctly ordered pairs among those that differ by more than
    20%.
    """
    errors = sorted(abs(line["error"]) for line in lines)
    found = [(line["measured_s"], line["predicted_s"]) for line in lines]
    apart = [(a, b) for a, b in itertools.combinations(found, 2) if max(a[0], b[0]) > 1.2 * min(a[0], b[0])]
    right = sum((a[0] < b[0]) == (a[1] < b[1]) for a, b in apart)
    return {
        "predicted": len(lines),
        "median_error": median(errors),
        "worst_error": errors[-1],
        "pairs": len(apart),
        "pairs_in_order": right / len(apart),
    }


if __name__ == "__main__":
    verb, folder = sys.argv[1], Path(sys.argv[2])
    if verb == "make":
        make(folder, sys.argv[3:] or ("eager", "distributed", "hybrid", "streaming"))
    else:
        result = compare(folder)
        (RESULTS / "plan_machine.json").write_text(json.dumps(result, indent=1) + "\n")
        for line in result["runs"]:
            about = "fitted" if line["fitted"] else ""
            print(f"{line['run']:24}{about:8}{line['measured_s']:9.3f}{line['predicted_s']:9.3f}{line['error']:8.0%}")
        print({key: value for key, value in result.items() if key not in ("runs", "rates", "machine")})
