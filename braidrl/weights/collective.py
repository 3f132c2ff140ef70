"""Weight versions that engines of other processes request, from device to device: NCCL on CUDA, gloo on a CPU, or
another transport.

engine ─asks─▶ store ─▶ a thread of each trainer rank ─parts─▶ a process group of this transfer alone
    ─▶ the engine's workers

Engines that request the same version at about the same time share a transfer, so that what several workers of a machine
need crosses to it once. Senders wait `JOIN_S` seconds for a late engine, and not at all for one that has ended. Where
senders and receivers have an earlier version, only changed values are sent: of bfloat16 weights, few change in a step.
"""

import atexit
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _set_pg_timeout

from braidrl.cluster.process_groups import (
    address_towards,
    connect_store,
    count_at,
    group_between,
    has_message,
    message_at,
    open_store,
    put_message,
)
from braidrl.cluster.shared_memory import machine
from braidrl.cluster.world import Ranks
from braidrl.errors import first_line
from braidrl.weights.names import TRANSPORTS
from braidrl.weights.publisher import PublishedEngine, TransferVolume, check_shapes
from braidrl.weights.reshard_plan import ShardIndex, gather_shard_index
from braidrl.weights.shards import Parts, WeightPart, check_parts, snapshot
from braidrl.weights.transfer import WeightTransfer

POLL_S = 0.02
JOIN_S = 10.0
"""Seconds that an engine whose workers are ready waits for another engine that has asked for the same version."""
CONNECT_S = 60.0
"""Time limit for processes that are all there to connect."""
END_S = 2.0
"""Seconds that `close` waits for the sending thread."""
JOINED = tuple[int, int, int]
"""The number of a request's transfer, the rank of its first receiver there, and the number of its processes."""


class TransferError(RuntimeError):
    """A weight transfer failed: a sender or receiver died or timed out."""


@dataclass(kw_only=True)
class Senders:
    """The ranks that send weights, and how; plain data, for servers too."""

    host: str
    port: int
    secret: str
    """The prefix of their keys in the store."""
    senders: int
    limit_s: float
    cuda: bool
    """True if the bytes are exchanged between CUDA devices."""
    transport: str

    def store(self) -> dist.Store:
        """Connect to the store through which receivers send requests. Raises TransferError if it is unreachable."""
        try:
            return connect_store(self.host, self.port, self.limit_s, self.secret)
        except RuntimeError as error:
            raise TransferError(f"weights did not arrive: {first_line(error)}") from error


@dataclass(kw_only=True)
class TransferNotice(Senders):
    """The data that a worker needs to receive a version."""

    number: int
    receivers: int
    changes: bool
    """True if the receivers hold a version of the same run, so that changed values suffice."""


@dataclass
class WeightRequest:
    """A request of one engine in the store, or of all engines of a transfer."""

    version: int
    receivers: int
    held: int | None
    """The version that the receivers hold; None without one of the same run."""
    since: float = 0.0
    """When the first sender read it, by the sender's clock, in seconds."""
    ready: float | None = None
    """When the first sender saw that all receivers had joined."""


