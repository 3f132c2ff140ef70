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
FIRST_GUESS = 512.0
"""The assumed length of responses in tokens until some have been seen."""
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

    def __init__(self, slots: Sequence[int]) -> None:
        self.engines = [EngineState(count) for count in slots]
        self.waiting: OrderedDict[Uid, Job] = OrderedDict()
        """The rows without an engine."""
        self._prefixes: OrderedDict[Prefix, dict[int, int]] = OrderedDict()
        self._seen: Counter[str] = Counter()

    def engine_of(self, uid: Uid) -> int | None:
        """Return the row's engine; None while it waits. Raises KeyError if it is not in flight."""
        for number, state in enumerate(self.engines):
            if uid in state.jobs:
                return number
        if uid not in self.waiting:
            raise KeyError(f"row {uid} is not under way")
        return None

    def add(self, uid: Uid, prompt_tokens: int) -> None:
        """Add a row. Raises ValueError if it is already in flight."""
        if uid in self.waiting or any(uid in state.jobs for state in self.engines):
            raise ValueError(f"row {uid} is under way already")
        self.waiting[uid] = Job(uid, prompt_tokens)

    def assign(self) -> list[tuple[Uid, int]]:
        """Assign waiting rows to engines with room, and return (row, engine) pairs.

        A row goes to the least loaded engine, or to one with its prefix that is only slightly more loaded.
        """
        assigned = []
        expected = self._seen["tokens"] / self._seen["rows"] if self._seen["rows"] else FIRST_GUESS
        while self.waiting:
            work = {n: s.work for n, s in enumerate(self.engines) if s.alive and len(s.jobs) < s.slots}
            if not work:
                break
            # Waiting rows can even out a difference in load; when none waits, only the load counts.
            unbound = len(self.waiting) * expected / len(self.engines)
            uid, job = self.waiting.popitem(last=False)
            held = {
                n: min(job.prompt_tokens, max(self._prefixes.get(p, {}).get(n, 0) for p in (uid, uid[:2])))
                for n in work
            }
            least = min(work.values())
            near = [n for n in work if work[n] <= least + min(SLACK * self.engines[n].slots * expected, unbound)]
            _, _, engine = min((-held[n], work[n], n) for n in near)
            if not held[engine]:
                _, engine = min((work[n], n) for n in work)
            job.work = expected + PROMPT_WORK * (job.prompt_tokens - held[engine])
            self.engines[engine].jobs[uid] = job
            self.engines[engine].work += job.work
            self._remember(uid[:2], engine, job.prompt_tokens)
            assigned.append((uid, engine))
        return assigned

    def done(self, uid: Uid, response_tokens: int | None) -> None:
        """Remove a row with its number of response tokens, or with None if it was not answered.

        An answered row may also wait for another engine, if its engine failed just afterwards.
        """
        engine = self.engine_of(uid)
        job = self.waiting.pop(uid) if engine is None else self.engines[engine].remove(uid)
        if response_tokens is not None:
            if engine is not None:
                self._remember(uid, engine, job.prompt_tokens + response_tokens)
            self._seen.update(rows=1, tokens=response_tokens)

    def fail(self, engine: int) -> list[Uid]:
        """Mark an engine as dead, and return its rows, which go to the front of the queue."""
        state = self.engines[engine]
        state.alive = False
        lost = [state.remove(uid) for uid in list(state.jobs)]
        for job in reversed(lost):
            self.waiting[job.uid] = job
            self.waiting.move_to_end(job.uid, last=False)
        for held in self._prefixes.values():
            held.pop(engine, None)
        return [job.uid for job in lost]

    def _remember(self, prefix: Prefix, engine: int, tokens: int) -> None:
        """Remember how many tokens of a row's prompt the engine has computed."""
        held = self._prefixes.setdefault(prefix, {})
        held[engine] = tokens if len(prefix) == 3 else min(tokens, held.get(engine, tokens))
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)
