"""A step's seconds over ranks: computing, what the played ranks measured, and a network of latency and bandwidth.

    python -m benchmarks.scale.network            # from benchmarks/results/ranks.json

step(N) = computing + own Python seconds(N) + rounds of messages(N) + gradients(N)

Weak scaling: each rank has equal rows, so that computing stays. The efficiency at N ranks is step(64) / step(N).
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULT = Path(__file__).parents[1] / "results" / "ranks.json"
COLLECTIVES, BASE, DISTFLOW = 26, 64, (512, 0.805)
"""Collectives of messages in a played step; the ranks that efficiency refers to; what DistFlow published for 512."""


@dataclass(frozen=True)
class Network:
    """Links between ranks."""

    latency_s: float = 20e-6
    gib_per_s: float = 25.0
    oversubscription: float = 1.0
    """How many times less bandwidth all ranks have together across the network's middle than at their own links."""

    def message_rounds(self, ranks: int, sent_bytes: float) -> float:
        """Return the seconds of a step's collectives of messages: up and down a tree, or as many rounds of Bruck."""
        rounds = COLLECTIVES * 2 * math.ceil(math.log2(ranks))
        return rounds * self.latency_s + sent_bytes * self.oversubscription / (self.gib_per_s * 2**30)

    def all_reduce(self, ranks: int, size_bytes: float, rings: int = 1) -> float:
        """Return the seconds of sums in rings: each part of a tensor passes every rank twice."""
        steps = 2 * (ranks - 1)
        moved = 2 * size_bytes * (ranks - 1) / ranks
        return rings * steps * self.latency_s + moved * self.oversubscription / (self.gib_per_s * 2**30)


def step_seconds(played: dict[str, Any], computing_s: float, gradient_bytes: float, network: Network) -> float:
    """Return the seconds of a step of the slowest played rank."""
    ranks, part = played["ranks"], played["parts"]["step"]
    return (
        computing_s
        + part["seconds"]
        + network.message_rounds(ranks, part["bytes"])
        + network.all_reduce(ranks, gradient_bytes)
    )


def main() -> None:
    every = json.loads(RESULT.read_text())["played"]
    slowest = {ranks: max((one for one in every if one["ranks"] == ranks), key=own_seconds) for ranks in sizes(every)}
    cases = [(c, b, o) for c in (10.0, 60.0) for b in (6e9, 28e9) for o in (1.0, 4.0)]
    print("| computing, s | gradients, GB | oversubscription |" + "".join(f" {n:,} ranks |" for n in slowest))
    print("|---" * (3 + len(slowest)) + "|")
    for computing, size, over in cases:
        network = Network(oversubscription=over)
        seconds = {n: step_seconds(one, computing, size, network) for n, one in slowest.items()}
        shares = "".join(f" {seconds[BASE] / value:.1%} |" for value in seconds.values())
        print(f"| {computing:g} | {size / 1e9:g} | {over:g} |{shares}")
    print(f"DistFlow, published: {DISTFLOW[1]:.1%} at {DISTFLOW[0]} ranks")


def own_seconds(played: dict[str, Any]) -> float:
    return float(played["parts"]["step"]["seconds"])


def sizes(every: list[dict[str, Any]]) -> list[int]:
    return sorted({one["ranks"] for one in every})


if __name__ == "__main__":
    main()
