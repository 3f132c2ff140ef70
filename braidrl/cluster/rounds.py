"""Rounds: sums and a minimum over all ranks, repeated while each rank works at its own pace.

numbers of a rank ──join──▶ all-reduce, not waited for ──ended──▶ totals of all ranks
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from braidrl.cluster.world import World

ROUND_EVERY_S = 0.05
"""Seconds between the rounds that a rank joins while it works."""
NOTHING_LEFT = 2**62
"""The minimum of ranks without a number."""


@dataclass(frozen=True)
class RoundTotals:
    """The totals of a round: the minimum and the sums of all ranks' numbers, and the number of ranks still working."""

    least: int
    sums: tuple[int, ...]
    working: int


class Rounds:
    """Sums and a minimum over all ranks, one round after another, while each rank works at its own pace.

    A round ends when every rank has joined it. It is an all-reduce of a few numbers: its cost grows with the logarithm
    of the ranks. No other collective may be called on the world's group until `leave` has returned.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.totals: RoundTotals | None = None
        """The totals of the last round."""
        self._works: list[dist.Work] = []
        self._sums, self._least = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
        self._next = 0.0

    def ended(self, wait: bool = False) -> RoundTotals | None:
        """Return the totals of this rank's round; None if it has not ended or none runs. `wait` waits for its end.

        The next round is joined after its totals are known, so that all ranks join it with the same knowledge.
        """
        if not self._works or not (wait or all(work.is_completed() for work in self._works)):
            return None
        return self._end()

    def join(self, least: int, sums: Sequence[int]) -> None:
        """Join the next round when it is due, unless this rank is in one."""
        if not self._works and (now := time.monotonic()) >= self._next:
            self._next = now + ROUND_EVERY_S
            self._begin(least, [*sums, 1])

    def wait(self, least: int, sums: Sequence[int], working: bool = True) -> RoundTotals:
        """Join the next round, and wait for its totals."""
        self._begin(least, [*sums, int(working)])
        return self._end()

    def leave(self, least: int, sums: Sequence[int]) -> RoundTotals | None:
        """Join the next round as a rank whose work has ended; return its totals, or None after the last round."""
        if self.totals is not None and not self.totals.working:
            return None
        return self.wait(least, sums, working=False)

    def _begin(self, least: int, sums: Sequence[int]) -> None:
        self._sums, self._least = torch.tensor(sums), torch.tensor([least])
        for tensor, operation in ((self._sums, dist.ReduceOp.SUM), (self._least, dist.ReduceOp.MIN)):
            work = dist.all_reduce(tensor, operation, group=self.world.group, async_op=True)
            assert work is not None
            self._works.append(work)

    def _end(self) -> RoundTotals:
        # A work object kept after a failure would keep the group's connections, for which another rank may wait.
        works, self._works = self._works, []
        with self.world.meeting("a round of all ranks"):
            for work in works:
                work.wait()
        *sums, working = self._sums.tolist()
        self.totals = RoundTotals(int(self._least), tuple(sums), working)
        return self.totals
