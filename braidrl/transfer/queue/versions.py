"""Where weights lie on their way from those who train to those who load them, and which of them nobody needs any more. Bookkeeping only.

Versions   trainer ──▶ engines        each publication of a role's weights, until every engine is past it
Copies     a role  ──▶ one that follows it        asked for when an update is due, gone when it is made
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from braidrl.transfer.queue.data_plane import Block

Weights = tuple[str, int, Sequence[Block]]
"""A role, a version of it, and where it lies."""


class Versions:
    """The versions of some roles that may still be loaded; 0, the model's own, lies nowhere."""

    def __init__(self, roles: Collection[str]) -> None:
        self._known: dict[str, dict[int, list[Block]]] = {role: {} for role in roles}

    def add(self, role: str, version: int, blocks: Sequence[Sequence[object]]) -> None:
        """Notes where a version lies."""
        self._known[role][version] = as_blocks(blocks)

    def has(self, role: str, version: int) -> bool:
        return version in self._known[role]

    def newest(self) -> list[Weights]:
        """The newest version of each role that has any."""
        return [(role, max(known), known[max(known)]) for role, known in self._known.items() if known]

    def between(self, held: int, wanted: int) -> list[Weights]:
        """What takes an engine from one version to another: of each role that has changed since, the newest up to `wanted`."""
        chosen: list[Weights] = []
        for role, known in self._known.items():
            version = newest_of(known, wanted)
            if version > held:
                chosen.append((role, version, known[version]))
        return chosen

    def outdated(self, wanted: Collection[int]) -> list[Block]:
        """Forgets what is older than everything that takes an engine to one of the `wanted` versions; its blocks."""
        freed: list[Block] = []
        for known in self._known.values():
            needed = {newest_of(known, version) for version in wanted}
            for version in [version for version in known if version < max(needed) and version not in needed]:
                freed += known.pop(version)
        return freed

    def blocks(self) -> Iterator[Block]:
        """All that is kept."""
        return (block for known in self._known.values() for many in known.values() for block in many)


@dataclass
class Copy:
    """Who was asked for the weights, and where they lie once they are given."""

    giver: str
    blocks: list[Block] | None = None


@dataclass
class Copies:
    """Weights that updates without a loss move towards, by the stage that is due."""

    _asked: dict[str, Copy] = field(default_factory=dict)

    def __contains__(self, stage: object) -> bool:
        """True if somebody was asked for them."""
        return stage in self._asked

    def ask(self, stage: str, giver: str) -> None:
        self._asked[stage] = Copy(giver)

    def give(self, stage: str, giver: str, blocks: Sequence[Sequence[object]]) -> list[Block]:
        """Notes where the weights lie; those blocks that nobody will read, as another was asked meanwhile."""
        copy = self._asked.get(stage)
        if copy is None or copy.giver != giver:
            return as_blocks(blocks)
        copy.blocks = as_blocks(blocks)
        return []

    def given(self, stage: str) -> list[Block] | None:
        """Where the weights lie; None until they are there."""
        copy = self._asked.get(stage)
        return copy.blocks if copy else None

    def taken(self, stage: str) -> list[Block]:
        """The update is made; the blocks that it has read."""
        copy = self._asked.pop(stage, None)
        return (copy.blocks if copy else None) or []

    def lost(self, giver: str) -> None:
        """A worker is gone: what it was asked for and has not given, another is asked for."""
        self._asked = {s: copy for s, copy in self._asked.items() if copy.giver != giver or copy.blocks is not None}

    def blocks(self) -> Iterator[Block]:
        """All that is kept."""
        return (block for copy in self._asked.values() for block in copy.blocks or [])


def newest_of(known: Collection[int], limit: int) -> int:
    """The newest version up to a limit; 0, the model's own, where there is none."""
    return max((version for version in known if version <= limit), default=0)


def as_blocks(blocks: Sequence[Sequence[object]]) -> list[Block]:
    """Blocks as they come over the wire."""
    return [Block(*block) for block in blocks]  # type: ignore[arg-type]
