"""The eager, hybrid and distributed runtimes in virtual time, as tests need them: an iteration's stages in order, as
devices become free.

eager          one process, one stage after the other
hybrid         a call starts when its inputs are there and its pool is free; calls to one pool keep their order
distributed    every rank walks the chain with its rows; ranks meet where groups or a batch must be complete, and to
               train
"""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from braidrl.data.packing import balanced_partition
from braidrl.data.rows import Uid
from braidrl.flow.batches import check_staleness, trained_on
from braidrl.flow.columns import ADMISSION
from braidrl.flow.flow import is_optimized, touched_weights
from braidrl.flow.selecting import GroupSelector, Selection, Verdict
from braidrl.flow.stage import Kind, Scope, Stage
from braidrl.observe.trace import Span
from braidrl.plan.simulation import Simulation, Workload

Fate = Literal["done", "dies", "late"]


@dataclass(frozen=True)
class AnyWorkload(Workload):
    """A workload for every runtime, with failures under `streaming`."""

    pools: Mapping[str, str] = field(default_factory=dict)
    """The pool of a stage (hybrid); default: a pool of its own. `workers` may be by pool."""
    ranks: int = 1
    """Ranks of the distributed runtime."""
    fate: Callable[[int], Fate] = lambda lease: "done"
    """The outcome of a lease: done, the worker dies halfway, or it answers after the lease expired."""
    lease_seconds: float = 1e6
    most_seconds: float = math.inf
    """Seconds of generation in one batch after which a row is suspended, if `sizes.partial_rollout`."""


@dataclass
class Account(Simulation):
    """A timeline, and the outcome of every row."""

    admitted: set[Uid] = field(default_factory=set)
    trained: Counter[tuple[tuple[str, int], Uid]] = field(default_factory=Counter)
    """The number of times that a train stage used a row in an epoch."""
    batches: list[tuple[int, ...]] = field(default_factory=list)
    """The groups of each iteration's batch."""
    versions: list[list[int]] = field(default_factory=list)
    """The policy version that each row of each batch started on (streaming)."""
    dropped: Counter[str] = field(default_factory=Counter)
    released: list[int] = field(default_factory=list)
    staleness: int = 0
    """The maximum over trained rows."""

    def finish_batch(self, outcome: Selection) -> None:
        self.batches.append(outcome.groups)
        self.dropped.update(outcome.dropped)
        self.released += outcome.released


@dataclass
class Iterations(ABC):
    """The common part of the three runtimes: waves until the batch is complete, then the other stages, each row
    once.
    """

    work: AnyWorkload
    result: Account = field(default_factory=Account)
    iteration: int = 0
    admitted: int = 0

    @abstractmethod
    def run(self, stage: Stage, uids: Sequence[Uid]) -> None:
        """Advance this runtime's clocks by one stage on some rows."""

    @abstractmethod
    def now(self) -> float:
        """Return the time at which all started work ends."""

    def simulate(self) -> Account:
        sizes = self.work.sizes
        sampling = GroupSelector(
            sizes.prompts_per_step, sizes.epoch_groups, sizes.surplus, sizes.max_staleness, sizes.over_sampling
        )
        versions: dict[int, int] = {}
        segment, flow = self.work.flow.sampling_segment, self.work.flow
        for iteration in range(1, self.work.sizes.iterations + 1):
            self.iteration = iteration
            sampling.begin(trained_on(self.iteration))
            while count := sampling.next_wave():
                groups = range(self.admitted, self.admitted + count)
                self.admitted += count
                sampling.admit(groups)
                uids = self.work.uids(groups)
                self.result.admitted.update(uids)
                versions.update(dict.fromkeys(groups, trained_on(self.iteration)))
                self._run_all(segment, uids)
                reasons = {group: self.work.verdict(group) if segment else None for group in groups}
                sampling.decide({group: Verdict(reason, versions[group]) for group, reason in reasons.items()})
            outcome = sampling.finish()
            self.result.finish_batch(outcome)
            uids = self.work.uids(outcome.groups)
            stale = check_staleness(
                self.iteration, [versions[uid[1]] for uid in uids], self.work.sizes.max_staleness, uids
            )
            self.result.staleness = max(self.result.staleness, stale)
            self._run_all(flow.stages[len(segment) :], uids)
            self.result.ends.append(self.now())
        return self.result

    def _run_all(self, stages: Sequence[Stage], uids: Sequence[Uid]) -> None:
        for stage in stages:
            if stage.when.includes(self.iteration):
                self.run(stage, uids)

    def parts(self, stage: Stage, uids: Sequence[Uid]) -> list[list[Uid]]:
        """Return a stage's consecutive portions: a train stage's updates, else all rows."""
        if not is_optimized(stage):
            return [list(uids)]
        sizes = self.work.sizes
        updates = sizes.updates(self.iteration, [uid[1] for uid in uids], [uid[2] for uid in uids])
        for number, rows in enumerate(updates):
            epoch = number * sizes.epochs // len(updates)
            self.result.trained.update(((stage.name, epoch), uids[row]) for row in rows)
        return [[uids[row] for row in rows] for rows in updates]

    def shares(self, stage: Stage, uids: Sequence[Uid], workers: int) -> list[float]:
        """Return the seconds of each worker when rows are partitioned by cost."""
        costs = [self.work.seconds(stage.name, uid) for uid in uids]
        return [sum(costs[i] for i in part) for part in balanced_partition(costs, workers)]

    def note(self, worker: str, stage: Stage, start: float, seconds: float, rows: int) -> None:
        self.result.spans.append(
            Span(worker, str(stage.role), stage.name, self.iteration, start, start + seconds, rows)
        )


