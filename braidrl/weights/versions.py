"""When each engine takes new weights: four ways as values of one schedule. No clock, no socket, no weights; engines are names.

published ─▶ advance ─▶ target ◀─ load: now, with its rows set down or without any, or not yet ─ an engine that asks ─▶ loaded

            end, delayed             rolling                   interrupt              ░ version 1   ▓ version 2   ╱ loads
engine 0    ░░░░░░░░╱▓▓▓▓▓▓          ░░░╱▓▓▓▓▓▓▓▓▓▓▓           ░░░╱▓▓▓▓▓▓▓▓▓▓▓
engine 1    ░░░░    ╱▓▓▓▓▓▓          ░░░░░░░╱▓▓▓▓▓▓▓           ░░░╱▓▓▓▓▓▓▓▓▓▓▓
            all at once, when the    in turn: takes no rows,   each at once: sets its rows down at a token
            batch's rows are there   finishes most of its own  and goes on with them under version 2

The runtime and the simulator drive the same object.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

Way = Literal["end", "delayed", "rolling", "interrupt"]
UNKNOWN = -(1 << 30)
"""Stands for a version that is older than any."""
FINISHED = 0.5
"""The share of its rows that an engine finishes before it loads in its turn; the others, whose ends may be far off, it sets down."""


class LoadOrder(NamedTuple):
    """What an engine is to do: load a version, and then go on with rows that it sets down before."""

    version: int
    keeps_rows: bool


@dataclass
class HeldVersion:
    """What one engine has."""

    version: int = 0
    received: int = 0
    """The newest version that lies in its host memory."""
    told: int = 0
    """The newest version that it was told to receive or to load."""
    loading: int | None = None
    out_with: int | None = None
    """The rows that it had when its turn came; None while it takes rows."""


class LoadingSchedule:
    """Which engines hold which version, and which of them are out: they take no rows until they have loaded."""

    def __init__(self, way: Way, most_out: int = 1) -> None:
        """Begin with the model's own weights, version 0, and without engines; `most_out` may be out at a time if they take turns."""
        self.way, self.most_out = way, most_out
        self.engines: dict[str, HeldVersion] = {}
        self.target = 0
        """What engines hold or shall load; prompts are admitted for rows of this version."""
        self.pinned = False
        """While True the target stays: an evaluation runs."""
        self.most_out_seen = 0

    def forget(self) -> None:
        """Note that no engine holds a version that counts: they take rows when they have loaded what `target` is set to, unpinned."""
        self.target, self.pinned = UNKNOWN, True
        self.engines = {name: HeldVersion(UNKNOWN) for name in self.engines}

    @property
    def is_forgotten(self) -> bool:
        """Return whether an engine holds no version that counts."""
        return any(held.version == UNKNOWN for held in self.engines.values())

    @property
    def receives_ahead(self) -> bool:
        """Return whether engines receive a version in host memory while they generate with another one."""
        return self.way != "end"

    @property
    def out(self) -> int:
        """Return how many engines are out."""
        return sum(held.out_with is not None for held in self.engines.values())

    @property
    def wanted(self) -> set[int]:
        """Return the versions that an engine may still ask for."""
        return {self.target, *(held.loading for held in self.engines.values() if held.loading is not None)}

    def join(self, name: str) -> None:
        """Note an engine that is there, with version 0."""
        self.engines[name] = HeldVersion(min(0, self.target))

    def leave(self, name: str) -> None:
        """Forget an engine."""
        self.engines.pop(name, None)

    def advance(self, newest: int, is_generation_over: bool) -> None:
        """Let engines load the newest version, if this is the time."""
        if not self.pinned and (self.way in ("rolling", "interrupt") or is_generation_over):
            self.target = max(self.target, newest)

    def version_of(self, name: str) -> int | None:
        """Return what an engine holds; None for one that is no engine."""
        return self.engines[name].version if name in self.engines else None

    def lags(self, name: str) -> bool:
        """Return whether an engine holds another version than it shall."""
        return name in self.engines and self.engines[name].version != self.target

    def takes_rows(self, name: str) -> bool:
        """Return whether an engine, or who is none, may be given rows."""
        return name not in self.engines or self.engines[name].out_with is None

    def receive(self, name: str, newest: int) -> bool:
        """Return whether to tell an engine now that it shall receive the newest version, and note that it was told."""
        held = self.engines.get(name)
        if held is None or not self.receives_ahead or newest <= held.told:
            return False
        held.told = newest
        return True

    def received(self, name: str, version: int) -> None:
        """Note that an engine has a version in host memory."""
        if name in self.engines:
            self.engines[name].received = version

    def load(self, name: str, rows: int) -> LoadOrder | None:
        """Return what an engine with so many rows is to load now, and note that it does; None where it goes on as it is."""
        if not self.lags(name):
            return None
        held = self.engines[name]
        if rows and not self._may_load(held, rows):
            return None
        if self.way == "rolling" and held.out_with is None and not self._goes_out(held, rows):
            return None
        held.loading, held.told = self.target, max(held.told, self.target)
        return LoadOrder(self.target, rows > 0)

    def loaded(self, name: str, version: int) -> None:
        """Note the version that an engine holds; it takes rows again."""
        if name in self.engines:
            held = self.engines[name]
            held.version, held.loading, held.out_with = version, None, None

    def _may_load(self, held: HeldVersion, rows: int) -> bool:
        """Return whether an engine with rows may load."""
        if self.way in ("end", "delayed") or held.received < self.target:
            return False
        if self.way == "interrupt":
            return True
        if held.out_with is None and not self._goes_out(held, rows):
            return False
        return rows <= (held.out_with or 0) * (1 - FINISHED)

    def _goes_out(self, held: HeldVersion, rows: int) -> bool:
        """Return whether it is an engine's turn, and note that it is out then."""
        if self.out >= self.most_out:
            return False
        held.out_with = rows
        self.most_out_seen = max(self.most_out_seen, self.out)
        return True
