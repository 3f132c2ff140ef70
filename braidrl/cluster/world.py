"""The processes of one run as one of them sees the others. All make the same calls in the same order.

gather      every rank's bytes, on every rank                 (index columns: a few numbers per row)
exchange    to each rank what is meant for it, and no more    (payload)
share       rank 0's JSON value, on every rank
notices     what any rank tells, while each goes on with its own work: a list in the store at which they met

Each wait has a limit. Before it waits, a rank notes in the store where it is; whoever waits in vain reads there for whom.
"""

import os
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from braidrl.cluster.devices import own_devices
from braidrl.cluster.process_groups import join_group
from braidrl.data.messages import pack_message, unpack_message
from braidrl.errors import LostPeers, first_line
from braidrl.observe.stalls import WORK

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
        """Begin the list of this name, which none has had before; nobody listens to the one before any more."""
        for key in self._told:
            self._store.delete_key(key)
        self._list, self._told, self._heard, self._next = name, [], 0, 0.0

    def tell(self, message: bytes) -> None:
        """Append a message."""
        number = self._store.add(f"{self._list}/count", 1) - 1
        self._told.append(f"{self._list}/{number}")
        self._store.set(self._told[-1], message)  # type: ignore[arg-type]  # takes bytes too

    def hear(self) -> Sequence[bytes]:
        """Return the messages that nobody had told when this was asked last, one's own too, in everybody's order."""
        if (now := time.monotonic()) < self._next:
            return ()
        self._next = now + HEAR_EVERY_S
        new = []
        # asked for first: a message that is numbered and not there yet would be waited for
        while self._store.check([key := f"{self._list}/{self._heard}"]):
            new.append(self._store.get(key))
            self._heard += 1
        return new


STORE_LIMIT_S = 5.0
"""For reading from the store who is where, after something went wrong."""


@dataclass
class BytesReceived:
    """Bytes that came to a rank from others, by the call that brought them."""

    gathered: int = 0
    exchanged: int = 0


