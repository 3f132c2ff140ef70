"""The members of a group of ranks, which change while they work: a rank is lost, or comes back.

launcher ──without a dead member──╮
                                  ├──▶ store: membership 0, 1, 2, ... ──▶ ranks: leave their groups, join new ones
first rank ──with one that waits──╯

A membership never changes: who writes a number first decides it. The process groups of a membership have keys of their
own in the store, so that a late message of an earlier one is not read.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from braidrl.cluster.process_groups import count_at, has_message, message_at, put_first, put_message, text_at

WAITING = "waiting"


@dataclass(frozen=True)
class Membership:
    """The members with a number, in the order of their ranks."""

    number: int
    members: tuple[str, ...]

    def rank_of(self, member: str) -> int:
        """Return the rank of a member."""
        return self.members.index(member)


def member_name(number: int, starts: int) -> str:
    """Return the name of a rank's process: its number, and how often that was started before."""
    return f"{number}.{starts}"


def newest(store: dist.Store, known: Membership) -> Membership:
    """Return the newest membership, at least the known one, without waiting."""
    while has_message(store, key := f"membership/{known.number + 1}"):
        known = Membership(known.number + 1, tuple(text_at(store, key).split(",")))
    return known


def propose(store: dist.Store, known: Membership, members: Sequence[str]) -> Membership:
    """Write the membership after a known one; return what was written first."""
    written = put_first(store, f"membership/{known.number + 1}", ",".join(members))
    return Membership(known.number + 1, tuple(written.split(",")))


def without(store: dist.Store, known: Membership, dead: Collection[str]) -> Membership:
    """Return the newest membership, which lacks the dead members."""
    while not set(dead).isdisjoint((known := newest(store, known)).members):
        known = propose(store, known, [member for member in known.members if member not in dead])
    return known


def wait_to_join(store: dist.Store, member: str) -> None:
    """Leave a notice that a process is ready to become a member."""
    put_message(store, f"{WAITING}/{count_at(store, WAITING, 1)}", member)


def note_death(store: dist.Store, member: str) -> None:
    """Leave a notice that a process is dead, which may have waited to become a member."""
    put_message(store, f"dead/{member}")


def waiting(store: dist.Store, known: Membership) -> list[str]:
    """Return the processes that live and wait to become members."""
    numbers = range(1, count_at(store, WAITING) + 1)
    came = [message_at(store, key, str) for key in (f"{WAITING}/{number}" for number in numbers)]
    return [one for one in came if one not in known.members and not has_message(store, f"dead/{one}")]
