"""The world: all ranks of a run as one rank sees them. All ranks make the same calls in the same order.

gather      every rank's message, on every rank               (index columns: a few numbers per row)
exchange    to each rank only the bytes meant for it          (payload)
share       rank 0's JSON value, on every rank
notices     messages without waiting: a list in the store of the process group

Each wait has a limit. Before it waits, a rank writes its location to the store; after a timeout the others read there
which ranks are missing.
"""

import os
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from braidrl.cluster.devices import own_devices
from braidrl.cluster.process_groups import (
    all_gather_bytes,
    as_tensor,
    count_at,
    has_message,
    join_group,
    message_at,
    put_message,
)
from braidrl.data.messages import pack_message, unpack_message
from braidrl.errors import LostPeers, first_line
from braidrl.observe.stalls import WORK

HEAR_EVERY_S = 0.02


class Notices:
    """Append-only message lists for all ranks. No call waits for another rank."""

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._list = ""
        self._told: list[str] = []
        self._heard, self._next = 0, 0.0

    def begin(self, name: str) -> None:
        """Start a new list under an unused name; the previous one is no longer read."""
        for key in self._told:
            self._store.delete_key(key)
        self._list, self._told, self._heard, self._next = name, [], 0, 0.0

    def tell(self, message: bytes) -> None:
        number = count_at(self._store, f"{self._list}/count", 1) - 1
        self._told.append(f"{self._list}/{number}")
        put_message(self._store, self._told[-1], message)

    def hear(self) -> Sequence[bytes]:
        """Return all new messages since the last call, including one's own, in the same order on every rank."""
        if (now := time.monotonic()) < self._next:
            return ()
        self._next = now + HEAR_EVERY_S
        new = []
        # `get` would block on a numbered message that is not written yet.
        while has_message(self._store, key := f"{self._list}/{self._heard}"):
            new.append(message_at(self._store, key, bytes))
            self._heard += 1
        return new


STORE_LIMIT_S = 5.0
"""Second connection to the store: after a failure it tells where each rank is."""


