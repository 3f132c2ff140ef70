"""Predict runs on this machine from others: rates are fitted to the first list of runs, and the second is predicted.

    python -m benchmarks.planning.machine make FOLDER       trains them all, one after the other
    python -m benchmarks.planning.machine compare FOLDER    fits, predicts, writes benchmarks/results/plan_machine.json

Seconds of a run are the median of its steps after the first ones. Nothing else should run meanwhile. On a machine that has other work
`make-eager` and `compare-eager` do the same for the runs of one process, in seconds of its processor time, which other work hardly
changes; waiting, and so runtimes of several processes, cannot be measured that way.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.machine import describe
from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.placement.plan.calibration import WARM_UP
from braidrl.placement.plan.devices import read_cluster
from braidrl.placement.plan.lengths import recorded_lengths
from braidrl.placement.plan.problem import Problem
from braidrl.placement.plan.rates import read_rates
from braidrl.runtimes.prepare.flow import build_flow
from braidrl.runtimes.prepare.plan import calibrated, predicted
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from tests.tiny import TOKENIZER, sums, write_jsonl

RESULTS = Path(__file__).parent.parent / "results"
STEPS = 4
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


def distributed(workers: int, **layout: Any) -> dict[str, Any]:
    return {"runtime": "distributed", "workers": workers, "trainer": {"layout": layout}}


def hybrid(placement: Any, workers: int = 1) -> dict[str, Any]:
    return {"runtime": "hybrid", "placement": placement, "workers": workers, "cluster": {"cpus": 2}}


def streaming(staleness: int = 0) -> dict[str, Any]:
    return {"runtime": "streaming", "trainer": {"max_staleness": staleness}}


FITTED = [
    Case("eager-a", "a", 5), Case("eager-b", "b", 5), Case("eager-c", "c", 2), Case("eager-b-long", "b", 2, 96),
    Case("eager-a-ppo", "a", 10, flow="ppo"), Case("eager-c-ppo", "c", 2, flow="ppo"),
    Case("distributed-a", "a", 32, settings=distributed(2)), Case("distributed-c", "c", 12, settings=distributed(2)),
    Case("hybrid-a", "a", 32, settings=hybrid("colocate", 2)), Case("hybrid-c-ppo", "c", 8, flow="ppo", settings=hybrid("colocate", 2)),
    Case("streaming-a", "a", 24, settings=streaming()), Case("streaming-c", "c", 10, settings=streaming()),
]  # fmt: skip
PREDICTED = [
    Case("eager-d", "d", 8), Case("eager-e", "e", 4), Case("eager-f", "f", 5), Case("eager-d-long", "d", 4, 96),
    Case("eager-e-ppo", "e", 3, flow="ppo"), Case("eager-a-rows", "a", 21), Case("eager-f-ppo", "f", 2, flow="ppo"),
    Case("eager-b-ppo", "b", 2, flow="ppo"), Case("eager-f-long", "f", 2, 96), Case("eager-e-few", "e", 2),
    Case("eager-d-ppo", "d", 5, flow="ppo"),
    Case("eager-b-rows", "b", 10), Case("eager-c-few", "c", 2),
    Case("distributed-d", "d", 32, settings=distributed(2)), Case("distributed-e", "e", 16, settings=distributed(2)),
    Case("distributed-d-ppo", "d", 16, flow="ppo", settings=distributed(2)),
    Case("distributed-f-sharded", "f", 24, settings=distributed(2, shard="full")),
    Case("hybrid-d", "d", 32, settings=hybrid("colocate", 2)), Case("hybrid-e-ppo", "e", 10, flow="ppo", settings=hybrid("split")),
    Case("hybrid-d-split", "d", 24, flow="ppo", settings=hybrid([["actor"], ["reference", "critic"]])),
    Case("streaming-d", "d", 24, settings=streaming()), Case("streaming-e", "e", 14, settings=streaming()),
    Case("streaming-d-late", "d", 24, settings=streaming(1)),
]  # fmt: skip


def write_model(folder: Path, shape: str) -> Path:
    """Write a random model of a shape as a Hugging Face directory."""
    width, layers = SHAPES[shape]
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(TOKENIZER), hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=width // 32, num_key_value_heads=width // 32, head_dim=32, max_position_embeddings=256,
        eos_token_id=TOKENIZER.eos_token_id, pad_token_id=TOKENIZER.pad_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def configuration(case: Case, root: Path) -> dict[str, Any]:
    """Return a case's configuration."""
    tree: dict[str, Any] = {
        "flow": case.flow, "model": str(root / f"model-{case.shape}"), "output": str(root), "name": case.name, "threads": 1,
        "device": "cpu", "data": {"train": str(root / "sums.jsonl"), "max_prompt_tokens": 16},
        "algorithm": {"kl_coef": 0.1, "reward": "verify"}, "reward": {"verify": "gsm8k"},
        "rollout": {"samples_per_prompt": 8, "max_response_tokens": case.response, "slots": 64},
        "trainer": {
            "steps": STEPS, "prompts_per_step": case.prompts, "learning_rate": 1e-5, "checkpoint_every": 0,
            "max_tokens_per_device": 2048,
        },
        "evaluation": {"every": 0},
    }  # fmt: skip
    for key, value in case.settings.items():
        tree[key] = {**tree.get(key, {}), **value} if isinstance(value, dict) else value
    return tree


