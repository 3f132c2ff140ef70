"""Tries, made as the rows of a pool, with outcomes in their order."""

from __future__ import annotations

import builtins
import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.config import RewardConfig
from braidrl.rewards.pool import CallOutcome, RewardPool
from braidrl.rewards.verifier import Completion, resolve
from braidrl.sandbox.walls import walls_missing

TRIES = str(Path(__file__).with_name("tries.py"))
WALLS = ("process", "bubblewrap")
needs_walls = pytest.mark.skipif(
    any(map(walls_missing, (False, True))), reason="this system gives no process namespaces of its own"
)


def made(
    rows: Sequence[str],
    mode: str = "process",
    function: str = "tried",
    at: dict[str, Any] | None = None,
    file: str = TRIES,
    **settings: Any,
) -> list[CallOutcome]:
    """Return the outcomes of rows, one after the other."""
    verifier = resolve(f"{file}:{function}")
    with RewardPool(RewardConfig(**{"sandbox": mode, "timeout_s": 20, **settings})) as pool:
        return [pool.submit(Completion("p", row, "a", at or {}), verifier).result(120) for row in rows]


def refused(found: CallOutcome) -> bool:
    """Return whether the system refused a try; any other exception is a fault of the try."""
    kind = getattr(builtins, found.detail.partition(":")[0], type(None))
    return found.failure == "exception" and issubclass(kind, (OSError, AssertionError, MemoryError))


def lost(found: CallOutcome) -> bool:
    """Return whether a try came to nothing: it was refused or ended, or says itself that it has not won."""
    return refused(found) or found.failure in ("died", "timeout") or found.correct is False


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no process is left afterwards."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 60
    while (left := {c.pid for c in psutil.Process().children(recursive=True)} - before) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def in_home(name: str) -> Path:
    """Return a path of this process's own in the home directory."""
    return Path.home() / f".braid-attack-{os.getpid()}-{name}"
