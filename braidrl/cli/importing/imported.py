"""A configuration of another framework that is being imported, and what the user is to decide."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
UNSET = ("", "???", -1)
"""Placeholders in configurations for missing or derived values."""
MOST_COUNTED = 1 << 30
"""Largest data file, in bytes, that is read to count its rows."""


class Decide(str):
    """Advice for a key that has no single counterpart: the user decides."""


@dataclass
class Imported:
    """A configuration of another framework by its keys, including its defaults, and the keys of Braid made from it."""

    source_keys: Mapping[str, Any]
    folder: Path = Path()
    """Folder of the configuration, for data files with relative paths."""
    flow: str = "grpo"
    key: str = ""
    """The key for which a rule is called."""
    converted: dict[str, Any] = field(default_factory=dict)
    together: list[str] = field(default_factory=list)
    """Keys of Braid made from several keys, by the row of another key or at the end."""
    advice: dict[str, str] = field(default_factory=dict)
    """Decisions about keys for the user, in addition to those that their rules return."""
    chosen: dict[str, str] = field(default_factory=dict)
    """Braid's settings that follow from the data, by the column that decides."""
    moved: dict[str, str] = field(default_factory=dict)
    """Braid's keys whose values became settings of another key, by the key."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Braid's keys that were made, and dropped or changed since other keys exclude them; with the reason."""

    def get(self, *keys: str, default: Any = None) -> Any:
        """Return the first value that is set, among several names of one setting."""
        return next((self.source_keys[key] for key in keys if self.source_keys.get(key) not in (None, *UNSET)), default)

    def number(self, *keys: str, default: int = 1) -> int:
        value = self.get(*keys, default=default)
        return int(value) if isinstance(value, int | float) and not isinstance(value, bool) else default


Rule = Callable[[Imported, Any, str], Any]
