"""A user-defined sampler: the longest rows first, so that no worker ends with a long row.

braid train run.yaml runtime=streaming streaming.sampler=examples/longest_first.py:longest_first
"""

from collections.abc import Sequence

from braidrl.queue.samplers import Candidate


def longest_first(ready: Sequence[Candidate], most: int, ranks: int) -> list[int]:
    """Return the positions of the rows with the most tokens."""
    return sorted(range(len(ready)), key=lambda place: -ready[place].tokens)[:most]
