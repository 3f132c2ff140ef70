"""The ranks of a run: N processes that do one task together, from start through supervision to the end.

run_ranks ──task──▶ rank 0 ... rank N-1        through the launcher: on this machine, or on a Ray cluster
          ◀──result or failure──

A failure in one rank stops the others. The user sees the failure that came first, not its consequences. Ranks may
continue without one that was killed, and admit it again after its restart (`membership.py`).
"""

import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name
from types import FrameType
from typing import Any

import torch.distributed as dist

from braidrl.cluster.child import TaskFailed, failure_of
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.membership import Members, Membership, RepairBudget, member_name, note_isolated, work_of
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import Failure, Launcher, Outcome, Process, ProcessSpec, interrupts_handled
from braidrl.cluster.process_groups import open_store, raised_open_files
from braidrl.cluster.row_deaths import RowDeaths, skipped_row_line
from braidrl.cluster.watchdog import FrozenWatch, heartbeat_limit
from braidrl.cluster.world import World, join, join_elastic
from braidrl.errors import LostProcess, UserError, first_line, printable

SETTLING_S = 3.0
"""Seconds to wait for the failure that caused a rank to lose its peers."""
STOPPING_S = 5.0
"""Seconds that ranks get to end after a request; then they are killed."""
PATIENCE = 2
"""Number of interrupts that are passed on; the next one kills the ranks."""
LOOK_EVERY_S = 0.2
"""Seconds within which an interrupt is passed on."""


def run_ranks(
    entry: str,
    task: Mapping[str, Any],
    workers: int | Pool,
    limit_s: float,
    launcher: Launcher | None = None,
    silence_s: float = 60.0,
    repairs: RepairBudget | None = None,
    deaths: RowDeaths | None = None,
) -> Any:
    """Run `module:function(world, task)` in `workers` processes and return rank 0's result, a JSON value.

    `workers` is a number, or a pool if the ranks start engines; by default they are local processes. In the task, a
    JSON object, `cuda` says whether they compute on CUDA devices. A rank waits for others at most `limit_s` seconds,
    and is killed after `silence_s` seconds without a heartbeat. The others continue after a loss while `repairs` are
    left, and the lost rank is restarted. Rows with which ranks die are recorded in `deaths`. Raises the failure of the
    rank that failed first; all processes have then ended.
    """
    repairs = repairs or RepairBudget(0, "trainer.max_restarts")
    # Another client of the store cannot guess the ranks' key prefix.
    secret = secrets.token_hex(16)
    launcher, pool = launcher or LocalLauncher(), workers if isinstance(workers, Pool) else Pool(("rank",), workers)
    ranks: list[Process] = []
    store, renewal = None, None
    try:
        interrupts: list[int] = []

        # The ranks save and end together; then the launcher ends in the same way.
        def collect(number: int, frame: FrameType | None) -> None:
            interrupts.append(number)
            if len(interrupts) > PATIENCE:
                raise KeyboardInterrupt

        with interrupts_handled(collect):
            launcher.reserve([pool])
            raised_open_files()
            store = open_store(launcher.ip, limit_s)
            meeting = {"MASTER_ADDR": launcher.ip, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(pool.workers)}

            def start(rank: int, starts: int) -> Process:
                environment = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
                arguments = {"entry": entry, "task": task, "limit_s": limit_s, "rank": rank, "secret": secret}
                spec = ProcessSpec(
                    f"rank {rank}",
                    f"{__name__}:work",
                    arguments | ({"starts": starts, "of": pool.workers} if repairs.per_hour else {}),
                    environment={**meeting, **environment},
                    also_calls=entry,
                )
                ranks.append(launcher.start(pool.name, rank, spec))
                return ranks[-1]

            renewal = Renewal(dist.PrefixStore(secret, store), start, repairs, deaths or RowDeaths())
            for rank in range(pool.workers):
                renewal.begin(rank)
            with FrozenWatch(silence_s, tell) as frozen:
                return supervise(launcher, renewal, interrupts, silence_s, frozen.killed)
    finally:
        # Ask each rank that still runs to end, then kill it.
        for process in ranks:
            process.hang_up()
        deadline = time.monotonic() + STOPPING_S
        for process in ranks:
            process.close(max(0.0, deadline - time.monotonic()))
        launcher.close()
        # A traceback would keep the store, and with it its port.
        if renewal is not None:
            del renewal.members
        store = None


def tell(line: str) -> None:
    """Print a line between the ranks' own output."""
    print("braid: " + printable(line, keep="\n\t"), file=sys.stderr, flush=True)


