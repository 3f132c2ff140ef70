"""Weight-update policies: end, delayed, rolling, interrupt. One pure schedule over engine names, without clocks,
sockets or weights.

published ─▶ advance ─▶ target ◀─ load: now, with its rows preempted or without rows, or not yet
    ─ an engine that asks ─▶ loaded

            end, delayed             rolling                   interrupt              ░ version 1   ▓ version 2  ╱ loads
engine 0    ░░░░░░░░╱▓▓▓▓▓▓          ░░░╱▓▓▓▓▓▓▓▓▓▓▓           ░░░╱▓▓▓▓▓▓▓▓▓▓▓
engine 1    ░░░░    ╱▓▓▓▓▓▓          ░░░░░░░╱▓▓▓▓▓▓▓           ░░░╱▓▓▓▓▓▓▓▓▓▓▓
            all at once, when the    in turn: drains most of   each at once: preempts its rows at a token
            batch's rows are there   its rows, takes no new    and resumes them under version 2

Under `delayed` an engine receives the next version into host memory while it generates, and only copies it when it
loads.

The runtime and the simulator drive the same object.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Way = Literal["end", "delayed", "rolling", "interrupt"]
UNKNOWN = -(1 << 30)
"""A version older than any other."""
FINISHED = 0.5
"""The share of its rows that a draining engine finishes before it loads; it preempts the rest."""


class LoadOrder(NamedTuple):
    """An order to load a version; with `keeps_rows` the engine preempts its rows and resumes them afterwards."""

    version: int
    keeps_rows: bool


@dataclass
class HeldVersion:
    """The state of one engine."""

    version: int = 0
    receiving: int = 0
    """The newest version that it was ordered to receive ahead of its load."""
    loading: int | None = None
    draining_from: int | None = None
    """The rows that it had when it started to drain; None while it takes rows."""


class LoadingSchedule:
    """The weight version of each engine, and the draining engines, which get no rows until they have loaded."""

    def __init__(self, way: Way, max_draining: int = 1) -> None:
        """Start at version 0 without engines; under `rolling` at most `max_draining` engines drain at a time."""
        self.way, self.max_draining = way, max_draining
        self.engines: dict[str, HeldVersion] = {}
        self.target = 0
        """The version that engines hold or should load; prompts are admitted for this version."""
        self.pinned = False
        """Whether the target is frozen, as during an evaluation."""
        self.draining: set[str] = set()
        self.max_draining_seen = 0

    def forget(self) -> None:
        """Invalidate all engines' versions: they take rows once `target` is set, unpinned and loaded."""
        self.target, self.pinned = UNKNOWN, True
        self.engines = {name: HeldVersion(UNKNOWN) for name in self.engines}
        self.draining.clear()

    @property
    def needed_versions(self) -> set[int]:
        """Return the versions that engines may still request."""
        return {self.target, *(engine.loading for engine in self.engines.values() if engine.loading is not None)}

    def join(self, name: str) -> None:
        """Add an engine that holds version 0."""
        self.engines[name] = HeldVersion(min(0, self.target))

    def limit_draining(self, engines: int) -> None:
        """Let half of this many engines drain at a time under `rolling`, otherwise all."""
        self.max_draining = engines // 2 if self.way == "rolling" else engines

    def leave(self, name: str) -> None:
        """Remove an engine."""
        self.engines.pop(name, None)
        self.draining.discard(name)

    def is_behind(self, newest: int) -> bool:
        """Return True if the target may move towards the newest version."""
        return not self.pinned and newest > self.target

    def advance(self, newest: int, is_generation_over: bool) -> None:
        """Move the target towards the newest version, if the policy allows it now.

        Engines that load together take one version after another: the version on which a batch starts then follows from
        its number alone, and not from how late versions arrive.
        """
        if not self.is_behind(newest):
            return
        if self.way in ("rolling", "interrupt"):
            self.target = newest
        elif is_generation_over:
            self.target += 1

    def version_of(self, name: str) -> int | None:
        """Return the version of an engine; None for other workers."""
        return self.engines[name].version if name in self.engines else None

    def takes_rows(self, name: str) -> bool:
        """Return False for draining engines, which get no rows."""
        return name not in self.engines or self.engines[name].draining_from is None

    def receive_ahead(self, name: str, newest: int) -> int | None:
        """Return the version that an engine receives into host memory while it generates with another; None if none is
        due.
        """
        engine = self.engines.get(name)
        if self.way != "delayed" or engine is None or engine.version != self.target:
            return None
        if newest <= self.target or engine.receiving > self.target:
            return None
        engine.receiving = self.target + 1
        return engine.receiving

    def load(self, name: str, rows: int) -> LoadOrder | None:
        """Return the version that an engine with `rows` rows must load now, and record that it loads; None if it
        continues.
        """
        engine = self.engines.get(name)
        if engine is None or engine.version == self.target:
            return None
        if rows and self.way in ("end", "delayed"):
            return None
        if self.way == "rolling":
            if engine.draining_from is None:
                # It drains if it is its turn.
                if len(self.draining) >= self.max_draining:
                    return None
                engine.draining_from = rows
                self.draining.add(name)
                self.max_draining_seen = max(self.max_draining_seen, len(self.draining))
            if rows > engine.draining_from * (1 - FINISHED):
                return None
        engine.loading = self.target
        return LoadOrder(self.target, rows > 0)

    def loaded(self, name: str, version: int) -> None:
        """Record the version that an engine loaded; it takes rows again."""
        if name in self.engines:
            engine = self.engines[name]
            engine.version, engine.loading, engine.draining_from = version, None, None
            self.draining.discard(name)
