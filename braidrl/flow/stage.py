"""A stage: its name, its role, the columns that it reads and writes. Immutable, plain data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from braidrl.errors import UserError


class Kind(StrEnum):
    """The kind of a stage; it decides which process may run it."""

    GENERATE = "generate"
    INFER = "infer"
    TRAIN = "train"
    COMPUTE = "compute"
    SELECT = "select"


class Scope(StrEnum):
    """The rows that a stage must see at once. No stage needs the whole batch."""

    ROW = "row"
    GROUP = "group"
    BATCH = "batch"


@dataclass(frozen=True)
class When:
    """The iterations (counted from 1) in which a stage runs: `start` to `until` inclusive, each `every`-th."""

    every: int = 1
    start: int = 1
    until: int | None = None

    def __post_init__(self) -> None:
        if self.every < 1 or self.start < 1 or (self.until is not None and self.until < self.start):
            raise UserError(
                "when: every and from count from 1 and until is not before from, "
                f"got every={self.every}, from={self.start}, until={self.until}"
            )

    def includes(self, iteration: int) -> bool:
        in_time = self.start <= iteration and (self.until is None or iteration <= self.until)
        return in_time and (iteration - self.start) % self.every == 0

    def covers(self, other: "When") -> bool:
        """Return True if this includes every iteration that `other` includes."""
        last = None if other.until is None else other.until - (other.until - other.start) % other.every
        ends_first = self.until is not None and (last is None or self.until < last)
        in_step = last == other.start or other.every % self.every == 0
        return self.includes(other.start) and in_step and not ends_first

    def __str__(self) -> str:
        often = "every iteration" if self.every == 1 else f"every {self.every} iterations"
        since = f" from {self.start}" if self.start > 1 else ""
        return often + since + (f" until {self.until}" if self.until is not None else "")


ALWAYS = When()


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The inputs and outputs of a stage.

    `optional` columns are read if an earlier stage writes them. Of each tuple in `one_of` the first written column is
    read, and one must be written. `state` holds the initial values of the stage's own small state, which changes once
    per iteration.
    """

    kind: Kind
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    one_of: tuple[tuple[str, ...], ...] = ()
    scope: Scope = Scope.ROW
    state: Mapping[str, float] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Stage(Signature):
    """One step of a flow. Made by `braidrl.flow.stages.make_stage`, immutable, compared by value."""

    name: str
    type: str
    role: str | None
    params: Mapping[str, Any] = field(default_factory=dict, hash=False)
    when: When = ALWAYS
    after: tuple[str, ...] = ()

    @property
    def settings(self) -> dict[str, Any]:
        """Return the parameters that the stage's function takes by keyword: all but the initial values of its state,
        and the namespace of a stage without a model.
        """
        left_out = {*self.state, *(("of",) if self.role is None else ())}
        return {name: value for name, value in self.params.items() if name not in left_out}

    def __str__(self) -> str:
        return self.name


def default_name(type: str, role: str | None, params: Mapping[str, Any]) -> str:
    """Return `actor.generate`, with a namespace `actor.generate.greedy`, or the name of a user's function."""
    namespace = params.get("into") or params.get("of")
    name = type.rsplit(":", 1)[-1] if role is None else f"{role}.{type.rsplit('.', 1)[-1]}"
    return f"{name}.{namespace}" if namespace and namespace != role else name
