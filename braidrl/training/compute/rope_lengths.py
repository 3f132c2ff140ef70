"""The lengths of rows at which a model's rope changes its factors, and the longest row that it allows; read from a
configuration, without model code.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SCALED = ("yarn", "dynamic", "linear", "longrope", "llama3")
"""Kinds of rope that compute positions beyond those of the training before it."""


@dataclass(frozen=True)
class RopeLengths:
    """The lengths at which a model's rope changes its factors."""

    switches: tuple[int, ...] = ()
    """Rows longer than one of these have other factors (longrope)."""
    growing: int | None = None
    """Each longer row has separate factors (dynamic NTK)."""

    @staticmethod
    def of(config: Any) -> "RopeLengths":
        """Return the lengths of a model's configuration."""
        switches, growing = set[int](), None
        text = config.get_text_config()
        for rope in rope_settings(text):
            kind = str(rope.get("rope_type", ""))
            if kind == "longrope":
                switches.add(int(rope["original_max_position_embeddings"]))
            elif "dynamic" in kind:
                growing = int(text.max_position_embeddings)
        return RopeLengths(tuple(sorted(switches)), growing)

    def __bool__(self) -> bool:
        return bool(self.switches) or self.growing is not None

    def kind(self, length: int) -> tuple[int, int]:
        """Return a key that rows with equal factors share."""
        growth = 0 if self.growing is None else max(0, length - self.growing)
        return sum(length > switch for switch in self.switches), growth

    @property
    def shortest(self) -> int | None:
        """Return the longest row length up to which all rows have the same factors; None without a limit."""
        return min([*self.switches, *([] if self.growing is None else [self.growing])], default=None)


SAME = RopeLengths()
"""The lengths of a rope whose factors are the same for all rows."""


def rope_settings(config: Any) -> list[dict[str, Any]]:
    """Return the rope settings of a text configuration: one, or one for each kind of layer."""
    settings = getattr(config, "rope_parameters", None) or {}
    if not isinstance(settings, dict):
        return []
    parts = [value for value in settings.values() if isinstance(value, dict)]
    return parts or [settings]


def most_positions(settings: Mapping[str, Any]) -> int | None:
    """Return the longest row (tokens) that a text model's settings in config.json allow; None if they set no limit.

    A rope that scales positions allows `factor` times the positions of the training before it.
    """
    positions = settings.get("max_position_embeddings")
    rope = settings.get("rope_scaling") or settings.get("rope_parameters") or {}
    if not isinstance(positions, int) or not isinstance(rope, dict):
        return positions if isinstance(positions, int) else None
    most = positions
    for part in [value for value in rope.values() if isinstance(value, dict)] or [rope]:
        kind, factor = part.get("rope_type", part.get("type")), part.get("factor")
        original = part.get("original_max_position_embeddings")
        if kind in SCALED and isinstance(factor, int | float) and factor > 1:
            most = max(most, int(factor * (original if isinstance(original, int) else positions)))
    return most
