"""What ranks with layouts do in tests: one case after the other on the same processes, each compared with one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.world import World
from braidrl.config import Config, parse_config
from braidrl.data.rows import Rows
from braidrl.models.objective import Objective, denominators
from braidrl.models.parts import whole
from braidrl.models.worker import DecoderWorker
from braidrl.observe.metrics import Sums
from braidrl.runtimes.iteration import group_tokens
from tests.tiny import TOKENIZER, settings

OBJECTIVE: dict[str, Any] = {"loss": "clip", "aggregate": "token-mean", "entropy_coef": 0.01}
Found = dict[str, torch.Tensor]


def make_rows() -> Rows:
    """Twelve rows of very different lengths, from 2 to 60 tokens."""
    draw = torch.Generator().manual_seed(5)
    lengths = torch.tensor([2, 60, 3, 5, 9, 41, 2, 4, 17, 3, 28, 6])
    prompts = (lengths // 3).clamp(min=1)
    actions, count = lengths - prompts, len(lengths)
    mask = torch.cat([torch.arange(n) >= p for n, p in zip(lengths.tolist(), prompts.tolist(), strict=True)])
    tokens = torch.randint(0, len(TOKENIZER), (int(lengths.sum()),), generator=draw)
    old = -2.5 + 0.3 * torch.randn(int(actions.sum()), generator=draw, dtype=torch.float64)
    rows = Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64), "group": torch.arange(count) // 2,
            "sample": torch.arange(count) % 2, "length": lengths, "action_tokens": actions,
            "advantage": torch.randn(count, generator=draw, dtype=torch.float64),
            "tokens": Ragged.from_lengths(tokens, lengths), "action_mask": Ragged.from_lengths(mask, lengths),
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
            "old_log_probs": Ragged.from_lengths(old, actions),
        }
    )  # fmt: skip
    return rows.with_columns({"group_tokens": group_tokens(rows)})


def config_of(model: Path | str, layout: dict[str, Any] | None = None, **more: Any) -> Config:
    trainer = {
        "max_tokens_per_device": 64, "max_grad_norm": 0.5, "layout": layout or {}, **more.pop("trainer", {})
    }  # fmt: skip
    return parse_config(settings(Path("."), Path(model), Path("none.jsonl"), dtype="float64", trainer=trainer, **more))


def owners(count: int, ranks: int) -> torch.Tensor:
    """The last rank gets no row."""
    return torch.arange(count) % max(1, ranks - 1)


def one_step(worker: DecoderWorker, rows: Rows, mine: torch.Tensor, sums: Sums) -> Found:
    """Log-probs of own rows, then gradients, norm and weights of one optimizer step on all of them."""
    objective, own = Objective.of("actor", OBJECTIVE), rows.take(mine)
    found = {"log_probs": worker.log_probs(own).values}
    half = len(own) // 2
    for part in (own.take(list(range(half))), own.take(list(range(half, len(own))))):
        worker.accumulate(objective, part, sums)
    norm = worker.step({"tokens": denominators(rows)["tokens"]}, 1)
    assert norm is not None and worker.optimizer is not None
    found["norm"] = torch.tensor(norm, dtype=torch.float64)
    found |= {f"weight {name}": whole(p) for name, p in worker.model.named_parameters()}
    return found


def alone(config: Config) -> Found:
    rows = make_rows()
    return one_step(DecoderWorker("actor", config, train=True), rows, torch.arange(len(rows)), Sums())


def compare(world: World, config: Config, model: str) -> list[str]:
    """On a rank: what differs from one process by more than 1e-7."""
    rows = make_rows()
    mine = (owners(len(rows), world.size) == world.rank).nonzero().flatten()
    worker = DecoderWorker("actor", config, True, world.data_parallel)
    found, wanted = one_step(worker, rows, mine, Sums()), alone(config_of(model))
    actions = Ragged.from_lengths(wanted["log_probs"], rows["action_tokens"]).take(mine)
    wanted["log_probs"] = actions.values
    return [
        f"rank {world.rank}: {name} differs by {float((found[name] - wanted[name]).abs().max())}"
        for name in wanted
        if not torch.allclose(found[name].double(), wanted[name].double(), rtol=1e-7, atol=1e-7)
    ]


def compare_all(world: World, task: dict[str, Any]) -> dict[str, list[str]]:
    torch.set_num_threads(1)
    found = {}
    for name, (model, layout) in task["cases"].items():
        world.at(name)
        found[name] = compare(world, config_of(model, layout), model)
        if world.rank == 0:
            import time

            print(name, found[name], time.time() % 1000, flush=True)
    return found
