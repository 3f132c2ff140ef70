"""Several runs of the same ranks, one after the other on the same processes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.config import parse_config
from braidrl.data.codec import unpack_rows
from braidrl.data.rows import Rows
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.spmd.rank_backend import RankBackend
from tests.runtimes.spmd.moving import received_by

WAIT_S = 200.0


def run_all(world: World, task: dict[str, Any]) -> list[list[dict[str, int]]]:
    """Train one configuration after the other on each rank; return the rows that each rank received through the buffer,
    and the most that it made at once.
    """
    counts = []
    for tree in task["runs"]:
        with received_by(world) as received, TrainingRun(parse_config(tree), world=world) as run:
            assert isinstance(run.backend, RankBackend)
            make, made = run.backend.store.make, [0]

            def noted(*arguments: Any, make: Any = make, made: list[int] = made) -> Rows:
                rows: Rows = make(*arguments)
                made.append(len(rows))
                return rows

            run.backend.store.make = noted  # type: ignore[method-assign]
            run.train()
            rows = sum(len(unpack_rows(message)) for message in received)
            count = {"rows": rows, "bytes": sum(map(len, received)), "made": max(made)}
            counts.append([json.loads(bytes(c)) for c in world.gather("counts", json.dumps(count).encode())])
    return counts


def run_in_ranks(trees: Sequence[dict[str, Any]], workers: int) -> list[list[dict[str, int]]]:
    """Train every configuration; return its counts, rank by rank."""
    counts: list[list[dict[str, int]]] = run_ranks(
        "tests.runtimes.spmd.ranks:run_all", {"runs": list(trees)}, workers, WAIT_S
    )
    return counts
