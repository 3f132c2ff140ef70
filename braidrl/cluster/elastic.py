"""A rank's membership where ranks may be lost and come back: it waits for members, and joins their process group.

store ──newest membership──▶ is this rank's outdated? ──▶ end its collectives ──▶ join the new group
"""

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from braidrl.cluster.child import exit_now
from braidrl.cluster.membership import Membership, newest, note_work, propose, wait_to_join, waiting
from braidrl.cluster.process_groups import abort_groups, has_message, join_group, put_message
from braidrl.data.identity import Uid
from braidrl.errors import LostPeers

WAITING_LOOK_S = 0.2
"""Seconds between two looks of a process that waits to become a member."""
STUCK_S = 20.0
"""Seconds in which a rank that waits in outdated groups has to notice."""
LOOK_S, JOIN_LIMIT_S = 0.02, 30.0
"""Seconds between two looks at the membership, and in which a group is made."""


@dataclass(frozen=True)
class Meeting:
    """The store at which ranks meet, and the arguments of `join_group`."""

    store: dist.Store
    limit_s: float
    cuda: bool
    host: str


class Elastic:
    """A rank's membership, which changes."""

    def __init__(self, meeting: Meeting, member: str, membership: Membership) -> None:
        self.meeting, self.member, self.membership = meeting, member, membership
        self.in_work: tuple[Uid, ...] = ()
        """The rows with which this rank may end."""
        self._outdated_at: float | None = None
        self.lock = threading.Lock()
        """Held while groups are made, or ended by another thread."""

    @property
    def newest(self) -> Membership:
        """Return the newest membership."""
        return newest(self.meeting.store, self.membership)

    @property
    def is_outdated(self) -> bool:
        """Return True if there is a newer membership than this rank's."""
        return self.newest.number > self.membership.number

    def wait_for_newer(self, limit_s: float) -> bool:
        """Wait until there is a newer membership than this rank's; return False after the limit."""
        limit = time.monotonic() + limit_s
        while not self.is_outdated:
            if time.monotonic() > limit:
                return False
            time.sleep(LOOK_S)
        return True

    def wait_until_member(self) -> None:
        """Wait, as long as this process lives, until it is a member."""
        wait_to_join(self.meeting.store, self.member)
        while self.member not in self.newest.members:
            time.sleep(WAITING_LOOK_S)

    def leave_outdated_groups(self, is_waiting: bool, newest: int) -> None:
        """End this process's collectives in groups older than the newest membership: a lost rank never joins them.

        A process that still waits after a time limit ends and counts as lost, so that the others need not wait for it.
        """
        if not self.lock.acquire(blocking=False):
            # Groups are being made, and this thread may be the machine's speaker.
            return
        try:
            if not dist.is_initialized() or newest <= self.membership.number:
                self._outdated_at = None
                return
            abort_groups()
        finally:
            self.lock.release()
        now = time.monotonic()
        self._outdated_at = self._outdated_at or now
        if is_waiting and now - self._outdated_at > STUCK_S:
            exit_now()

    def waiting(self) -> list[str]:
        """Return the processes that wait to become members."""
        return waiting(self.meeting.store, self.newest)

    def wait_for_waiting(self) -> list[str]:
        """Wait until there are processes that wait to become members, and return them."""
        limit = time.monotonic() + self.meeting.limit_s
        while not (came := self.waiting()):
            if time.monotonic() > limit:
                raise LostPeers(f"waited {self.meeting.limit_s:g} s for a lost rank to come back")
            time.sleep(WAITING_LOOK_S)
        return came

    def work_on(self, rows: Sequence[Uid]) -> None:
        """Record the rows that this rank works on from now on."""
        self.in_work = tuple(rows)
        note_work(self.meeting.store, self.member, self.in_work)

    def add(self, members: Sequence[str]) -> None:
        """Propose a membership with more members."""
        propose(self.meeting.store, membership := self.newest, [*membership.members, *members])

    def join(self) -> dist.ProcessGroup:
        """Join the group of the newest membership when all of its members have arrived, and return it.

        Raises LostPeers if this process is not a member, or for members that do not arrive.
        """
        limit_s = self.meeting.limit_s
        limit = time.monotonic() + limit_s
        while True:
            self.membership = membership = self.newest
            if self.member not in membership.members:
                raise LostPeers(f"process {self.member} is no longer a member")
            store = dist.PrefixStore(str(membership.number), self.meeting.store)
            put_message(store, f"here/{self.member}")
            keys = [f"here/{member}" for member in membership.members]
            while not (is_whole := has_message(store, *keys)) and not self.is_outdated:
                if time.monotonic() > limit:
                    late = [member for member in membership.members if not has_message(store, f"here/{member}")]
                    raise LostPeers(f"waited {limit_s:g} s for ranks {', '.join(late)} to join")
                time.sleep(LOOK_S)
            if not is_whole:
                continue
            rank, size = membership.members.index(self.member), len(membership.members)
            try:
                group = join_group(store, rank, size, min(JOIN_LIMIT_S, limit_s), self.meeting.cuda, self.meeting.host)
            except LostPeers:
                # A member was lost since it arrived.
                if not self.wait_for_newer(JOIN_LIMIT_S):
                    raise
                continue
            _set_pg_timeout(timedelta(seconds=limit_s), group)
            return group
