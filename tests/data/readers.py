"""Several readers of the same files, one per thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from braidrl.data.prompts import LoadedSource, Readers


def read_together(size: int, read: Callable[[Readers], LoadedSource]) -> list[LoadedSource]:
    """Return the results of several readers, one per thread."""
    said: list[Any] = [None] * size
    met = threading.Barrier(size)

    def tell(rank: int, value: Any) -> list[Any]:
        said[rank] = value
        met.wait(60)
        heard = list(said)
        # No reader sends again before all have received.
        met.wait(60)
        return heard

    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(lambda rank: read(Readers(rank, size, partial(tell, rank))), range(size)))
