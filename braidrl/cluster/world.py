"""The world: all ranks of a run as one rank sees them. All ranks make the same calls in the same order.

gather      every rank's message, on every rank
gather_columns  the columns of all ranks' rows, on every rank  (index columns: a few numbers per row)
reduce      one combination of all ranks' messages, on every rank   (metric sums), or on the first
exchange    to each rank only the bytes meant for it          (payload)
share       rank 0's JSON value, on every rank
mail        single messages between two ranks, in the store
regroup     new process groups of the remaining members, or of more  (`elastic`)

Sums that are repeated while each rank works are in `rounds`.

Each wait has a limit. A thread of each rank sends its location once a second (`locations`); after a timeout the others
read in the store which ranks are missing.
"""

import gc
import os
import platform
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from traceback import clear_frames
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from braidrl.cluster.devices import visible_devices
from braidrl.cluster.elastic import Elastic, Meeting
from braidrl.cluster.locations import Location, Locations, known_locations, write
from braidrl.cluster.membership import Membership, isolated_rows
from braidrl.cluster.peers import Peers
from braidrl.cluster.process_groups import abort_groups, destroy_groups, join_group
from braidrl.cluster.row_deaths import Isolated
from braidrl.data.identity import Uid
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import named_rows
from braidrl.errors import LostPeers, causes, first_line
from braidrl.observe.stalls import WORK

NEWER_LIMIT_S = 15.0
"""Seconds in which a loss leads to a new membership."""
LOCATE_EVERY_S = 1.0
"""Seconds between the locations that a rank tells."""
STORE_LIMIT_S = 5.0
"""Second connection to the store: after a failure it tells where each rank is."""


