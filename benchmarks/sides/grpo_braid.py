"""Braid's eager runtime: one whole step of `flow: grpo`, rollout records and metrics included."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from tempfile import mkdtemp
from typing import Any

from benchmarks.turns import Turn, peak_mebibytes
from braidrl.config import parse_config
from braidrl.engines.requests import Request
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.spmd.rank_backend import RankBackend


def prepare(case: Mapping[str, Any]) -> Turn:
    rows, group, lengths = len(case["lengths"]), case["group"], case["lengths"]
    tree = {
        "flow": "grpo",
        "algorithm": {"kl_coef": 0.0},
        "model": case["model"],
        "data": {"train": case["data"], "shuffle": False},
        "rollout": {"samples_per_prompt": group, "max_response_tokens": max(lengths), "slots": rows},
        "trainer": {
            "steps": 1_000_000,
            "prompts_per_step": rows // group,
            "learning_rate": 1e-6,
            "checkpoint_every": 0,
            "max_tokens_per_device": case.get("max_tokens", 16384),
        },
        "evaluation": {"every": 0},
        "output": mkdtemp(prefix="braid-bench-"),
        "name": "run",
        "device": "cpu",
        "dtype": case["dtype"],
        "threads": case["threads"],
    }
    for section, settings in case.get("settings", {}).items():
        tree[section] = {**tree.get(section, {}), **settings}
    run = TrainingRun(parse_config(tree))
    assert isinstance(run.backend, RankBackend)
    force_lengths(run.backend.executor.engines["actor"], lengths, group, case["prompt_tokens"])
    images = {"images": case["images"]} if "images" in case else {}

    def turn() -> dict[str, float]:
        run._one_step(run._snapshot())
        found = read_metrics(run.folder)[-1]
        stages = {name: value for name, value in found.items() if name.startswith("time/")}
        return {"tokens": total_tokens(case), **images, "peak_mebibytes": peak_mebibytes(), **stages}

    turn()
    return turn


def total_tokens(case: Mapping[str, Any]) -> int:
    """Return the prompt and response tokens of a step."""
    return case["prompt_tokens"] * len(case["lengths"]) + sum(case["lengths"])


def force_lengths(engine: Any, lengths: list[int], group: int, prompt: int) -> None:
    """Give each row as many tokens as its counterpart on the other side has; check its prompt's tokens."""
    add = engine.add

    def add_with_length(request: Request) -> None:
        _, number, sample = request.uid
        assert len(request.prompt) == prompt, len(request.prompt)
        count = lengths[(number * group + sample) % len(lengths)]
        add(replace(request, sampling=replace(request.sampling, max_tokens=count, ends=False)))

    engine.add = add_with_length
