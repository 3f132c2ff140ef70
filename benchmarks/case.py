"""Benchmark cases: several sides that do the same work, and how their numbers are summarized."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from benchmarks.duel import Side

Found = Mapping[str, Mapping[str, Any]]
"""Maps a side's name to the medians of its turns' numbers, and to the turns themselves."""
Rates = Mapping[str, float]
"""Operations and bytes per second that the machine can do; see `machine.measure`."""


@dataclass(frozen=True)
class Case(ABC):
    """Sides that take turns, A B A B.

    Without `at_once` they run one after the other, and each has the machine's memory alone.
    """

    name: str
    sides: list[Side]
    rounds: int = 3
    threads: int | None = None
    """Defaults to the number of cores."""
    at_once: bool = True

    @property
    def needs_rates(self) -> bool:
        """Return whether the summary reads the machine's rates."""
        return False

    def only(self, dtypes: Collection[str]) -> Self:
        """Return the case without the sides that compute in another dtype."""
        return replace(self, sides=[side for side in self.sides if side.case.get("dtype", "float32") in dtypes])

    @abstractmethod
    def summary(self, found: Found, rates: Rates) -> dict[str, Any]:
        """Return what is written to the results file."""

    @abstractmethod
    def table(self, summary: Mapping[str, Any]) -> str:
        """Return the summary as a table to print."""
