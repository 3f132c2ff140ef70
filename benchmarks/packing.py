"""Packing against padding on real and long-tailed lengths, the balance of rows over ranks, and the memory of
log-probs.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.case import Case, Found, Rates
from benchmarks.comparison import Comparison
from benchmarks.duel import Side
from benchmarks.shapes import Shape, long_tail, model_folder
from braidrl.data.packing import balanced_partition, imbalance

# Quantiles, in steps of 1/32, of question plus answer tokens in GSM8K's training set, under a byte-level BPE of 8,192
# tokens trained on it.
GSM8K_QUANTILES = [
    47,
    75,
    83,
    88,
    93,
    98,
    102,
    106,
    109,
    113,
    117,
    120,
    124,
    129,
    133,
    137,
    141,
    146,
    150,
    155,
    161,
    166,
    171,
    177,
    183,
    189,
    197,
    207,
    218,
    231,
    248,
    276,
    443,
]
ROWS = 128
PADDED_ROWS = 16
RANKS = (8, 256)
ROWS_PER_RANK = 32


def packing() -> list[Case]:
    """Return the cases: a training step packed and padded, the balance over ranks, the memory of log-probs."""
    return [
        packing_case("GSM8K's lengths", gsm8k_lengths(ROWS)),
        packing_case("log-normal lengths, the longest ten times the median", long_tail(ROWS, 64, 10)),
        *(balance_case(ranks) for ranks in RANKS),
        log_prob_memory(),
    ]


def packing_case(name: str, lengths: list[int]) -> Comparison:
    shape = Shape(128)
    case = {"model": str(model_folder(shape)), "lengths": lengths, "dtype": "float32", "vocabulary": shape.vocabulary}
    sides = [
        Side(way, "packing_braid", {**case, "way": way, "padded_rows": PADDED_ROWS}) for way in ("packed", "padded")
    ]
    return Comparison(f"training step, {name}", sides, goals=[("packed", "padded", 1.0)])


def gsm8k_lengths(rows: int) -> list[int]:
    """Return lengths distributed as in GSM8K, in random order."""
    parts = len(GSM8K_QUANTILES) - 1
    lengths = []
    for row in range(rows):
        part, within = divmod((row + 0.5) / rows * parts, 1.0)
        low, high = GSM8K_QUANTILES[int(part)], GSM8K_QUANTILES[int(part) + 1]
        lengths.append(round(low + within * (high - low)))
    random.Random(3).shuffle(lengths)
    return lengths


@dataclass(frozen=True)
class Balance(Case):
    """Tokens of the fullest rank over the mean, for each way to partition rows. Nothing is timed."""

    ranks: int = 1
    lengths: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def summary(self, found: Found, rates: Rates) -> dict[str, Any]:
        return {
            name: {
                "in turn": imbalance(lengths, [range(rank, len(lengths), self.ranks) for rank in range(self.ranks)]),
                "equally many rows": imbalance(lengths, balanced_partition(lengths, self.ranks, equal_size=True)),
                "any number of rows": imbalance(lengths, balanced_partition(lengths, self.ranks)),
            }
            for name, lengths in self.lengths.items()
        }

    def table(self, summary: Mapping[str, Any]) -> str:
        return "\n".join(
            f"  {name}: " + ", ".join(f"{way} {over:.4f}" for way, over in ways.items())
            for name, ways in summary.items()
        )


def balance_case(ranks: int) -> Balance:
    rows = ranks * ROWS_PER_RANK
    lengths = {"GSM8K": gsm8k_lengths(rows), "log-normal": long_tail(rows, 512, 10)}
    return Balance(
        f"fullest rank over the mean, {ranks} ranks, {ROWS_PER_RANK} rows for each", [], ranks=ranks, lengths=lengths
    )


def log_prob_memory() -> Comparison:
    """Return the case that computes log-probs of 8,192 tokens at a vocabulary of 152,064."""
    shape = Shape(152_064)
    case = {
        "model": str(model_folder(shape)),
        "rows": 64,
        "tokens": 128,
        "vocabulary": shape.vocabulary,
        "dtype": "float32",
    }
    sides = [Side(way, "log_probs_braid", {**case, "way": way}) for way in ("chunked", "plain")]
    name = f"peak memory of log-probs, vocabulary {shape.vocabulary}, 8192 tokens"
    goals = [("chunked", "plain", 1.0)]
    return Comparison(name, sides, rounds=1, at_once=False, goals=goals, measure="peak_mebibytes")
