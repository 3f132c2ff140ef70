"""How many threads a process computes with: one for each core that it gets.

The threads of an operation wait for one another, awake. Where another program has the core of one of them they all wait until it
is back, and a step takes ten times as long and more. So a process that waits for cores goes on with as many threads as it got cores,
and takes more again while cores are idle.

`follow_load` once in a process ──▶ `adapt_threads` between steps: share of time waited for a core, idle cores ──▶ threads
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from braidrl.cluster.process import CHOSEN_BY_BRAID, usable_cores

USERS_SETTINGS = ("OMP_WAIT_POLICY", "OMP_DYNAMIC", "GOMP_SPINCOUNT", "GOMP_CPU_AFFINITY", "KMP_BLOCKTIME")
"""Who sets one of these has an opinion about waiting threads, and keeps it."""
INTERVAL_S = 0.5
WAITING = 0.22
"""Share of its threads' time spent waiting for a core from which on there are too many; 0.1 on a quiet machine, 0.4 beside one program."""
IDLE = 0.7
"""Share of a core that has to be idle for one thread more."""


@dataclass(frozen=True)
class Usage:
    """Seconds since some start: of this process's threads on a core, of their waiting for one, and of usable cores idle."""

    at: float
    ran: float
    waited: float
    idle: float

    @staticmethod
    def now() -> "Usage":
        """Return the usage until now. Raises OSError on a system without Linux's /proc."""
        ran = waited = 0
        for thread in os.listdir("/proc/self/task"):
            try:
                times = Path(f"/proc/self/task/{thread}/schedstat").read_text().split()
            except (FileNotFoundError, ProcessLookupError):  # It has ended since the folder was listed.
                continue
            ran, waited = ran + int(times[0]), waited + int(times[1])
        usable = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        lines = (line.split() for line in Path("/proc/stat").read_text().splitlines())
        idle = sum(int(words[4]) + int(words[5]) for words in lines if words and words[0] in usable)
        return Usage(time.monotonic(), ran / 1e9, waited / 1e9, idle / os.sysconf("SC_CLK_TCK"))


def threads_for(threads: int, most: int, before: Usage, now: Usage) -> int:
    """Return how many threads to compute with from now on.

    Args:
        threads: How many computed between `before` and `now`.
        most: How many there may be.
        before: The usage at the start of the interval.
        now: The usage at its end.
    """
    seconds, ran, waited = now.at - before.at, now.ran - before.ran, now.waited - before.waited
    if threads > 1 and waited > WAITING * (ran + waited):
        return min(threads - 1, max(1, int(ran / seconds)))
    more = int((now.idle - before.idle) / seconds + 1 - IDLE)
    return min(most, threads + more)


class FollowedLoad:
    """Keeps a process's threads to the cores that it gets."""

    def __init__(self, most: int) -> None:
        self.most = self.threads = most
        self._before = Usage.now()

    def adapt(self) -> None:
        """Look at the machine where the last look is long ago, and let the calling thread compute with as many threads as are due."""
        if time.monotonic() - self._before.at >= INTERVAL_S:
            now = Usage.now()
            self.threads, self._before = threads_for(self.threads, self.most, self._before, now), now
        if torch.get_num_threads() != self.threads:
            torch.set_num_threads(self.threads)


_followed: FollowedLoad | None = None


def follow_load(wanted: bool = True) -> None:
    """Let this process follow the machine's load from now on, where it is wanted and the user has not settled its threads."""
    global _followed
    settled = "OMP_NUM_THREADS" in os.environ and CHOSEN_BY_BRAID not in os.environ
    settled = settled or any(name in os.environ for name in USERS_SETTINGS)
    if not wanted or settled or not Path("/proc/self/schedstat").exists():
        _followed = None
    elif _followed is None and (most := min(torch.get_num_threads(), usable_cores())) > 1:
        _followed = FollowedLoad(most)


def adapt_threads() -> None:
    """Call this often from whichever thread computes, between steps and micro-batches."""
    if _followed is not None:
        _followed.adapt()
