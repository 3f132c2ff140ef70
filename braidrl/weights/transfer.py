"""Transfers a model's weights from one layout to another: into a second model, or into a file that ranks write together.

model ──parts──▶ what each rank has ╮
                                    ├─plan─▶ rounds of one all-to-all each ──▶ into parts of the other
          what each rank wants ─────╯         no rank sends or receives more than LIMIT_BYTES in any of them

Ranks exchange once which blocks they have; then each plans its own moves, and they agree on the number of rounds.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.training.parallel.replicated import DataParallel
from braidrl.weights.boxes import Box
from braidrl.weights.reshard_plan import TensorGroup, plan_moves
from braidrl.weights.rounds import Piece, Schedule, rounds_needed
from braidrl.weights.weight_index import WeightIndex, WeightPart

LIMIT_BYTES = 64 << 20
"""Bytes that a rank sends, and that it receives, in one round."""


@dataclass
class TransferVolume:
    """What one rank did: bytes that it sent, received and copied locally, the most in flight at a time, rounds and seconds."""

    sent: int = 0
    received: int = 0
    stayed: int = 0
    peak: int = 0
    rounds: int = 0
    seconds: float = 0.0


class WeightTransfer:
    """The moves between two layouts over the same ranks, made anew for each version."""

    def __init__(
        self, known: WeightIndex, groups: Sequence[TensorGroup], ranks: DataParallel, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """Plan this rank's moves; all ranks call this at the same time.

        Args:
            known: What each rank has.
            groups: The tensors, with what each rank wants.
            ranks: The ranks that exchange blocks.
            limit_bytes: Bytes that a rank sends, or receives, in one round.

        Raises:
            ValueError: No rank has something that is wanted.
        """
        self.ranks, self.names = ranks, list(known.tensors)
        self.dtypes = [known.dtypes[name] for name in self.names]
        self.plan = plan_moves(groups, ranks.rank, ranks.size, known.machines)
        self.schedules = self._scheduled(sorted({group.item_bytes for group in groups}), limit_bytes)
        opened, last = self._first_and_last_rounds()
        self._opened_in, self._closed_in = (
            [
                [name for name, at in zip(self.names, rounds, strict=True) if at == number]
                for number in range(self.rounds)
            ]
            for rounds in (opened, last)
        )

    @property
    def rounds(self) -> int:
        """Return the number of rounds; one in which nothing is exchanged where blocks only stay."""
        return max(1, self.exchanges)

    @property
    def exchanges(self) -> int:
        """Return the number of rounds in which ranks exchange blocks, the same on all of them."""
        return sum(sends.count for sends, _ in self.schedules)

    def _scheduled(self, item_sizes: Sequence[int], limit_bytes: int) -> list[tuple[Schedule, Schedule]]:
        """Schedule sends and receives of each element size: blocks of one size lie aligned in a buffer."""
        ways = [(self.plan.sends.of_item(item), self.plan.receives.of_item(item)) for item in item_sizes]
        counts = [max(rounds_needed(moves, limit_bytes) for moves in both) for both in ways]
        agreed = self._agreed(torch.tensor(counts, dtype=torch.int64), dist.ReduceOp.MAX)
        return [(Schedule(a, count), Schedule(b, count)) for (a, b), count in zip(ways, agreed.tolist(), strict=True)]

    def _first_and_last_rounds(self) -> tuple[list[int], list[int]]:
        """Return in which round each tensor's values are made, the same on all ranks, and after which they are no longer needed.

        Ranks that have divided a tensor meet to merge its adapter: each that has some of it, whether or not it sends any.
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

    @torch.no_grad()
    def run(self, parts: Mapping[str, WeightPart], into: Mapping[str, WeightPart]) -> TransferVolume:
        """Move the weights; every rank calls this at the same time.

        Args:
            parts: This rank's source parts.
            into: Its target parts.

        Returns:
            The bytes that this rank moved.
        """
        begun, traffic = time.perf_counter(), TransferVolume(rounds=self.exchanges)
        # Of all ranks: also one that has nothing to send in a round meets the others on its device.
        device = next(part.device for part in (*parts.values(), *into.values()))
        rounds = [(*both, number) for both in self.schedules for number in range(both[0].count)]
        values = dict[str, Tensor]()
        with self.ranks.meeting("weights in another layout"):
            for number in range(self.rounds):
                for name in self._opened_in[number]:
                    if name in parts:
                        values[name] = parts[name].values()
                        self._stay(name, values[name], parts[name].box, into, traffic)
                if rounds:
                    self._exchange(*rounds[number], parts, values, into, traffic, device)
                for name in self._closed_in[number]:
                    values.pop(name, None)
        traffic.seconds = time.perf_counter() - begun
        return traffic

    def _stay(
        self, name: str, values: Tensor, held: Box, into: Mapping[str, WeightPart], traffic: TransferVolume
    ) -> None:
        for box in self.plan.stays.get(self._number_of[name], ()):
            traffic.stayed += box.elements * values.itemsize
            into[name].put(values[box.within(held)], box)

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.names)}

    def _exchange(
        self, sends: Schedule, receives: Schedule, number: int, parts: Mapping[str, WeightPart],
        values: Mapping[str, Tensor], into: Mapping[str, WeightPart], traffic: TransferVolume, device: torch.device,
    ) -> None:  # fmt: skip
        """Run one all-to-all. Between two ranks blocks go in an order that both know."""
        going, coming = list(sends.pieces(number)), list(receives.pieces(number))
        sent, received = (
            torch.empty(sum(map(self._bytes, some)), dtype=torch.uint8, device=device) for some in (going, coming)
        )
        for piece, place in self._places(going, sent):
            name = self.names[piece.tensor]
            place.copy_(values[name][piece.box.within(parts[name].box)])
        sizes_in, sizes_out = (self._by_peer(some) for some in (coming, going))
        dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.ranks.group)
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
        return sizes

    def _places(self, pieces: Sequence[Piece], buffer: Tensor) -> Iterator[tuple[Piece, Tensor]]:
        for piece, part in zip(pieces, buffer.split([self._bytes(piece) for piece in pieces]), strict=True):
            yield piece, part.view(self.dtypes[piece.tensor]).view(piece.box.sizes)
