"""Leases: rows given out to be worked on, which count as done only when acknowledged, and come back when they are not.

    free ──take──▶ held ──acknowledge──▶ done
      ▲              │
      └──── fail ────┘   expire, fail_holder: the holder died or was too slow

A pure state machine: time is an argument. A consumer (a stage, and the epoch where it trains) is done with a row exactly once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from braidrl.flow.readiness import Consumer, Uid


class LeaseLost(RuntimeError):
    """The lease expired or its holder was given up: its rows are someone else's, and what was made of them must not be used."""


@dataclass(frozen=True)
class Lease:
    """Rows that `holder` works on for `consumer` until `deadline`."""

    number: int
    consumer: Consumer
    holder: str
    rows: tuple[Uid, ...]
    deadline: float


@dataclass
class Leases:
    """All leases of a queue, and who is done with what."""

    held: dict[int, Lease] = field(default_factory=dict)
    taken: dict[Consumer, dict[Uid, int | None]] = field(default_factory=dict)
    """For each consumer its rows: the number of the lease that holds a row, or None once it is done."""
    given: int = 0

    def take(self, consumer: Consumer, holder: str, rows: Sequence[Uid], now: float, duration: float) -> Lease:
        """Gives rows to a holder for `duration` seconds. Raises ValueError if this consumer has one of them or is done with it."""
        taken = self.taken.setdefault(consumer, {})
        doubled = [row for row in rows if row in taken]
        if doubled or len(set(rows)) < len(rows):
            raise ValueError(f"{consumer} is given row {(doubled or list(rows))[0]} for the second time")
        lease = Lease(self.given, consumer, holder, tuple(rows), now + duration)
        self.given += 1
        self.held[lease.number] = lease
        taken.update(dict.fromkeys(rows, lease.number))
        return lease

    def acknowledge(self, number: int, now: float) -> Lease:
        """Ends a lease: its rows are done. Raises LeaseLost if it has expired or was given up."""
        lease = self._current(number, now)
        del self.held[number]
        self.taken[lease.consumer].update(dict.fromkeys(lease.rows, None))
        return lease

    def renew(self, number: int, now: float, duration: float) -> Lease:
        """Moves the deadline of a holder that is alive and slow. Raises LeaseLost as `acknowledge` does."""
        lease = self._current(number, now)
        renewed = Lease(lease.number, lease.consumer, lease.holder, lease.rows, now + duration)
        self.held[number] = renewed
        return renewed

    def fail(self, number: int) -> Lease:
        """Gives a lease up: its rows are free again. Raises LeaseLost if they were already."""
        if number not in self.held:
            raise LeaseLost(f"lease {number} is not held")
        lease = self.held.pop(number)
        for row in lease.rows:
            del self.taken[lease.consumer][row]
        return lease

    def fail_holder(self, holder: str) -> list[Lease]:
        """Gives up all leases of a holder that is gone."""
        return [self.fail(lease.number) for lease in list(self.held.values()) if lease.holder == holder]

    def expire(self, now: float) -> list[Lease]:
        """Gives up all leases whose deadline has passed."""
        return [self.fail(lease.number) for lease in list(self.held.values()) if lease.deadline < now]

    def next_deadline(self) -> float | None:
        """When the first lease expires, or None."""
        return min((lease.deadline for lease in self.held.values()), default=None)

    def is_done(self, consumer: Consumer, rows: Iterable[Uid]) -> bool:
        """True if the consumer has acknowledged all of these rows."""
        taken = self.taken.get(consumer, {})
        return all(row in taken and taken[row] is None for row in rows)

    def forget(self, rows: Iterable[Uid]) -> list[Lease]:
        """Rows leave the queue; leases that hold any of them are given up and returned, with their other rows free again."""
        gone = set(rows)
        lost = [self.fail(lease.number) for lease in list(self.held.values()) if gone & set(lease.rows)]
        for taken in self.taken.values():
            for row in gone & set(taken):
                del taken[row]
        return lost

    def _current(self, number: int, now: float) -> Lease:
        lease = self.held.get(number)
        if lease is None or lease.deadline < now:
            raise LeaseLost(
                f"lease {number} was lost: it expired or its holder was given up, and its rows are free again"
            )
        return lease
