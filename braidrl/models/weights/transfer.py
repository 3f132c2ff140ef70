"""Brings a model's weights from the layout of its ranks to another one: into a second model, or a file that ranks write together.

model ──parts──▶ what each rank has ╮
                                    ├─plan─▶ rounds of one all-to-all each ──▶ into parts of the other
          what each rank wants ─────╯         no rank has more than LIMIT_BYTES to send or to receive in any of them

Ranks tell each other once which blocks they have; from then on all know every move of every version.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from braidrl.models.lora import Adapted, plain_names
from braidrl.models.parallel.boxes import Box
from braidrl.models.parallel.decoding import Slices
from braidrl.models.parallel.messages import gathered
from braidrl.models.parallel.replicated import DataParallel, by_tensor
from braidrl.models.parallel.shards import box_of, local_part
from braidrl.models.weights.plan import Boxes, Move, in_rounds, plan_moves

LIMIT_BYTES = 64 << 20
"""What a rank sends in one round, and what it receives."""


@dataclass(frozen=True)
class WeightPart:
    """What this rank has of a tensor that has these names, of which tied ones have several; with its adapter, if it has one."""

    names: list[str]
    tensor: Tensor | Adapted
    slices: Slices | None = None
    """Which part of the whole a tensor is that does not know it itself."""
    kept: float = 0.0
    """The share of what is here that stays when something comes."""

    @property
    def box(self) -> Box:
        """Where in the whole tensor it is."""
        if self.slices is not None:
            return self.slices.boxes[self.names[0]]
        return box_of(self.tensor.base if isinstance(self.tensor, Adapted) else self.tensor)

    @property
    def device(self) -> torch.device:
        return (self.tensor.base if isinstance(self.tensor, Adapted) else self.tensor).device

    @property
    def shape(self) -> torch.Size:
        """Of the whole tensor."""
        return self.tensor.shape if self.slices is None else self.slices.shapes[self.names[0]]

    def values(self) -> Tensor:
        """The part, adapters merged: all ranks that have divided it call this at the same time."""
        return self.tensor.merged_part() if isinstance(self.tensor, Adapted) else local_part(self.tensor)

    def put(self, block: Tensor, box: Box) -> None:
        """Brings a block of the whole tensor to its place in the part, which has no adapter."""
        assert isinstance(self.tensor, Tensor)
        own = local_part(self.tensor)[box.within(self.box)]
        if self.kept:
            own.lerp_(block.to(own), 1.0 - self.kept)
        else:
            own.copy_(block)


def weight_parts(model: nn.Module, slices: Slices | None = None) -> dict[str, WeightPart]:
    """What this rank has of a model, by the first of each tensor's names; of a module whose plain tensors are `slices` of one."""
    named = by_tensor(plain_names(model, model.state_dict(keep_vars=True)))
    return {names[0]: WeightPart(names, tensor, slices) for names, tensor in named}


@dataclass(frozen=True)
class Holdings:
    """What every rank knows of a model's tensors: of each all names, shape and type; and which blocks each rank has."""

    boxes: list[Boxes]
    names: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    machines: list[str]
    """Ranks with the same value here share memory."""


def holdings(parts: Mapping[str, WeightPart], ranks: DataParallel, machine: str = "") -> Holdings:
    """What all ranks have; each calls this at the same time with its own."""
    own = {"machine": machine, "parts": {name: described(part) for name, part in parts.items()}}
    of_all: list[dict[str, Any]] = [own]
    if ranks.group is not None:
        with ranks.meeting("who has which weights"):
            of_all = [json.loads(bytes(m)) for m in gathered(bytearray(json.dumps(own).encode()), ranks.group)]
    found = Holdings([], {}, {}, {}, [said["machine"] for said in of_all])
    for said in of_all:
        boxes: dict[str, Sequence[Box]] = {}
        found.boxes.append(boxes)
        for name, (names, shape, dtype, offsets, sizes) in said["parts"].items():
            boxes[name] = (Box(tuple(offsets), tuple(sizes)),)
            found.names[name] = list(dict.fromkeys([*found.names.get(name, ()), *names]))
            found.shapes[name], found.dtypes[name] = tuple(shape), getattr(torch, dtype)
    return found


def described(part: WeightPart) -> list[Any]:
    """A part in JSON values."""
    dtype, box = str(part.tensor.dtype).removeprefix("torch."), part.box
    return [part.names, list(part.shape), dtype, box.offsets, box.sizes]


@dataclass
class TransferVolume:
    """Bytes of one rank: what it sent to others, received from them and had itself, and the most that was on its way at a time."""

    sent: int = 0
    received: int = 0
    stayed: int = 0
    peak: int = 0


