"""A role's weights on their way from the ranks that train to engines: boxes of tensors in buckets, each a block of the queue's data plane.

rank 0   its boxes ─▶ bucket, bucket ╮                                           ╭─▶ an engine's own tensors, whole or slices
rank 1   its boxes ─▶ bucket, bucket ┴─▶ control plane: where a version lies ─▶ ─┴─▶ host memory, for engines in other processes
                                                                                 ╰─▶ a role that follows this one

Who writes which box follows from the same plan as a file that ranks write together: everything once, and no rank more than it has.
Whoever takes a version takes each box as it comes, and needs no room for more than one of them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack
import numpy as np
import torch
from torch import Tensor

from braidrl.data.codec import DTYPES
from braidrl.data.frames import Frame
from braidrl.engines.embedded.sharded_decoding import Slices
from braidrl.queue.storage import DataPlane
from braidrl.queue.table import Block
from braidrl.weights.boxes import Box
from braidrl.weights.mirror import Parts
from braidrl.weights.reshard_plan import shared_blocks
from braidrl.weights.weight_index import WeightIndex, WeightPart

BUCKET_BYTES = 64 << 20


Weights = tuple[str, int, Sequence[Block]]
"""A role, a version of it, and where it lies."""


class WrongWeights(RuntimeError):
    """The tensors that came are not those of the model."""


class WeightBox(NamedTuple):
    """A box of a tensor as it travels: the tensor's first name and global shape, the box, and its values."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor


def own_boxes(known: WeightIndex, rank: int, ranks: int) -> dict[str, list[Box]]:
    """Return the boxes of each tensor that a rank writes: together the ranks write everything once.

    Args:
        known: What each rank has.
        rank: Whose boxes.
        ranks: How many there are.
    """
    names, boxes = list(known.tensors), dict[str, list[Box]]()
    for group in known.groups():
        own = [box for writer, box in shared_blocks(group, range(ranks)) if writer == rank]
        boxes |= dict.fromkeys((names[number] for number in group.tensors), own)
    return boxes


