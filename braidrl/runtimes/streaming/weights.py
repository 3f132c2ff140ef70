"""A role's weights on their way from trainer to engines: named tensors in buckets, each a block of the queue's data plane.

trainer ──export──▶ bucket, bucket, ... ──▶ control plane knows the version ──receive──▶ host memory ──load──▶ engine's model
        └─export──▶ bucket, bucket, ... ──▶ an update that asked for them ──▶ a role that follows this one

Every tensor travels under its own name, tied ones too, so that nothing depends on what is tied where. An engine changes its
version between two decode steps, all tensors at once.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgpack
import torch
from torch import Tensor, nn

from braidrl.data.codec import DTYPES
from braidrl.data.frames import Frame
from braidrl.transfer.queue.storage import DataPlane
from braidrl.transfer.queue.table import Block

BUCKET_BYTES = 64 << 20


Weights = tuple[str, int, Sequence[Block]]
"""A role, a version of it, and where it lies."""


class WrongWeights(RuntimeError):
    """The tensors that came are not those of the model."""


def export(tensors: Mapping[str, Tensor], data: DataPlane, bucket_bytes: int = BUCKET_BYTES) -> list[Block]:
    """Write tensors by name as blocks of at most `bucket_bytes`, or one tensor where that is larger."""
    blocks, bucket, size = [], dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > bucket_bytes:
            blocks.append(data.write(bucket_frames(bucket)))
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    return [*blocks, data.write(bucket_frames(bucket))]


def bucket_frames(tensors: Mapping[str, Tensor]) -> list[Frame]:
    """Return a header with name, dtype and shape of each tensor, then their bytes."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in host.items()]
    return [msgpack.packb(header), *(t.reshape(-1).view(torch.uint8).numpy().data for t in host.values())]


def bucket_tensors(frames: Sequence[Frame]) -> dict[str, Tensor]:
    """Return copies of a bucket's tensors in host memory. Raises WrongWeights where header and bytes do not agree."""
    header = msgpack.unpackb(frames[0])
    if len(header) != len(frames) - 1:
        raise WrongWeights(f"{len(header)} tensors are named and {len(frames) - 1} came")
    tensors = {}
    for (name, dtype, shape), frame in zip(header, frames[1:], strict=True):
        tensor = torch.empty(shape, dtype=DTYPES[dtype])
        target = tensor.reshape(-1).view(torch.uint8).numpy()
        if target.nbytes != memoryview(frame).nbytes:
            raise WrongWeights(f"{name}: {memoryview(frame).nbytes} bytes where {target.nbytes} are due")
        target.data[:] = frame
        tensors[name] = tensor
    return tensors


def received(blocks: Sequence[Block], data: DataPlane) -> dict[str, Tensor]:
    """Return all tensors of an export. Raises Evicted."""
    tensors: dict[str, Tensor] = {}
    for block in blocks:
        tensors |= bucket_tensors(data.read(Block(*block)))
    return tensors


class WeightReceiver:
    """An engine's side: receives versions bucket by bucket, and loads one whole."""

    def __init__(self, data: DataPlane) -> None:
        self.data = data
        self.version = 0
        self._tensors: dict[str, Tensor] = {}
        self._left: Iterator[Block] = iter(())
        self._complete = True

    def begin(self, version: int, blocks: Sequence[Block]) -> None:
        """Receive this version from now on, in place of what was received before."""
        self.version, self._tensors, self._left, self._complete = version, {}, iter(blocks), False

    def receive(self) -> bool:
        """Receive the next bucket; return False if there was none left."""
        block = next(self._left, None)
        if block is None:
            self._complete = True
            return False
        self._tensors |= bucket_tensors(self.data.read(block))
        return True

    @torch.no_grad()
    def load(self, model: nn.Module, version: int, blocks: Sequence[Block]) -> None:
        """Put a version into the model; what was not received yet is now. Raises WrongWeights for another model's."""
        if self.version != version:
            self.begin(version, blocks)
        while not self._complete:
            self.receive()
        target = model.state_dict()
        different = target.keys() ^ self._tensors.keys()
        if different:
            raise WrongWeights(f"version {version} and the engine's model differ in {sorted(different)[:4]}")
        for name, tensor in self._tensors.items():
            target[name].copy_(tensor)
        self.forget()

    def forget(self) -> None:
        """Forget what was received."""
        self.version, self._tensors, self._left, self._complete = 0, {}, iter(()), True


class Versions:
    """The versions of some roles that may still be loaded; 0, the model's own, lies nowhere."""

    def __init__(self, roles: Collection[str]) -> None:
        self._known: dict[str, dict[int, list[Block]]] = {role: {} for role in roles}

    def add(self, role: str, version: int, blocks: Sequence[Sequence[object]]) -> None:
        """Note where a version lies."""
        self._known[role][version] = as_blocks(blocks)

    def has(self, role: str, version: int) -> bool:
        """Return whether a version of a role is known."""
        return version in self._known[role]

    def newest(self) -> list[Weights]:
        """Return the newest version of each role that has any."""
        return [(role, max(known), known[max(known)]) for role, known in self._known.items() if known]

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
        return (block for known in self._known.values() for many in known.values() for block in many)


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
