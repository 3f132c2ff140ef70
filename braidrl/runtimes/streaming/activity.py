"""What the workers of a run do, as a user sees it: which are idle and how much, rows in flight, weights that move.

the queue's controller ──after each request: who has rows──▶ Activity ──at the end of an iteration──▶ metrics
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from braidrl.observe.metrics import Sums


@dataclass
class GroupActivity:
    """The workers of a group: how long they were there, and without rows."""

    seconds: float = 0.0
    idle: float = 0.0


@dataclass
class Activity:
    """Sums since they were told last."""

    groups: dict[str, GroupActivity] = field(default_factory=dict)
    weight_bytes: int = 0
    """What engines have read of new weights."""
    drawn_again: int = 0
    """Rows that an engine had begun and that were forgotten with a trainer."""
    updates: Sums = field(default_factory=Sums)
    """How long each engine stood still to load new weights, and a rank took to write its share of them."""
    _noted: float | None = None
    _workers: list[tuple[str, bool]] = field(default_factory=list)

    def note(self, now: float, workers: Iterable[tuple[str, bool]]) -> None:
        """Note which workers have rows from now on.

        Args:
            now: Seconds on any clock.
            workers: The group of each, and whether it has rows.
        """
        passed = 0.0 if self._noted is None else now - self._noted
        for group, is_busy in self._workers:
            known = self.groups.setdefault(group, GroupActivity())
            known.seconds += passed
            known.idle += 0.0 if is_busy else passed
        self._noted, self._workers = now, list(workers)

    def told(self) -> Mapping[str, float]:
        """Return what is summed, the idle share of each group and the seconds of an update, since this was asked last."""
        found = {f"streaming/idle/{name}": one.idle / one.seconds for name, one in self.groups.items() if one.seconds}
        found["streaming/weight_bytes"] = float(self.weight_bytes)
        found["streaming/rows_drawn_again"] = float(self.drawn_again)
        found |= self.updates.means()
        self.groups, self.weight_bytes, self.drawn_again, self.updates = {}, 0, 0, Sums()
        return found
