"""Weight transfers between ranks that call at the same time: to another layout, another pool, or a file's tensors.

trainer rank 0 ─ its parts ╮                                                         ╭─▶ rank 2  parts of another model
trainer rank 1 ─ its parts ┴─plan─▶ rounds of one all-to-all each, of bounded bytes ─┴─▶ rank 3  its parts

Ranks exchange their shard indices once. Each rank then plans its own moves, and all agree on the number of rounds.
Where ranks of a machine share what comes from another, each round has a second all-to-all, in which relays forward what
they received in the first.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.shared_memory import machine
from braidrl.cluster.world import Ranks
from braidrl.weights.publisher import TransferVolume, WeightTransport
from braidrl.weights.reshard_plan import Piece, RankPlan, ShardIndex, TensorGroup, gather_shard_index, plan_moves
from braidrl.weights.shards import Parts, WeightPart

LIMIT_BYTES = 64 << 20
"""Most bytes that a rank sends, and receives, in one round."""
PLACE = torch.int32
"""The type of a place in a block, which has at most `LIMIT_BYTES`."""
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers by size, as which values are compared, so that a changed sign of zero counts."""


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
        self,
        index: ShardIndex,
        groups: Sequence[TensorGroup],
        ranks: Ranks,
        limit_bytes: int = LIMIT_BYTES,
        device: torch.device | None = None,
        transport: WeightTransport | None = None,
    ) -> None:
        """Plan this rank's moves of the tensors of `index` to the blocks that `groups` want; all ranks call this at
        the same time.

        A rank sends, and receives, at most `limit_bytes` in one all-to-all, in buffers on `device`, by default that of
        its parts. The `transport` moves the bytes, by default the ranks' process group. Raises ValueError if a wanted
        block is on no rank.
        """
        self.index, self.ranks, self.device, self.limit_bytes = index, ranks, device, limit_bytes
        self.names = list(index.tensors)
        self.dtypes = [part.tensor.dtype for part in index.tensors.values()]
        self.transport = transport or GroupTransport(ranks, torch.device("cpu"))
        self.before: Mapping[str, WeightPart] | None = None
        """This rank's source parts of the version that all targets hold: changed values alone are moved.

        None: all values are.
        """
        self.traffic = TransferVolume()
        """The bytes that this rank moved in the last run."""
        self._buffers = dict[str, Tensor]()
        """The memory of rounds, kept from one to the next: fresh memory would cost as much as the copy into it."""
        # One plan per element size, so that blocks are aligned in a buffer.
        self.plans = [
            plan_moves([group for group in groups if group.item_bytes == item], ranks.rank, ranks.size, index.machines)
            for item in sorted({group.item_bytes for group in groups})
        ]
        passes = any(plan.relayed or any(block.onward for block in plan.receives.blocks) for plan in self.plans)
        needed = [int(passes), *(plan.rounds_needed(limit_bytes) for plan in self.plans)]
        passes, *counts = self._agreed(torch.tensor(needed), dist.ReduceOp.MAX).tolist()
        self.has_relays = bool(passes)
        self.exchanges = [
            (plan, count, step) for plan, count in zip(self.plans, counts, strict=True) for step in range(count)
        ]
        """The plan of each exchange, the number of its exchanges, and the number of this one."""
        # At least one round without an exchange, in which blocks are copied locally.
        self.rounds = max(1, len(self.exchanges))
        self._place_tensors(counts)

    def _agreed(self, values: Tensor, how: dist.ReduceOp.RedOpType) -> Tensor:
        if self.ranks.group is not None:
            with self.ranks.meeting("rounds of weights"):
                dist.all_reduce(values, how, group=self.ranks.group)
        return values

    def _place_tensors(self, counts: Sequence[int]) -> None:
        """Find for each round the tensors that it needs first (`_opened`) or last (`_closed`), or completes on this
        rank (`arrivals`).

        The first round is equal on all ranks: ranks that shard an adapter merge it together, whether or not they send
        any of it.
        """
        tensors, started = len(self.names), 0
        first, last = torch.full((tensors,), self.rounds), torch.full((tensors,), -1)
        arrives = torch.zeros(tensors, dtype=torch.int64)
        for plan, count in zip(self.plans, counts, strict=True):
            opens, closes = map(torch.from_numpy, plan.sends.first_and_last(count, tensors))
            first = torch.where(opens < count, opens + started, first)
            last = torch.maximum(last, closes + started)
            for arriving in (plan.receives, *plan.relayed.values()):
                closes = torch.from_numpy(arriving.first_and_last(count, tensors)[1])
                arrives = torch.where(closes >= 0, torch.maximum(arrives, closes + started), arrives)
            for tensor in plan.stays:
                first[tensor] = min(int(first[tensor]), tensor * self.rounds // tensors)
            started += count
        first = self._agreed(first, dist.ReduceOp.MIN)

        def by_round(rounds: Tensor) -> list[list[int]]:
            by_step: list[list[int]] = [[] for _ in range(self.rounds)]
            for tensor, number in enumerate(rounds.tolist()):
                if number < self.rounds:
                    by_step[number].append(tensor)
            return by_step

        self._opened, self._closed = by_round(first), by_round(torch.maximum(last, first))
        self.arrivals = [[self.names[tensor] for tensor in of_round] for of_round in by_round(arrives)]

    def run(self, parts: Mapping[str, WeightPart], into: Mapping[str, WeightPart]) -> TransferVolume:
        """Move the weights from this rank's source parts into its target parts; all ranks call this together."""
        for _ in self.steps(parts, into):
            pass
        return self.traffic

    @torch.no_grad()
    def steps(self, parts: Mapping[str, WeightPart], into: Mapping[str, WeightPart]) -> Iterator[int]:
        """Move the weights as `run` does; yield the number of each finished round."""
        started, self.traffic = time.perf_counter(), TransferVolume(rounds=len(self.exchanges))
        # A rank with nothing to send in a round still participates, on its device.
        device = self.device or next(part.tensor.device for part in (*parts.values(), *into.values()))
        sources = dict[str, WeightPart]()
        for number in range(self.rounds):
            with self.ranks.meeting("weights in another layout"):
                for tensor in self._opened[number]:
                    if (name := self.names[tensor]) in parts:
                        sources[name] = parts[name].merged()
                        self._copy_here(tensor, sources[name], into)
                if self.exchanges:
                    plan, count, step = self.exchanges[number]
                    send = self._send if self.before is None else self._send_changes
                    received, sizes = send(plan, step, count, sources, device)
                    onward = self._take(plan.receives.pieces(step, count), received, sizes, into)
                    if self.has_relays:
                        received, sizes = self._swap(onward, device, "passed on")
                        self._take(plan.passed(step, count), received, sizes, into)
                for tensor in self._closed[number]:
                    sources.pop(self.names[tensor], None)
            self.traffic.seconds = time.perf_counter() - started
            yield number
        self._buffers.clear()

    def _copy_here(self, tensor: int, source: WeightPart, into: Mapping[str, WeightPart]) -> None:
        for box in (box for plan in self.plans for box in plan.stays.get(tensor, ())):
            size, target = box.elements * source.local.itemsize, into[self.names[tensor]]
            self.traffic.stayed += size
            most = self.limit_bytes // source.local.itemsize
            starts = range(0, box.elements, most)
            for piece in (part for start in starts for part in box.span(start, min(box.elements, start + most))):
                block = source.block(piece)
                if block.is_cuda and target.tensor.device.type != "cuda":
                    # Copy through pinned memory, whose pages torch keeps for the next block.
                    block = torch.empty(block.shape, dtype=block.dtype, pin_memory=True).copy_(block)
                target.put(block, piece)

    def _send(
        self, plan: RankPlan, step: int, count: int, sources: Mapping[str, WeightPart], device: torch.device
    ) -> tuple[Tensor, list[int]]:
        """Exchange all values of a round's pieces, whose sizes are known; return the received bytes, and the bytes from
        each peer.
        """
        pieces = list(plan.sends.pieces(step, count))
        sizes_out, sizes_in = [0] * self.ranks.size, [0] * self.ranks.size
        for blocks, sizes in ((pieces, sizes_out), (plan.receives.pieces(step, count), sizes_in)):
            for piece in blocks:
                sizes[piece.peer] += piece.box.elements * plan.sends.item_bytes
        # A buffer on the host is pinned where it is filled from CUDA, which is then at full speed.
        pinned = device.type == "cpu" and any(part.local.is_cuda for part in sources.values())
        sent, end = self._buffer("sent", sum(sizes_out), device, pinned), 0
        for piece in pieces:
            name, dtype = self.names[piece.tensor], self.dtypes[piece.tensor]
            start, end = end, end + piece.box.elements * dtype.itemsize
            sent[start:end].view(dtype).view(piece.box.sizes).copy_(sources[name].block(piece.box))
        return self._exchange(sent, sizes_out, sizes_in, "received"), sizes_in

    def _send_changes(
        self, plan: RankPlan, step: int, count: int, sources: Mapping[str, WeightPart], device: torch.device
    ) -> tuple[Tensor, list[int]]:
        """Exchange changed values: for each piece number, positions and values; or -1 and all values."""
        messages: list[list[Tensor]] = [[] for _ in range(self.ranks.size)]
        for piece in plan.sends.pieces(step, count):
            name = self.names[piece.tensor]
            before = (self.before or sources)[name].merged()
            messages[piece.peer] += changes(sources[name].block(piece.box), before.block(piece.box))
        return self._swap(messages, device, "changes")

    def _swap(self, messages: Sequence[Sequence[Tensor]], device: torch.device, name: str) -> tuple[Tensor, list[int]]:
        """Exchange messages, each of several tensors of bytes, whose sizes the receivers do not know; return them and
        their sizes.
        """
        sizes_out, coming = [sum(map(len, parts)) for parts in messages], torch.empty(len(messages), dtype=torch.int64)
        dist.all_to_all_single(coming, torch.tensor(sizes_out), group=self.ranks.group)
        sizes_in, sent = coming.tolist(), self._buffer(f"{name}, sent", sum(sizes_out), device)
        if len(sent):
            torch.cat([part for parts in messages for part in parts], out=sent)
        return self._exchange(sent, sizes_out, sizes_in, f"{name}, received"), sizes_in

    def _exchange(self, sent: Tensor, sizes_out: list[int], sizes_in: list[int], name: str) -> Tensor:
        received = self._buffer(name, sum(sizes_in), sent.device)
        self.transport.exchange(received, sent, sizes_in, sizes_out)
        traffic = self.traffic
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
        """Write pieces into the target parts; return the bytes that this rank forwards, by peer."""
        ends = [0, *accumulate(sizes)]
        onward: list[list[Tensor]] = [[] for _ in sizes]

        def read(peer: int, count: int, dtype: torch.dtype) -> Tensor:
            start, ends[peer] = ends[peer], ends[peer] + count * dtype.itemsize
            values = received[start : ends[peer]]
            # A copy is aligned.
            return (values.clone() if start % dtype.itemsize else values).view(dtype)

        for piece in pieces:
            part, dtype, started = into[self.names[piece.tensor]], self.dtypes[piece.tensor], ends[piece.peer]
            count = -1 if self.before is None else int(read(piece.peer, 1, torch.int64))
            if count < 0:
                part.put(read(piece.peer, piece.box.elements, dtype).view(piece.box.sizes), piece.box)
            elif count:
                positions = torch.unravel_index(read(piece.peer, count, PLACE).long(), piece.box.sizes)
                part.block(piece.box)[positions] = read(piece.peer, count, dtype).to(part.local)
            for peer in piece.onward:
                onward[peer].append(received[started : ends[piece.peer]])
        return onward


def changes(new: Tensor, old: Tensor) -> list[Tensor]:
    """Return as bytes the number of values that differ, their positions and the values; or -1 and all values if these
    are fewer bytes.
    """
    new, old, bits = new.flatten(), old.flatten(), BITS[new.itemsize]
    differs = new.view(bits) != old.view(bits)
    count = int(torch.count_nonzero(differs))
    if count * (PLACE.itemsize + new.itemsize) >= new.nbytes:
        parts = [torch.tensor([-1], device=new.device), new]
    else:
        positions = differs.nonzero().flatten()
        parts = [torch.tensor([count], device=new.device), positions.to(PLACE), new[positions]]
    return [part.view(torch.uint8) for part in parts]


class LayoutCopy:
    """A copy from one model's parts to another's, on any ranks; ranks with some of either call it together."""

    def __init__(self, source: Parts, target: Parts, ranks: Ranks, limit_bytes: int = LIMIT_BYTES) -> None:
        """Plan the transfer between ranks with parts of either model.

        Raises ValueError if the target is another model.
        """
        self.source, self.target = source, target
        index = gather_shard_index(source(), ranks, machine())
        self.transfer = WeightTransfer(index, index.groups(gather_shard_index(target(), ranks)), ranks, limit_bytes)

    def refresh(self, keep: float = 0.0) -> TransferVolume:
        """Copy the current weights; `keep` is the weight of the old values (EMA decay). Return the bytes moved."""
        into = {name: replace(part, decay=keep) for name, part in self.target().items()}
        return self.transfer.run(self.source(), into)
