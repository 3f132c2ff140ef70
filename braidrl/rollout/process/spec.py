"""The specification of an engine, which travels to its process."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """An engine to be made, as plain data."""

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
    """Further options of this kind of engine."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)
