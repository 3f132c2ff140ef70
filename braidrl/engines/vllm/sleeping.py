"""The memory of a vLLM engine that shares its device with training.

generate ──sleep──▶ train ──publish──▶ weights wake, new ones are loaded ──generate──▶ keys and values wake

On CUDA vLLM's sleep mode does this: weights wait in host memory, or are dropped if the trainer publishes new ones. On
a CPU, where vLLM has no such mode, the memory pages of keys and values are freed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import UntypedStorage

from braidrl.weights.shards import empty

PARTS = ("weights", "kv_cache")
"""vLLM's names, in wake-up order: the caches take the memory that the weights leave free."""
KEPT, DROPPED = 1, 2
"""vLLM's levels of sleep: weights are kept in host memory, or dropped."""


@dataclass
class VllmMemory:
    """The device memory of a vLLM engine: weights and caches."""

    engine: Any
    may_leave: bool
    """True if `enable_sleep_mode` is set."""
    level: int = KEPT
    """DROPPED if weights are published before each generation; otherwise generation may resume without new ones."""
    caches: Sequence[UntypedStorage] = ()
    """Keys and values whose pages are freed here, if vLLM cannot sleep."""
    away: list[str] = field(default_factory=list)
    """The parts that are not on the device."""

    def leave(self) -> None:
        """Free the device memory of weights and caches."""
        if self.away or not (self.may_leave or self.caches):
            return
        # Cached prompts are freed with the caches.
        self.engine.reset_prefix_cache()
        for storage in self.caches:
            empty(storage)
        if self.may_leave:
            self.engine.sleep(level=self.level)
            self.away = list(PARTS)

    def bring(self, *parts: str) -> None:
        """Load these parts to the device, in order; parts already there stay."""
        for part in parts:
            if part in self.away:
                self.engine.wake_up([part])
                self.away.remove(part)
