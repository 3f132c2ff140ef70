"""Rows are partitioned by length, and the rows of a group stay on one rank if a loss compares them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from braidrl.config import parse_config
from braidrl.data.rows import Rows
from braidrl.runtimes.hybrid.group import by_cost
from tests.invariants.traces import assert_same_weights, merged, weights
from tests.recipes.tiny import write_data
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop

CONFIG = parse_config({"flow": "grpo", "model": "unread"})


def test_groups_stay_whole_at_the_price_of_balance() -> None:
    index = Rows({"group": torch.tensor([0, 0, 1, 1, 2, 2]), "length": torch.tensor([10, 1, 1, 10, 6, 6])})
    apart, whole = by_cost(index, 2, CONFIG), by_cost(index, 2, CONFIG, whole_groups=True)
    tokens = [[int(index["length"][rows].sum()) for rows in part] for part in (apart, whole)]
    groups = [[set(index["group"][rows].tolist()) for rows in part] for part in (apart, whole)]
    assert tokens[0] == [17, 17] and groups[0][0] & groups[0][1]
    assert sorted(tokens[1]) in ([11, 23], [12, 22]) and not groups[1][0] & groups[1][1]


def test_pairs_distributed_over_ranks_train_as_in_one_process(
    workshop: Workshop, warm_cluster: WarmCluster, tmp_path: Path
) -> None:
    """Return five pairs on two ranks: single rows could be split equally, pairs cannot."""
    settings: dict[str, Any] = {
        "flow": "dpo",
        "dtype": "float64",
        "data": {"train": str(write_data(tmp_path))},
        "rollout": {"samples_per_prompt": 2},
        "trainer": {"steps": 2, "prompts_per_step": 5, "checkpoint_every": 1},
    }
    ours = workshop.run("hybrid", **merged(settings, {"runtime": "hybrid", "workers": 2}))
    theirs = workshop.run("eager", **settings)
    assert_same_weights(weights(ours / "checkpoints" / "step-2"), weights(theirs / "checkpoints" / "step-2"))