class World:
    """Rank `rank` of `size`, made by `join`. `World()` is a single process, which never waits.

    Callers read `group` each time they need it: `regroup` replaces it.
    """

    def __init__(
        self, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None, store: dist.Store | None = None
    ) -> None:
        self.rank, self.size, self.group = rank, size, group
        self.first = rank == 0
        """True for the rank that writes shared files."""
        self.place, self.rows = "the start", ""
        self._store, self._meetings = store, 0
        self._location = 0, self.place
        self._is_meeting = False
        self.mail = None if store is None else dist.PrefixStore("mail", store)
        self._machines: list[list[int]] | None = None
        self.elastic: Elastic | None = None
        """Set if ranks may be lost, and come back."""
        self._closed = threading.Event()
        if store is not None:
            threading.Thread(target=self._locate, name="location", daemon=True).start()

    @property
    def members(self) -> tuple[str, ...]:
        """Return the names of the processes that are the ranks."""
        return self.elastic.membership.members if self.elastic is not None else ()

    @property
    def is_waiting(self) -> bool:
        """Return True in a process that waits to become a member."""
        return self.elastic is not None and self.group is None

    def at(self, activity: str) -> None:
        """Record this rank's current activity; the text is the same on every rank."""
        self.place, self.rows = activity, ""
        self._location = self._meetings, activity

    @contextmanager
    def working(self, rows: Sequence[Uid], may_end_rank: bool) -> Iterator[None]:
        """Name these rows if their work fails, and with `may_end_rank` also if the rank dies."""
        self.rows = named_rows(rows)
        elastic = self.elastic if may_end_rank else None
        if elastic is not None:
            elastic.work_on(rows)
        try:
            yield
        finally:
            if elastic is not None:
                elastic.work_on(())
        self.rows = ""

    def isolated_rows(self) -> Isolated:
        """Return the rows that ranks run alone, and the rows that they skip; all ranks call this together."""
        rows_here = isolated_rows(self.elastic.meeting.store) if self.elastic is not None and self.first else ([], [])
        isolated: Isolated = self.share("rows that have ended ranks", rows_here)
        return isolated

    def _locate(self) -> None:
        """Send this rank's location once a second, until it closes or the store is unreachable."""
        locations: Locations | None = None
        with suppress(RuntimeError, OSError):
            while not self._closed.is_set():
                if locations is None or locations.store is not self._store:
                    if locations is not None:
                        locations.close()
                    assert self._store is not None
                    locations = Locations(self._store)
                newest = locations.exchange(self._rank_location, LOCATE_EVERY_S, self._newest)
                if self.elastic is not None:
                    self.elastic.leave_outdated_groups(self._is_meeting, newest)
        if locations is not None:
            locations.close()

    @property
    def _rank_location(self) -> Location:
        return Location(self.rank, *self._location)

    def _newest(self) -> int:
        """Return the number of the newest membership."""
        return 0 if self.elastic is None else self.elastic.newest.number

    @contextmanager
    def meeting(self, purpose: str) -> Iterator[str]:
        """Guard a collective. Raises LostPeers with the missing ranks and their locations if it fails."""
        self._meetings += 1
        where = f"{self.place}: {purpose}"
        self._location = self._meetings, where
        start, self._is_meeting = time.monotonic(), True
        try:
            with WORK.waiting():
                yield where
        except RuntimeError as error:
            if isinstance(error, LostPeers):
                raise
            seconds = time.monotonic() - start
            if self.elastic is not None and self.elastic.wait_for_newer(2 * LOCATE_EVERY_S):
                raise LostPeers(f"ranks were lost in {where}: {first_line(error)}") from error
            assert self._store is not None
            self._store.set_timeout(timedelta(seconds=STORE_LIMIT_S))
            # The ranks missing from this collective, and their last locations.
            late = []
            try:
                write(self._store, [self._rank_location])
                # By then the other ranks' locations are written, by themselves or their machines' speakers.
                time.sleep(3 * LOCATE_EVERY_S)
                latest = known_locations(self._store)
                for rank in range(self.size):
                    if rank not in latest:
                        late.append(f"rank {rank}, of which nothing is known")
                    elif latest[rank].meetings < self._meetings:
                        late.append(f"rank {rank}, last seen in {latest[rank].place}")
            except (RuntimeError, OSError) as unknown:
                late.append(f"ranks in an unknown state ({first_line(unknown)})")
            missing = "; ".join(late) or "a rank that has ended since"
            raise LostPeers(f"waited {seconds:.0f} s in {where} for {missing}: {first_line(error)}") from error
        finally:
            self._is_meeting = False

    @contextmanager
    def supervised(self, purpose: str) -> Iterator[None]:
        """Guard work in which libraries call collectives.

        Raises LostPeers if one of those fails; other errors propagate.
        """
        try:
            yield
        except RuntimeError as error:
            of_others = isinstance(error, dist.DistError) or "gloo/transport" in str(error)
            if not of_others and (self.elastic is None or not self.elastic.is_outdated):
                raise
            with self.meeting(purpose):
                raise

    @property
    def peers(self) -> Peers:
        """Return the other ranks as partners of messages."""
        assert self.group is not None, "a process alone has no peers"
        return Peers(self.group)

    @property
    def machines(self) -> list[list[int]]:
        """Return the ranks of each machine; all ranks make the first call together."""
        if self._machines is None:
            ranks: dict[str, list[int]] = {}
            for rank, name in enumerate(self.gather("names of machines", platform.node(), str)):
                ranks.setdefault(name, []).append(rank)
            self._machines = list(ranks.values())
        return self._machines

    def meet(self, purpose: str) -> None:
        """Wait until all ranks have arrived."""
        self.reduce(purpose, None, lambda low, _: low)

    def gather(self, purpose: str, value: Any, type: Any = Any) -> list[Any]:
        """All-gather messages of a type, in the order of ranks."""
        if self.group is None:
            return [value]
        message = pack_message(value)
        with self.meeting(purpose) as where:
            parts = self.peers.all_gather(message, sign_of(where))
        return [unpack_message(part, type) for part in parts]

    def gather_columns(self, purpose: str, columns: Mapping[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
        """All-gather columns of numbers, in the order of ranks.

        Every rank has the same columns, with its number of rows in `counts` (N,).
        """
        if self.group is None or not columns:
            return dict(columns)
        parts = [bytes_of(column) for column in columns.values()]
        with self.meeting(purpose):
            gathered = self.peers.all_gather_rows(torch.cat(parts, dim=1), counts)
        columns_of_all, start = dict[str, Tensor](), 0
        for (name, column), part in zip(columns.items(), parts, strict=True):
            # A slice of one row is contiguous at any offset.
            values = gathered[:, start : start + part.shape[1]].clone(memory_format=torch.contiguous_format)
            columns_of_all[name] = values.view(column.dtype).reshape(-1, *column.shape[1:])
            start += part.shape[1]
        return columns_of_all

    def reduce(self, purpose: str, value: Any, combine: Callable[[Any, Any], Any], type: Any = Any) -> Any:
        """Combine messages of a type along a tree; every rank gets the same value.

        `combine` is associative, and gets the value of lower ranks first.
        """
        if self.group is None:
            return value

        with self.meeting(purpose) as where:
            message = self.peers.reduce(pack_message(value), combined(combine, type), sign_of(where))
        return unpack_message(message, type)

    def reduce_to_first(self, purpose: str, value: Any, combine: Callable[[Any, Any], Any], type: Any = Any) -> Any:
        """Combine messages as `reduce` does; only the first rank gets the value of all ranks, the others None."""
        if self.group is None:
            return value
        with self.meeting(purpose) as where:
            message = self.peers.collect(pack_message(value), combined(combine, type), sign_of(where))
        return unpack_message(message, type) if self.first else None

    def exchange(
        self, purpose: str, messages: Mapping[int, bytes | bytearray], senders: Collection[int]
    ) -> dict[int, memoryview]:
        """Send a message to each rank in `messages`; return the messages from `senders` by rank."""
        if self.group is None:
            return {rank: memoryview(message) for rank, message in messages.items()}
        with self.meeting(purpose) as where:
            return self.peers.exchange(messages, senders, sign_of(where))

    def share(self, purpose: str, value: Any) -> Any:
        """Return rank 0's value, a message; other ranks' values are ignored."""
        if self.group is None:
            return value
        with self.meeting(purpose) as where:
            message = self.peers.broadcast(pack_message(value) if self.first else b"", sign_of(where))
        return unpack_message(message)

    def wait_until_member(self) -> None:
        """Wait until the members admit this process; `regroup` then joins them."""
        assert self.elastic is not None, "these ranks are the same to the end"
        self.elastic.wait_until_member()

    def regroup(self, error: BaseException | None = None) -> None:
        """Leave all process groups, and join those of the newest membership, after an error or between two steps.

        All members call this. Raises LostPeers if there is no other membership, or if members do not arrive.
        """
        elastic = self.elastic
        if elastic is None or not elastic.wait_for_newer(NEWER_LIMIT_S):
            raise error or LostPeers("there is no other membership")
        for cause in causes(error):
            # Stack frames hold groups.
            clear_frames(cause.__traceback__)
        self.join_newest()

    def join_newest(self) -> None:
        """Join the process groups of the newest membership."""
        elastic = self.elastic
        assert elastic is not None, "these ranks are the same to the end"
        with elastic.lock:
            if dist.is_initialized():
                abort_groups()
                # Connections close with the last reference: a rank that waits for this one then notices.
                self.group = None
                destroy_groups()
                gc.collect()
            self.group = elastic.join()
        self.rank, self.size = self.group.rank(), self.group.size()
        self.first = self.rank == 0
        # Locations and mail of the earlier membership are not read.
        store = dist.PrefixStore(str(elastic.membership.number), elastic.meeting.store)
        self._store, self.mail = dist.PrefixStore("places", store), dist.PrefixStore("mail", store)
        self._meetings, self._machines = 0, None
        self.at("the passage to other ranks")

    def leave_store(self) -> None:
        """Stop writing this rank's location."""
        self._closed.set()

    def close(self) -> None:
        """Leave the group without waiting for other ranks."""
        self.leave_store()
        if self.group is not None:
            dist.destroy_process_group()
            self.group = None


def join(limit_s: float, cuda: bool, engines: int = 0, engine_devices: int = 1, secret: str = "") -> World:
    """Join the world described by the environment variables of `torchrun` or of our launchers (RANK, WORLD_SIZE, ...).

    Waits take at most `limit_s` seconds. With `cuda` each rank takes a device; `secret` is the prefix of the ranks'
    keys in the store.
    """
    if cuda:
        torch.cuda.set_device(visible_devices(torch.cuda.device_count(), engines, engine_devices).every[0])
    store, rank, size = next(rendezvous("env://", timeout=timedelta(seconds=limit_s)))
    store = dist.PrefixStore(secret, store) if secret else store
    return world_at(store, rank, size, limit_s, cuda, os.environ.get("MASTER_ADDR", ""))


def join_elastic(limit_s: float, cuda: bool, member: str, secret: str, membership: Membership) -> World:
    """Join the members of a membership as `join` does.

    A process that is not a member gets a world of one rank, whose `elastic` lets it become a member later.
    """
    if cuda:
        torch.cuda.set_device(visible_devices(torch.cuda.device_count(), 0, 1).every[0])
    store, rank, _ = next(rendezvous("env://", timeout=timedelta(seconds=limit_s)))
    meeting = Meeting(dist.PrefixStore(secret, store), limit_s, cuda, os.environ.get("MASTER_ADDR", ""))
    return elastic_world(meeting, member, membership, rank)


def elastic_world(meeting: Meeting, member: str, membership: Membership, rank: int) -> World:
    """Return the world of a membership's members; a process that is not a member gets a world of one rank."""
    world = World(store=dist.PrefixStore("places", meeting.store))
    world.elastic = Elastic(meeting, member, membership)
    if member in membership.members:
        world.join_newest()
    else:
        # It writes no shared files.
        world.rank, world.first = rank, False
    return world


def world_at(store: dist.Store, rank: int, size: int, limit_s: float, cuda: bool, host: str) -> World:
    """Return the world of all ranks that use a store at `host`; arguments and errors are those of `join_group`."""
    group = join_group(store, rank, size, limit_s, cuda, host)
    return World(rank, size, group, dist.PrefixStore("places", store))


def sign_of(call: str) -> int:
    """Return a number by which ranks detect that they made different calls."""
    return zlib.crc32(call.encode())


def combined(combine: Callable[[Any, Any], Any], type: Any) -> Callable[[bytes, bytes], bytes]:
    """Return the combination of packed messages of a type; a message that it returns unchanged is not packed again."""

    def of_packed(low: bytes, high: bytes) -> bytes:
        lower = unpack_message(low, type)
        both = combine(lower, unpack_message(high, type))
        return low if both is lower else pack_message(both)

    return of_packed


def bytes_of(column: Tensor) -> Tensor:
    """Return the bytes (K, W) of each row of a column."""
    flat = column.contiguous().reshape(len(column), column.shape[1:].numel())
    return flat.view(torch.uint8)


@dataclass(frozen=True)
class Ranks:
    """Processes that call collectives together.

    Without a process group it is one process, and every reduction is the identity.
    """

    own_group: dist.ProcessGroup | None = None
    """The group, if there is no supervisor."""
    supervisor: World | None = None
    """The world that provides the group. It names the missing ranks when a collective fails."""

    @property
    def group(self) -> dist.ProcessGroup | None:
        """Return the current process group."""
        return self.own_group if self.supervisor is None else self.supervisor.group

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def members(self, rank: int) -> list[int]:
        """Return the world ranks of this group's ranks; `rank` indexes them."""
        return [rank] if self.group is None else sorted(dist.get_process_group_ranks(self.group))

    def meeting(self, purpose: str) -> AbstractContextManager[object]:
        """Return the guard of a collective: if it fails, the supervisor names the missing ranks."""
        return nullcontext() if self.supervisor is None else self.supervisor.meeting(purpose)

    def all_gather(self, purpose: str, value: Any, type: Any = Any) -> list[Any]:
        """All-gather messages of a type, in the order of ranks."""
        if self.group is None:
            return [value]
        with self.meeting(purpose):
            parts = Peers(self.group).all_gather(pack_message(value), sign_of(purpose))
        return [unpack_message(part, type) for part in parts]
