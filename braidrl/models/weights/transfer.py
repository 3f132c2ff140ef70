"""Transfers a model's weights from one layout to another: into a second model, or into a file that ranks write together.

model ──parts──▶ what each rank has ╮
                                    ├─plan─▶ rounds of one all-to-all each ──▶ into parts of the other
          what each rank wants ─────╯         no rank sends or receives more than LIMIT_BYTES in any of them

Ranks exchange once which blocks they have; from then on every rank knows every move of every version.
"""

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
from braidrl.models.parallel.replicated import DataParallel, all_gather_bytes, by_tensor
from braidrl.models.parallel.shards import box_of, local_shard
from braidrl.models.weights.plan import Boxes, Move, in_rounds, plan_moves

LIMIT_BYTES = 64 << 20
"""Bytes that a rank sends, and that it receives, in one round."""


@dataclass(frozen=True)
class WeightPart:
    """This rank's local part of a tensor, with all names of the tensor (tied ones have several) and its adapter, if it has one."""

    names: list[str]
    tensor: Tensor | Adapted
    slices: Slices | None = None
    """The slice of the global tensor that a plain (non-DTensor) tensor holds."""
    kept: float = 0.0
    """The share of the old values that stays when a block is put."""

    @property
    def box(self) -> Box:
        """Return the local block of the global tensor."""
        if self.slices is not None:
            return self.slices.boxes[self.names[0]]
        return box_of(self.tensor.base if isinstance(self.tensor, Adapted) else self.tensor)

    @property
    def device(self) -> torch.device:
        return (self.tensor.base if isinstance(self.tensor, Adapted) else self.tensor).device

    @property
    def shape(self) -> torch.Size:
        """Return the global shape."""
        return self.tensor.shape if self.slices is None else self.slices.shapes[self.names[0]]

    def values(self) -> Tensor:
        """Return the local values, adapters merged: all ranks of a sharded tensor call this at the same time."""
        return self.tensor.merged_part() if isinstance(self.tensor, Adapted) else local_shard(self.tensor)

    def put(self, block: Tensor, box: Box) -> None:
        """Write a block of the global tensor into its place in this part, which has no adapter."""
        assert isinstance(self.tensor, Tensor)
        own = local_shard(self.tensor)[box.within(self.box)]
        if self.kept:
            own.lerp_(block.to(own), 1.0 - self.kept)
        else:
            own.copy_(block)


def weight_parts(model: nn.Module, slices: Slices | None = None) -> dict[str, WeightPart]:
    """Return this rank's parts of a model by the first of each tensor's names; `slices` describes a divided model of plain tensors."""
    named = by_tensor(plain_names(model, model.state_dict(keep_vars=True)))
    return {names[0]: WeightPart(names, tensor, slices) for names, tensor in named}


@dataclass(frozen=True)
class WeightIndex:
    """What every rank knows of a model's tensors: names, shapes and types, and which blocks each rank has."""

    boxes: list[Boxes]
    names: dict[str, list[str]]
    shapes: dict[str, tuple[int, ...]]
    dtypes: dict[str, torch.dtype]
    machines: list[str]
    """Ranks with the same value here share memory."""


def gather_weight_index(parts: Mapping[str, WeightPart], ranks: DataParallel, machine: str = "") -> WeightIndex:
    """Gather the index of all ranks' parts; each calls this at the same time with its own."""
    own = {"machine": machine, "parts": {name: to_plain(part) for name, part in parts.items()}}
    of_all: list[dict[str, Any]] = [own]
    if ranks.group is not None:
        with ranks.meeting("who has which weights"):
            of_all = [json.loads(bytes(m)) for m in all_gather_bytes(bytearray(json.dumps(own).encode()), ranks.group)]
    found = WeightIndex([], {}, {}, {}, [said["machine"] for said in of_all])
    for said in of_all:
        boxes: dict[str, Sequence[Box]] = {}
        found.boxes.append(boxes)
        for name, (names, shape, dtype, offsets, sizes) in said["parts"].items():
            boxes[name] = (Box(tuple(offsets), tuple(sizes)),)
            found.names[name] = list(dict.fromkeys([*found.names.get(name, ()), *names]))
            found.shapes[name], found.dtypes[name] = tuple(shape), getattr(torch, dtype)
    return found


