"""What a simulation runs, and what it leaves behind: made-up durations and verdicts in, a timeline and an account of rows out."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from braidrl.data.rows import Uid
from braidrl.flow.batches import Sizes
from braidrl.flow.flow import Flow
from braidrl.flow.readiness import Consumer
from braidrl.flow.selecting import Selection
from braidrl.weights.versions import Way

Fate = Literal["done", "dies", "late"]


@dataclass(frozen=True)
class Workload:
    """A flow with its sizes, and functions that say how long things take and how they end.

    `seconds(stage, uid)` is what one row costs one worker; `verdict(group)` is None to keep it; `fate(lease)` is how the
    work on a lease ends: done, its worker dies halfway, or it answers after the lease has expired.
    """

    flow: Flow
    sizes: Sizes
    seconds: Callable[[str, Uid], float]
    workers: Mapping[str, int] = field(default_factory=dict)
    """Workers of a stage (streaming) or of a pool (hybrid); 1 where not named."""
    pools: Mapping[str, str] = field(default_factory=dict)
    """The pool of a stage (hybrid); one of its own where not named."""
    ranks: int = 1
    """Ranks of the distributed runtime."""
    dispatch_rows: int = 4
    """The most rows of a lease (streaming); a generating worker takes them one by one."""
    slots: int = 1
    """Rows that a generating worker has at once (streaming), each in its own time or by steps."""
    step_seconds: float = 0.0
    """How long a decode step of a generating worker takes, in which each of its rows draws a token (streaming). Rows begin with a step,
    and that one row has ended and another is wanted is told while the next step runs. With 0 there are no steps."""
    loading: Way = "rolling"
    """When engines take new weights (streaming)."""
    load_seconds: float = 0.0
    """How long an engine generates nothing when it loads weights that it has."""
    receive_seconds: float = 0.0
    """How long it takes to receive them."""
    seconds_per_iteration: float = math.inf
    """How long a generating worker draws a row before it is set aside, where `sizes.sets_aside` (streaming)."""
    verdict: Callable[[int], str | None] = lambda group: None
    fate: Callable[[int], Fate] = lambda lease: "done"
    lease_seconds: float = 1e6

    def uids(self, groups: Sequence[int]) -> list[Uid]:
        """Return the rows of some groups."""
        return [(0, group, sample) for group in groups for sample in range(self.sizes.samples_per_prompt)]


class SimulatedSpan(NamedTuple):
    """One worker at one stage, in seconds, with how many rows of which iteration."""

    worker: str
    stage: str
    start: float
    end: float
    rows: int
    iteration: int


@dataclass
class Simulation:
    """The timeline, when iterations ended, and what became of every row."""

    spans: list[SimulatedSpan] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    admitted: set[Uid] = field(default_factory=set)
    trained: Counter[tuple[Consumer, Uid]] = field(default_factory=Counter)
    batches: list[tuple[int, ...]] = field(default_factory=list)
    """Groups of each iteration's batch."""
    versions: list[list[int]] = field(default_factory=list)
    """For each iteration the version that each row of its batch was begun with (streaming)."""
    dropped: Counter[str] = field(default_factory=Counter)
    released: list[int] = field(default_factory=list)
    staleness: int = 0
    """The largest of any trained row."""

    def finish_batch(self, outcome: Selection) -> None:
        """Note what selection made of a batch."""
        self.batches.append(outcome.groups)
        self.dropped.update(outcome.dropped)
        self.released += outcome.released

    def seconds_per_iteration(self, skip: int = 2) -> float:
        """Mean over the iterations after the first `skip`, in which a pipeline fills; there must be more than those."""
        return (self.ends[-1] - self.ends[skip - 1]) / (len(self.ends) - skip)