class Renewal:
    """The launcher's view of a run's ranks: it restarts dead ranks, which are not members until they rejoin."""

    def __init__(
        self, store: dist.Store, start: Callable[[int, int], Process], repairs: RepairBudget, deaths: RowDeaths
    ) -> None:
        """Start without members; `start(rank, starts)` starts a rank that has been started `starts` times."""
        self.members, self._start, self.repairs, self.deaths = Members(store), start, repairs, deaths
        note_isolated(store, deaths.isolated())
        self.starts: dict[Process, tuple[int, int]] = {}
        """The number of each living process, and how often that was started before."""
        self.losses = 0

    def begin(self, number: int) -> None:
        """Start a member for the first time."""
        self.starts[self._start(number, 0)] = number, 0
        self.members = Members(self.members.store, (member_name(*starts) for starts in self.starts.values()))

    def is_member(self, process: Process) -> bool:
        """Return True if a process is one of the ranks, and False if it waits to join them."""
        return member_name(*self.starts[process]) in self.members.membership.members

    def continues_without(self, lost: Process, failure: Failure) -> bool:
        """Return True and restart a lost process if the other ranks continue without it."""
        if not self.is_member(lost):
            tell(f"{first_line(failure.error())}; the others go on without it")
            self._forget(lost)
            return True
        others = any(self.is_member(process) for process in self.starts if process is not lost)
        is_lost = failure.kind == "died" and not failure.follows
        if is_lost:
            self._record_rows(lost)
        if not (is_lost and others and self.repairs.spend()):
            return False
        self.losses += 1
        tell(f"{first_line(failure.error())}; it starts again by itself, the others go on ({self.repairs})")
        number, starts = self._forget(lost)
        self.starts[self._start(number, starts + 1)] = number, starts + 1
        return True

    def _record_rows(self, lost: Process) -> None:
        """Record the rows that a lost process was working on, before the others continue."""
        rows = work_of(self.members.store, member_name(*self.starts[lost]))
        for row in self.deaths.record("rank", rows):
            tell(skipped_row_line(row, "ranks", lost.describe_end()))
        note_isolated(self.members.store, self.deaths.isolated())

    def _forget(self, process: Process) -> tuple[int, int]:
        """Remove a dead process from the membership; return its number, and its earlier starts."""
        number, starts = self.starts.pop(process)
        self.members.lose(member_name(number, starts))
        return number, starts


def supervise(
    launcher: Launcher, renewal: Renewal, interrupts: Sequence[int], silence_s: float, killed: Sequence[str]
) -> Any:
    """Wait for all ranks and return the first one's result, or raise the first failure; `killed` has log lines about
    frozen processes.
    """
    silent, outcomes = list(renewal.starts), dict[Process, Outcome]()
    deadline, passed_on = float("inf"), 0
    failures: list[Failure] = []
    while any(renewal.is_member(rank) for rank in silent) and time.monotonic() < deadline:
        # Not in the signal handler: it may run in the middle of a Ray call.
        while passed_on < len(interrupts):
            passed_on += 1
            for rank in silent:
                rank.interrupt()
        renewal.members.look()
        ended = launcher.answered(silent, min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
        for rank in ended:
            frozen = next((line for line in killed if f"(process {rank.pid})" in line), "")
            outcomes[rank] = rank.outcome or Outcome(
                failure=Failure("died", frozen or f"{rank.name} is gone without a word ({rank.describe_end()})")
            )
        mute = [rank for rank in silent if rank not in ended and rank.end_if_silent(heartbeat_limit(silence_s))]
        outcomes |= {rank: Outcome(failure=Failure("died", f"{rank.name} {rank.describe_end()}")) for rank in mute}
        for rank in (*ended, *mute):
            failure = outcomes[rank].failure
            if failure is not None and not interrupts and renewal.continues_without(rank, failure):
                del outcomes[rank]
        silent = [rank for rank in renewal.starts if rank not in outcomes]
        failures = [outcome.failure for outcome in outcomes.values() if outcome.failure]
        if any(not failure.follows and failure.kind != "interrupted" for failure in failures):
            break
        # No time limit for interrupted ranks: one of them saves.
        if deadline == float("inf") and any(failure.follows for failure in failures):
            deadline = time.monotonic() + SETTLING_S
    if failures:
        # An interrupt counts only if no rank failed.
        first = min(failures, key=lambda f: (f.follows, f.kind == "interrupted"))
        error = first.error()
        if isinstance(error, LostProcess):
            # The loss after which the others could not continue.
            error.is_counted = first.follows and renewal.losses > 0
        raise error
    return outcomes[next(rank for rank in renewal.starts if rank in outcomes)].result


def work(arguments: Mapping[str, Any]) -> Any:
    """Run in a rank's process: join the others, do the task, and wait for the end of the run."""
    task, secret, limit_s = arguments["task"], arguments["secret"], arguments["limit_s"]
    world = World(arguments["rank"])
    try:
        if "starts" in arguments:
            first = Membership(0, tuple(member_name(number, 0) for number in range(arguments["of"])))
            member = member_name(arguments["rank"], arguments["starts"])
            world = join_elastic(limit_s, task.get("cuda", False), member, secret, first)
        else:
            world = join(limit_s, task.get("cuda", False), secret=secret)
        result = resolve_name(arguments["entry"])(world, task)
        world.gather("the end of the run", None)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TaskFailed(failure_of(f"rank {world.rank} failed in {world.place}{world.rows}", error)) from error
    world.close()
    return result