def to_plain(part: WeightPart) -> list[Any]:
    """Describe a part in JSON values."""
    dtype, box = str(part.tensor.dtype).removeprefix("torch."), part.box
    return [part.names, list(part.shape), dtype, box.offsets, box.sizes]


@dataclass
class TransferVolume:
    """Bytes that one rank sent, received and copied locally, and the most that was in flight at a time."""

    sent: int = 0
    received: int = 0
    stayed: int = 0
    peak: int = 0


@dataclass(frozen=True)
class Round:
    """One round as this rank needs it: tensor names in order, whether any ranks exchange blocks, and this rank's moves."""

    names: list[str]
    exchanges: bool
    own: list[Move]

    @classmethod
    def of(cls, moves: Sequence[Move], rank: int) -> "Round":
        names = list(dict.fromkeys(move.name for move in moves))
        own = [move for move in moves if rank in (move.source, move.target)]
        return cls(names, not all(move.stays for move in moves), own)


class WeightTransfer:
    """The moves between two layouts over the same ranks, made anew for each version."""

    def __init__(
        self, known: WeightIndex, targets: Sequence[Boxes], ranks: DataParallel, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """Plan the moves to `targets`, the blocks that each rank wants. Raises ValueError where no rank has one."""
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
        """Move the weights; every rank calls this at the same time.

        Args:
            parts: This rank's source parts.
            into: Its target parts.

        Returns:
            The bytes that this rank moved.
        """
        traffic, local_tensors = TransferVolume(), dict[str, Tensor]()
        # Of all ranks: also one that has nothing to send in a round meets the others on its device.
        device = next(part.device for part in (*parts.values(), *into.values()))
        with self.ranks.meeting("weights in another layout"):
            for number, one in enumerate(self.rounds):
                # Ranks that have divided a tensor meet to merge its adapter: each that has some of it, whether or not it sends any.
                for name in one.names:
                    if name in parts and self.first[name] == number:
                        local_tensors[name] = parts[name].values()
                self._stay(one.own, local_tensors, into, traffic)
                if one.exchanges:
                    self._exchange(one.own, local_tensors, into, traffic, device)
                for name in [name for name in local_tensors if self.last[name] == number]:
                    del local_tensors[name]
        return traffic

    def _stay(
        self,
        moves: Sequence[Move],
        local_tensors: Mapping[str, Tensor],
        into: Mapping[str, WeightPart],
        traffic: TransferVolume,
    ) -> None:
        for move in moves:
            if move.stays:
                traffic.stayed += self._bytes(move)
                into[move.name].put(self._block(move, local_tensors), move.box)

    def _exchange(
        self, moves: Sequence[Move], local_tensors: Mapping[str, Tensor], into: Mapping[str, WeightPart],
        traffic: TransferVolume, device: torch.device,
    ) -> None:  # fmt: skip
        """Run one all-to-all. Between two ranks blocks go in the order of the plan, which both know."""
        me, everyone = self.ranks.rank, range(self.ranks.size)
        going = [move for to in everyone for move in moves if move.target == to and move.source == me != to]
        coming = [move for by in everyone for move in moves if move.source == by and move.target == me != by]
        sent, received = (
            torch.empty(sum(map(self._bytes, some)), dtype=torch.uint8, device=device) for some in (going, coming)
        )
        for move, block in self._blocks(going, sent):
            block.copy_(self._block(move, local_tensors))
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

    def _block(self, move: Move, local_tensors: Mapping[str, Tensor]) -> Tensor:
        (held,) = self.known.boxes[self.ranks.rank][move.name]
        return local_tensors[move.name][move.box.within(held)]

    def _blocks(self, moves: Sequence[Move], buffer: Tensor) -> Iterator[tuple[Move, Tensor]]:
        for move, part in zip(moves, buffer.split([self._bytes(move) for move in moves]), strict=True):
            yield move, part.view(self.known.dtypes[move.name]).view(move.box.sizes)
