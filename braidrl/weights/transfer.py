"""Weight transfers between ranks that call at the same time: to another layout, another pool, or a file's tensors.

trainer rank 0 ─ its parts ╮                                                          ╭─▶ rank 2   its parts of another model
trainer rank 1 ─ its parts ┴─plan─▶ rounds of one all-to-all each, of bounded bytes ──┴─▶ rank 3   its parts

Ranks exchange their shard indices once. Each rank then plans its own moves, and all agree on the number of rounds.
"""

import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.world import Ranks
from braidrl.weights.publisher import TransferVolume
from braidrl.weights.reshard_plan import Piece, Schedule, TensorGroup, plan_moves, rounds_needed
from braidrl.weights.shard_index import Parts, ShardIndex, WeightPart, gather_shard_index

LIMIT_BYTES = 64 << 20
"""Most bytes that a rank sends, and receives, in one round."""
CHECK_BYTES = 8
PLACE = torch.int32
"""The type of a place in a block, which has at most `LIMIT_BYTES`."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size, as which values are compared, so that a changed sign of zero counts."""


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
        self.before: Mapping[str, WeightPart] | None = None
        """This rank's source parts of the version that all targets hold: changed values alone are moved. None: all values are."""
        self.plan = plan_moves(groups, ranks.rank, ranks.size, known.machines)
        # One schedule per element size, so that blocks are aligned in a buffer.
        item_sizes = sorted({group.item_bytes for group in groups})
        ways = [(self.plan.sends.of_item(item), self.plan.receives.of_item(item)) for item in item_sizes]
        counts = [max(rounds_needed(moves, limit_bytes) for moves in both) for both in ways]
        agreed = self._agreed(torch.tensor(counts, dtype=torch.int64), dist.ReduceOp.MAX).tolist()
        self.schedules = [(Schedule(a, count), Schedule(b, count)) for (a, b), count in zip(ways, agreed, strict=True)]
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
        for sends, receives in self.schedules:
            own = torch.from_numpy(sends.first_rounds(count))
            first = torch.where(own < sends.count, own + begun, first)
            last = torch.maximum(last, torch.from_numpy(sends.last_rounds(count)) + begun)
            own = torch.from_numpy(receives.last_rounds(count))
            arrives = torch.where(own >= 0, own + begun, arrives)
            begun += sends.count
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
        device = self.device or next(part.device for part in (*parts.values(), *into.values()))
        rounds = [(*both, number) for both in self.schedules for number in range(both[0].count)]
        values = dict[str, Tensor]()
        buffers = [torch.empty(0, dtype=torch.uint8, device=device)] * 2
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
                            block = source[piece.within(parts[name].box)]
                            if source.is_cuda and into[name].device.type == "cpu":
                                # Copy by way of pinned memory, whose pages torch keeps for the next block.
                                block = torch.empty(block.shape, dtype=block.dtype, pin_memory=True).copy_(block)
                            into[name].put(block, piece)
                if rounds and self.before is None:
                    self._exchange(*rounds[number], parts, values, into, traffic, buffers)
                elif rounds:
                    self._exchange_changes(*rounds[number], parts, values, into, traffic, device)
                for tensor in self._closed[number]:
                    values.pop(self.names[tensor], None)
            traffic.seconds = time.perf_counter() - begun
            yield number

    def _exchange(
        self, sends: Schedule, receives: Schedule, number: int, parts: Mapping[str, WeightPart],
        values: Mapping[str, Tensor], into: Mapping[str, WeightPart], traffic: TransferVolume, buffers: list[Tensor],
    ) -> None:  # fmt: skip
        """Run one all-to-all. Blocks between two ranks are in an order that both can derive."""
        going, sizes_out = self._laid_out(sends.pieces(number))
        coming, sizes_in = self._laid_out(receives.pieces(number))
        # All rounds use the same buffers: fresh memory would cost as much as the copy into it.
        # A buffer on the host is pinned where it is filled from CUDA, which is then at full speed.
        from_cuda = any(value.is_cuda for value in values.values())
        for place, size in enumerate((sum(sizes_out), sum(sizes_in))):
            if len(buffers[place]) < size:
                device = buffers[place].device
                pinned = from_cuda and device.type == "cpu" and place == 0
                buffers[place] = torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        sent, received = buffers[0][: sum(sizes_out)], buffers[1][: sum(sizes_in)]
        for piece, start, end in going:
            name = self.names[piece.tensor]
            block = sent[start:end].view(self.dtypes[piece.tensor]).view(piece.box.sizes)
            block.copy_(values[name][piece.box.within(parts[name].box)])
        if self.check_bytes:
            for message in filter(len, sent.split(sizes_out)):
                message[-CHECK_BYTES:].copy_(torch.tensor([checksum(message[:-CHECK_BYTES])]).view(torch.uint8))
        dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.ranks.group)
        self._verify(received, sizes_in)
        for piece, start, end in coming:
            block = received[start:end].view(self.dtypes[piece.tensor]).view(piece.box.sizes)
            into[self.names[piece.tensor]].put(block, piece.box)
        traffic.sent += sent.nbytes
        traffic.received += received.nbytes
        traffic.peak = max(traffic.peak, sent.nbytes, received.nbytes)

    def _exchange_changes(
        self, sends: Schedule, receives: Schedule, number: int, parts: Mapping[str, WeightPart],
        values: Mapping[str, Tensor], into: Mapping[str, WeightPart], traffic: TransferVolume, device: torch.device,
    ) -> None:  # fmt: skip
        """Run one all-to-all of changed values: for each piece their number, their places in it, and the values; or -1 and all values."""
        going: list[list[Tensor]] = [[torch.empty(0, dtype=torch.uint8, device=device)] for _ in range(self.ranks.size)]
        for piece in sends.pieces(number):
            name = self.names[piece.tensor]
            inside = piece.box.within(parts[name].box)
            going[piece.peer] += changes(values[name][inside], (self.before or parts)[name].values()[inside])
        messages = [torch.cat(some) for some in going]
        if self.check_bytes:
            messages = [torch.cat([own, number_of(checksum(own), device)]) if len(own) else own for own in messages]
        sizes_out = torch.tensor([len(own) for own in messages], device=device)
        sizes_in = torch.empty_like(sizes_out)
        dist.all_to_all_single(sizes_in, sizes_out, group=self.ranks.group)
        sizes, sent = sizes_in.tolist(), torch.cat(messages)
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        dist.all_to_all_single(received, sent, sizes, sizes_out.tolist(), group=self.ranks.group)
        self._verify(received, sizes)
        ends = [0, *accumulate(sizes)]

        def read(peer: int, count: int, dtype: torch.dtype) -> Tensor:
            start, ends[peer] = ends[peer], ends[peer] + count * dtype.itemsize
            # A copy is aligned.
            return received[start : ends[peer]].clone().view(dtype)

        for piece in receives.pieces(number):
            part, dtype = into[self.names[piece.tensor]], self.dtypes[piece.tensor]
            count = int(read(piece.peer, 1, torch.int64))
            if count < 0:
                part.put(read(piece.peer, piece.box.elements, dtype).view(piece.box.sizes), piece.box)
            elif count:
                places = torch.unravel_index(read(piece.peer, count, PLACE).long(), piece.box.sizes)
                part.block(piece.box)[places] = read(piece.peer, count, dtype).to(part.local)
        traffic.sent += sent.nbytes
        traffic.received += received.nbytes
        traffic.peak = max(traffic.peak, sent.nbytes, received.nbytes)

    def _verify(self, received: Tensor, sizes: list[int]) -> None:
        """Raise ValueError if the bytes of a peer have another checksum than the one that ends them."""
        for message in filter(len, received.split(sizes) if self.check_bytes else ()):
            expected = int(message[-CHECK_BYTES:].clone().view(torch.int64))
            found = checksum(message[:-CHECK_BYTES])
            if expected != found:
                raise ValueError(f"the weights that arrived have checksum {found:08x}, and {expected:08x} was sent")

    def _laid_out(self, pieces: Iterator[Piece]) -> tuple[list[tuple[Piece, int, int]], list[int]]:
        """Return each piece with its start and end in a round's buffer, and the bytes of each peer, which a checksum may end."""
        places, sizes, at, peer = [], [0] * self.ranks.size, 0, None
        for piece in pieces:
            at += self.check_bytes * (peer is not None and piece.peer != peer)
            size, peer = piece.box.elements * self.dtypes[piece.tensor].itemsize, piece.peer
            places.append((piece, at, at + size))
            sizes[peer] += size
            at += size
        return places, [size + self.check_bytes * bool(size) for size in sizes]


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
        known = gather_shard_index(source(), ranks)
        self.transfer = WeightTransfer(known, known.groups(gather_shard_index(target(), ranks)), ranks, limit_bytes)
        self.traffic = TransferVolume()

    def refresh(self, keep: float = 0.0) -> TransferVolume:
        """Copy the current weights; `keep` is the weight of the old values (EMA decay). Return the bytes moved."""
        into = {name: replace(part, kept=keep) for name, part in self.target().items()}
        self.traffic = self.transfer.run(self.source(), into)
        return self.traffic
