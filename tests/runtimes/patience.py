"""Generation that ends early as soon as it may, however slow the checks are: the aborted rows then do not depend on
time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from braidrl.cluster import rounds
from braidrl.cluster.world import World
from braidrl.rewards.verify import Pending
from tests.runtimes.spmd.ranks import run_all


def at_once(check: Pending) -> bool:
    """Replace `Pending.done`: wait for the checks."""
    check.result()
    return True


@contextmanager
def patient() -> Iterator[None]:
    """Make a rank generate nothing else while a finished row is checked, and join the ranks' rounds at once."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(Pending, "done", at_once)
        patches.setattr(rounds, "ROUND_EVERY_S", 0.0)
        yield


def run_all_patiently(world: World, task: dict[str, Any]) -> list[list[dict[str, int]]]:
    """Run `ranks.run_all` with this patience."""
    with patient():
        return run_all(world, task)