class WeightOffer:
    """Versions of this rank's parts, sent to engines on request; all senders construct theirs at the same time."""

    def __init__(
        self, ranks: Ranks, host: str, limit_s: float, device: torch.device, transport: str = "collective"
    ) -> None:
        """Open the store at this machine's address `host`, and start the sending thread.

        `limit_s` is the time limit of a transfer. CUDA selects NCCL.
        """
        self.device = current_device(device.type == "cuda")
        self.ranks, self.sent_bytes = ranks, 0
        self._offered: dict[int, tuple[Mapping[str, WeightPart], Callable[[], bool]]] = {}
        self._offered_before = set[int]()
        """All versions that were ever offered; their numbers need not grow."""
        self._requests = dict[int, WeightRequest]()
        """Requests that are in no transfer yet, at the first sender."""
        self._last_request, self._unread = 0, set[int]()
        self._changed, self._closed = threading.Condition(), threading.Event()
        self._store = open_store(host, limit_s) if ranks.rank == 0 else None
        address = {"host": host, "port": self._store.port, "secret": secrets.token_hex(8)} if self._store else None
        first, *_ = ranks.all_gather("address of the weights", address)
        cuda = device.type == "cuda"
        self.senders = Senders(**first, senders=ranks.size, limit_s=limit_s, cuda=cuda, transport=transport)
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
            self._offered[version] = snapshot(parts) if merged else parts, is_current
            self._offered_before.add(version)
            self._changed.notify_all()
        return OfferedWeights(**vars(self.senders), version=version)

    def forget(self, version: int) -> None:
        """Stop offering a version; a transfer in progress completes."""
        with self._changed:
            self._offered.pop(version, None)

    def close(self) -> None:
        """Stop serving; a transfer still in progress ends with this process."""
        atexit.unregister(self.close)
        self._closed.set()
        self._thread.join(END_S)

    @torch.no_grad()
    def _serve(self) -> None:
        """Serve transfers one after another; report a failure to their receivers."""
        store, number, senders = self.senders.store(), 1, self.senders
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        while not self._closed.wait(POLL_S):
            try:
                if self.ranks.rank == 0 and (formed := self._next_transfer(store, number)):
                    put_message(store, f"transfer/{number}", formed)
                if not has_message(store, f"transfer/{number}"):
                    continue
                request = message_at(store, f"transfer/{number}", WeightRequest)
            except RuntimeError:
                return  # the sender that opened the store has exited
            try:
                # Wait until this sender has the version.
                with self._changed:
                    has_version = partial(self._offered_before.__contains__, request.version)
                    self._changed.wait_for(has_version, senders.limit_s)
                    parts, is_current = self._offered.get(request.version, ({}, lambda: False))
                    before, is_before = self._offered.get(request.held, (None, lambda: True))
                if not is_current():
                    raise TransferError("the weights have changed since that version; engines receive the next one")
                before = before if is_before() else None
                meeting, size = dist.PrefixStore(f"transfer {number}", store), senders.senders + request.receivers
                with transfer_group(
                    meeting, self.ranks.rank, size, self.device, senders, parts, lambda held: {}, before
                ) as transfer:
                    self.sent_bytes += transfer.run(parts, {}).sent
            # This includes errors in a user's transport: the receivers would wait for this thread.
            except Exception as error:
                put_message(store, f"transfer {number}/failed", first_line(error))
            number += 1

    def _next_transfer(self, store: dist.Store, number: int) -> WeightRequest | None:
        """Form a transfer for the first engine whose workers are all ready, and for others that request them."""
        now, requests = time.monotonic(), self._requests
        # The request follows its number, unless the requesting process died between the two writes.
        last, self._last_request = self._last_request, count_at(store, "asked")
        self._unread |= set(range(last + 1, self._last_request + 1))
        for request in sorted(self._unread):
            if has_message(store, f"request/{request}"):
                self._unread.discard(request)
                requests[request] = replace(message_at(store, f"request/{request}", WeightRequest), since=now)
        for request, waiting in list(requests.items()):
            if has_message(store, f"{request}/cancelled") or now > waiting.since + self.senders.limit_s:
                del requests[request]
            elif waiting.ready is None and count_at(store, f"{request}/here") == waiting.receivers:
                waiting.ready = now
        first = next((waiting for waiting in requests.values() if waiting.ready is not None), None)
        if first is None or first.ready is None:
            return None
        alike = {n: r for n, r in requests.items() if (r.version, r.held) == (first.version, first.held)}
        joined = [n for n, r in alike.items() if r.ready is not None]
        if len(joined) < len(alike) and now < first.ready + JOIN_S:
            return None
        receivers, total = 0, sum(alike[n].receivers for n in joined)
        for request in joined:
            group = number, self.senders.senders + receivers, self.senders.senders + total
            put_message(store, f"{request}/joined", group)
            receivers += requests.pop(request).receivers
            if has_message(store, f"{request}/cancelled"):
                # It was cancelled after it was read: the canceller did not see that the request had joined.
                put_message(store, f"transfer {number}/failed", "a request for weights was cancelled")
        return WeightRequest(first.version, total, first.held)


