"""What ranks tell each other while each goes on with its own work: a list in the store at which they met.

rank 0 ──tell──▶ list ◀──tell── rank 1        hear ──▶ what is new in it, at once
"""

import time
from collections.abc import Sequence

import torch.distributed as dist

HEAR_EVERY_S = 0.02
"""How often a rank looks for what is new; in between it is told nothing."""


class Notices:
    """Lists that any rank may append to, one after the other. Nobody waits for anybody."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._list = ""
        self._told: list[str] = []
        self._heard, self._next = 0, 0.0

    def begin(self, name: str) -> None:
        """From now on the list is that of this name, which none has had before; nobody listens to the one before any more."""
        for key in self._told:
            self._store.delete_key(key)
        self._list, self._told, self._heard, self._next = name, [], 0, 0.0

    def tell(self, message: bytes) -> None:
        """Appends a message."""
        number = self._store.add(f"{self._list}/count", 1) - 1
        self._told.append(f"{self._list}/{number}")
        self._store.set(self._told[-1], message)  # type: ignore[arg-type]  # takes bytes too

    def hear(self) -> Sequence[bytes]:
        """Messages that nobody had told when this was asked last, one's own too, in everybody's order."""
        if (now := time.monotonic()) < self._next:
            return ()
        self._next = now + HEAR_EVERY_S
        new = []
        # asked for first: a message that is numbered and not there yet would be waited for
        while self._store.check([key := f"{self._list}/{self._heard}"]):
            new.append(self._store.get(key))
            self._heard += 1
        return new
