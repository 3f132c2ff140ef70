"""A stage: what it is called, who does it, which columns it reads and which it writes. Immutable, plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from braidrl.errors import UserError


class Kind(StrEnum):
    """What a stage does; decides who may run it and where."""

    GENERATE = "generate"
    INFER = "infer"
    TRAIN = "train"
    COMPUTE = "compute"
    SELECT = "select"


class Scope(StrEnum):
    """How many rows a stage must see at once. No stage ever needs the whole batch."""

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
            raise UserError(f"when: every and start count from 1 and until is not before start, got {self}")

    def includes(self, iteration: int) -> bool:
        """True if the stage runs in this iteration."""
        in_time = self.start <= iteration and (self.until is None or iteration <= self.until)
        return in_time and (iteration - self.start) % self.every == 0


ALWAYS = When()


@dataclass(frozen=True)
class Signature:
    """What a stage touches.

    `optional` columns are read where an earlier stage writes them; of each tuple in `one_of` the first one that is written is read,
    and one must be.
    """

    kind: Kind
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    one_of: tuple[tuple[str, ...], ...] = ()
    scope: Scope = Scope.ROW


@dataclass(frozen=True)
class Stage:
    """One step of a flow. Made by `braidrl.flow.stages.make_stage`, never edited, compared by value."""

    name: str
    type: str
    role: str | None
    signature: Signature
    params: Mapping[str, Any] = field(default_factory=dict)
    when: When = ALWAYS
    after: tuple[str, ...] = ()

    @property
    def kind(self) -> Kind:
        return self.signature.kind

    @property
    def scope(self) -> Scope:
        return self.signature.scope

    @property
    def reads(self) -> tuple[str, ...]:
        return self.signature.reads

    @property
    def writes(self) -> tuple[str, ...]:
        return self.signature.writes

    def renamed(self, name: str) -> Stage:
        return replace(self, name=name)

    def __str__(self) -> str:
        return self.name
