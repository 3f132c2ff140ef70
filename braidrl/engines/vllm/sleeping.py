"""vLLM's own sleep: its weights wait in host memory and its keys and values are given back, while training has the device.

generate ──sleep──▶ train ──publish──▶ weights wake, new ones are loaded ──generate──▶ keys and values wake
"""

from typing import Protocol

PARTS = ("weights", "kv_cache")
"""What vLLM calls them, in the order in which they wake: caches take what weights leave."""


class Sleeper(Protocol):
    """What vLLM's engine does of it."""

    def reset_prefix_cache(self) -> object: ...

    def sleep(self, level: int) -> None: ...

    def wake_up(self, tags: list[str]) -> None: ...


class VllmMemory:
    """What of an engine of vLLM's is on its device."""

    def __init__(self, engine: Sleeper, may_leave: bool) -> None:
        """Take charge of an engine; `may_leave` where `enable_sleep_mode` was asked for."""
        self._engine, self._may_leave = engine, may_leave
        self._away: list[str] = []

    def leave(self) -> None:
        """Have weights and caches leave. Weights are kept, for a second generation may follow without new ones."""
        if self._may_leave and not self._away:
            # What was computed of prompts is given back with the caches.
            self._engine.reset_prefix_cache()
            self._engine.sleep(level=1)
            self._away = list(PARTS)

    def bring(self, *parts: str) -> None:
        """Bring these parts back, in order; those that are there already stay."""
        for part in parts:
            if part in self._away:
                self._engine.wake_up([part])
                self._away.remove(part)
