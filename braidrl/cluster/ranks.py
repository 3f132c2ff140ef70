"""The ranks of a run: N processes that do one task together. Starts them, supervises them, and is what each does inside.

run_ranks ──task──▶ rank 0 ... rank N-1        by the launcher: on this machine, or on a Ray cluster
          ◀──result or failure──

A failure in one rank stops the others; what the user sees is the failure that came first and not what followed from it.
"""

import contextlib
import secrets
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from braidrl.cluster.child import TaskFailed, failure_of, function_of
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import Failure, Launcher, Outcome, Process, ProcessSpec, interrupts_handled
from braidrl.cluster.process_groups import open_store
from braidrl.cluster.watchdog import FrozenWatch, mute_after
from braidrl.cluster.world import World, join
from braidrl.errors import UserError

SETTLING_S = 3.0
"""After a rank has lost its peers: how long to wait for the failure that it follows from."""
STOPPING_S = 5.0
"""How long ranks have to end once they are told to; then they are killed."""
PATIENCE = 2
"""Interrupts that are passed on; at the next one the ranks are killed."""
LOOK_EVERY_S = 0.2
"""How soon an interrupt is passed on."""


def run_ranks(
    entry: str, task: Mapping[str, Any], workers: int | Pool, limit_s: float, launcher: Launcher | None = None,
    silence_s: float = 60.0,
) -> Any:  # fmt: skip
    """Run `module:function(world, task)` in `workers` processes and return what rank 0 returned, a JSON value.

    Args:
        entry: The function.
        task: A JSON object; `cuda` says whether the ranks compute on CUDA devices.
        workers: How many ranks, or their pool where it matters which engines they start.
        limit_s: How long ranks wait for one another, in seconds.
        launcher: Who starts them; by default this process, on this machine.
        silence_s: After so many seconds without a sign of life a process is killed.

    Raises:
        UserError, WorkerError, KeyboardInterrupt: The failure of the rank that failed first. None of the processes is left.
    """
    # Whoever else reaches the store does not know under which keys the ranks meet.
    secret = secrets.token_hex(16)
    launcher, pool = launcher or LocalLauncher(), workers if isinstance(workers, Pool) else Pool(("rank",), workers)
    ranks: list[Process] = []
    store = None
    try:
        with counted_interrupts() as interrupts:
            launcher.reserve([pool])
            store = open_store(launcher.ip, limit_s)
            for rank in range(pool.workers):
                meeting = {"MASTER_ADDR": launcher.ip, "MASTER_PORT": str(store.port), "WORLD_SIZE": str(pool.workers)}
                own = {"RANK": str(rank), "LOCAL_RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
                spec = ProcessSpec(
                    f"rank {rank}", f"{__name__}:work", 
                    {"entry": entry, "task": task, "limit_s": limit_s, "rank": rank, "secret": secret},
                    environment={**meeting, **own}, also_calls=entry,
                )  # fmt: skip
                ranks.append(launcher.start(pool.name, rank, spec))
            with FrozenWatch(silence_s, tell) as frozen:
                return supervise(launcher, ranks, interrupts, silence_s, frozen.killed)
    finally:
        end(ranks)
        launcher.close()
        # A traceback would keep the store, and with it its port.
        store = None


@dataclass
class InterruptCount:
    """How often Ctrl-C came, and how often it was passed on."""

    asked: int = 0
    passed_on: int = 0

    def pass_on(self, ranks: Sequence[Process]) -> None:
        """Pass on what has come since the last call. A signal handler must not: Ray may be at work when it is called."""
        while self.passed_on < self.asked:
            self.passed_on += 1
            for rank in ranks:
                rank.interrupt()


def tell(line: str) -> None:
    """Say something beside the ranks' own words."""
    print(f"braid: {line}", file=sys.stderr, flush=True)


def supervise(
    launcher: Launcher, ranks: Sequence[Process], interrupts: InterruptCount, silence_s: float, killed: Sequence[str]
) -> Any:
    """Wait until every rank is done and return rank 0's result. Raises the first failure; `killed` are lines on frozen processes."""
    silent, outcomes = list(ranks), dict[str, Outcome]()
    deadline = float("inf")
    while silent and time.monotonic() < deadline:
        interrupts.pass_on(ranks)
        for rank in launcher.answered(silent, min(LOOK_EVERY_S, max(0.0, deadline - time.monotonic()))):
            silent.remove(rank)
            outcomes[rank.name] = last_word(rank, killed)
        for rank in [each for each in silent if each.end_if_silent(mute_after(silence_s))]:
            silent.remove(rank)
            outcomes[rank.name] = Outcome(failure=Failure("died", f"{rank.name} {rank.describe_end()}"))
        failures = [outcome.failure for outcome in outcomes.values() if outcome.failure]
        if any(failure.is_cause for failure in failures):
            break
        # Interrupted ranks are waited for as long as they take: one of them saves.
        if deadline == float("inf") and any(failure.follows for failure in failures):
            deadline = time.monotonic() + SETTLING_S
    if failures:
        # An interrupt counts only where nothing failed.
        raise min(failures, key=lambda f: (f.follows, f.kind == "interrupted")).error()
    return outcomes[ranks[0].name].result


def last_word(rank: Process, killed: Sequence[str] = ()) -> Outcome:
    """Return the outcome of a rank that has answered, or that has ended without a word."""
    if rank.outcome is not None:
        return rank.outcome
    frozen = next((line for line in killed if f"(process {rank.pid})" in line), "")
    return Outcome(failure=Failure("died", frozen or f"{rank.name} is gone without a word ({rank.describe_end()})"))


def end(ranks: Sequence[Process]) -> None:
    """End every rank that still runs: it is told to, and killed if it does not. None is left."""
    for rank in ranks:
        rank.hang_up()
    deadline = time.monotonic() + STOPPING_S
    for rank in ranks:
        rank.close(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def counted_interrupts() -> Iterator[InterruptCount]:
    """Count Ctrl-C and SIGTERM, for the ranks to save and end together; then the launcher ends as they did."""
    interrupts = InterruptCount()

    def count(number: int, frame: FrameType | None) -> None:
        interrupts.asked += 1
        if interrupts.asked > PATIENCE:
            raise KeyboardInterrupt

    with interrupts_handled(count):
        yield interrupts


def work(arguments: Mapping[str, Any]) -> Any:
    """Do a rank's part, in its process: join the others, do the task, and wait for the end of the run."""
    task = arguments["task"]
    world = World(arguments["rank"])
    try:
        world = join(arguments["limit_s"], task.get("cuda", False), secret=arguments["secret"])
        result = function_of(arguments["entry"])(world, task)
        world.gather("the end of the run", b"")
    except (UserError, KeyboardInterrupt):
        raise
    except BaseException as error:
        raise TaskFailed(rank_failure(world, error)) from error
    world.close()
    return result


def rank_failure(world: World, error: BaseException) -> Failure:
    """Return how a rank reports an error: where it happened and on which rows, with the traceback."""
    return failure_of(f"rank {world.rank} failed in {world.place}{world.rows}", error)
