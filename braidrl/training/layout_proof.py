"""The layout proof: on a decoder's tiny twin, two ranks must compute the log-probs and gradient norm of one process."""

import json
import tempfile
from typing import Any

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.config import parse_config
from braidrl.data.rows import Rows
from braidrl.errors import UserError, WorkerError, first_line
from braidrl.observe.metrics import Sums
from braidrl.training.decoders.body import ForwardPlan
from braidrl.training.decoders.proof import BOUND, Finding, Twin, quietly
from braidrl.training.objective import Objective
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.roles.make import DecoderWorker

RANKS = 2
LAYOUTS: dict[str, dict[str, Any]] = {
    "data 2": {"data": 2}, "shard full": {"shard": "full"}, "sequence 2": {"sequence": 2}, "tensor 2": {"tensor": 2},
    "pipeline 2": {"pipeline": 2},
}  # fmt: skip
LIMIT_S = 60.0


def layout_findings(twin: Twin, plan: ForwardPlan) -> list[Finding]:
    """Run two ranks on this machine for each layout, and compare them with one process."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        twin.model(plan).save_pretrained(folder)
        alone = figures(None, folder, {}, twin.rows)
        for name, layout in LAYOUTS.items():
            if plan.by_rows and name != "data 2":
                found.append(Finding(f"{name} equals one process", float("inf"), BOUND, "its attention is its own"))
                continue
            task = {"folder": folder, "layout": layout, "rows": [row.tolist() for row in twin.rows]}
            try:
                merged = run_ranks(f"{__name__}:of_rank", task, RANKS, LIMIT_S)
                pairs = [(merged["log_probs"][n], row) for n, row in alone["log_probs"].items()]
                each = [abs(a - b) for one, row in pairs for a, b in zip(one, row, strict=True)]
                value = max(*each, abs(merged["norm"] - alone["norm"]) / alone["norm"])
                found.append(Finding(f"{name} equals one process", value, BOUND))
            except (UserError, WorkerError) as error:
                found.append(Finding(f"{name} equals one process", float("inf"), BOUND, first_line(error)))
    return found


def of_rank(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """Compute on one rank; return the merged figures of all ranks."""
    rows = [torch.tensor(row) for row in task["rows"]]
    with quietly():
        own = figures(world, task["folder"], task["layout"], rows)
    parts = [json.loads(bytes(part)) for part in world.gather("figures", json.dumps(own).encode())]
    return {"norm": parts[0]["norm"], "log_probs": {k: v for part in parts for k, v in part["log_probs"].items()}}


def figures(world: World | None, folder: str, layout: dict[str, Any], rows: list[torch.Tensor]) -> dict[str, Any]:
    """Return the log-probs of this rank's rows by row number, and the global gradient norm.

    Every token of a row but the first is an action.
    """
    torch.set_num_threads(1)
    rank, size = (world.rank, world.size) if world else (0, 1)
    settings = {"flow": "sft", "model": folder, "device": "cpu", "dtype": "float32", "data": {"train": "none.jsonl"}}
    config = parse_config(
        {**settings, "trainer": {"layout": layout, "max_tokens_per_device": 64, "max_grad_norm": 1.0}}
    )
    ranks = DataParallel(world.group, world) if world else DataParallel()
    worker = DecoderWorker("actor", config, True, ranks)
    numbers = [n for n in range(len(rows)) if n % size == rank and len(rows[n]) > 1]
    tokens = [rows[n] for n in numbers]
    lengths = torch.tensor([len(row) for row in tokens])
    mask = torch.cat([torch.arange(len(row)) > 0 for row in tokens])
    mine = Rows(
        {
            "source": torch.zeros_like(lengths), "group": torch.tensor(numbers), "sample": torch.zeros_like(lengths),
            "length": lengths, "action_tokens": lengths - 1, "tokens": Ragged.from_lengths(torch.cat(tokens), lengths),
            "action_mask": Ragged.from_lengths(mask, lengths),
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
        }
    )  # fmt: skip
    log_probs = worker.forward("log_probs", mine)
    worker.forward_backward(Objective.of("actor", {"loss": "sft", "aggregate": "token-mean"}), mine, Sums())
    norm = worker.optim_step({"tokens": float(sum(len(row) - 1 for row in rows))}, 1)
    values = dict(zip(map(str, numbers), log_probs.tolist(), strict=True))
    return {"norm": norm, "log_probs": values}
