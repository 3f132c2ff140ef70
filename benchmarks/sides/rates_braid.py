"""The machine itself: its matrix rates and its memory bandwidth, in turn with what is compared."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.machine import measure
from benchmarks.turns import Turn


def prepare(case: Mapping[str, Any]) -> Turn:
    return lambda: measure(case["threads"])
