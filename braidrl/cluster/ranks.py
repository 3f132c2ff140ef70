"""The ranks of a run: N processes that do one task together, from start through supervision to the end.

run_ranks ──task──▶ rank 0 ... rank N-1        through the launcher: on this machine, or on a Ray cluster
          ◀──result or failure──

A failure in one rank stops the others. The user sees the failure that came first, not its consequences.
"""

import secrets
import sys
import time
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from types import FrameType
from typing import Any

from braidrl.cluster.child import TaskFailed, failure_of
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import Failure, Launcher, Outcome, Process, ProcessSpec, interrupts_handled
from braidrl.cluster.process_groups import open_store
from braidrl.cluster.watchdog import FrozenWatch, mute_after
from braidrl.cluster.world import World, join
from braidrl.errors import UserError, printable

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
) -> Any:
    """Run `module:function(world, task)` in `workers` processes and return rank 0's result, a JSON value.

    `workers` is a number, or a pool if the ranks start engines; by default they are local processes. In the task, a
    JSON object, `cuda` says whether they compute on CUDA devices. A rank waits for others at most `limit_s` seconds,
    and is killed after `silence_s` seconds without a heartbeat. Raises the failure of the rank that failed first; all
    processes have then ended.
    """
    # Another client of the store cannot guess the ranks' key prefix.
    secret = secrets.token_hex(16)
    launcher, pool = launcher or LocalLauncher(), workers if isinstance(workers, Pool) else Pool(("rank",), workers)
    ranks: list[Process] = []
    store = None
    try:
        interrupts: list[int] = []

        # The ranks save and end together; then the launcher ends in the same way.
        def collect(number: int, frame: FrameType | None) -> None:
            interrupts.append(number)
            if len(interrupts) > PATIENCE:
                raise KeyboardInterrupt

        with interrupts_handled(collect):
            launcher.reserve([pool])
            store = open_store(launcher.ip, limit_s)
            for rank in range(pool.workers):
                meeting = {"MASTER_ADDR": launcher.ip, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(pool.workers)}
                environment = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
                spec = ProcessSpec(
                    f"rank {rank}",
                    f"{__name__}:work",
                    {"entry": entry, "task": task, "limit_s": limit_s, "rank": rank, "secret": secret},
                    environment={**meeting, **environment},
                    also_calls=entry,
                )
                ranks.append(launcher.start(pool.name, rank, spec))
            with FrozenWatch(silence_s, tell) as frozen:
                return supervise(launcher, ranks, interrupts, silence_s, frozen.killed)
    finally:
        # Ask each rank that still runs to end, then kill it.
        for process in ranks:
            process.hang_up()
        deadline = time.monotonic() + STOPPING_S
        for process in ranks:
            process.close(max(0.0, deadline - time.monotonic()))
        launcher.close()
        # A traceback would keep the store, and with it its port.
        store = None


def tell(line: str) -> None:
    """Print a line between the ranks' own output."""
    print("braid: " + printable(line, keep="\n\t"), file=sys.stderr, flush=True)


def supervise(
    launcher: Launcher, ranks: Sequence[Process], interrupts: Sequence[int], silence_s: float, killed: Sequence[str]
) -> Any:
    """Wait for all ranks and return rank 0's result, or raise the first failure; `killed` has lines on frozen
    processes.
    """
    silent, outcomes = list(ranks), dict[str, Outcome]()
    deadline, passed_on = float("inf"), 0
    while silent and time.monotonic() < deadline:
        # Not in the signal handler: it may run in the middle of a Ray call.
        while passed_on < len(interrupts):
            passed_on += 1
            for rank in ranks:
                rank.interrupt()
        for rank in launcher.answered(silent, min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))):
            silent.remove(rank)
            frozen = next((line for line in killed if f"(process {rank.pid})" in line), "")
            outcomes[rank.name] = rank.outcome or Outcome(
                failure=Failure("died", frozen or f"{rank.name} is gone without a word ({rank.describe_end()})")
            )
        for rank in [process for process in silent if process.end_if_silent(mute_after(silence_s))]:
            silent.remove(rank)
            outcomes[rank.name] = Outcome(failure=Failure("died", f"{rank.name} {rank.describe_end()}"))
        failures = [outcome.failure for outcome in outcomes.values() if outcome.failure]
        if any(not failure.follows and failure.kind != "interrupted" for failure in failures):
            break
        # No time limit for interrupted ranks: one of them saves.
        if deadline == float("inf") and any(failure.follows for failure in failures):
            deadline = time.monotonic() + SETTLING_S
    if failures:
        # An interrupt counts only if no rank failed.
        raise min(failures, key=lambda f: (f.follows, f.kind == "interrupted")).error()
    return outcomes[ranks[0].name].result


def work(arguments: Mapping[str, Any]) -> Any:
    """Run in a rank's process: join the others, do the task, and wait for the end of the run."""
    task = arguments["task"]
    world = World(arguments["rank"])
    try:
        world = join(arguments["limit_s"], task.get("cuda", False), secret=arguments["secret"])
        result = resolve_name(arguments["entry"])(world, task)
        world.gather("the end of the run", None)
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TaskFailed(failure_of(f"rank {world.rank} failed in {world.place}{world.rows}", error)) from error
    world.close()
    return result