class World:
    """Rank `rank` of `size`, made by `join`. `World()` is a single process, which never waits."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, store: dist.Store | None = None
    ) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.first = rank == 0
        """True for the rank that writes shared files."""
        self.place, self.rows = "the start", ""
        self._store, self._meetings = store, 0
        self.notices = None if store is None else Notices(dist.PrefixStore("notices", store))

    def at(self, place: str) -> None:
        """Record what this rank does from now on; the text is the same on every rank."""
        self.place, self.rows = place, ""
        if self._store is not None:
            put_message(self._store, f"place/{self.rank}", [self._meetings, place])

    @contextmanager
    def meeting(self, purpose: str) -> Iterator[str]:
        """Guard a collective. Raises LostPeers with the missing ranks and their locations if it fails."""
        self._meetings += 1
        where = f"{self.place}: {purpose}"
        if self._store is not None:
            put_message(self._store, f"place/{self.rank}", [self._meetings, where])
        start = time.monotonic()
        try:
            with WORK.waiting():
                yield where
        except RuntimeError as error:
            if isinstance(error, LostPeers):
                raise
            seconds = time.monotonic() - start
            assert self._store is not None
            self._store.set_timeout(timedelta(seconds=STORE_LIMIT_S))
            # The ranks missing from this collective, and where they were last.
            late = []
            try:
                for rank in range(self.size):
                    meetings, place = message_at(self._store, f"place/{rank}", tuple[int, str])
                    if meetings < self._meetings:
                        late.append(f"rank {rank}, last seen in {place}")
            except (RuntimeError, OSError) as unknown:
                late.append(f"ranks that nothing is known of ({first_line(unknown)})")
            missing = "; ".join(late) or "a rank that has ended since"
            raise LostPeers(f"waited {seconds:.0f} s in {where} for {missing}: {first_line(error)}") from error

    @contextmanager
    def supervised(self, purpose: str) -> Iterator[None]:
        """Guard work in which libraries call collectives.

        Raises LostPeers if one of those fails; other errors pass through.
        """
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
                raise
            with self.meeting(purpose):
                raise

    def gather(self, purpose: str, value: Any, type: Any = Any) -> list[Any]:
        """All-gather messages of a type, in the order of ranks."""
        if self.group is None:
            return [value]
        message = pack_message(value)
        with self.meeting(purpose) as where:
            sizes = self._sizes(where, torch.tensor([len(message)]).expand(self.size))
            parts = all_gather_bytes(message, self.group, sizes)
        return [unpack_message(part, type) for part in parts]

    def exchange(self, purpose: str, messages: Sequence[bytes | bytearray]) -> list[memoryview]:
        """Exchange messages with all ranks, one for each; a single all-to-all of bytes."""
        if self.group is None:
            return [memoryview(message) for message in messages]
        parts = [as_tensor(message) for message in messages]
        sizes = torch.tensor([len(part) for part in parts])
        with self.meeting(purpose) as where:
            coming = self._sizes(where, sizes)
            received = torch.empty(int(coming.sum()), dtype=torch.uint8)
            dist.all_to_all_single(received, torch.cat(parts), coming.tolist(), sizes.tolist(), group=self.group)
        return [part.numpy().data for part in received.split(coming.tolist())]

    def _sizes(self, where: str, sizes: Tensor) -> Tensor:
        """Return the bytes to receive from each rank. Raises RuntimeError if a rank is in another collective."""
        sign = zlib.crc32(where.encode())
        sent = torch.stack([sizes, torch.full_like(sizes, sign)], dim=1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        strangers = (received[:, 1] != sign).nonzero().flatten().tolist()
        if strangers:
            raise RuntimeError(f"ranks {strangers} came to another meeting: the ranks have not made the same calls")
        return received[:, 0]

    def share(self, purpose: str, value: Any) -> Any:
        """Return rank 0's value, a message; other ranks' values are ignored."""
        if self.group is None:
            return value
        message = as_tensor(pack_message(value) if self.first else b"")
        with self.meeting(purpose) as where:
            size = int(self._sizes(where, torch.tensor([len(message)]).expand(self.size))[0])
            message = message if self.first else torch.empty(size, dtype=torch.uint8)
            dist.broadcast(message, src=0, group=self.group)
        return unpack_message(message.numpy().tobytes())

    def close(self) -> None:
        """Leave the group without waiting for other ranks."""
        if self.group is not None:
            dist.destroy_process_group()
            self.group = None


def join(limit_s: float, cuda: bool, engines: int = 0, engine_devices: int = 1, secret: str = "") -> World:
    """Join the world described by the environment that `torchrun` or our launchers set (RANK, WORLD_SIZE, ...).

    Waits take `limit_s` seconds at most. With `cuda` each rank takes a device; `secret` is the prefix of their keys in
    the store.
    """
    if cuda:
        torch.cuda.set_device(own_devices(torch.cuda.device_count(), engines, engine_devices).every[0])
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=limit_s)))
    store = dist.PrefixStore(secret, store) if secret else store
    return world_at(store, rank, size, limit_s, cuda, os.environ.get("MASTER_ADDR", ""))


def world_at(store: dist.Store, rank: int, size: int, limit_s: float, cuda: bool, host: str) -> World:
    """Return the world of all ranks that use a store at `host`; arguments and errors are those of `join_group`."""
    group = join_group(store, rank, size, limit_s, cuda, host)
    return World(rank, size, group, dist.PrefixStore("places", store))


@dataclass(frozen=True)
class Ranks:
    """Processes that call collectives together.

    Without a process group it is one process, and every reduction is the identity.
    """

    group: dist.ProcessGroup | None = None
    supervisor: World | None = None
    """Names the missing ranks when a collective fails."""

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def meeting(self, purpose: str) -> AbstractContextManager[object]:
        """Return the guard of a collective: if it fails, the supervisor names the missing ranks."""
        return nullcontext() if self.supervisor is None else self.supervisor.meeting(purpose)

    def all_gather(self, purpose: str, value: Any, type: Any = Any) -> list[Any]:
        """All-gather messages of a type, in the order of ranks."""
        if self.group is None:
            return [value]
        with self.meeting(purpose):
            parts = all_gather_bytes(pack_message(value), self.group)
        return [unpack_message(part, type) for part in parts]
