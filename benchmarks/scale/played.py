"""A simulation of the other ranks of a large run, in which every rank has as many rows as the real one.

rank 0 runs first ──its messages──▶ record
rank r: all-gather   the record of rank 0, and its own message for every other rank
        columns      its own, with the groups of each rank; unequal rows are drawn from its own by chance
        rows         from other ranks have the lengths of the index, and the values of the real rank
        reduce       the record of rank 0; on rank 0 its own value, once for each rank
        collect      on rank 0 its own value, once for each rank
        broadcast    the record of rank 0
        all-reduce   a sum times the number of ranks; a minimum or maximum as it is

Every rank makes the same calls in the same order, so the record's k-th entry answers the k-th call. The seconds of the
simulation are not counted. Messages and bytes are those that `cluster/peers.py` would send; those of an all-reduce are
of gloo's ring.
"""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.locations import Location, Locations
from braidrl.cluster.peers import FRAME, HEAD, Buffer, Peers, distances
from braidrl.cluster.world import LOCATE_EVERY_S, World, bytes_of
from braidrl.data.codec import encode
from braidrl.data.messages import join
from braidrl.data.rows import Column, Objects, Rows
from braidrl.observe.rollouts import part_path
from braidrl.observe.trace import TraceWriter
from braidrl.runtimes.interfaces import Interrupts
from braidrl.runtimes.saving.checkpoints import digests, files_in
from braidrl.runtimes.saving.folders import latest_checkpoint
from braidrl.runtimes.spmd.shard import Shard, ShardExchange, StageReport
from braidrl.runtimes.step_metrics import GapWatch

OF_A_MACHINE = 8
"""Ranks of a machine."""
GROUPS, SAMPLES = 2, 4
"""Groups of a rank's rows, and their samples."""


class Counted:
    """The bytes and messages that this rank sends, and the seconds of the simulation."""

    def __init__(self) -> None:
        self.sent, self.messages, self.modelled_s = Counter[str](), Counter[str](), 0.0

    def add(self, name: str, sent: int, messages: int) -> None:
        self.sent[name] += sent
        self.messages[name] += messages

    @contextmanager
    def modelling(self) -> Iterator[None]:
        """Count the seconds of the block as those of the simulation."""
        start = time.process_time()
        yield
        self.modelled_s += time.process_time() - start


