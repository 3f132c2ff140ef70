"""Load balancing: the router's choice of an engine for each row, without clocks or sockets.

add ──▶ waiting ──an engine has room──▶ on the engine with the least work ──done──▶ removed
           ▲                                    |
           └────────────── the engine failed ───┘

A row is assigned only when an engine has room for it: lengths are not known beforehand, and unassigned rows can still
balance rows that turned out long. Work is counted in response tokens.
"""

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

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
    """A row in flight."""

    uid: Uid
    prompt_tokens: int
    engine: int | None = None
    """None while it waits."""
    work: float = 0.0


@dataclass
class EngineState:
    """One engine as seen by the dispatcher."""

    slots: int
    alive: bool = True
    rows: int = 0
    work: float = 0.0
    """Total work of its rows, in response tokens."""


class Dispatcher:
    """The assignment of rows to engines; `slots` is the number of concurrent rows of each engine."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.engines = [EngineState(count) for count in slots]
        self.jobs: dict[Uid, Job] = {}
        self.waiting: OrderedDict[Uid, Job] = OrderedDict()
        self._prefixes: OrderedDict[Prefix, dict[int, int]] = OrderedDict()
        self._finished: Counter[str] = Counter()

    def engine_of(self, uid: Uid) -> int | None:
        """Return the row's engine; None while it waits. Raises KeyError if it is not in flight."""
        if uid not in self.jobs:
            raise KeyError(f"row {uid} is not under way")
        return self.jobs[uid].engine

    def add(self, uid: Uid, prompt_tokens: int) -> None:
        """Add a row. Raises ValueError if it is already in flight."""
        if uid in self.jobs:
            raise ValueError(f"row {uid} is under way already")
        self.jobs[uid] = self.waiting[uid] = Job(uid, prompt_tokens)

    def assign(self) -> list[tuple[Uid, int]]:
        """Assign waiting rows to the least loaded engines, or to slightly more loaded ones that have their prefix;
        return (row, engine).
        """
        assigned = []
        expected = self._finished["tokens"] / self._finished["rows"] if self._finished["rows"] else FIRST_GUESS
        while self.waiting:
            work = {n: s.work for n, s in enumerate(self.engines) if s.alive and s.rows < s.slots}
            if not work:
                break
            # Waiting rows can even out a difference in load; when none waits, only the load counts.
            unbound = len(self.waiting) * expected / len(self.engines)
            uid, job = self.waiting.popitem(last=False)
            tokens_by_engine = {
                n: min(job.prompt_tokens, max(self._prefixes.get(p, {}).get(n, 0) for p in (uid, uid[:2])))
                for n in work
            }
            least = min(work.values())
            near = [n for n in work if work[n] <= least + min(SLACK * self.engines[n].slots * expected, unbound)]
            _, _, engine = min((-tokens_by_engine[n], work[n], n) for n in near)
            if not tokens_by_engine[engine]:
                _, engine = min((work[n], n) for n in work)
            job.engine, job.work = engine, expected + PROMPT_WORK * (job.prompt_tokens - tokens_by_engine[engine])
            self.engines[engine].rows += 1
            self.engines[engine].work += job.work
            self._remember(uid[:2], engine, job.prompt_tokens)
            assigned.append((uid, engine))
        return assigned

    def done(self, uid: Uid, response_tokens: int | None) -> None:
        """Remove a row; without `response_tokens` it was not answered, and may be added again."""
        engine, job = self.engine_of(uid), self.jobs.pop(uid)
        if engine is None:
            del self.waiting[uid]
        else:
            state = self.engines[engine]
            state.rows -= 1
            # An engine without rows starts again from exactly 0, so that rounding errors do not accumulate.
            state.work = state.work - job.work if state.rows else 0.0
        if response_tokens is not None:
            if engine is not None:
                self._remember(uid, engine, job.prompt_tokens + response_tokens)
            self._finished.update(rows=1, tokens=response_tokens)

    def fail(self, engine: int) -> list[Uid]:
        """Mark an engine as dead, and return its rows, which go to the front of the queue."""
        self.engines[engine] = EngineState(self.engines[engine].slots, alive=False)
        lost = [job for job in self.jobs.values() if job.engine == engine]
        for job in reversed(lost):
            job.engine, self.waiting[job.uid] = None, job
            self.waiting.move_to_end(job.uid, last=False)
        for tokens_by_engine in self._prefixes.values():
            tokens_by_engine.pop(engine, None)
        return [job.uid for job in lost]

    def _remember(self, prefix: Prefix, engine: int, tokens: int) -> None:
        """Remember how many tokens of a row's prompt the engine has computed."""
        tokens_by_engine = self._prefixes.setdefault(prefix, {})
        tokens_by_engine[engine] = tokens if len(prefix) == 3 else min(tokens, tokens_by_engine.get(engine, tokens))
        self._prefixes.move_to_end(prefix)
        if len(self._prefixes) > PREFIXES:
            self._prefixes.popitem(last=False)
