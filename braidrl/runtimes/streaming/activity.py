"""Activity of a run's workers for its metrics: idle time, rows in flight, weight updates.

the queue's controller ──after each request: workers with rows──▶ Activity ──at the end of an iteration──▶ metrics
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from braidrl.observe.metrics import Sums


@dataclass
class GroupActivity:
    """The workers of a group: their seconds in total, and without rows."""

    seconds: float = 0.0
    idle: float = 0.0


@dataclass
class Activity:
    """Sums since the last report."""

    groups: dict[str, GroupActivity] = field(default_factory=dict)
    weight_bytes: int = 0
    """Bytes of new weights that engines have read."""
    drawn_again: int = 0
    """Rows started by an engine and forgotten with a lost trainer."""
    updates: Sums = field(default_factory=Sums)
    """Seconds that each engine stood still to load weights, and that a rank took to write its share."""
    _noted: float | None = None
    _workers: list[tuple[str, bool]] = field(default_factory=list)

    def note(self, now: float, workers: Iterable[tuple[str, bool]]) -> None:
        """Record which workers have rows from now on.

        Args:
            now: Seconds on any clock.
            workers: The group of each worker, and True if it has rows.
        """
        passed = 0.0 if self._noted is None else now - self._noted
        for group, is_busy in self._workers:
            known = self.groups.setdefault(group, GroupActivity())
            known.seconds += passed
            known.idle += 0.0 if is_busy else passed
        self._noted, self._workers = now, list(workers)

    def told(self) -> Mapping[str, float]:
        """Return the sums, each group's idle share and the seconds of an update since the last call."""
        found = {f"streaming/idle/{name}": one.idle / one.seconds for name, one in self.groups.items() if one.seconds}
        found["streaming/weight_bytes"] = float(self.weight_bytes)
        found["streaming/rows_drawn_again"] = float(self.drawn_again)
        found |= self.updates.means()
        self.groups, self.weight_bytes, self.drawn_again, self.updates = {}, 0, 0, Sums()
        return found
