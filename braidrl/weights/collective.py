"""Weight transfers between processes of one group, device to device: NCCL on CUDA, gloo on a CPU.

trainer rank 0 ─ its parts ╮                                                          ╭─▶ rank 2   its parts of another model
trainer rank 1 ─ its parts ┴─plan─▶ rounds of one all-to-all each, of bounded bytes ──┴─▶ rank 3   its parts

Ranks exchange their shard indices once. Each rank then plans its own moves, and all agree on the number of rounds.

WeightTransfer, LayoutCopy    ranks that call at the same time: another layout, another pool
WeightOffer                   engines that ask at any time: a thread of each sender serves every request in its own process group
"""

import atexit
import json
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.process_groups import address_towards, all_gather_bytes, connect_store, group_between, open_store
from braidrl.cluster.world import Ranks
from braidrl.errors import first_line
from braidrl.weights.boxes import Box
from braidrl.weights.publisher import PublishedEngine, TransferVolume, check_shapes
from braidrl.weights.reshard_plan import Piece, Schedule, TensorGroup, plan_moves, rounds_needed
from braidrl.weights.shard_index import ShardIndex, WeightPart, check_parts, gather_shard_index, snapshot

LIMIT_BYTES = 64 << 20
"""Most bytes that a rank sends, and receives, in one round."""
CHECK_BYTES = 8
POLL_S = 0.02
END_S = 2.0
"""Seconds that `close` waits for the sending thread."""
Parts = Callable[[], Mapping[str, WeightPart]]


class TransferError(RuntimeError):
    """Weights did not arrive: a sender or receiver died or timed out."""


