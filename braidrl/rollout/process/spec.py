"""Which engine a process makes, as values that travel to it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """Which engine a process makes, as plain data."""

    kind: str
    """embedded or vllm."""
    model: str
    """A Hugging Face directory."""
    slots: int
    max_sequence_tokens: int
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 1
    """CPU threads of each of its processes."""
    tensor: int = 1
    """Processes that divide the weights; of a cuda `device` each has the next one."""
    limit_s: float = 600.0
    """How long these wait for one another."""
    options: dict[str, Any] = field(default_factory=dict)
    """Of this kind of engine."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)