@dataclass(kw_only=True)
class OfferedWeights(Senders):
    """One offered version: a weight source for engines of any process, serializable as plain data."""

    version: int
    received: int = 0
    """Bytes that workers have received through this object's requests."""

    @contextmanager
    def request(self, receivers: int, held: "OfferedWeights | None" = None) -> Iterator[TransferNotice]:
        """Request the version; yield the notice for its `receivers` workers.

        The request is cancelled if the caller fails. `held` is the version that the workers hold: if the senders still
        have it, only changed values are sent.
        """
        version_held, store = held.version if held is not None and held.secret == self.secret else None, self.store()
        number = count_at(store, "asked", 1)
        put_message(store, f"request/{number}", WeightRequest(self.version, receivers, version_held))
        try:
            senders = {setting.name: getattr(self, setting.name) for setting in fields(Senders)}
            yield TransferNotice(**senders, number=number, receivers=receivers, changes=version_held is not None)
        except BaseException:
            with suppress(RuntimeError):  # the store has ended, and the senders with it
                put_message(store, f"{number}/cancelled")
                if has_message(store, f"{number}/joined"):
                    # The senders wait for all workers of the transfer, and one of them may have died.
                    transfer, *_ = message_at(store, f"{number}/joined", JOINED)
                    put_message(store, f"transfer {transfer}/failed", "a request for weights was cancelled")
            raise
        self.received += count_at(store, f"{number}/received")

    def is_same(self, other: "OfferedWeights") -> bool:
        """Return True if both are one version of the same senders."""
        return (self.secret, self.version) == (other.secret, other.version)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        with self.request(1) as notice:
            yield from Incoming(notice, 0, current_device(self.cuda)).tensors()

    def put_into(self, parts: Mapping[str, WeightPart], ranks: Ranks | None = None) -> None:
        """Receive into the parts of a model, which all of its `ranks` do at the same time.

        Raises as `Incoming.put_into`.
        """
        ranks, device = ranks or Ranks(), next(part.tensor.device for part in parts.values())
        with self.request(ranks.size) if ranks.rank == 0 else nullcontext() as notice_here:
            notice, *_ = ranks.all_gather("weights on offer", notice_here, TransferNotice | None)
            Incoming(notice, ranks.rank, device).put_into(parts)


def current_device(cuda: bool) -> torch.device:
    """Return this process's CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")


class Incoming:
    """The receiving side of one transfer."""

    def __init__(self, notice: TransferNotice, worker: int, device: torch.device) -> None:
        """Receive as worker number `worker`, counted from 0; `device` holds the buffers with NCCL."""
        self.notice, self.worker = notice, worker
        self.device = device if self.notice.cuda else torch.device("cpu")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every full tensor under each of its names; memory holds one round's. Raises TransferError."""
        with self._joined(lambda held: held.tensors) as transfer:
            tensors = transfer.index.tensors
            arriving = ReceivedTensors(tensors, self.device)
            for number in transfer.steps({}, arriving):
                for name in transfer.arrivals[number]:
                    tensor = arriving[name].local
                    del arriving[name]
                    yield from ((alias, tensor) for alias in tensors[name].names)

    def put_into(
        self, parts: Mapping[str, WeightPart], shapes: Mapping[str, torch.Size] | None = None
    ) -> TransferVolume:
        """Receive into a worker's parts.

        With `shapes`, all tensors of the model by every name, check that all are sent. Raises TransferError if a sender
        died or timed out, and ValueError, before any change, if the weights are another model's.
        """
        differs = list[ValueError]()

        def parts_to_receive(held: ShardIndex) -> Mapping[str, WeightPart]:
            offered = {alias: part.shape for part in held.tensors.values() for alias in part.names}
            try:
                check_parts(offered, parts) if shapes is None else check_shapes(offered, shapes)
            except ValueError as error:
                # The senders wait for this worker's request: send an empty one.
                differs.append(error)
            return {} if differs else parts

        with self._joined(parts_to_receive, {} if self.notice.changes else None) as transfer:
            moved = transfer.run({}, {} if differs else parts)
        if differs:
            raise differs[0]
        return moved

    @contextmanager
    def _joined(
        self,
        parts_for: Callable[[ShardIndex], Mapping[str, WeightPart]],
        before: Mapping[str, WeightPart] | None = None,
    ) -> Iterator[WeightTransfer]:
        """Join the transfer that the senders form once all workers of this request are ready; leave it when all have
        their copies.
        """
        notice, meeting = self.notice, None
        store = notice.store()
        request = dist.PrefixStore(str(notice.number), store)
        try:
            count_at(request, "here", 1)
            meet(request, "joined", notice.senders, notice.senders + notice.receivers, notice.limit_s)
            number, first, size = message_at(request, "joined", JOINED)
            meeting = dist.PrefixStore(f"transfer {number}", store)
            with transfer_group(
                meeting, first + self.worker, size, self.device, notice, {}, parts_for, before
            ) as transfer:
                yield transfer
            count_at(request, "received", transfer.traffic.received)
        except TransferError:
            raise
        except RuntimeError as error:
            reason = first_line(error)
            with suppress(RuntimeError):  # the store ended with the first sender
                if meeting is not None and has_message(meeting, "failed"):
                    reason = message_at(meeting, "failed", str)
            raise TransferError(f"weights did not arrive: {reason}") from error


