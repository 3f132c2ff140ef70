"""Predict published runs without fitting to them, and the placements that HybridFlow compares.

    python -m benchmarks.planning.published           every run of benchmarks/published/runs.yaml beside what its source
                                                      states
    python -m benchmarks.planning.published hybridflow    which placement wins for PPO at 8 to 128 devices
    python -m benchmarks.planning.published scale         PPO with four 70B roles on 8 to 1,024 devices

Each writes benchmarks/results/plan_NAME.json.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import NormalDist
from tempfile import mkdtemp
from typing import Any

import numpy as np
import yaml
from transformers import LlamaConfig

from braidrl.cluster.device_kinds import Cluster, read_cluster
from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.plan.choices import Choice, Choices
from braidrl.plan.problem import Problem
from braidrl.plan.search import Plan, Search, synchronous_plan
from braidrl.plan.work import Lengths
from braidrl.runtimes.prepare.run_flow import build_flow

ROOT = Path(__file__).parent.parent
QUERIES = 264_292
"""Prompts of an epoch in DeepSpeed-Chat, from its page of benchmark settings."""
PROMPT, DEVIATION = 128, 0.5
LLAMA = {
    "7b": (4096, 11008, 32, 32, 32, 128, 32000, False),
    "13b": (5120, 13824, 40, 40, 40, 128, 32000, False),
    "34b": (8192, 22016, 48, 64, 8, 128, 32000, False),
    "70b": (8192, 28672, 80, 64, 8, 128, 32000, False),
}
"""Sizes of Llama 2 and Code Llama 34B, as their configurations state them."""
PAPER = {
    ("13b", 16): "colocate",
    ("13b", 32): "colocate",
    ("13b", 64): "colocate",
    ("13b", 96): "split",
    ("13b", 128): "standalone",
    ("34b", 16): "colocate",
    ("34b", 32): "colocate",
    ("34b", 64): "colocate",
    ("34b", 96): "split",
    ("34b", 128): "split",
}
"""HybridFlow, arXiv 2409.19256, section 8.3 on figure 12."""
PIPELINES = {"7b": 1, "13b": 1, "34b": 4, "70b": 8}


def write_sizes(folder: Path, sizes: Any) -> Path:
    """Write a model's configuration without weights."""
    width, intermediate, layers, heads, key_value, head, vocabulary, tied = sizes
    LlamaConfig(
        hidden_size=width,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value,
        head_dim=head,
        vocab_size=vocabulary,
        tie_word_embeddings=tied,
        max_position_embeddings=131072,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def lengths_of(run: dict[str, Any]) -> Lengths:
    """Return a published run's lengths: all alike, or log-normal about its mean."""
    rows, prompt = run["rows"], run.get("prompt", PROMPT)
    mean, most = run["mean"] - prompt, run["longest"] - prompt
    if mean == most:
        return Lengths(np.full(rows, prompt), np.full(rows, mean))
    quantiles = np.array([NormalDist().inv_cdf((i + 0.5) / rows) for i in range(rows)])
    low, high = 1.0, float(most)
    for _ in range(60):
        median = (low + high) / 2
        drawn = np.minimum(most, median * np.exp(DEVIATION * quantiles))
        low, high = (median, high) if drawn.mean() < mean else (low, median)
    return Lengths(np.full(rows, prompt), drawn.round().astype(np.int64))


def problem_of(run: dict[str, Any], folders: dict[str, Path], cluster: Cluster) -> Problem:
    """Return a published run as a problem."""
    scalar = folders[run.get("critic", run["actor"])]
    tree: dict[str, Any] = {
        "flow": run["flow"],
        "model": str(folders[run["actor"]]),
        "dtype": "bfloat16",
        "data": {"max_prompt_tokens": run.get("prompt", PROMPT)},
        "algorithm": {"old": "recompute"},
        "rollout": {
            "samples_per_prompt": run["samples"],
            "max_response_tokens": run["longest"] - run.get("prompt", PROMPT),
            "slots": 256,
        },
        "trainer": {
            "prompts_per_step": run["rows"] // run["samples"],
            "rows_per_update": run["rows"] // run["updates"],
            "max_tokens_per_device": max(8192, run["longest"]),
        },
    }
    if run["flow"] == "ppo":
        tree["roles"] = {"critic": {"model": str(scalar)}, "reward": {"model": str(scalar)}}
        if "lora" in run:
            tree["roles"]["actor"] = {"lora": {"rank": run["lora"]}}
    config = parse_config(tree)
    return Problem(config, build_flow(config), cluster, lengths_of(run))


def allowed_by(run: dict[str, Any]) -> Callable[[Choice], bool]:
    """Return whether a choice matches a published run: the training layout of roles that train, and the width of
    engines.
    """
    wanted, engine = run.get("train", {}), run.get("generate")

    def allowed(choice: Choice) -> bool:
        layout, use = choice.use.layout, choice.use
        lies = all(getattr(layout, axis) == value for axis, value in wanted.items())
        if "shard" in wanted:
            lies = lies and layout.tensor == layout.pipeline == 1
        decodes = use.engine is None or engine is None or use.engine.divisor == engine
        again = not use.trained or run.get("checkpointing") in (None, use.checkpointing)
        return decodes and again and use.inference is None and (lies or not use.trained)

    return allowed


def predict(run: dict[str, Any], folders: dict[str, Path]) -> tuple[float, dict[str, float]]:
    """Return a published run's predicted seconds (nan if it does not fit in memory), and the seconds of each stage."""
    problem = problem_of(run, folders, read_cluster(run["devices"]))
    group, roles, allowed = problem.cluster.groups[0], tuple(problem.flow.roles), allowed_by(run)
    if "apart" not in run:
        plan = Search(problem, allowed=allowed).best_of((roles,))
        if plan is None:
            return math.nan, {}
        return plan.seconds, {name: round(float(cost.seconds), 1) for name, cost in plan.costs.items()}
    choices = Choices(problem, allowed)
    engines = choices.of_set(("actor",), group, run["apart"], "generate")
    models = choices.of_set(roles, group, group.size - run["apart"], "model")
    assert engines is not None and models is not None, run["name"]
    costs = {name: round(float(cost.seconds), 1) for name, cost in {**engines.costs, **models.costs}.items()}
    # One step off: generation overlaps with training.
    return max(engines.busy, models.busy), costs


def published() -> list[dict[str, Any]]:
    """Return a line for each published run."""
    read = yaml.safe_load((ROOT / "published" / "runs.yaml").read_text())
    folder = Path(mkdtemp())
    folders = {name: write_sizes(folder / name, sizes) for name, sizes in read["models"].items()}
    lines = []
    for run in read["runs"]:
        stated = run.get("seconds") or run["hours"] * 3600 / (QUERIES / run["rows"])
        seconds, stages = predict(run, folders)
        lines.append(
            {
                "run": run["name"],
                "source": run["source"],
                "devices": run["devices"],
                "published_s": round(stated, 1),
                "predicted_s": round(float(seconds), 1),
                "ratio": round(float(seconds / stated), 2),
                "stages": stages,
            }
        )
        print(
            f"{run['name']:34}{run['devices']:16}{stated:9.1f}{seconds:9.1f}{seconds / stated:7.2f}  {stages}",
            flush=True,
        )
    return lines


def ppo(model: Path, cluster: Cluster) -> Problem:
    """Return HybridFlow's experiment: 1,024 prompts and responses of 1,024 tokens each, eight updates."""
    run = {
        "flow": "ppo",
        "actor": "m",
        "rows": 1024,
        "samples": 1,
        "updates": 8,
        "prompt": 1024,
        "mean": 2048,
        "longest": 2048,
    }
    return problem_of(run, {"m": model}, cluster)


def testbed(devices: int) -> Cluster:
    """Return HybridFlow's machines: eight A100-80GB that share 200 Gb/s to the others (section 8.1)."""
    cluster = read_cluster(f"{devices // 8}x8xA100-80GB")
    kinds = {name: kind.model_copy(update={"network": 200e9 / 8 / 8}) for name, kind in cluster.kinds.items()}
    return Cluster(groups=cluster.groups, kinds=kinds)


def megatron(pipeline: int) -> Callable[[Choice], bool]:
    """Return whether a choice matches HybridFlow's runs: Megatron-core 0.6, with training matrices over a node's eight
    devices.

    Args:
        pipeline: the most pipeline ranks (figure 14 has 1 for 7B and 13B, 4 for 34B, 8 for 70B).
    """

    def allowed(choice: Choice) -> bool:
        layout, use = choice.use.layout, choice.use
        grouped = not use.trained or (layout.tensor == 8 and layout.pipeline <= pipeline)
        # Without shards: the gradients of replicas are summed after the backward pass.
        return grouped and layout.shard == "none" and layout.sequence == 1 and use.inference is None

    return allowed


def named_placements(problem: Problem, allowed: Callable[[Choice], bool] | None) -> dict[str, Plan]:
    """Return the best plan that fits in memory for each of HybridFlow's named placements."""
    search, models = Search(problem, keep=1, allowed=allowed), problem.models
    # Split, as NeMo-Aligner does: one half for the roles that generate or provide frozen log-probs, the other for the
    # rest.
    first = tuple(
        role for role, model in models.items() if model.generates or not (model.use.trained or model.use.scalar)
    )
    second = tuple(role for role in models if role not in first)
    (group,) = problem.cluster.groups
    halves = [search.choices.of_set(roles, group, group.size // 2) for roles in (first, second)]
    plans = {
        "colocate": search.best_of((tuple(models),)),
        "split": synchronous_plan(problem, "hybrid", [one for one in halves if one]) if all(halves) else None,
        "standalone": search.best_of(tuple((role,) for role in models)),
    }
    return {name: plan for name, plan in plans.items() if plan}


def hybridflow() -> list[dict[str, Any]]:
    """Return the fastest of HybridFlow's placements for each model and number of devices, with its layouts and with all
    of ours.
    """
    folder, lines = Path(mkdtemp()), []
    for name, sizes in LLAMA.items():
        model = write_sizes(folder / name, sizes)
        for count in (8, 16, 32, 64, 96, 128):
            line: dict[str, Any] = {"model": name, "devices": count, "paper": PAPER.get((name, count), "")}
            for layouts, allowed in (("theirs", megatron(PIPELINES[name])), ("all", None)):
                plans = named_placements(ppo(model, testbed(count)), allowed)
                seconds = {which: round(float(plan.seconds), 1) for which, plan in plans.items()}
                line[layouts] = {
                    "seconds": seconds,
                    "quickest": min(seconds, key=lambda which: seconds[which], default="none"),
                }
            lines.append(line)
            print(line, flush=True)
    return lines


def scale() -> list[dict[str, Any]]:
    """Return the best plan of four 70B roles on 8 to 1,024 devices, and the time that the search took."""
    model, lines = write_sizes(Path(mkdtemp()) / "70b", LLAMA["70b"]), []
    for count in (8, 16, 32, 64, 128, 256, 512, 1024):
        search, began, cpu = (
            Search(ppo(model, read_cluster(f"{count // 8}x8xH100-80GB"))),
            time.perf_counter(),
            time.process_time(),
        )
        line: dict[str, Any] = {"devices": count}
        try:
            plan = search.hybrid()[0]
            line |= {"seconds": round(float(plan.seconds), 1), "placement": plan.name}
        except UserError as error:
            line["refused"] = str(error)
        spent = {"search_s": time.perf_counter() - began, "search_cpu_s": time.process_time() - cpu}
        line |= {name: round(value, 1) for name, value in spent.items()}
        lines.append(line)
        print(line, flush=True)
    return lines


if __name__ == "__main__":
    tables = {"published": published, "hybridflow": hybridflow, "scale": scale}
    for which in sys.argv[1:] or ["published"]:
        result = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "lines": tables[which]()}
        (ROOT / "results" / f"plan_{which}.json").write_text(json.dumps(result, indent=1) + "\n")
