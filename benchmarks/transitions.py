"""Seconds of the transition from training to generation on eight processes by grouping, and an estimate for larger
models and more ranks.

python -m benchmarks.transitions              # measures, and writes benchmarks/results/transitions.json with the model
                                              fitted to it

The model fitted to the medians: a transition takes `seconds` to begin, and `seconds_per_byte` for each byte that a rank
receives. The processes share the machine's cores, so the second figure describes a machine, not a network. The ratios
carry over.
"""

from __future__ import annotations

import datetime
import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.config import parse_config
from braidrl.engines.embedded.sharded_decoding import join_generation_groups, load_for_decoding
from braidrl.training.backends import BackendSpec
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.shards import weight_parts
from tests.weights.transitions import GROUPINGS, LAYOUTS

RESULT = Path("benchmarks/results/transitions.json")
RANKS, TURNS, LIMIT_BYTES, WAIT_S = 8, 5, 8 << 20, 600.0
DRAWN = {"7B": (7e9, 1, 8, 1, 2), "13B": (13e9, 1, 8, 1, 4), "34B": (34e9, 2, 8, 1, 4), "70B": (70e9, 4, 8, 1, 8)}
"""Parameters; pipeline and tensor ranks of training and of generation, on 1,024 ranks."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder))
        measured = run_ranks("benchmarks.transitions:measure", {"model": folder}, RANKS, WAIT_S)
    fitted = fit([case for some in measured.values() for case in some.values()])
    result = {
        "benchmark": "transitions",
        "date": datetime.date.today().isoformat(),
        "ranks": RANKS,
        "turns": TURNS,
        "cases": measured,
        "fitted": fitted,
        "drawn": {name: drawn(*about, fitted) for name, about in DRAWN.items()},
    }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["cases"], indent=1), json.dumps(fitted), json.dumps(result["drawn"], indent=1), sep="\n")


def write_model(folder: Path) -> None:
    """Write a model of 30 million parameters whose tensors divide evenly over eight ranks."""
    config = Qwen3Config(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def measure(world: World, task: Mapping[str, Any]) -> dict[str, dict[str, dict[str, float]]]:
    """Return, on each rank, the slowest rank's seconds, the most bytes of a rank, and the rounds, by layouts and
    grouping.
    """
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for name, ((p, t, d), generation) in LAYOUTS.items():
        for grouping in GROUPINGS:
            training = {"shard": "full"} if grouping == "gather" else {"pipeline": p, "tensor": t, "data": d}
            layout = GenerationLayout(*generation, grouping)  # type: ignore[arg-type]
            found.setdefault(name, {})[grouping] = transitions(world, task["model"], training, layout)
    return found


def transitions(world: World, model: str, training: dict[str, Any], layout: GenerationLayout) -> dict[str, float]:
    """Return the median over turns. The first turn, which touches memory first, is left out."""
    world.at(f"{training} {layout}")
    weights = made(world, model, training, layout)
    turns = []
    for _ in range(TURNS + 1):
        dist.barrier()
        volume = weights.enter()
        assert volume is not None
        weights.leave()
        said = json.dumps([volume.seconds, volume.received, volume.rounds, weights.peak_bytes, weights.redundant_bytes])
        turns.append([json.loads(bytes(part)) for part in world.gather("turn", said.encode())])
    seconds = [max(rank[0] for rank in turn) for turn in turns[1:]]
    received, rounds, peak, redundant = (max(rank[n] for rank in turns[-1]) for n in (1, 2, 3, 4))
    return {
        "seconds": median(seconds),
        "least_seconds": min(seconds),
        "most_seconds": max(seconds),
        "received": received,
        "rounds": rounds,
        "peak": peak,
        "redundant": redundant,
    }


def made(world: World, model: str, training: dict[str, Any], layout: GenerationLayout) -> GenerationWeights:
    """Return a rank's weights of both phases."""
    config = parse_config({"flow": "grpo", "model": model, "data": {"train": "none"}, "trainer": {"layout": training}})
    worker = RoleWorker(BackendSpec("actor", config, False, DataParallel(world.group, world)))
    resolved = config.trainer.layout.resolve(world.size)
    ranks = join_generation_groups(layout.groups(resolved))
    module, slices = load_for_decoding(worker.path, worker.dtype, "cpu", *ranks)
    return GenerationWeights(
        worker.weights,
        resolved,
        worker.ranks,
        partial(weight_parts, module, slices),
        layout,
        LIMIT_BYTES,
    )


def fit(cases: list[dict[str, float]]) -> dict[str, float]:
    """Return seconds per byte and to begin by least squares, and the mean error as a share of the time."""
    known = np.array([[case["received"], 1.0] for case in cases])
    seconds = np.array([case["seconds"] for case in cases])
    # Relative errors: a short transition counts as much as a long one.
    (per_byte, begin), *_ = np.linalg.lstsq(known / seconds[:, None], np.ones(len(cases)), rcond=None)
    error = float(np.abs(known @ [per_byte, begin] / seconds - 1).mean())
    return {"seconds_per_byte": float(per_byte), "seconds": float(begin), "mean_error": error}


def drawn(parameters: float, p: int, t: int, p_g: int, t_g: int, fitted: Mapping[str, float]) -> dict[str, float]:
    """Return the bytes that a rank of 1,024 receives in bfloat16 by each formula, and the relative gain of
    intervals.
    """
    model, ranks = 2 * parameters, 1024
    shares = {
        "interval": (t * p - t_g * p_g) / (t_g * p_g * t * p),
        "neighbour": (t * p - 1) / (t * p),
        "gather": (ranks - 1) / ranks,
    }
    received = {name: share * model for name, share in shares.items()}
    seconds = {name: size * fitted["seconds_per_byte"] + fitted["seconds"] for name, size in received.items()}
    less = {f"less_than_{name}": 1 - seconds["interval"] / seconds[name] for name in ("neighbour", "gather")}
    return {**{f"{name}_bytes": size for name, size in received.items()}, **less}


if __name__ == "__main__":
    main()
