"""Upper limit set by memory: the same bytes copied into newly allocated memory each time, as a transport needs it."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.tables import BATCH, QUEUED, SMALL, TOKENS, dispatched, queued, repeats, timed, values
from benchmarks.turns import Turn


def prepare(case: Mapping[str, Any]) -> Turn:
    torch.set_num_threads(case["threads"])
    tables = {f"{tokens} tokens": (list(dispatched(tokens).values()), repeats(tokens)) for tokens in TOKENS}
    shapes = {**QUEUED, "small": SMALL, "batch": BATCH}
    tables |= {name: ([values(c) for c in queued(*shape).values()], 4) for name, shape in shapes.items()}

    def turn() -> dict[str, float]:
        return {
            f"copy {name}": timed(lambda c=columns: copied(c), times)  # type: ignore[misc]
            for name, (columns, times) in tables.items()
        }

    turn()
    return turn


def copied(columns: Sequence[Tensor]) -> None:
    for column in columns:
        # Not from the allocator, which would reuse the same pages.
        memory = np.frombuffer(mmap.mmap(-1, column.nbytes), dtype=np.uint8)
        torch.from_numpy(memory).copy_(column.flatten().view(torch.uint8))
