"""Which engine a process makes, as values that travel to it."""

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class EngineSpec:
    """Which engine a process makes, as plain data."""

    kind: str
    """`embedded`, `vllm`, or `module:name` or `file.py:name` of a user's own."""
    model: str
    """A Hugging Face directory."""
    slots: int
    max_sequence_tokens: int
    seed: int = 0
    dtype: str = "float32"
    device: str = "cpu"
    """cpu or cuda: the first of `devices`."""
    threads: int | None = 1
    """CPU threads of each of its processes; None leaves what the environment says."""
    tensor: int = 1
    """Processes that divide the weights."""
    limit_s: float = 600.0
    """How long these wait for one another."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of this kind of engine: `rollout.engine_settings` of a user's own."""
    devices: tuple[int, ...] | None = None
    """The CUDA devices that its processes see, one for each, by their numbers among the run's; None for all of those."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)
