"""What a benchmark compares: sides that do the same work, and how their numbers are read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.duel import Side

Found = Mapping[str, Mapping[str, Any]]
"""By side: the medians of what its turns reported, and the turns."""
Rates = Mapping[str, float]
"""What the machine can do in a second; see `machine.measure`."""


@dataclass(frozen=True)
class Case(ABC):
    """Sides that take turns, A B A B; or, unless `at_once`, one after the other, each alone with the machine's memory."""

    name: str
    sides: list[Side]
    rounds: int = 3
    threads: int | None = None
    """By default as many as there are cores."""
    at_once: bool = True

    @abstractmethod
    def summary(self, found: Found, rates: Rates) -> dict[str, Any]:
        """What goes into the file of results."""

    @abstractmethod
    def table(self, summary: Mapping[str, Any]) -> str:
        """The summary for people."""