@dataclass
class Eager(Iterations):
    """One process."""

    time: float = 0.0

    def run(self, stage: Stage, uids: Sequence[Uid]) -> None:
        for rows in self.parts(stage, uids):
            seconds = sum(self.shares(stage, rows, 1))
            self.note("process", stage, self.time, seconds, len(rows))
            self.time += seconds

    def now(self) -> float:
        return self.time


@dataclass
class Hybrid(Iterations):
    """A controller that never waits but to decide on another wave; pools that work through their calls in order."""

    free: dict[str, float] = field(default_factory=dict)
    done: dict[str, float] = field(default_factory=dict)
    """When each stage's latest call is over."""
    weights: dict[str, float] = field(default_factory=dict)
    """When each role's latest update is over, and its latest use."""
    used: dict[str, float] = field(default_factory=dict)
    decided: float = 0.0
    """When the controller had what it needed to admit the rows now in work."""

    def run(self, stage: Stage, uids: Sequence[Uid]) -> None:
        pool = self.work.pools.get(stage.name, stage.name)
        inputs = [column.writer for column in self.work.flow.inputs[stage.name]] + list(stage.after)
        start = max(
            self.free.get(pool, 0.0),
            self.decided,
            *(self.done.get(name, 0.0) for name in inputs if name != ADMISSION),
            *(self.weights.get(role, 0.0) for role in touched_weights(stage)),
            self.used.get(stage.role or "", 0.0) if stage.kind is Kind.TRAIN else 0.0,
        )
        end = start
        for rows in self.parts(stage, uids):
            shares = self.shares(stage, rows, self.work.workers.get(pool, 1))
            for worker, seconds in enumerate(shares):
                self.note(f"{pool}/{worker}", stage, end, seconds, len(rows))
            end += max(shares)
        self.free[pool] = self.done[stage.name] = end
        self._use_weights(stage, end)
        if stage.kind is Kind.SELECT:
            self.decided = end

    def now(self) -> float:
        return max(self.free.values())

    def _use_weights(self, stage: Stage, end: float) -> None:
        for role in touched_weights(stage):
            self.used[role] = max(end, self.used.get(role, 0.0))
        if stage.kind is Kind.TRAIN and stage.role:
            self.weights[stage.role] = end


@dataclass
class Distributed(Iterations):
    """Ranks with separate clocks, which synchronise only at collectives."""

    clocks: list[float] = field(default_factory=list)

    def run(self, stage: Stage, uids: Sequence[Uid]) -> None:
        self.clocks = self.clocks or [0.0] * self.work.ranks
        for rows in self.parts(stage, uids):
            if stage.kind in (Kind.TRAIN, Kind.SELECT) or stage.scope is not Scope.ROW:
                self._meet()
            for rank, seconds in enumerate(self.shares(stage, rows, self.work.ranks)):
                self.note(f"rank {rank}", stage, self.clocks[rank], seconds, len(rows))
                self.clocks[rank] += seconds
            if stage.kind is Kind.TRAIN:
                self._meet()

    def now(self) -> float:
        return max(self.clocks)

    def _meet(self) -> None:
        self.clocks = [max(self.clocks)] * len(self.clocks)
