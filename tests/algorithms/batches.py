"""Small batches for the tests of this folder: drawn by hypothesis, or fixed by a seed."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

import braidrl.algorithms.library  # noqa: F401  (registers what comes with Braid)
from braidrl.algorithms.ragged import Ragged, offsets_of
from braidrl.algorithms.registry import Entry, Registry

numbers = st.floats(-3, 3, allow_nan=False, width=32)
scores = st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0])


def built_in(registry: Registry) -> dict[str, Entry]:
    """Return Braid's own registered functions, without those that other tests in this process have registered."""
    return {n: e for n, e in registry.items() if e.function.__module__.startswith("braidrl.")}


def ragged_rows(elements: st.SearchStrategy[float] = numbers, min_len: int = 0) -> st.SearchStrategy[list[list[float]]]:
    """Draw rows of different lengths, some empty."""
    return st.lists(st.lists(elements, min_size=min_len, max_size=6), min_size=1, max_size=5)


@st.composite
def grouped(draw: st.DrawFn, elements: st.SearchStrategy[float] = scores) -> tuple[list[float], list[int]]:
    """Draw one number per row and the rows' groups, in any order, with groups of at least one row."""
    groups = draw(st.lists(st.integers(0, 3).map(lambda g: 7 * g + 2), min_size=1, max_size=12))
    return [draw(elements) for _ in groups], groups


def ragged(rows: list[list[float]]) -> Ragged:
    return Ragged.from_rows(rows, torch.float64)


def floats(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_columns(seed: int, dtype: torch.dtype = torch.float64, pairs: int = 3) -> dict[str, Any]:
    """Return every column that a loss may read, for 2·pairs rows of 1 to 5 action tokens; rows 2i and 2i + 1 are a
    pair.
    """
    random = torch.Generator().manual_seed(seed)
    rows = 2 * pairs
    lengths = torch.randint(1, 6, (rows,), generator=random)
    tokens = int(lengths.sum())

    def normal(count: int, scale: float) -> Tensor:
        return scale * torch.randn(count, generator=random, dtype=torch.float64).to(dtype)

    old = -normal(tokens, 1.0).abs() - 0.1
    return {
        "log_probs": old + normal(tokens, 0.3),
        "old_log_probs": old,
        "rollout_log_probs": old + normal(tokens, 0.2),
        "ref_log_probs": old + normal(tokens, 0.3),
        "advantages": normal(rows, 1.0).repeat_interleave(lengths),
        "high_covariance": (torch.rand(tokens, generator=random) < 0.3).to(dtype),
        "values": normal(tokens, 1.0),
        "old_values": normal(tokens, 1.0),
        "returns": normal(tokens, 1.0),
        "scores": normal(rows, 1.0),
        "offsets": offsets_of(lengths),
        "group": torch.arange(rows) // 2 + 11,
        "sample": torch.arange(rows) % 2,
    }


PER_ROW = ("scores", "group", "sample")


def take_rows(columns: dict[str, Any], rows: list[int]) -> dict[str, Any]:
    """Return the same columns for some of the rows, in the given order."""
    chosen, offsets = torch.tensor(rows, dtype=torch.int64), columns["offsets"]
    taken: dict[str, Any] = {}
    for name, column in columns.items():
        if name in PER_ROW:
            taken[name] = column[chosen]
        elif name != "offsets":
            taken[name] = Ragged(column, offsets).take(chosen).values
    return taken | {"offsets": offsets_of(offsets.diff()[chosen])}
