"""Load balancing: the router's choice of an engine for each row, without clocks or sockets.

add ──▶ waiting ──an engine has room──▶ on the engine with the least work ──done──▶ gone
           ▲                                    |
           └────────────── the engine failed ───┘

A row is assigned only when an engine has room for it: lengths are not known beforehand, and unassigned rows can still balance rows that
turned out long. Work is counted in response tokens.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from braidrl.data.rows import Uid

PROMPT_WORK = 0.1
"""Work of prefilling one prompt token, relative to decoding one token."""
SLACK = 0.25
"""The most load of an engine with a row's prefix beyond the least loaded engine's, as a share of its capacity."""
PREFIXES = 4096
"""Number of prefixes whose engine is remembered."""

Prefix = tuple[int, ...]
"""(source, group) for the prompt of a group, a uid for the earlier turns of a trajectory."""


@dataclass
class Job:
    """A row that waits or is in flight."""

    uid: Uid
    prompt_tokens: int
    work: float = 0.0


@dataclass
class EngineState:
    """One engine as the dispatcher sees it."""

    slots: int
    alive: bool = True
    jobs: dict[Uid, Job] = field(default_factory=dict)
    work: float = 0.0
    """Total work of its jobs, in response tokens."""

    def remove(self, uid: Uid) -> Job:
        job = self.jobs.pop(uid)
        # An empty engine starts again from exactly 0, so that rounding errors do not accumulate.
        self.work = self.work - job.work if self.jobs else 0.0
        return job


class Dispatcher:
    """The assignment of rows to engines; `slots` is the number of rows that each engine may have at once."""

    def __init__(self, slots: Sequence[int], expected_tokens: float = 512.0) -> None:
        """Start without rows; `expected_tokens` is the assumed response length until responses have been seen."""
        self.engines = [EngineState(count) for count in slots]
        self._waiting: OrderedDict[Uid, Job] = OrderedDict()
        self._prefixes: OrderedDict[Prefix, dict[int, int]] = OrderedDict()
        self._first_guess = expected_tokens
        self._seen: Counter[str] = Counter()

    @property
    def waiting(self) -> int:
        """Return the number of rows without an engine."""
        return len(self._waiting)

    @property
    def expected_tokens(self) -> float:
        """Return the mean length of the responses seen so far."""
        return self._seen["tokens"] / self._seen["rows"] if self._seen["rows"] else self._first_guess

    def engine_of(self, uid: Uid) -> int | None:
        """Return the row's engine; None while it waits. Raises KeyError if it is not in flight."""
        for number, state in enumerate(self.engines):
            if uid in state.jobs:
                return number
        if uid not in self._waiting:
            raise KeyError(f"row {uid} is not under way")
        return None

    def add(self, uid: Uid, prompt_tokens: int) -> None:
        """Add a row. Raises ValueError if it is already in flight."""
        if uid in self._waiting or any(uid in state.jobs for state in self.engines):
            raise ValueError(f"row {uid} is under way already")
        self._waiting[uid] = Job(uid, prompt_tokens)

    def assign(self) -> list[tuple[Uid, int]]:
        """Assign waiting rows to engines with room, and return (row, engine) pairs."""
        assigned = []
        while self._waiting:
            open_now = [n for n, s in enumerate(self.engines) if s.alive and len(s.jobs) < s.slots]
            if not open_now:
                break
            uid, job = self._waiting.popitem(last=False)
            engine = self._choose(job, open_now)
            job.work = self.expected_tokens + PROMPT_WORK * (job.prompt_tokens - self._held(job, engine))
            self.engines[engine].jobs[uid] = job
            self.engines[engine].work += job.work
            self._remember(uid[:2], engine, job.prompt_tokens)
            assigned.append((uid, engine))
        return assigned

    def done(self, uid: Uid, response_tokens: int) -> None:
        """Remove a row that is answered, also if its engine failed just afterwards and the row waits for another one."""
        engine = self.engine_of(uid)
        if engine is None:
            del self._waiting[uid]
        else:
            job = self.engines[engine].remove(uid)
            self._remember(uid, engine, job.prompt_tokens + response_tokens)
        self._seen.update(rows=1, tokens=response_tokens)

    def drop(self, uid: Uid) -> None:
        engine = self.engine_of(uid)
        if engine is None:
            del self._waiting[uid]
        else:
            self.engines[engine].remove(uid)

    def fail(self, engine: int) -> list[Uid]:
        """Mark an engine as dead, and return its rows, which go to the front of the queue."""
        state = self.engines[engine]
        state.alive = False
        lost = [state.remove(uid) for uid in list(state.jobs)]
        for job in reversed(lost):
            self._waiting[job.uid] = job
            self._waiting.move_to_end(job.uid, last=False)
        for held in self._prefixes.values():
            held.pop(engine, None)
        return [job.uid for job in lost]

    def recover(self, engine: int) -> None:
        """Mark an engine as alive again."""
        self.engines[engine].alive = True

    def _choose(self, job: Job, open_now: Sequence[int]) -> int:
        """Return the least loaded engine, or an engine with the row's prefix that is only slightly more loaded."""
        work = {engine: self.engines[engine].work for engine in open_now}
        least = min(work.values())
        # Waiting rows can even out a difference in load; when none waits, only the load counts.
        unbound = (len(self._waiting) + 1) * self.expected_tokens / len(self.engines)
        near = [
            engine
            for engine in open_now
            if work[engine] <= least + min(SLACK * self.engines[engine].slots * self.expected_tokens, unbound)
        ]
        best = max(near, key=lambda engine: (self._held(job, engine), -work[engine], -engine))
        return best if self._held(job, best) else min(open_now, key=lambda engine: (work[engine], engine))

    def _held(self, job: Job, engine: int) -> int:
        """Return how many tokens of the row's prompt the engine has computed."""
        held = max(self._prefixes.get(prefix, {}).get(engine, 0) for prefix in (job.uid, job.uid[:2]))
        return min(held, job.prompt_tokens)

    def _remember(self, prefix: Prefix, engine: int, tokens: int) -> None:
        held = self._prefixes.setdefault(prefix, {})
        held[engine] = tokens if len(prefix) == 3 else min(tokens, held.get(engine, tokens))
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)