@dataclass(frozen=True)
class Round:
    """What a rank keeps of one round: its tensors in order, whether any ranks meet in it, and the rank's own moves."""

    names: list[str]
    exchanges: bool
    own: list[Move]

    @classmethod
    def of(cls, moves: Sequence[Move], rank: int) -> Round:
        names = list(dict.fromkeys(move.name for move in moves))
        own = [move for move in moves if rank in (move.source, move.target)]
        return cls(names, not all(move.stays for move in moves), own)


class WeightTransfer:
    """The moves between two layouts over the same ranks, made anew for each version."""

    def __init__(
        self, known: Holdings, targets: Sequence[Boxes], ranks: DataParallel, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """`targets` are the blocks that each rank wants. Raises ValueError where no rank has one."""
        self.known, self.ranks = known, ranks
        item_bytes = {name: dtype.itemsize for name, dtype in known.dtypes.items()}
        moves = plan_moves(known.boxes, targets, known.machines)
        self.rounds = [Round.of(some, ranks.rank) for some in in_rounds(moves, item_bytes, limit_bytes)]
        self.first: dict[str, int] = {}
        self.last: dict[str, int] = {}
        for number, one in enumerate(self.rounds):
            for name in one.names:
                self.first.setdefault(name, number)
                self.last[name] = number

    @torch.no_grad()
    def run(self, parts: Mapping[str, WeightPart], into: Mapping[str, WeightPart]) -> TransferVolume:
        """Brings `parts`, of this rank, to where they are wanted, and what it wants to `into`; every rank calls this at the same time."""
        traffic, at_hand = TransferVolume(), dict[str, Tensor]()
        # Of all ranks: also one that has nothing to send in a round meets the others on its device.
        device = next(part.device for part in (*parts.values(), *into.values()))
        with self.ranks.meeting("weights in another layout"):
            for number, one in enumerate(self.rounds):
                # Ranks that have divided a tensor meet to merge its adapter: each that has some of it, whether or not it sends any.
                for name in one.names:
                    if name in parts and self.first[name] == number:
                        at_hand[name] = parts[name].values()
                self._stay(one.own, at_hand, into, traffic)
                if one.exchanges:
                    self._exchange(one.own, at_hand, into, traffic, device)
                for name in [name for name in at_hand if self.last[name] == number]:
                    del at_hand[name]
        return traffic

    def _stay(
        self,
        moves: Sequence[Move],
        at_hand: Mapping[str, Tensor],
        into: Mapping[str, WeightPart],
        traffic: TransferVolume,
    ) -> None:
        """What this rank has itself."""
        for move in moves:
            if move.stays:
                traffic.stayed += self._bytes(move)
                into[move.name].put(self._block(move, at_hand), move.box)

    def _exchange(
        self,
        moves: Sequence[Move],
        at_hand: Mapping[str, Tensor],
        into: Mapping[str, WeightPart],
        traffic: TransferVolume,
        device: torch.device,
    ) -> None:
        """One all-to-all. Between two ranks blocks go in the order of the plan, which both know."""
        me, everyone = self.ranks.rank, range(self.ranks.size)
        going = [move for to in everyone for move in moves if move.target == to and move.source == me != to]
        coming = [move for by in everyone for move in moves if move.source == by and move.target == me != by]
        sent, received = (
            torch.empty(sum(map(self._bytes, some)), dtype=torch.uint8, device=device) for some in (going, coming)
        )
        for move, block in self._blocks(going, sent):
            block.copy_(self._block(move, at_hand))
        sizes_in = [sum(self._bytes(move) for move in coming if move.source == rank) for rank in everyone]
        sizes_out = [sum(self._bytes(move) for move in going if move.target == rank) for rank in everyone]
        dist.all_to_all_single(received, sent, sizes_in, sizes_out, group=self.ranks.group)
        for move, block in self._blocks(coming, received):
            into[move.name].put(block, move.box)
        traffic.sent += sent.nbytes
        traffic.received += received.nbytes
        traffic.peak = max(traffic.peak, sent.nbytes, received.nbytes)

    def _bytes(self, move: Move) -> int:
        return move.box.elements * self.known.dtypes[move.name].itemsize

    def _block(self, move: Move, at_hand: Mapping[str, Tensor]) -> Tensor:
        """What this rank sends, of what it has of the tensor."""
        (held,) = self.known.boxes[self.ranks.rank][move.name]
        return at_hand[move.name][move.box.within(held)]

    def _blocks(self, moves: Sequence[Move], buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
        """Moves with their places in a buffer of bytes."""
        for move, part in zip(moves, buffer.split([self._bytes(move) for move in moves]), strict=True):
            yield move, part.view(self.known.dtypes[move.name]).view(move.box.sizes)
