"""Weight transfers between ranks that call at the same time: to another layout, another pool, or a file's tensors.

trainer rank 0 ─ its parts ╮                                                          ╭─▶ rank 2   its parts of another model
trainer rank 1 ─ its parts ┴─plan─▶ rounds of one all-to-all each, of bounded bytes ──┴─▶ rank 3   its parts

Ranks exchange their shard indices once. Each rank then plans its own moves, and all agree on the number of rounds. Where ranks of a
machine share what comes from another, each round has a second all-to-all, in which relays pass on what they received in the first.
"""

import time
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.shared_memory import machine
from braidrl.cluster.world import Ranks
from braidrl.weights.boxes import Box
from braidrl.weights.publisher import TransferVolume, WeightTransport
from braidrl.weights.reshard_plan import Ints, Moves, RankPlan, ShardIndex, TensorGroup, gather_shard_index, plan_moves
from braidrl.weights.shards import Parts, WeightPart

LIMIT_BYTES = 64 << 20
"""Most bytes that a rank sends, and receives, in one round."""
CHECK_BYTES = 8
PLACE = torch.int32
"""The type of a place in a block, which has at most `LIMIT_BYTES`."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size, as which values are compared, so that a changed sign of zero counts."""


class Piece(NamedTuple):
    """The part of a move within one round."""

    peer: int
    tensor: int
    box: Box
    onward: tuple[int, ...]


