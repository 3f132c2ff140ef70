"""Input and output of a simulation: durations and verdicts in, a timeline and an account of all rows out."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from braidrl.data.rows import Uid
from braidrl.flow.batches import Sizes
from braidrl.flow.flow import Flow
from braidrl.flow.selecting import Selection
from braidrl.weights.versions import Way

Fate = Literal["done", "dies", "late"]


@dataclass(frozen=True)
class Workload:
    """A flow with its sizes, and functions that give durations and outcomes.

    `seconds(stage, uid)` is the time of one row on one worker; `verdict(group)` is None to keep a group, else the reason to drop it;
    `fate(lease)` is the outcome of a lease: done, the worker dies halfway, or it answers after the lease expired.
    """

    flow: Flow
    sizes: Sizes
    seconds: Callable[[str, Uid], float]
    workers: Mapping[str, int] = field(default_factory=dict)
    """Workers of a stage (streaming) or of a pool (hybrid); default 1."""
    pools: Mapping[str, str] = field(default_factory=dict)
    """The pool of a stage (hybrid); default: a pool of its own."""
    ranks: int = 1
    """Ranks of the distributed runtime."""
    dispatch_rows: int = 4
    """Most rows of a lease (streaming); engines lease one row at a time."""
    slots: int = 1
    """Rows that an engine generates at once (streaming)."""
    step_seconds: float = 0.0
    """Seconds of an engine's decode step (streaming). Rows start at a step boundary; an engine requests a new row while the next step
    runs. 0: rows start at once."""
    loading: Way = "rolling"
    """The weight-update policy (streaming)."""
    load_seconds: float = 0.0
    """Seconds that an engine pauses to load received weights."""
    receive_seconds: float = 0.0
    """Seconds to receive weights."""
    seconds_per_iteration: float = math.inf
    """Seconds of generation after which a row is suspended, if `sizes.sets_aside` (streaming)."""
    verdict: Callable[[int], str | None] = lambda group: None
    fate: Callable[[int], Fate] = lambda lease: "done"
    lease_seconds: float = 1e6

    def uids(self, groups: Sequence[int]) -> list[Uid]:
        """Return the uids of the rows of some groups."""
        return [(0, group, sample) for group in groups for sample in range(self.sizes.samples_per_prompt)]


class SimulatedSpan(NamedTuple):
    """A span of one worker's work on rows of one iteration, in seconds."""

    worker: str
    stage: str
    start: float
    end: float
    rows: int
    iteration: int


@dataclass
class Simulation:
    """The result: a timeline, the ends of iterations, and the outcome of every row."""

    spans: list[SimulatedSpan] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
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
        """Record the selection of a batch."""
        self.batches.append(outcome.groups)
        self.dropped.update(outcome.dropped)
        self.released += outcome.released

    def seconds_per_iteration(self, skip: int = 2) -> float:
        """Return the mean over the iterations after the first `skip` (pipeline fill); needs more than `skip` iterations."""
        return (self.ends[-1] - self.ends[skip - 1]) / (len(self.ends) - skip)