class WeightExport:
    """One rank's share of writing a role's weights; all ranks of the role use theirs at the same time."""

    def __init__(
        self, parts: Parts, boxes: Mapping[str, Sequence[Box]], data: DataPlane, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        """Write nothing yet.

        Args:
            parts: Returns this rank's parts of the model.
            boxes: What it writes of each tensor, none of some; in one order on all ranks.
            data: Where it writes.
            bucket_bytes: The most bytes of a block, but for a box that is larger.
        """
        self.parts, self.boxes, self.data, self.bucket_bytes = parts, boxes, data, bucket_bytes

    def write(self) -> list[Block]:
        """Write this rank's boxes; return the blocks that they lie in."""
        return self.begin()()

    def begin(self) -> Callable[[], list[Block]]:
        """Return a call that writes this rank's boxes, which a thread can make while the weights are read, and not changed.

        What ranks must merge together is written before this returns.
        """
        parts = self.parts()
        if any(part.is_merged_together for part in parts.values()):
            blocks = self._write(parts)
            return lambda: blocks
        beside = beside_computing(next((part.device for part in parts.values()), torch.device("cpu")))

        def write() -> list[Block]:
            with beside:
                return self._write(parts)

        return write

    def _write(self, parts: Mapping[str, WeightPart]) -> list[Block]:
        blocks, bucket, size = [], list[WeightBox](), 0
        for piece in self._pieces(parts):
            if bucket and size + piece.values.nbytes > self.bucket_bytes:
                blocks.append(self.data.write(bucket_frames(bucket)))
                bucket, size = [], 0
            bucket.append(piece)
            size += piece.values.nbytes
        return [*blocks, self.data.write(bucket_frames(bucket))] if bucket else blocks

    @torch.no_grad()
    def _pieces(self, parts: Mapping[str, WeightPart]) -> Iterator[WeightBox]:
        for name in self.boxes:
            if name in parts:
                # Ranks that have divided a tensor with an adapter meet here, also those that write none of it.
                values = parts[name].values()
                for box in self.boxes[name]:
                    yield WeightBox(name, tuple(parts[name].shape), box, values[box.within(parts[name].box)])


def beside_computing(device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which a thread reads what a device has computed by now: on CUDA a stream beside that of what comes next."""
    if device.type != "cuda":
        return nullcontext()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


def in_host_memory(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return contiguous tensors in host memory; from CUDA they come through pinned memory, as the current stream has computed them."""
    if not any(tensor.is_cuda for tensor in tensors):
        return [tensor.contiguous() for tensor in tensors]
    pinned = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for host, tensor in zip(pinned, tensors, strict=True):
        host.copy_(tensor, non_blocking=True)
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return pinned


def bucket_frames(pieces: Sequence[WeightBox]) -> list[Frame]:
    """Return a header that describes the boxes, then the bytes of each."""
    host = in_host_memory([piece.values.detach() for piece in pieces])
    header = [
        [piece.name, str(values.dtype).removeprefix("torch."), piece.shape, piece.box.offsets, piece.box.sizes]
        for piece, values in zip(pieces, host, strict=True)
    ]
    return [msgpack.packb(header), *(values.reshape(-1).view(torch.uint8).numpy().data for values in host)]


def bucket_pieces(frames: Sequence[Frame]) -> Iterator[WeightBox]:
    """Yield the boxes of a bucket, whose values are views on its frames. Raises WrongWeights where header and bytes do not agree."""
    header = msgpack.unpackb(frames[0])
    if len(header) != len(frames) - 1:
        raise WrongWeights(f"{len(header)} boxes are named and {len(frames) - 1} came")
    for (name, dtype, shape, offsets, sizes), frame in zip(header, frames[1:], strict=True):
        box, size = Box(tuple(offsets), tuple(sizes)), memoryview(frame).nbytes
        if size != box.elements * DTYPES[dtype].itemsize:
            raise WrongWeights(f"{name}: {size} bytes where {box.elements} elements of {dtype} are due")
        # Over DLPack and not torch.frombuffer, which warns about read-only memory.
        values = torch.from_dlpack(np.frombuffer(frame, dtype=np.uint8))
        yield WeightBox(name, tuple(shape), box, values.view(DTYPES[dtype]).view(box.sizes))


class WeightReceiver:
    """The side of whoever takes weights: puts a version into parts of its own, box by box."""

    def __init__(self, data: DataPlane, parts: Parts, stages: bool = False) -> None:
        """Take nothing yet.

        Args:
            data: Where blocks are read.
            parts: Returns what is to be filled.
            stages: Keep what comes in host memory until `load`, so that the parts may be in use meanwhile.
        """
        self.data, self.parts, self.stages = data, parts, stages
        self.version = 0
        self._bytes = 0
        self._into: Mapping[str, WeightPart] = {}
        self._left: Iterator[Block] = iter(())
        self._missing: dict[str, int] = {}
        """Of each tensor the elements that have not come."""

    def begin(self, version: int, blocks: Sequence[Block]) -> None:
        """Take this version from now on, in place of what came before."""
        own = self.parts()
        self._into = staged(own) if self.stages else own
        self.version, self._left = version, iter(blocks)
        self._missing = {name: part.box.elements for name, part in own.items()}

    def receive(self) -> bool:
        """Take the next block; return False if there was none left. Raises Evicted, and WrongWeights for another model's."""
        block = next(self._left, None)
        if block is None:
            return False
        self._bytes += block.size
        for piece in bucket_pieces(self.data.read(block)):
            self._put(piece)
        return True

    def load(self, version: int, blocks: Sequence[Block]) -> None:
        """Have a version in the parts; what has not come yet does now. Raises as `receive`, and for a tensor that did not come whole."""
        if self.version != version:
            self.begin(version, blocks)
        while self.receive():
            pass
        if lacking := sorted(name for name, count in self._missing.items() if count):
            raise WrongWeights(f"version {version} lacks {lacking[:4]} of the model")
        if self.stages:
            for name, part in self.parts().items():
                part.put(self._into[name].local, part.box)
        self.forget()

    def taken(self) -> int:
        """Return the bytes that were read since this was asked last."""
        read, self._bytes = self._bytes, 0
        return read

    def forget(self) -> None:
        """Forget what has come."""
        self.version, self._into, self._left, self._missing = 0, {}, iter(()), {}

    @torch.no_grad()
    def _put(self, piece: WeightBox) -> None:
        part = self._into.get(piece.name)
        if part is None:
            # A tied tensor comes under its first name too.
            if not any(piece.name in other.names for other in self._into.values()):
                raise WrongWeights(f"version {self.version} has {piece.name}, and the model has not")
            return
        if tuple(part.shape) != piece.shape:
            raise WrongWeights(f"version {self.version} and the model differ in {piece.name}")
        common = part.box.overlap(piece.box)
        if common is not None:
            part.put(piece.values[common.within(piece.box)], common)
            self._missing[piece.name] -= common.elements


def staged(parts: Mapping[str, WeightPart]) -> dict[str, WeightPart]:
    """Return parts of the same boxes in host memory."""
    return {
        name: WeightPart(
            part.names,
            torch.empty(part.box.sizes, dtype=part.tensor.dtype),
            Slices({part.names[0]: part.shape}, {part.names[0]: part.box}),
        )
        for name, part in parts.items()
    }


class Versions:
    """The versions of some roles that may still be loaded; 0, the model's own, lies nowhere."""

    def __init__(self, roles: Collection[str]) -> None:
        self._known: dict[str, dict[int, list[Block]]] = {role: {} for role in roles}
        self._coming: dict[tuple[str, int], list[list[Block]]] = {}
        """Shares of versions of which others have not come."""

    def add(self, role: str, version: int, blocks: Sequence[Sequence[object]], shares: int = 1) -> None:
        """Note where one of so many shares of a version lies, which is known once all of them have come."""
        coming = self._coming.setdefault((role, version), [])
        coming.append(as_blocks(blocks))
        if len(coming) == shares:
            self._known[role][version] = [block for share in self._coming.pop((role, version)) for block in share]

    def lost(self, role: str) -> list[Block]:
        """Note that the role's ranks are gone: what has not come of a version never will. Return the blocks that have."""
        gone = [key for key in self._coming if key[0] == role]
        return [block for key in gone for share in self._coming.pop(key) for block in share]

    def has(self, role: str, version: int) -> bool:
        """Return whether a version of a role is known."""
        return version in self._known[role]

    @property
    def newest(self) -> int:
        """Return the newest version of which there are weights; 0 where there are none."""
        return max((version for known in self._known.values() for version in known), default=0)

    def between(self, held: int, wanted: int) -> list[Weights]:
        """Return what takes an engine from one version to another: of each role that has changed since, the newest up to `wanted`."""
        chosen: list[Weights] = []
        for role, known in self._known.items():
            version = newest_of(known, wanted)
            if version > held:
                chosen.append((role, version, known[version]))
        return chosen

    def outdated(self, wanted: Collection[int]) -> list[Block]:
        """Forget what is older than everything that takes an engine to one of the `wanted` versions; return its blocks."""
        freed: list[Block] = []
        for known in self._known.values():
            needed = {newest_of(known, version) for version in wanted}
            for version in [version for version in known if version < max(needed) and version not in needed]:
                freed += known.pop(version)
        return freed

    def blocks(self) -> Iterator[Block]:
        """Return all blocks that are kept."""
        known = (blocks for versions in self._known.values() for blocks in versions.values())
        coming = (share for shares in self._coming.values() for share in shares)
        return (block for blocks in (*known, *coming) for block in blocks)


@dataclass
class Copy:
    """Who was asked for the weights, and where they lie once they are given."""

    giver: str
    blocks: list[Block] | None = None


@dataclass
class Copies:
    """Weights that updates without a loss move towards, by the stage that is due."""

    _asked: dict[str, Copy] = field(default_factory=dict)

    def __contains__(self, stage: object) -> bool:
        """Return True if somebody was asked for them."""
        return stage in self._asked

    def ask(self, stage: str, giver: str) -> None:
        """Note who is asked for the weights that a stage moves towards."""
        self._asked[stage] = Copy(giver)

    def give(self, stage: str, giver: str, blocks: Sequence[Sequence[object]]) -> list[Block]:
        """Note where the weights lie; return those blocks that nobody will read, as another was asked meanwhile."""
        copy = self._asked.get(stage)
        if copy is None or copy.giver != giver:
            return as_blocks(blocks)
        copy.blocks = as_blocks(blocks)
        return []

    def given(self, stage: str) -> list[Block] | None:
        """Return where the weights lie; None until they are there."""
        copy = self._asked.get(stage)
        return copy.blocks if copy else None

    def taken(self, stage: str) -> list[Block]:
        """Note that the update is made; return the blocks that it has read."""
        copy = self._asked.pop(stage, None)
        return (copy.blocks if copy else None) or []

    def lost(self, giver: str) -> None:
        """Note that a worker is gone: what it was asked for and has not given, another is asked for."""
        self._asked = {s: copy for s, copy in self._asked.items() if copy.giver != giver or copy.blocks is not None}

    def blocks(self) -> Iterator[Block]:
        """Return all blocks that are kept."""
        return (block for copy in self._asked.values() for block in copy.blocks or [])


def newest_of(known: Collection[int], limit: int) -> int:
    """Return the newest version up to a limit; 0, the model's own, where there is none."""
    return max((version for version in known if version <= limit), default=0)


def as_blocks(blocks: Sequence[Sequence[object]]) -> list[Block]:
    """Return blocks from what came over the wire."""
    return [Block(*block) for block in blocks]  # type: ignore[arg-type]
