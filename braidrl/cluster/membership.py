"""The members of a group of ranks, which change while they work: a rank is lost, or comes back.

launcher ──without a dead member──╮
                                  ├──▶ store: membership 0, 1, 2, ... ──▶ ranks: leave their groups, join new ones
first rank ──with one that waits──╯

A membership never changes: the first writer of a number decides it. The process groups of a membership have separate
keys in the store, so that a late message of an earlier one is not read. How often lost processes are replaced is
limited by a budget per hour.
"""

import time
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from braidrl.cluster.process_groups import count_at, has_message, message_at, put_first, put_message, text_at
from braidrl.cluster.row_deaths import Isolated
from braidrl.data.identity import Uid

WAITING = "waiting"
HOUR_S = 3600.0


@dataclass(frozen=True)
class Membership:
    """The members with a number, in the order of their ranks."""

    number: int
    members: tuple[str, ...]

    def rank_of(self, member: str) -> int:
        """Return the rank of a member."""
        return self.members.index(member)


def member_name(number: int, starts: int) -> str:
    """Return the name of a rank's process: its number, and its earlier starts."""
    return f"{number}.{starts}"


def newest(store: dist.Store, membership: Membership) -> Membership:
    """Return the newest membership, `membership` or a later one, without waiting."""
    while has_message(store, key := f"membership/{membership.number + 1}"):
        membership = Membership(membership.number + 1, tuple(text_at(store, key).split(",")))
    return membership


def propose(store: dist.Store, membership: Membership, members: Sequence[str]) -> Membership:
    """Propose the next membership; return the proposal that was written first."""
    written = put_first(store, f"membership/{membership.number + 1}", ",".join(members))
    return Membership(membership.number + 1, tuple(written.split(",")))


def without(store: dist.Store, membership: Membership, dead: Collection[str]) -> Membership:
    """Return the newest membership, from which the dead members are removed."""
    while not set(dead).isdisjoint((membership := newest(store, membership)).members):
        membership = propose(store, membership, [member for member in membership.members if member not in dead])
    return membership


def wait_to_join(store: dist.Store, member: str) -> None:
    """Leave a notice that a process is ready to become a member."""
    put_message(store, f"{WAITING}/{count_at(store, WAITING, 1)}", member)


def note_death(store: dist.Store, member: str) -> None:
    """Record in the store that a process is dead; it may have waited to become a member."""
    put_message(store, f"dead/{member}")


def waiting(store: dist.Store, membership: Membership) -> list[str]:
    """Return the living processes that wait to become members."""
    numbers = range(1, count_at(store, WAITING) + 1)
    came = [message_at(store, key, str) for key in (f"{WAITING}/{number}" for number in numbers)]
    return [
        process for process in came if process not in membership.members and not has_message(store, f"dead/{process}")
    ]


def note_work(store: dist.Store, member: str, rows: Sequence[Uid]) -> None:
    """Record the rows that a process works on, in case they kill it."""
    put_message(store, f"work/{member}", rows)


def work_of(store: dist.Store, member: str) -> list[Uid]:
    """Return the rows that a process was working on when it ended."""
    rows: list[Uid] = message_at(store, key, list[Uid]) if has_message(store, key := f"work/{member}") else []
    return rows


def note_isolated(store: dist.Store, isolated: Isolated) -> None:
    """Record the rows that run alone, and the rows that are skipped."""
    put_message(store, "isolated", isolated)


def isolated_rows(store: dist.Store) -> Isolated:
    """Return the rows that run alone, and the rows that are skipped."""
    isolated: Isolated = message_at(store, "isolated", Isolated) if has_message(store, "isolated") else ([], [])
    return isolated


class Members:
    """The launcher's view of a group's members, without dead processes."""

    def __init__(self, store: dist.Store, members: Iterable[str] = ()) -> None:
        """Start with membership 0."""
        self.store, self.membership, self.dead = store, Membership(0, tuple(members)), set[str]()

    def lose(self, member: str) -> None:
        """Record a dead process, and remove it from the membership."""
        self._note(member)
        self.look()

    def look(self) -> None:
        """Remove dead processes from the newest membership, which ranks may have proposed."""
        if self.dead:
            self.membership = without(self.store, self.membership, self.dead)

    def change(self, dead: Iterable[str] = (), new: Iterable[str] = ()) -> None:
        """Write the next membership, possibly unchanged; from then on only the launcher writes memberships."""
        for member in dead:
            self._note(member)
        self.membership = propose(self.store, self.membership, [*self.living, *new])

    @property
    def living(self) -> list[str]:
        """Return the members that are not dead."""
        return [member for member in self.membership.members if member not in self.dead]

    def waiting(self) -> list[str]:
        """Return the processes that wait to become members."""
        return waiting(self.store, self.membership)

    def _note(self, member: str) -> None:
        self.dead.add(member)
        note_death(self.store, member)


class RepairBudget:
    """A limit on repairs per hour: more of them have a common cause."""

    def __init__(self, per_hour: int, key: str) -> None:
        """Start without repairs; `key` is the configuration key of `per_hour`."""
        self.per_hour, self.key = per_hour, key
        self._times = deque[float]()

    def spend(self, now: float | None = None) -> bool:
        """Record a repair at a time in seconds; return False if the limit of the last hour is reached."""
        now = time.monotonic() if now is None else now
        while self._times and self._times[0] <= now - HOUR_S:
            self._times.popleft()
        if len(self._times) >= self.per_hour:
            return False
        self._times.append(now)
        return True

    def __str__(self) -> str:
        return f"{len(self._times)} of {self.key}={self.per_hour} within an hour"
