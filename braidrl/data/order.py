"""Which example an admission number stands for: pure functions of the number, so that any rank can ask for any of them.

number n ──WeightedDraw──▶ source s, and how many before n came from s ──permutation of (seed, s, epoch)──▶ example
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

# Shares of the weights are fractions of this, so that counting is exact for any admission number.
UNIT = 1 << 32


class WeightedDraw:
    """Deals numbers 0, 1, 2, ... out to sources in proportion to `weights`.

    Of any first n numbers, source 0 has floor((n * share + phase) / UNIT), the others share the rest in the same way: an even
    spread, closer to the weights than independent draws are, and counted without walking through them. The seed sets the phases.
    """

    def __init__(self, weights: Sequence[float], seed: int) -> None:
        if not weights or min(weights) <= 0:
            raise ValueError(f"weights must be positive and at least one, got {list(weights)}")
        rest = [sum(weights[i:]) for i in range(len(weights))]
        self.shares = [min(UNIT - 1, max(1, round(UNIT * w / r))) for w, r in zip(weights[:-1], rest, strict=False)]
        self.phases = [seeded_key(seed, "source", i) % UNIT for i in range(len(self.shares))]

    def locate(self, number: int) -> tuple[int, int]:
        """(source, how many earlier numbers it has) of one number."""
        for source, (share, phase) in enumerate(zip(self.shares, self.phases, strict=True)):
            before = (number * share + phase) // UNIT
            if ((number + 1) * share + phase) // UNIT > before:
                return source, before
            number -= before
        return len(self.shares), number

    def counts(self, numbers: int) -> list[int]:
        """Return how many of the first `numbers` each source has."""
        counts = []
        for share, phase in zip(self.shares, self.phases, strict=True):
            counts.append((numbers * share + phase) // UNIT)
            numbers -= counts[-1]
        return [*counts, numbers]


# A step may straddle the end of an epoch in each source; older orders are not needed again.
@lru_cache(maxsize=32)
def permutation(seed: int, source: int, epoch: int, size: int) -> np.ndarray:
    """Return the order (size,) int64 of a source's examples in one epoch; Philox keeps its stream between numpy releases."""
    keys = np.random.Philox(key=seeded_key(seed, "epoch", source, epoch)).random_raw(size)
    return np.argsort(keys, kind="stable")


def seeded_key(seed: int, purpose: str, *counters: int) -> int:
    """128 bits that depend on all arguments and on nothing else."""
    text = f"{purpose}:{seed}:{':'.join(map(str, counters))}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