class World:
    """Rank `rank` of `size`. Made by `join`; `World()` is a process alone, which waits for nobody."""

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, store: dist.Store | None = None
    ) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.place, self.rows = "the start", ""
        self.received = BytesReceived()
        self._store, self._meetings = store, 0

    @property
    def first(self) -> bool:
        """Return True for the one rank that writes what is written once."""
        return self.rank == 0

    @property
    def notices(self) -> Notices | None:
        """Return what ranks tell each other in passing; None for a process alone."""
        return None if self._store is None else Notices(dist.PrefixStore("notices", self._store))

    def at(self, place: str) -> None:
        """Note what this rank does from now on; the same words on every rank."""
        self.place, self.rows = place, ""
        self._note(place)

    def _note(self, where: str) -> None:
        if self._store is not None:
            self._store.set(f"place/{self.rank}", f"{self._meetings} {where}")

    @contextmanager
    def meeting(self, purpose: str) -> Iterator[str]:
        """Around a collective. Raises LostPeers with who was missing, and where they were, when it fails."""
        self._meetings += 1
        where = f"{self.place}: {purpose}"
        self._note(where)
        start = time.monotonic()
        try:
            with WORK.waiting():
                yield where
        except RuntimeError as error:
            if isinstance(error, LostPeers):
                raise
            seconds = time.monotonic() - start
            raise LostPeers(f"waited {seconds:.0f} s in {where} for {self._missing()}: {first_line(error)}") from error

    @contextmanager
    def supervised(self, purpose: str) -> Iterator[None]:
        """Around work in which libraries call collectives: raises LostPeers where one of those fails; other errors pass."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
                raise
            with self.meeting(purpose):
                raise

    def _missing(self) -> str:
        """Return the ranks that are not at this meeting and where they were seen last."""
        assert self._store is not None
        self._store.set_timeout(timedelta(seconds=STORE_LIMIT_S))
        late = []
        try:
            for rank in range(self.size):
                meetings, _, where = self._store.get(f"place/{rank}").decode().partition(" ")
                if int(meetings) < self._meetings:
                    late.append(f"rank {rank}, last seen in {where}")
        except (RuntimeError, OSError) as error:
            late.append(f"ranks that nothing is known of ({first_line(error)})")
        return "; ".join(late) or "a rank that has ended since"

    def gather(self, purpose: str, message: bytes | bytearray | memoryview) -> list[memoryview]:
        """Return every rank's message, in the order of ranks."""
        if self.group is None:
            return [memoryview(message)]
        mine = as_tensor(message)
        with self.meeting(purpose) as where:
            sizes = self._sizes(where, torch.tensor([len(mine)]).expand(self.size))
            padded = torch.zeros(int(sizes.max()), dtype=torch.uint8)
            padded[: len(mine)] = mine
            found = [torch.empty_like(padded) for _ in range(self.size)]
            dist.all_gather(found, padded, group=self.group)
        self.received.gathered += int(sizes.sum()) - len(mine)
        return [part[:size].numpy().data for part, size in zip(found, sizes.tolist(), strict=True)]

    def exchange(self, purpose: str, messages: Sequence[bytes | bytearray]) -> list[memoryview]:
        """Return what each rank has for this one, given what this one has for each; one all-to-all of bytes."""
        if self.group is None:
            return [memoryview(message) for message in messages]
        parts = [as_tensor(message) for message in messages]
        sizes = torch.tensor([len(part) for part in parts])
        with self.meeting(purpose) as where:
            coming = self._sizes(where, sizes)
            received = torch.empty(int(coming.sum()), dtype=torch.uint8)
            dist.all_to_all_single(received, torch.cat(parts), coming.tolist(), sizes.tolist(), group=self.group)
        self.received.exchanged += len(received) - int(coming[self.rank])
        return [part.numpy().data for part in received.split(coming.tolist())]

    def _sizes(self, where: str, sizes: Tensor) -> Tensor:
        """Return the bytes that come from each rank. Raises RuntimeError where a rank is at another meeting than this one."""
        sign = zlib.crc32(where.encode())
        sent = torch.stack([sizes, torch.full_like(sizes, sign)], dim=1).contiguous()
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        strangers = (received[:, 1] != sign).nonzero().flatten().tolist()
        if strangers:
            raise RuntimeError(f"ranks {strangers} came to another meeting: the ranks have not made the same calls")
        return received[:, 0]

    def share(self, purpose: str, value: Any) -> Any:
        """Return rank 0's value, a message; the values of other ranks are ignored."""
        if self.group is None:
            return value
        message = as_tensor(pack_message(value) if self.first else b"")
        with self.meeting(purpose) as where:
            size = int(self._sizes(where, torch.tensor([len(message)]).expand(self.size))[0])
            message = message if self.first else torch.empty(size, dtype=torch.uint8)
            dist.broadcast(message, src=0, group=self.group)
        self.received.gathered += 0 if self.first else size
        return unpack_message(message.numpy().tobytes())

    def from_first(self, purpose: str, make: Callable[[], Any]) -> Any:
        """Return what `make` returns on rank 0, where alone it is called."""
        return self.share(purpose, make() if self.first else None)

    def close(self) -> None:
        """Leave the group; nobody is waited for."""
        if self.group is not None:
            dist.destroy_process_group()
            self.group = None


def join(limit_s: float, cuda: bool, engines: int = 0, engine_devices: int = 1, secret: str = "") -> World:
    """Join the world that the environment describes, as `torchrun` and our own launchers set it (RANK, WORLD_SIZE, ...).

    Args:
        limit_s: How long ranks wait for one another, in seconds.
        cuda: Whether they compute on CUDA devices, of which this rank takes its own.
        engines: Engine processes that each rank starts.
        engine_devices: Devices of each of those.
        secret: What the ranks' keys in the store begin with.
    """
    if cuda:
        torch.cuda.set_device(own_devices(torch.cuda.device_count(), engines, engine_devices).every[0])
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=limit_s)))
    store = dist.PrefixStore(secret, store) if secret else store
    group = join_group(store, rank, size, limit_s, cuda, os.environ.get("MASTER_ADDR", ""))
    return World(rank, size, group, dist.PrefixStore("places", store))


@dataclass(frozen=True)
class Ranks:
    """Processes that call collectives together. Without a process group there is one, and every reduction is the identity."""

    group: dist.ProcessGroup | None = None
    supervisor: World | None = None
    """Says which ranks were missing when a collective fails."""

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def meeting(self, purpose: str) -> AbstractContextManager[object]:
        """Return the context of a collective: when it fails, the supervisor reports which ranks were missing."""
        return nullcontext() if self.supervisor is None else self.supervisor.meeting(purpose)


def as_tensor(message: bytes | bytearray | memoryview) -> Tensor:
    """Return the bytes (N,) uint8; a writable buffer is not copied."""
    if len(message) == 0:
        return torch.empty(0, dtype=torch.uint8)
    buffer = message if isinstance(message, bytearray) else bytearray(message)
    return torch.frombuffer(buffer, dtype=torch.uint8)