class PlayedGroup(dist.ProcessGroup):
    """A process group of which one rank is real, for the all-reduces of gradients and rounds."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.number, self.count, self.counted = rank, size, Counted()

    def getBackendName(self) -> str:
        return "played"

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.number

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        with self.counted.modelling():
            operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
            size = tensors[0].numel() * tensors[0].element_size()
            # A ring passes each part of the tensor on twice.
            self.counted.add("all_reduce", 2 * size * (self.count - 1) // self.count, 2 * (self.count - 1))
            for tensor in tensors if operation == dist.ReduceOp.SUM else ():
                tensor.mul_(self.count)
        return ended(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self.allreduce(tensors, options)

    def barrier(self, options: Any = None) -> dist.Work:
        return self.allreduce([torch.ones(1)])


def ended(result: Any) -> dist.Work:
    """Return a completed work handle."""
    future: Future[Any] = Future()
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


class Record(Protocol):
    """Keeps the messages of rank 0: a list, or a store if several real ranks run at the same time."""

    def append(self, message: bytes, /) -> object: ...

    def __getitem__(self, call: int, /) -> bytes: ...


class PlayedPeers(Peers):
    """Simulates the peers with which a rank exchanges messages."""

    def __init__(self, group: PlayedGroup, record: Record) -> None:
        self.group, self.rank, self.size = group, group.number, group.count
        self.counted, self.record, self.calls = group.counted, record, 0
        self.coming = dict[int, memoryview]()
        """The messages with rows that other ranks send next."""
        self.rounds = len(list(distances(self.size)))

    def _recorded(self, message: Buffer) -> bytes:
        """Return the message that rank 0 sent in this call."""
        self.calls += 1
        if not self.rank:
            self.record.append(bytes(message))
        return self.record[self.calls - 1]

    def all_gather(self, message: Buffer, sign: int) -> list[memoryview]:
        with self.counted.modelling():
            first = self._recorded(message)
            self.counted.add("gather", (8 + len(message)) * (self.size - 1), 2 * self.rounds)
            own = memoryview(message)
            return [memoryview(first) if self.rank else own, *[own] * (self.size - 1)]

    def collect(self, message: bytes, combine: Callable[[bytes, bytes], bytes], sign: int) -> bytes:
        for _ in self._children():
            message = combine(message, message)
        self.counted.add("up", frames(message) * bool(self.rank), bool(self.rank))
        return message

    def reduce(self, message: bytes, combine: Callable[[bytes, bytes], bytes], sign: int) -> bytes:
        message = self.collect(message, combine, sign)
        with self.counted.modelling():
            message = self._recorded(message)
            children = len(list(self._children()))
            self.counted.add("down", frames(message) * children, children)
            return message

    def broadcast(self, message: bytes, sign: int) -> bytes:
        with self.counted.modelling():
            children = len(list(self._children()))
            self.counted.add("broadcast", frames(message) * children, children)
            return self._recorded(message)

    def exchange(self, messages: Mapping[int, Buffer], senders: Collection[int], sign: int) -> dict[int, memoryview]:
        assert set(senders) == set(self.coming), "a model of the rows that others send is made before they are moved"
        self.counted.add("exchange", FRAME * 2 + sum(map(frames, messages.values())), 2 + len(messages))
        coming, self.coming = self.coming, {}
        return coming


def frames(message: Buffer) -> int:
    """Return the size of a message in bytes."""
    return FRAME + max(0, len(message) - FRAME + HEAD)


class PlayedWorld(World):
    """The world of the real rank. It counts the seconds at each step of the code, without those of the simulation."""

    def __init__(self, group: PlayedGroup, record: Record, unequal: bool = False) -> None:
        super().__init__(group.number, group.count, group, dist.HashStore())
        self.unequal = unequal
        self.played, self.seconds = PlayedPeers(group, record), defaultdict[str, float](float)
        self.counted, self.part = group.counted, "start"
        self.parts = defaultdict[str, Counter[str]](Counter)
        """Seconds, bytes and messages of each part of the run."""
        self.places = defaultdict[str, float](float)
        """Seconds by part of the run and position in the code."""
        self._known = self._counts()
        self.folder: Path | None = None
        """The run's folder, in which the simulation writes the recorded rows of this machine's other ranks."""

    @property
    def peers(self) -> Peers:
        return self.played

    @property
    def machines(self) -> list[list[int]]:
        return [list(range(first, first + OF_A_MACHINE)) for first in range(0, self.size, OF_A_MACHINE)]

    def meet(self, purpose: str) -> None:
        if purpose == "written rows" and self.folder is not None:
            with self.counted.modelling():
                for part in self.folder.glob(f"rollouts/.*rank-{self.rank}"):
                    path = part.with_name(part.name.removeprefix(".").removesuffix(f".rank-{self.rank}"))
                    for other in self.machines[self.rank // OF_A_MACHINE]:
                        part_path(path, other).write_bytes(part.read_bytes())
        super().meet(purpose)

    def gather(self, purpose: str, value: Any, type: Any = Any) -> list[Any]:
        of_all = super().gather(purpose, value, type)
        latest = latest_checkpoint(self.folder) if self.folder else None
        if latest is not None and purpose.startswith("digests"):
            with self.counted.modelling():
                return [value, digests(latest, files_in(latest))]
        return of_all

    def reduce(self, purpose: str, value: Any, combine: Callable[[Any, Any], Any], type: Any = Any) -> Any:
        of_all = super().reduce(purpose, value, combine, type)
        if isinstance(of_all, StageReport) and value.forms:
            # The record has the values of rank 0 alone.
            forms = {name: form.of_both(value.forms[name]) for name, form in of_all.forms.items()}
            if own := value.forms.get("group"):
                below, above = self.rank * GROUPS, (self.size - 1 - self.rank) * GROUPS
                forms["group"] = replace(own, low=own.low - below, high=own.high + above)
            return replace(of_all, forms=forms)
        return of_all

    def gather_columns(self, purpose: str, columns: Mapping[str, Tensor], counts: Tensor) -> dict[str, Tensor]:
        """Return the columns of all ranks: separate groups, and otherwise the values of this rank."""
        if not columns:
            return {}
        row = sum(bytes_of(column).shape[1] for column in columns.values())
        self.counted.add("columns", row * int(counts.sum() - counts[self.rank - 1]), self.played.rounds)
        packed = torch.cat([bytes_of(column) for column in columns.values()], dim=1)
        with self.counted.modelling():
            gathered = (
                packed[self._drawn(counts, "group" in columns)]
                if len(packed)
                else packed.new_zeros(int(counts.sum()), row)
            )
        found, start = dict[str, Tensor](), 0
        for name, column in columns.items():
            width = bytes_of(column).shape[1]
            found[name] = gathered[:, start : start + width].contiguous().view(column.dtype).reshape(-1)
            start += width
        with self.counted.modelling():
            if "group" in columns:
                own, each = columns["group"].long(), len(columns["group"])
                groups = len(own.unique())
                shift = (torch.arange(self.size) - self.rank).repeat_interleave(each) * groups
                found["group"] = (own.repeat(self.size) + shift).to(torch.int64)
        return found

    def _drawn(self, counts: Tensor, names_rows: bool) -> Tensor:
        """Return for each row (B,) of all ranks the row of this rank that it copies; equal counts give equal rows."""
        own, first = int(counts[self.rank]), int(counts[: self.rank].sum())
        if not self.unequal or names_rows:
            return torch.arange(int(counts.sum())) % own
        drawn = torch.randint(own, (int(counts.sum()),), generator=torch.Generator().manual_seed(own))
        drawn[first : first + own] = torch.arange(own)
        return drawn

    def at(self, place: str) -> None:
        self.mark()
        super().at(place)

    def mark(self) -> None:
        """Add the counts since the last mark to this part of the run, and the seconds to the position in the code."""
        known, self._known = self._known, self._counts()
        self.parts[self.part].update({name: count - known[name] for name, count in self._known.items()})
        self.places[f"{self.part}: {self.place}"] += self._known["seconds"] - known["seconds"]

    @contextmanager
    def within(self, part: str) -> Iterator[None]:
        """Count the block as another part of the run."""
        self.mark()
        before, self.part = self.part, part
        yield
        self.mark()
        self.part = before

    def _counts(self) -> dict[str, float]:
        counted = self.counted
        seconds = time.process_time() - counted.modelled_s
        rings = "all_reduce"
        return {
            "seconds": seconds,
            "bytes": counted.sent.total() - counted.sent[rings],
            "messages": counted.messages.total() - counted.messages[rings],
            "bytes_in_rings": counted.sent[rings],
            "messages_in_rings": counted.messages[rings],
        }


class PlayedExchange(ShardExchange):
    """Exchanges the real rank's rows with simulated rows of other ranks."""

    world: PlayedWorld

    def __init__(self, world: PlayedWorld, interrupts: Interrupts, trace: TraceWriter | None) -> None:
        super().__init__(world, interrupts, trace)
        self._known = Rows({})

    def move(self, edge: str, table: Shard, owner: Tensor, needed: Sequence[str] | None = None) -> Shard:
        with self.world.counted.modelling():
            # A rank without rows now has had some.
            self._known = table.rows if len(table.local_positions) else self._known
            self.world.played.coming = self._coming(table, owner, needed)
        return super().move(edge, table, owner, needed)

    def _coming(self, table: Shard, owner: Tensor, needed: Sequence[str] | None) -> dict[int, memoryview]:
        rank, source = self.world.rank, table.owner
        coming = {}
        for sender in set(source[owner == rank].tolist()) - {rank}:
            index = table.index.take((source == sender) & (owner == rank))
            rows = Rows({name: like(index, self._known, name) for name in self._known.payload})
            rows = rows if needed is None else rows.only([name for name in dict.fromkeys(needed) if name in rows])
            coming[sender] = memoryview(join(encode(rows)))
        return coming


