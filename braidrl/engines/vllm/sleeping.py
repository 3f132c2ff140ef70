"""vLLM's sleep mode: while training has the device, weights are kept in host memory and keys and values are freed.

generate ──sleep──▶ train ──publish──▶ weights wake, new ones are loaded ──generate──▶ keys and values wake
"""

from typing import Protocol

PARTS = ("weights", "kv_cache")
"""vLLM's names, in wake-up order: the caches take the memory that the weights leave free."""


class Sleeper(Protocol):
    """The part of vLLM's engine that sleeps and wakes."""

    def reset_prefix_cache(self) -> object: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str]) -> None: ...


class VllmMemory:
    """The device memory of a vLLM engine: weights and caches."""

    def __init__(self, engine: Sleeper, may_leave: bool) -> None:
        """Manage an engine's memory; `may_leave` if `enable_sleep_mode` is set."""
        self._engine, self._may_leave = engine, may_leave
        self._away: list[str] = []

    def leave(self) -> None:
        """Offload the weights to host memory and free the caches. Weights are kept, since generation may resume without new ones."""
        if self._may_leave and not self._away:
            # Cached prompts are freed with the caches.
            self._engine.reset_prefix_cache()
            self._engine.sleep(level=1)
            self._away = list(PARTS)

    def bring(self, *parts: str) -> None:
        """Bring these parts back to the device, in order; parts already there stay."""
        for part in parts:
            if part in self._away:
                self._engine.wake_up([part])
                self._away.remove(part)