class Schedule:
    """A rank's moves in one direction, of one element size, split into `count` rounds: of each stream an equal part in each."""

    def __init__(self, moves: Moves, count: int) -> None:
        self.moves, self.count = moves, count
        _, begins = np.unique(moves.streams, return_index=True)
        self._begins = np.append(begins, len(moves.streams))
        done = np.cumsum(moves.sizes)
        self._totals = np.diff(np.append(0, done)[self._begins])
        # The byte offset of each move in its stream.
        self._starts = done - moves.sizes - np.repeat(np.append(0, done)[begins], np.diff(self._begins))

    def first_and_last(self, tensors: int) -> tuple[Ints, Ints]:
        """Return the first and the last round that needs each tensor; `count` and -1 if none does."""
        first, last = np.full(tensors, self.count, dtype=np.int64), np.full(tensors, -1, dtype=np.int64)
        totals = np.repeat(self._totals, np.diff(self._begins))
        last_elements = self._starts + self.moves.sizes - self.moves.item_bytes
        # The round of the element at a byte offset of its stream.
        np.minimum.at(first, self.moves.tensors, ((self._starts + 1) * self.count - 1) // totals)
        np.maximum.at(last, self.moves.tensors, ((last_elements + 1) * self.count - 1) // totals)
        return first, last

    def pieces(self, number: int) -> Iterator[Piece]:
        """Yield the pieces of a round, by peer and in an order that both ends derive."""
        moves = self.moves
        for stream, total in enumerate(self._totals.tolist()):
            begin, end = int(self._begins[stream]), int(self._begins[stream + 1])
            start, stop = total * number // self.count, total * (number + 1) // self.count
            starts = self._starts[begin:end]
            first = begin + max(0, int(np.searchsorted(starts, start, "right")) - 1)
            for move in range(first, begin + int(np.searchsorted(starts, stop))):
                # The part of the move whose elements start within these bytes.
                at, item = int(self._starts[move]), int(moves.item_bytes[move])
                box, onward = moves.shapes[moves.boxes[move]], moves.onward[moves.boxes[move]]
                for part in box.span(max(0, -((at - start) // item)), min(box.elements, -((at - stop) // item))):
                    yield Piece(int(moves.peers[move]), int(moves.tensors[move]), part, onward)


def rounds_needed(plan: RankPlan, limit_bytes: int) -> int:
    """Return the number of rounds that keep what a rank sends, receives, passes on and is passed within `limit_bytes` each.

    Raises:
        ValueError: The limit is less than one element per stream.
    """

    def rounds(every: Sequence[Moves], passes_on: bool = False) -> int:
        total = streams = item = 0
        for moves in every:
            times = np.array([len(ranks) if passes_on else 1 for ranks in moves.onward], dtype=np.int64)[moves.boxes]
            total += int((moves.sizes * times).sum())
            streams += int(times[np.unique(moves.streams, return_index=True)[1]].sum())
            item = max(item, int(moves.item_bytes.max(initial=0)))
        # Rounds end at whole elements: each stream may need one extra element in a round.
        room = limit_bytes - streams * item
        if total and room <= 0:
            raise ValueError(f"{limit_bytes} bytes are too few for a round with {streams} streams")
        return -(-total // room) if total else 0

    relayed = [*plan.relayed.values()]
    return max(rounds([plan.sends]), rounds([plan.receives]), rounds([plan.receives], passes_on=True), rounds(relayed))


class GroupTransport:
    """The transport `collective`: NCCL between CUDA devices, gloo between CPUs."""

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        self.group = ranks.group

    def exchange(self, received: Tensor, sent: Tensor, sizes_in: list[int], sizes_out: list[int]) -> None:
        dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.group)

    def close(self) -> None:
        """Do nothing: the group belongs to the transfer."""


class WeightTransfer:
    """A planned transfer between two layouts over the same ranks, run once per version."""

    def __init__(
        self, known: ShardIndex, groups: Sequence[TensorGroup], ranks: Ranks, limit_bytes: int = LIMIT_BYTES,
        device: torch.device | None = None, check: bool = False, transport: WeightTransport | None = None,
    ) -> None:  # fmt: skip
        """Plan this rank's moves; all ranks call this at the same time.

        Args:
            known: The blocks that each rank holds.
            groups: The tensors, with the blocks that each rank wants.
            ranks: The ranks that exchange blocks.
            limit_bytes: Most bytes that a rank sends, or receives, in one all-to-all.
            device: The device of the exchanged buffers; by default that of this rank's parts.
            check: Send a checksum with the bytes of each peer in each round.
            transport: Moves the bytes; by default the ranks' process group.

        Raises:
            ValueError: A wanted block is on no rank.
        """
        self.ranks, self.names, self.device = ranks, list(known.tensors), device
        self.transport = transport or GroupTransport(ranks, torch.device("cpu"))
        self.dtypes = [known.dtypes[name] for name in self.names]
        self.check_bytes = CHECK_BYTES * check
        self._buffers = dict[str, Tensor]()
        """The memory of rounds, kept from one to the next: fresh memory would cost as much as the copy into it."""
        self.before: Mapping[str, WeightPart] | None = None
        """This rank's source parts of the version that all targets hold: changed values alone are moved. None: all values are."""
        self.plan = plan_moves(groups, ranks.rank, ranks.size, known.machines)
        # One schedule per element size, so that blocks are aligned in a buffer.
        plans = [self.plan.of_item(item) for item in sorted({group.item_bytes for group in groups})]
        counts = [rounds_needed(plan, limit_bytes) for plan in plans]
        # Whether a rank passes blocks on, or receives blocks that are passed on.
        relays = bool(self.plan.relayed) or any(self.plan.receives.onward)
        agreed = self._agreed(torch.tensor([int(relays), *counts]), dist.ReduceOp.MAX).tolist()
        self.has_relays = bool(agreed.pop(0))
        self.rounds_of = [Rounds.of(plan, count) for plan, count in zip(plans, agreed, strict=True)]
        # `rounds` is one without an exchange if all blocks are copied locally.
        self.exchanges = sum(agreed)
        self.rounds = max(1, self.exchanges)
        self._place_tensors()

    def _agreed(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.ranks.group is not None:
            with self.ranks.meeting("rounds of weights"):
                dist.all_reduce(values, how, group=self.ranks.group)
        return values

    def _place_tensors(self) -> None:
        """Find for each round the tensors that it needs first (`_opened`) or last (`_closed`), or completes on this rank (`arrivals`).

        The first round is equal on all ranks: ranks that shard an adapter merge it together, whether or not they send any of it.
        """
        count, begun = len(self.names), 0
        first, last = torch.full((count,), self.rounds), torch.full((count,), -1)
        arrives = torch.zeros(count, dtype=torch.int64)
        for rounds in self.rounds_of:
            opens, closes = map(torch.from_numpy, rounds.sends.first_and_last(count))
            first = torch.where(opens < rounds.sends.count, opens + begun, first)
            last = torch.maximum(last, closes + begun)
            for arriving in (rounds.receives, *rounds.relayed.values()):
                _, closes = map(torch.from_numpy, arriving.first_and_last(count))
                arrives = torch.where(closes >= 0, torch.maximum(arrives, closes + begun), arrives)
            begun += rounds.sends.count
        for tensor in self.plan.stays:
            first[tensor] = min(int(first[tensor]), tensor * self.rounds // count)
        first = self._agreed(first, dist.ReduceOp.MIN)
        last = torch.maximum(last, first)

        def by_round(rounds: Tensor) -> list[list[int]]:
            found: list[list[int]] = [[] for _ in range(self.rounds)]
            for tensor, number in enumerate(rounds.tolist()):
                if number < self.rounds:
                    found[number].append(tensor)
            return found

        self._opened, self._closed = by_round(first), by_round(last)
        self.arrivals = [[self.names[tensor] for tensor in some] for some in by_round(arrives)]

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
        device = self.device or next(part.tensor.device for part in (*parts.values(), *into.values()))
        rounds = [(own, number) for own in self.rounds_of for number in range(own.sends.count)]
        values = dict[str, Tensor]()
        for number in range(self.rounds):
            with self.ranks.meeting("weights in another layout"):
                for tensor in self._opened[number]:
                    name = self.names[tensor]
                    if name not in parts:
                        continue
                    source = values[name] = parts[name].values()
                    for box in self.plan.stays.get(tensor, ()):
                        size = box.elements * source.itemsize
                        traffic.stayed += size
                        for piece in box.divided(-(-size // LIMIT_BYTES)) if source.is_cuda else [box]:
                            block = piece.of(source, parts[name].box)
                            if source.is_cuda and into[name].tensor.device.type == "cpu":
                                # Copy by way of pinned memory, whose pages torch keeps for the next block.
                                block = torch.empty(block.shape, dtype=block.dtype, pin_memory=True).copy_(block)
                            into[name].put(block, piece)
                if rounds:
                    own, step = rounds[number]
                    send = self._send if self.before is None else self._send_changes
                    received, sizes = send(own, step, parts, values, traffic, device)
                    onward = self._take(own.receives.pieces(step), received, sizes, into)
                    if self.has_relays:
                        received, sizes = self._swap(onward, traffic, device, "passed on")
                        self._take(own.passed(step), received, sizes, into)
                for tensor in self._closed[number]:
                    values.pop(self.names[tensor], None)
            traffic.seconds = time.perf_counter() - begun
            yield number
        self._buffers.clear()

    def _send(
        self, rounds: "Rounds", number: int, parts: Mapping[str, WeightPart], values: Mapping[str, Tensor],
        traffic: TransferVolume, device: torch.device,
    ) -> tuple[Tensor, list[int]]:  # fmt: skip
        """Exchange all values of a round's pieces, whose sizes both ends know; return what came, and the bytes from each peer."""
        places, sizes_out, at, peer = [], [0] * self.ranks.size, 0, -1
        for piece in rounds.sends.pieces(number):
            at += self.check_bytes * (peer not in (-1, piece.peer))
            size, peer = piece.box.elements * self.dtypes[piece.tensor].itemsize, piece.peer
            places.append((piece, at, at + size))
            sizes_out[peer] += size
            at += size
        sizes_in = [0] * self.ranks.size
        for piece in rounds.receives.pieces(number):
            sizes_in[piece.peer] += piece.box.elements * self.dtypes[piece.tensor].itemsize
        sizes_out, sizes_in = (
            [size + self.check_bytes * bool(size) for size in sizes] for sizes in (sizes_out, sizes_in)
        )
        # A buffer on the host is pinned where it is filled from CUDA, which is then at full speed.
        pinned = device.type == "cpu" and any(value.is_cuda for value in values.values())
        sent = self._buffer("sent", sum(sizes_out), device, pinned)
        for piece, start, end in places:
            name = self.names[piece.tensor]
            block = sent[start:end].view(self.dtypes[piece.tensor]).view(piece.box.sizes)
            block.copy_(piece.box.of(values[name], parts[name].box))
        if self.check_bytes:
            for message in filter(len, sent.split(sizes_out)):
                message[-CHECK_BYTES:].copy_(torch.tensor([checksum(message[:-CHECK_BYTES])]).view(torch.uint8))
        return self._exchange(sent, sizes_out, sizes_in, traffic, "received"), sizes_in

    def _send_changes(
        self, rounds: "Rounds", number: int, parts: Mapping[str, WeightPart], values: Mapping[str, Tensor],
        traffic: TransferVolume, device: torch.device,
    ) -> tuple[Tensor, list[int]]:  # fmt: skip
        """Exchange changed values: for each piece their number, their places in it, and the values; or -1 and all values."""
        messages: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for piece in rounds.sends.pieces(number):
            name = self.names[piece.tensor]
            held, before = parts[name].box, (self.before or parts)[name].values()
            messages[piece.peer] += changes(piece.box.of(values[name], held), piece.box.of(before, held))
        return self._swap(messages, traffic, device, "changes")

    def _swap(
        self, messages: Sequence[Sequence[Tensor]], traffic: TransferVolume, device: torch.device, name: str
    ) -> tuple[Tensor, list[int]]:
        """Exchange messages, each of several tensors of bytes, whose sizes the receivers do not know; return them and their sizes."""
        if self.check_bytes:
            messages = [[*own, number_of(checksum(torch.cat([*own])), device)] if own else own for own in messages]
        sizes_out = torch.tensor([sum(map(len, own)) for own in messages])
        sizes_in = torch.empty_like(sizes_out)
        dist.all_to_all_single(sizes_in, sizes_out, group=self.ranks.group)
        sizes, sent = sizes_in.tolist(), self._buffer(f"{name}, sent", int(sizes_out.sum()), device)
        if len(sent):
            torch.cat([part for own in messages for part in own], out=sent)
        return self._exchange(sent, sizes_out.tolist(), sizes, traffic, f"{name}, received"), sizes

    def _exchange(
        self, sent: Tensor, sizes_out: list[int], sizes_in: list[int], traffic: TransferVolume, name: str
    ) -> Tensor:
        """Run one all-to-all. Raises ValueError if the bytes of a peer have another checksum than the one that ends them."""
        received = self._buffer(name, sum(sizes_in), sent.device)
        self.transport.exchange(received, sent, sizes_in, sizes_out)
        for message in filter(len, received.split(sizes_in) if self.check_bytes else ()):
            expected = int(message[-CHECK_BYTES:].clone().view(torch.int64))
            found = checksum(message[:-CHECK_BYTES])
            if expected != found:
                raise ValueError(f"the weights that arrived have checksum {found:08x}, and {expected:08x} was sent")
        traffic.sent += sent.nbytes
        traffic.received += received.nbytes
        traffic.peak = max(traffic.peak, sent.nbytes, received.nbytes)
        return received

    def _buffer(self, name: str, size: int, device: torch.device, pinned: bool = False) -> Tensor:
        if name not in self._buffers or len(self._buffers[name]) < size:
            self._buffers[name] = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        return self._buffers[name][:size]

    def _take(
        self, pieces: Iterable[Piece], received: Tensor, sizes: list[int], into: Mapping[str, WeightPart]
    ) -> list[list[Tensor]]:
        """Write pieces into the target parts; return the bytes that this rank passes on, by peer."""
        ends = [0, *accumulate(sizes)]
        onward: list[list[Tensor]] = [[] for _ in sizes]

        def read(peer: int, count: int, dtype: torch.dtype) -> Tensor:
            start, ends[peer] = ends[peer], ends[peer] + count * dtype.itemsize
            found = received[start : ends[peer]]
            # A copy is aligned.
            return (found.clone() if start % dtype.itemsize else found).view(dtype)

        for piece in pieces:
            part, dtype, begun = into[self.names[piece.tensor]], self.dtypes[piece.tensor], ends[piece.peer]
            count = -1 if self.before is None else int(read(piece.peer, 1, torch.int64))
            if count < 0:
                part.put(read(piece.peer, piece.box.elements, dtype).view(piece.box.sizes), piece.box)
            elif count:
                places = torch.unravel_index(read(piece.peer, count, PLACE).long(), piece.box.sizes)
                part.block(piece.box)[places] = read(piece.peer, count, dtype).to(part.local)
            for peer in piece.onward:
                onward[peer].append(received[begun : ends[piece.peer]])
        return onward


class Rounds(NamedTuple):
    """The schedules of a rank for one element size."""

    sends: Schedule
    receives: Schedule
    relayed: dict[int, Schedule]
    """By relay, what it receives for this rank too."""

    @classmethod
    def of(cls, plan: RankPlan, count: int) -> "Rounds":
        """Split a plan into rounds."""
        relayed = {relay: Schedule(moves, count) for relay, moves in plan.relayed.items()}
        return cls(Schedule(plan.sends, count), Schedule(plan.receives, count), relayed)

    def passed(self, number: int) -> Iterator[Piece]:
        """Yield the pieces that relays pass on to this rank in a round."""
        for relay in sorted(self.relayed):
            yield from (piece._replace(peer=relay, onward=()) for piece in self.relayed[relay].pieces(number))


def checksum(message: Tensor) -> int:
    return zlib.crc32(message.cpu().numpy().data)


def number_of(value: int, device: torch.device) -> Tensor:
    """Return an integer as eight bytes."""
    return torch.tensor([value], device=device).view(torch.uint8)


def changes(new: Tensor, old: Tensor) -> list[Tensor]:
    """Return as bytes the number of values that differ, their places and the values; or -1 and all values if these are fewer bytes."""
    new, old, bits = new.flatten(), old.flatten(), BITS[new.itemsize]
    differs = new.view(bits) != old.view(bits)
    count = int(torch.count_nonzero(differs))
    if count * (PLACE.itemsize + new.itemsize) >= new.nbytes:
        return [number_of(-1, new.device), new.view(torch.uint8)]
    places = differs.nonzero().flatten().to(PLACE)
    return [number_of(count, new.device), places.view(torch.uint8), new[places].view(torch.uint8)]


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
        known = gather_shard_index(source(), ranks, machine())
        self.transfer = WeightTransfer(known, known.groups(gather_shard_index(target(), ranks)), ranks, limit_bytes)
        self.traffic = TransferVolume()

    def refresh(self, keep: float = 0.0) -> TransferVolume:
        """Copy the current weights; `keep` is the weight of the old values (EMA decay). Return the bytes moved."""
        into = {name: replace(part, kept=keep) for name, part in self.target().items()}
        self.traffic = self.transfer.run(self.source(), into)
        return self.traffic