def chosen(cases: Sequence[Case], eager: bool) -> list[Case]:
    """Return the cases of one process, or all."""
    return [case for case in cases if not eager or "runtime" not in case.settings]


def make(root: Path, eager: bool) -> None:
    """Train every case whose folder is not there yet, one after the other."""
    root.mkdir(parents=True, exist_ok=True)
    write_jsonl(root / "sums.jsonl", sums(80))
    for shape in SHAPES:
        if not (root / f"model-{shape}").exists():
            write_model(root / f"model-{shape}", shape)
    for case in chosen((*FITTED, *PREDICTED), eager):
        if (root / case.name / "report.html").exists():
            continue
        path = root / f"{case.name}.yaml"
        path.write_text(json.dumps(configuration(case, root)))
        run = train_here if eager else train_apart
        run(path)
        print(f"{case.name}: {measured(root / case.name):.3f} s a step", flush=True)


def train_apart(path: Path) -> None:
    """Train in processes of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    subprocess.run(
        [sys.executable, "-m", "braidrl.cli", "train", str(path)],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


def train_here(path: Path) -> None:
    """Train in this process, whose clock counts its processor time."""
    time.perf_counter = time.process_time
    with TrainingRun(load_config(path)) as run:
        run.train()


def measured(run: Path) -> float:
    """Return the median seconds of a run's steps after the first ones."""
    return median(line["time/step"] for line in read_metrics(run) if line["step"] > WARM_UP)


def compare(root: Path, eager: bool) -> dict[str, Any]:
    """Fit, predict, and write the table."""
    file = root / "rates.yaml"
    file.unlink(missing_ok=True)
    calibrated([root / case.name for case in chosen(FITTED, eager)], "cpu", file)
    rates, cluster = read_rates(file), read_cluster("cpu")
    lines = []
    for fitted, case in [(True, c) for c in chosen(FITTED, eager)] + [(False, c) for c in chosen(PREDICTED, eager)]:
        config = run_config(root / case.name)
        problem = Problem(config, build_flow(config), cluster, recorded_lengths(root / case.name), rates)
        seconds, real = float(predicted(problem).seconds), measured(root / case.name)
        lines.append({"run": case.name, "fitted": fitted, "measured_s": round(real, 4), "predicted_s": round(seconds, 4),
                      "error": round(seconds / real - 1, 3)})  # fmt: skip
    new = [line for line in lines if not line["fitted"]]
    errors = sorted(abs(line["error"]) for line in new)
    apart = [
        (a, b)
        for a, b in itertools.combinations(new, 2)
        if max(a["measured_s"], b["measured_s"]) > 1.2 * min(a["measured_s"], b["measured_s"])
    ]
    right = [(a["measured_s"] < b["measured_s"]) == (a["predicted_s"] < b["predicted_s"]) for a, b in apart]
    found = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "seconds": "processor time" if eager else "wall clock",
        "machine": describe(1), "cores": os.cpu_count(),
        "median_error": median(errors), "worst_error": errors[-1], "pairs": len(right), "pairs_in_order": sum(right) / len(right),
        "runs": lines, "rates": rates["cpu"].model_dump(mode="json"),
    }  # fmt: skip
    return found


if __name__ == "__main__":
    verb, folder = sys.argv[1], Path(sys.argv[2])
    one_process = verb.endswith("-eager")
    if verb.startswith("make"):
        make(folder, one_process)
    else:
        result = compare(folder, one_process)
        (RESULTS / ("plan_eager.json" if one_process else "plan_machine.json")).write_text(
            json.dumps(result, indent=1) + "\n"
        )
        for line in result["runs"]:
            about = "fitted" if line["fitted"] else ""
            print(f"{line['run']:24}{about:8}{line['measured_s']:9.3f}{line['predicted_s']:9.3f}{line['error']:8.0%}")
        print({key: result[key] for key in ("median_error", "worst_error", "pairs", "pairs_in_order")})