class ReceivedTensors(dict[str, WeightPart]):
    """Full tensors, each allocated when its first block arrives."""

    def __init__(self, tensors: Mapping[str, WeightPart], device: torch.device) -> None:
        self._tensors, self._device = tensors, device

    def __missing__(self, name: str) -> WeightPart:
        self[name] = WeightPart([name], torch.empty_like(self._tensors[name].local, device=self._device))
        return self[name]


def meet(store: dist.Store, ready: str, others: int, size: int, limit_s: float) -> None:
    """Wait until a key is in the store. Raises TransferError if the transfer fails, or after `limit_s` seconds."""
    end = time.monotonic() + limit_s
    while not has_message(store, ready):
        if has_message(store, "cancelled"):
            raise TransferError("the request for weights was cancelled")
        if has_message(store, "failed"):
            raise TransferError(message_at(store, "failed"))
        if time.monotonic() > end:
            here = others + count_at(store, "here")
            raise TransferError(f"{here} of {size} processes joined the weight transfer in {limit_s:g} s")
        time.sleep(POLL_S)


@contextmanager
def transfer_group(
    store: dist.Store,
    rank: int,
    size: int,
    device: torch.device,
    senders: Senders,
    parts: Mapping[str, WeightPart],
    parts_for: Callable[[ShardIndex], Mapping[str, WeightPart]],
    before: Mapping[str, WeightPart] | None,
) -> Iterator[WeightTransfer]:
    """Join the processes of one transfer when all are there, plan it, and leave when all have finished their copies.

    Only then may senders change their tensors. A failed transfer leaves no state behind. Senders have the lower ranks.

    This process sends its `parts`. `parts_for` returns the parts to receive, given the senders' tensors; buffers are on
    `device`. `before` are the parts of the version before, at senders; an empty mapping at receivers that hold it.
    Raises TransferError if a sender fails, or if processes are missing after the time limit.
    """
    if count_at(store, "here", 1) == size:
        put_message(store, "complete")
    meet(store, "complete", 0, size, senders.limit_s)
    nccl, address = device.type == "cuda" and senders.transport == "collective", address_towards(senders.host)
    # All have joined: only a process that dies now delays the others and the next request.
    ranks = Ranks(group := group_between(store, rank, size, min(senders.limit_s, CONNECT_S), nccl, address))
    _set_pg_timeout(timedelta(seconds=senders.limit_s), group)
    with closing(TRANSPORTS.make(senders.transport, ranks, device)) as transport:
        index = gather_shard_index(parts, ranks, machine())
        groups = index.groups(gather_shard_index(parts_for(index), ranks))
        transfer = WeightTransfer(index, groups, ranks, device=device, transport=transport)
        # Changed values suffice if all processes hold the previous version.
        if all(ranks.all_gather("the version before", before is not None, bool)):
            transfer.before = before
        yield transfer
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        dist.all_reduce(torch.zeros(1), group=group)


@dataclass
class CollectivePublisher:
    """A publisher that offers the trainer's own tensors to engine workers while they are current; without a copy."""

    offer: WeightOffer
    parts: Parts
    engine: PublishedEngine
    """Receives an `OfferedWeights` source."""
    state: Callable[[], object]
    """Returns a value that changes whenever the parts do."""
    _version: int | None = None

    def publish(self, version: int) -> None:
        if self._version is not None:
            self.offer.forget(self._version)
        self._version, before = version, self.state()
        self.engine.publish(version, self.offer.keep(version, self.parts(), lambda: self.state() == before))
        # Engines of other ranks may still be receiving from this one.
        self.offer.ranks.all_gather("weights at all engines", None)

    def close(self) -> None:
        self.offer.close()
