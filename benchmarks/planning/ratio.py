"""Predict how many of twelve workers should generate and how many train, and time each split with processes.

    python -m benchmarks.planning.ratio

The streaming schedule hands out rows to processes that sleep for the given time of a row's work. `braid plan` simulates
the same schedule in virtual time. The compared figure is the number of generating workers with the shortest iteration.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path

from braidrl.data.rows import Uid
from braidrl.flow import Flow, Kind, Stage, actor, reward
from braidrl.flow.batches import Sizes
from braidrl.flow.stage import Scope
from braidrl.plan.simulation import SimulatedWorker, Simulation, Streaming, Workload
from tests.plan.durations import long_tailed

WORKERS = 12
ITERATIONS = 4
FLOW = Flow(
    "grpo",
    [
        actor.generate(),
        reward.verify(),
        Stage(
            "normalized",
            "normalized",
            None,
            kind=Kind.COMPUTE,
            reads=("reward",),
            writes=("advantage",),
            scope=Scope.GROUP,
        ),
        Stage("actor.update", "update", "actor", kind=Kind.TRAIN, reads=("advantage",)),
    ],
)


def sleeper(orders: Connection) -> None:
    """Sleep for the seconds of each order, then answer."""
    while (seconds := orders.recv()) is not None:
        time.sleep(seconds)
        orders.send(seconds)


class ProcessClock:
    """Wall clock: an action falls due when all workers of its job have slept for their shares."""

    def __init__(self, processes: int) -> None:
        context = multiprocessing.get_context("fork")
        self.idle: list[Connection] = []
        self.busy: dict[Connection, list[Connection]] = {}
        self.actions: dict[int, Callable[[], None]] = {}
        self.shares: Sequence[float] = ()
        self.began = time.monotonic()
        for _ in range(processes):
            here, there = context.Pipe()
            context.Process(target=sleeper, args=(there,), daemon=True).start()
            self.idle.append(here)

    @property
    def now(self) -> float:
        """Return the seconds since the beginning."""
        return time.monotonic() - self.began

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Start one sleeping process per share."""
        together = [self.idle.pop() for _ in self.shares]
        for process, share in zip(together, self.shares, strict=True):
            process.send(share)
            self.busy[process] = together
        self.actions[id(together)] = action

    def step(self) -> bool:
        """Wait for the next answer, and run what is due."""
        if not self.busy:
            return False
        for process in wait(list(self.busy)):
            assert isinstance(process, Connection)
            process.recv()
            together = self.busy.pop(process)
            self.idle.append(process)
            if not any(other is together for other in self.busy.values()):
                self.actions.pop(id(together))()
        return True

    def close(self) -> None:
        """End the processes."""
        for process in self.idle:
            process.send(None)


class Timed(Streaming):
    """A streaming run on the wall clock."""

    def __init__(self, work: Workload) -> None:
        super().__init__(work)
        # One process beside the twelve for each stage whose work takes no time.
        self.clock = ProcessClock(WORKERS + 2)  # type: ignore[assignment]

    def _shares(self, worker: SimulatedWorker, rows: Sequence[Uid], stage: Stage | None = None) -> list[float]:
        shares = super()._shares(worker, rows, stage)
        self.clock.shares = shares  # type: ignore[attr-defined]
        return shares


def workload(generating: int, seconds: float, balance: float) -> Workload:
    """Return a long-tailed run in which training a row takes `balance` times as long as generating a row of mean
    length.
    """
    lengths = long_tailed(seed=1, median=1.0, longest=4.0, among=32)

    def cost(stage: str, uid: Uid) -> float:
        return {"actor.generate": lengths(uid), "actor.update": 1.3 * balance}.get(stage, 0.0) * seconds

    return Workload(
        FLOW,
        Sizes(ITERATIONS, 8, 4, 32, max_staleness=1),
        cost,
        workers={"actor.generate": generating, "actor.update": WORKERS - generating},
        dispatch_rows=8,
    )


def timed(work: Workload) -> Simulation:
    """Return a run that is timed by the wall clock."""
    run = Timed(work)
    result = run.simulate()
    run.clock.close()  # type: ignore[attr-defined]
    return result


def main() -> None:
    """Time every split for three ratios of generation to training."""
    lines = []
    for balance in (0.35, 1.0, 2.0):
        predicted, measured = {}, {}
        for generating in range(2, WORKERS - 1):
            predicted[generating] = Streaming(workload(generating, 1.0, balance)).simulate().seconds_per_iteration(1)
            scale = 0.25
            measured[generating] = timed(workload(generating, scale, balance)).seconds_per_iteration(1) / scale
        best, found = min(predicted, key=lambda n: predicted[n]), min(measured, key=lambda n: measured[n])
        lines.append(
            {
                "balance": balance,
                "predicted_best": best,
                "measured_best": found,
                "predicted": {n: round(s, 2) for n, s in predicted.items()},
                "measured": {n: round(s, 2) for n, s in measured.items()},
            }
        )
        print(lines[-1], flush=True)
    result = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "workers": WORKERS, "lines": lines}
    path = Path(__file__).parent.parent / "results" / "plan_ratio.json"
    path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