class WeightTransfer:
    """A planned transfer between two layouts over the same ranks, run once per version."""

    def __init__(
        self, known: ShardIndex, groups: Sequence[TensorGroup], ranks: Ranks, limit_bytes: int = LIMIT_BYTES,
        device: torch.device | None = None, check: bool = False,
    ) -> None:  # fmt: skip
        """Plan this rank's moves; all ranks call this at the same time.

        Args:
            known: The blocks that each rank holds.
            groups: The tensors, with the blocks that each rank wants.
            ranks: The ranks that exchange blocks.
            limit_bytes: Most bytes that a rank sends, or receives, in one round.
            device: The device of the exchanged buffers; by default that of this rank's parts.
            check: Send a checksum with the bytes of each peer in each round.

        Raises:
            ValueError: A wanted block is on no rank.
        """
        self.ranks, self.names, self.device = ranks, list(known.tensors), device
        self.dtypes = [known.dtypes[name] for name in self.names]
        self.check_bytes = CHECK_BYTES * check
        self.plan = plan_moves(groups, ranks.rank, ranks.size, known.machines)
        item_sizes = sorted({group.item_bytes for group in groups})
        # One schedule per element size, so that blocks are aligned in a buffer.
        ways = [(self.plan.sends.of_item(item), self.plan.receives.of_item(item)) for item in item_sizes]
        counts = [max(rounds_needed(moves, limit_bytes) for moves in both) for both in ways]
        agreed = self._agreed(torch.tensor(counts, dtype=torch.int64), dist.ReduceOp.MAX)
        self.schedules = [
            (Schedule(a, count), Schedule(b, count)) for (a, b), count in zip(ways, agreed.tolist(), strict=True)
        ]
        opened, last = self._first_and_last_rounds()
        self._opened_in, self._closed_in = (self._by_round(opened), self._by_round(last))

    @property
    def rounds(self) -> int:
        """Return the number of rounds: one without an exchange if all blocks are copied locally."""
        return max(1, self.exchanges)

    @property
    def exchanges(self) -> int:
        """Return the number of rounds in which ranks exchange blocks; equal on all ranks."""
        return sum(sends.count for sends, _ in self.schedules)

    @cached_property
    def arrivals(self) -> list[list[str]]:
        """Return, for each round, the tensors whose last block this rank receives in it."""
        last, begun = torch.zeros(len(self.names), dtype=torch.int64), 0
        for _, receives in self.schedules:
            own = torch.from_numpy(receives.last_rounds(len(self.names)))
            last = torch.where(own >= 0, own + begun, last)
            begun += receives.count
        return self._by_round(last.tolist())

    def _by_round(self, rounds: Sequence[int]) -> list[list[str]]:
        found: list[list[str]] = [[] for _ in range(self.rounds)]
        for name, number in zip(self.names, rounds, strict=True):
            if number < self.rounds:
                found[number].append(name)
        return found

    def _first_and_last_rounds(self) -> tuple[list[int], list[int]]:
        """Return the rounds in which each tensor's values are first and last needed.

        The first round is equal on all ranks: those that shard an adapter merge it together, whether or not they send any of it.
        """
        first = torch.full((len(self.names),), self.rounds)
        last, begun = torch.full_like(first, -1), 0
        for sends, _ in self.schedules:
            own = torch.from_numpy(sends.first_rounds(len(self.names)))
            first = torch.where(own < sends.count, own + begun, first)
            last = torch.maximum(last, torch.from_numpy(sends.last_rounds(len(self.names))) + begun)
            begun += sends.count
        for tensor in self.plan.stays:
            first[tensor] = min(int(first[tensor]), tensor * self.rounds // len(self.names))
        first = self._agreed(first, dist.ReduceOp.MIN)
        return first.tolist(), torch.maximum(last, first).tolist()

    def _agreed(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.ranks.group is not None:
            with self.ranks.meeting("rounds of weights"):
                dist.all_reduce(values, how, group=self.ranks.group)
        return values

    def run(self, parts: Mapping[str, WeightPart], into: Mapping[str, WeightPart]) -> TransferVolume:
        """Move the weights; every rank calls this at the same time.

        Args:
            parts: This rank's source parts.
            into: Its target parts.

        Returns:
            The bytes that this rank moved, by direction.
        """
        traffic = TransferVolume()
        for _ in self.steps(parts, into, traffic):
            pass
        return traffic

    @torch.no_grad()
    def steps(
        self, parts: Mapping[str, WeightPart], into: Mapping[str, WeightPart], traffic: TransferVolume
    ) -> Iterator[int]:
        """Move the weights as `run` does; yield the number of each finished round."""
        begun, traffic.rounds = time.perf_counter(), self.exchanges
        # A rank with nothing to send in a round still takes part, on its own device.
        device = self.device or next(part.device for part in (*parts.values(), *into.values()))
        rounds = [(*both, number) for both in self.schedules for number in range(both[0].count)]
        values = dict[str, Tensor]()
        buffers = RoundBuffers(device)
        for number in range(self.rounds):
            with self.ranks.meeting("weights in another layout"):
                for name in self._opened_in[number]:
                    if name in parts:
                        values[name] = parts[name].values()
                        for box in self.plan.stays.get(self._number_of[name], ()):
                            size = box.elements * values[name].itemsize
                            traffic.stayed += size
                            for piece in box.divided(-(-size // LIMIT_BYTES)) if values[name].is_cuda else [box]:
                                block = values[name][piece.within(parts[name].box)]
                                into[name].put(staged(block, into[name].device), piece)
                if rounds:
                    self._exchange(*rounds[number], parts, values, into, traffic, buffers)
                for name in self._closed_in[number]:
                    values.pop(name, None)
            traffic.seconds = time.perf_counter() - begun
            yield number

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def _exchange(
        self, sends: Schedule, receives: Schedule, number: int, parts: Mapping[str, WeightPart],
        values: Mapping[str, Tensor], into: Mapping[str, WeightPart], traffic: TransferVolume, buffers: "RoundBuffers",
    ) -> None:  # fmt: skip
        """Run one all-to-all. Blocks between two ranks are in an order that both can derive."""
        going, coming = list(sends.pieces(number)), list(receives.pieces(number))
        sizes_in, sizes_out = (self._by_peer(some) for some in (coming, going))
        sent = buffers.sent(sum(sizes_out), any(value.is_cuda for value in values.values()))
        received = buffers.received(sum(sizes_in))
        for piece, place in self._places(going, sent):
            name = self.names[piece.tensor]
            place.copy_(values[name][piece.box.within(parts[name].box)])
        for message in self._messages(sent, sizes_out):
            message[-CHECK_BYTES:].copy_(torch.tensor([checksum(message[:-CHECK_BYTES])]).view(torch.uint8))
        dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.ranks.group)
        for message in self._messages(received, sizes_in):
            expected, found = int(message[-CHECK_BYTES:].clone().view(torch.int64)), checksum(message[:-CHECK_BYTES])
            if expected != found:
                raise ValueError(f"the weights that arrived have checksum {found:08x}, and {expected:08x} was sent")
        for piece, place in self._places(coming, received):
            into[self.names[piece.tensor]].put(place, piece.box)
        traffic.sent += sent.nbytes
        traffic.received += received.nbytes
        traffic.peak = max(traffic.peak, sent.nbytes, received.nbytes)

    def _bytes(self, piece: Piece) -> int:
        return piece.box.elements * self.dtypes[piece.tensor].itemsize

    def _by_peer(self, pieces: Sequence[Piece]) -> list[int]:
        sizes = [0] * self.ranks.size
        for piece in pieces:
            sizes[piece.peer] += self._bytes(piece)
        return [size + self.check_bytes * bool(size) for size in sizes]

    def _messages(self, buffer: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return each peer's bytes that end with a checksum; none without checks."""
        return [message for message in buffer.split(list(sizes)) if len(message)] if self.check_bytes else []

    def _places(self, pieces: Sequence[Piece], buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        start, peer = 0, None
        for piece in pieces:
            start += self.check_bytes * (peer is not None and piece.peer != peer)
            end, peer = start + self._bytes(piece), piece.peer
            yield piece, buffer[start:end].view(self.dtypes[piece.tensor]).view(piece.box.sizes)
            start = end


class RoundBuffers:
    """The buffers of a transfer, which all of its rounds use: fresh memory would cost as much as the copy into it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent = self._received = torch.empty(0, dtype=torch.uint8, device=device)

    def sent(self, size: int, from_cuda: bool) -> Tensor:
        """Return a buffer to send; on the host it is pinned where it is filled from CUDA, which is then at full speed."""
        if len(self._sent) < size:
            pinned = from_cuda and self._device.type == "cpu"
            self._sent = torch.empty(size, dtype=torch.uint8, device=self._device, pin_memory=pinned)
        return self._sent[:size]

    def received(self, size: int) -> Tensor:
        if len(self._received) < size:
            self._received = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._received[:size]


def staged(block: Tensor, target: torch.device) -> Tensor:
    """Return a block that is copied to a device next: from CUDA to the host by way of pinned memory, whose pages torch keeps for later."""
    if not block.is_cuda or target.type == "cuda":
        return block
    return torch.empty(block.shape, dtype=block.dtype, pin_memory=True).copy_(block)


def checksum(message: Tensor) -> int:
    return zlib.crc32(message.cpu().numpy().data)


class LayoutCopy:
    """A copy from one model's parts to another's, on any ranks; all ranks that hold some of either call it at the same time."""

    def __init__(self, source: Parts, target: Parts, ranks: Ranks, limit_bytes: int = LIMIT_BYTES) -> None:
        """Plan the transfer. Raises ValueError if the target is another model.

        Args:
            source: Returns this rank's parts of the first model; empty if it has none.
            target: Returns its parts of the second model.
            ranks: The ranks that hold parts of either.
            limit_bytes: Most bytes that a rank sends, or receives, in one round.
        """
        self.source, self.target = source, target
        known = gather_shard_index(source(), ranks)
        self.transfer = WeightTransfer(known, known.groups(gather_shard_index(target(), ranks)), ranks, limit_bytes)
        self.traffic = TransferVolume()

    def refresh(self, keep: float = 0.0) -> TransferVolume:
        """Copy the current weights; `keep` is the weight of the old values (EMA decay). Return the bytes moved."""
        into = {name: replace(part, kept=keep) for name, part in self.target().items()}
        self.traffic = self.transfer.run(self.source(), into)
        return self.traffic


@dataclass(frozen=True)
class TransferNotice:
    """The data that a worker needs to receive a version; `asdict` makes plain JSON of it for servers."""

    host: str
    port: int
    number: str
    """The prefix of the request's keys in the store."""
    senders: int
    receivers: int
    limit_s: float
    cuda: bool
    """True: NCCL between CUDA devices; False: gloo."""
    check: bool


class WeightOffer:
    """Versions of this rank's parts, sent to engines on request; all senders construct theirs at the same time."""

    def __init__(self, ranks: Ranks, host: str, limit_s: float, device: torch.device, check: bool = False) -> None:
        """Open the store through which receivers ask, and start the sending thread.

        Args:
            ranks: The senders.
            host: This machine's address, for receivers.
            limit_s: Time-out of a transfer, in seconds.
            device: The device of the parts; CUDA selects NCCL.
            check: Send checksums.
        """
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        self.rank, self.limit_s, self.check = ranks.rank, limit_s, check
        self._kept: dict[int, tuple[Mapping[str, WeightPart], Callable[[], bool]]] = {}
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._store = open_store(host, limit_s) if ranks.rank == 0 else None
        address = json.dumps([host, self._store.port, secrets.token_hex(8)] if self._store else None).encode()
        every = all_gather_bytes(bytearray(address), ranks.group) if ranks.group is not None else [address]
        self._host, self._port, self._secret = json.loads(bytes(every[0]))
        self._senders = ranks.size
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        # A thread still inside a store or process group at interpreter exit aborts the process.
        atexit.register(self.close)

    def keep(
        self, version: int, parts: Mapping[str, WeightPart], is_current: Callable[[], bool] = lambda: True
    ) -> "OfferedWeights":
        """Offer a version until `forget`, or until `is_current` returns False because the parts changed.

        Ranks that shard an adapter call this at the same time.
        """
        merged = any(part.is_merged_together for part in parts.values())
        with self._changed:
            self._kept[version] = snapshot(parts) if merged else parts, is_current
            self._changed.notify_all()
        about = (self._host, self._port, self._secret, version, self._senders, self.limit_s, self.device.type == "cuda")
        return OfferedWeights(*about, self.check)

    def forget(self, version: int) -> None:
        """Stop offering a version; a transfer in progress completes."""
        with self._changed:
            self._kept.pop(version, None)

    def close(self) -> None:
        """Stop serving; a transfer still in progress ends with this process."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(END_S)

    def _serve(self) -> None:
        """Serve requests one after another; report a failure to the receiver that asked."""
        store = dist.PrefixStore(self._secret, connect_store(self._host, self._port, self.limit_s))
        number = 1
        while not self._closed.wait(POLL_S):
            try:
                if not store.check([f"request/{number}"]):
                    continue
            except RuntimeError:
                return  # the sender that opened the store has exited
            asked = json.loads(store.get(f"request/{number}"))
            try:
                parts = self._parts_of(asked["version"])
                self._send(parts, dist.PrefixStore(str(number), store), asked["receivers"])
            except (RuntimeError, ValueError) as error:
                store.set(f"{number}/failed", first_line(error))
            number += 1

    def _parts_of(self, version: int) -> Mapping[str, WeightPart]:
        """Wait until this sender has a version, and return its parts. Raises TransferError if it is no longer offered."""
        with self._changed:
            self._changed.wait_for(lambda: max(self._kept, default=-1) >= version, self.limit_s)
            parts, is_current = self._kept.get(version, ({}, lambda: False))
        if not is_current():
            raise TransferError("the weights have changed since that version; engines receive the next one")
        return parts

    @torch.no_grad()
    def _send(self, parts: Mapping[str, WeightPart], store: dist.Store, receivers: int) -> None:
        if not all_here(store, self._senders + receivers, self.limit_s):
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        ranks = join(store, self.rank, self._senders + receivers, self.limit_s, self.device.type == "cuda", self._host)
        held = gather_shard_index(parts, ranks)
        groups = held.groups(gather_shard_index({}, ranks))
        WeightTransfer(held, groups, ranks, device=self.device, check=self.check).run(parts, {})
        finish(ranks, self.device)


@dataclass(frozen=True)
class OfferedWeights:
    """One offered version: a weight source for engines of any process, serializable as plain data."""

    host: str
    port: int
    secret: str
    version: int
    senders: int
    limit_s: float
    cuda: bool
    check: bool

    @contextmanager
    def asked(self, receivers: int) -> Iterator[TransferNotice]:
        """Ask for the version; yield the notice for its `receivers` workers. Cancel the request if the caller fails."""
        store = dist.PrefixStore(self.secret, connect_store(self.host, self.port, self.limit_s))
        number = store.add("asked", 1)
        store.set(f"request/{number}", json.dumps({"version": self.version, "receivers": receivers}))
        key = f"{self.secret}/{number}"
        try:
            yield TransferNotice(
                self.host, self.port, key, self.senders, receivers, self.limit_s, self.cuda, self.check
            )
        except BaseException:
            store.set(f"{number}/cancelled", "")
            raise

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with self.asked(1) as notice:
            device = torch.device("cuda", torch.cuda.current_device()) if self.cuda else torch.device("cpu")
            yield from Incoming(notice, 0, device).tensors()

    def put_into(self, parts: Mapping[str, WeightPart]) -> None:
        """Receive into parts of a model. Raises as `Incoming.receive`."""
        with self.asked(1) as notice:
            Incoming(notice, 0, next(part.device for part in parts.values())).receive(parts)

    def close(self) -> None:
        """Do nothing: the senders decide how long they keep the version."""


class Incoming:
    """The receiving side of one transfer."""

    def __init__(self, notice: TransferNotice, worker: int, device: torch.device) -> None:
        """Receive as number `worker`, counted from 0; `device` holds the buffers with NCCL."""
        self.notice, self.worker = notice, worker
        self.device = device if self.notice.cuda else torch.device("cpu")
        self.begun = False
        """True once the receiver's tensors may have changed."""

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full tensor under each of its names, holding in memory only the tensors of a round.

        Raises:
            TransferError: A sender died or timed out.
            ValueError: A checksum is wrong.
        """
        with self._joined() as ranks:
            held = gather_shard_index({}, ranks)
            arriving = Arriving(held, self.device)
            transfer = self._planned(held, arriving.described(), ranks)
            for number in transfer.steps({}, arriving, TransferVolume()):
                for name in transfer.arrivals[number]:
                    tensor = arriving.pop(name)
                    for alias in held.names[name]:
                        yield alias, tensor
            finish(ranks, self.device)

    def receive(
        self, parts: Mapping[str, WeightPart], shapes: Mapping[str, torch.Size] | None = None
    ) -> TransferVolume:
        """Receive into a worker's own parts; with `shapes`, all tensors of the model by every name, check that all are sent.

        Raises:
            TransferError: A sender died or timed out.
            ValueError: The weights are another model's (nothing has changed then), or a checksum is wrong.
        """
        with self._joined() as ranks:
            held = gather_shard_index({}, ranks)
            given = {alias: torch.Size(held.shapes[name]) for name, names in held.names.items() for alias in names}
            differs = None
            try:
                check_parts(given, parts) if shapes is None else check_shapes(given, shapes)
            except ValueError as error:
                # The senders wait for this worker's request: send an empty one.
                differs, parts = error, {}
            planned = self._planned(held, parts, ranks)
            self.begun = differs is None
            moved = planned.run({}, parts)
            finish(ranks, self.device)
            if differs is not None:
                raise differs
            return moved

    def _planned(self, held: ShardIndex, wanted: Mapping[str, WeightPart], ranks: Ranks) -> WeightTransfer:
        groups = held.groups(gather_shard_index(wanted, ranks))
        return WeightTransfer(held, groups, ranks, device=self.device, check=self.notice.check)

    @contextmanager
    def _joined(self) -> Iterator[Ranks]:
        notice = self.notice
        store = dist.PrefixStore(notice.number, connect_store(notice.host, notice.port, notice.limit_s))
        try:
            size = notice.senders + notice.receivers
            if not all_here(store, size, notice.limit_s):
                raise TransferError("the request for weights was cancelled")
            address = address_towards(notice.host)
            yield join(store, notice.senders + self.worker, size, notice.limit_s, notice.cuda, address)
        except RuntimeError as error:
            if isinstance(error, TransferError):
                raise
            reason = store.get("failed").decode() if store.check(["failed"]) else first_line(error)
            raise TransferError(f"weights did not arrive: {reason}") from error


class Arriving(Mapping[str, WeightPart]):
    """Full tensors, each allocated when its first block arrives."""

    def __init__(self, known: ShardIndex, device: torch.device) -> None:
        self._known, self._device = known, device
        self._here: dict[str, WeightPart] = {}

    def __getitem__(self, name: str) -> WeightPart:
        if name not in self._here:
            shape, dtype = self._known.shapes[name], self._known.dtypes[name]
            self._here[name] = WeightPart([name], torch.empty(shape, dtype=dtype, device=self._device))
        return self._here[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known.shapes)

    def __len__(self) -> int:
        return len(self._known.shapes)

    def described(self) -> dict[str, WeightPart]:
        """Return parts on the meta device that describe the wanted tensors."""
        known = self._known
        return {
            name: WeightPart(known.names[name], torch.empty(shape, dtype=known.dtypes[name], device="meta"))
            for name, shape in known.shapes.items()
        }

    def pop(self, name: str) -> Tensor:
        """Remove and return a complete tensor."""
        tensor = self[name].local
        del self._here[name]
        return tensor


def all_here(store: dist.Store, size: int, limit_s: float) -> bool:
    """Wait for all processes of a transfer; return False if it was cancelled first.

    Raises TransferError after `limit_s` seconds, and if a sender failed.
    """
    end, here = time.monotonic() + limit_s, store.add("here", 1)
    while here < size:
        if store.check(["cancelled"]):
            return False
        if store.check(["failed"]):
            raise TransferError(store.get("failed").decode())
        if time.monotonic() > end:
            raise TransferError(f"{here} of {size} processes joined the weight transfer in {limit_s:g} s")
        time.sleep(POLL_S)
        here = store.add("here", 0)
    return True


def join(store: dist.Store, rank: int, size: int, limit_s: float, cuda: bool, address: str) -> Ranks:
    """Create a process group for one transfer, so that a failed transfer leaves no state behind."""
    return Ranks(group_between(store, rank, size, limit_s, cuda, address))


def finish(ranks: Ranks, device: torch.device) -> None:
    """Wait until all ranks have finished their copies: only then may senders change their tensors or destroy the group."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1), group=ranks.group)


def whole_boxes(groups: Sequence[TensorGroup], ranks: Sequence[int]) -> list[TensorGroup]:
    """Return the tensors, each wanted in full by these ranks."""
    return [replace(one, wanted=[(rank, Box.whole(one.shape)) for rank in ranks]) for one in groups]


class CollectivePublisher:
    """A publisher that offers the trainer's own tensors to engine workers while they are current; no intermediate copy."""

    def __init__(
        self, offer: WeightOffer, parts: Parts, engine: PublishedEngine, ranks: Ranks, state: Callable[[], object]
    ) -> None:
        """Prepare without publishing.

        Args:
            offer: Sends the parts to workers.
            parts: Returns this rank's parts.
            engine: Receives an `OfferedWeights` source.
            ranks: The senders.
            state: Returns a value that changes whenever the parts do.
        """
        self.offer, self.parts, self.engine, self.ranks, self.state = offer, parts, engine, ranks, state
        self._version: int | None = None

    def publish(self, version: int) -> None:
        if self._version is not None:
            self.offer.forget(self._version)
        self._version, before = version, self.state()
        self.engine.publish(version, self.offer.keep(version, self.parts(), lambda: self.state() == before))
        if self.ranks.group is not None:
            # Engines of other ranks may still be receiving from this one.
            with self.ranks.meeting("weights at all engines"):
                dist.barrier(group=self.ranks.group)

    def close(self) -> None:
        self.offer.close()
