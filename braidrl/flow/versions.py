"""Versions and staleness: which weights a batch is trained on, how old its rows may be, and how far ahead admission may run.

    version  0            1            2            3          publications of a role's weights, one at the end of each iteration
    batch    └─ 1 on 0 ──▶└─ 2 on 1 ──▶└─ 3 on 2 ──▶           iteration k trains batch k on version k - 1 and publishes version k

A role that skips an iteration (`when`) publishes what it has, so that version and iteration keep step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TooStale(RuntimeError):
    """Rows older than `max_staleness` reached training: admission let too much in."""


def trained_on(iteration: int) -> int:
    """Return the version whose weights iteration `iteration` (from 1) starts from."""
    return iteration - 1


def latest_admissible(engine_version: int, max_staleness: int) -> int:
    """Return the last iteration for which prompts may be admitted while the engine holds `engine_version`.

    A row begun now has tokens of this version or later ones, whatever is loaded while it is generated.
    """
    return engine_version + max_staleness + 1


def admissible(iteration: int, engine_version: int, max_staleness: int) -> bool:
    """Return True if prompts for the batch of `iteration` may be admitted while the engine holds `engine_version`."""
    return iteration <= latest_admissible(engine_version, max_staleness)


def staleness(iteration: int, versions: Sequence[int]) -> list[int]:
    """Return for each row of the batch of `iteration`, how many versions lie between its oldest token (`versions`) and its training."""
    return [trained_on(iteration) - version for version in versions]


def check_staleness(iteration: int, versions: Sequence[int], max_staleness: int, uids: Sequence[Any]) -> int:
    """Return the largest staleness in a batch. Raises TooStale, naming the row, if it is over the bound or a version not yet published."""
    oldest = 0
    for uid, behind, version in zip(uids, staleness(iteration, versions), versions, strict=True):
        if not 0 <= behind <= max_staleness:
            raise TooStale(
                f"row {uid} has tokens of version {version}, and iteration {iteration} trains on version "
                f"{trained_on(iteration)} with max_staleness={max_staleness}"
            )
        oldest = max(oldest, behind)
    return oldest