def like(index: Rows, known: Rows, name: str) -> Column:
    """Return a payload column for rows with these index columns, with the values of other rows."""
    column, size = known[name], len(index)
    if isinstance(column, Objects):
        return Objects(tuple(column[row % len(column)] for row in range(size)))
    of = next((each for each in ("length", "action_tokens", "prompt_length") if is_as_long(column, known, each)), None)
    lengths = torch.ones(size, dtype=torch.int64) if of is None else index[of].long()
    if name == "action_mask":
        return Ragged.from_rows([torch.arange(n) >= n - a for n, a in pairs(index)], torch.bool)
    if of is None:
        assert name in ("sequence_lengths", "turn_lengths"), f"nothing is known of the lengths of {name}"
        return Ragged.from_lengths(index["length" if name == "sequence_lengths" else "action_tokens"].long(), lengths)
    return Ragged.from_lengths(
        column.values.repeat(-(-int(lengths.sum()) // len(column.values)))[: int(lengths.sum())], lengths
    )


def pairs(index: Rows) -> list[tuple[int, int]]:
    """Return the tokens and the action tokens of each row."""
    return list(zip(index["length"].tolist(), index["action_tokens"].tolist(), strict=True))


def is_as_long(column: Ragged, known: Rows, name: str) -> bool:
    return name in known and torch.equal(column.lengths, known[name].long())


class AnyGap(GapWatch):
    """Allows any gap of log-probs: simulated rows have the values of other tokens."""

    def check(self, metrics: Mapping[str, float | int | None]) -> None:
        pass


class CountingStore(dist.Store):
    """A store in this process that counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.store, self.requests = dist.HashStore(), 0

    def __getattribute__(self, name: str) -> Any:
        if name not in ("set", "get", "add", "check", "compare_set"):
            return super().__getattribute__(name)
        self.requests += 1
        return getattr(self.store, name)


def heartbeats(ranks: int = OF_A_MACHINE, seconds: int = 5) -> float:
    """Return the requests to the store per second from a machine whose ranks all make progress."""
    store = CountingStore()
    machine = [Locations(store) for _ in range(ranks)]

    def moves_on(rank: int) -> None:
        for meeting in range(seconds):
            machine[rank].exchange(Location(rank, meeting, "a step"), LOCATE_EVERY_S, lambda: 0)

    for count in (1, seconds):
        # The first second begins with their names and numbers.
        store.requests, seconds = 0, count
        threads = [threading.Thread(target=moves_on, args=[rank]) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for one in machine:
        one.close()
    return store.requests / seconds


def join_played(rank: int, size: int) -> PlayedGroup:
    """Make the simulated group the default process group of torch.distributed."""
    made: list[PlayedGroup] = []

    def create(store: Any, number: int, count: int, timeout: Any) -> PlayedGroup:
        made.append(PlayedGroup(number, count))
        return made[-1]

    dist.Backend.register_backend("played", create, devices=["cpu"])
    dist.init_process_group("played", store=dist.HashStore(), rank=rank, world_size=size)
    return made[0]
