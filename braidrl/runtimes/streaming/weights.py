"""A role's weights on their way from trainer to engines: named tensors in buckets, each a block of the queue's data plane.

trainer ──export──▶ bucket, bucket, ... ──▶ control plane knows the version ──receive──▶ host memory ──load──▶ engine's model
        └─export──▶ bucket, bucket, ... ──▶ an update that asked for them ──▶ a role that follows this one

Every tensor travels under its own name, tied ones too, so that nothing depends on what is tied where. An engine changes its
version between two decode steps, all tensors at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgpack
import torch
from torch import Tensor, nn

from braidrl.data.codec import DTYPES
from braidrl.data.frames import Frame
from braidrl.transfer.queue.data_plane import Block, DataPlane

BUCKET_BYTES = 64 << 20


class WrongWeights(RuntimeError):
    """The tensors that came are not those of the model."""


def export(tensors: Mapping[str, Tensor], data: DataPlane, bucket_bytes: int = BUCKET_BYTES) -> list[Block]:
    """Writes tensors by name as blocks of at most `bucket_bytes`, or one tensor where that is larger."""
    blocks, bucket, size = [], dict[str, Tensor](), 0
    for name, tensor in tensors.items():
        if bucket and size + tensor.nbytes > bucket_bytes:
            blocks.append(data.write(bucket_frames(bucket)))
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    return [*blocks, data.write(bucket_frames(bucket))]


def bucket_frames(tensors: Mapping[str, Tensor]) -> list[Frame]:
    """A header with name, dtype and shape of each tensor, then their bytes."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    header = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in host.items()]
    return [msgpack.packb(header), *(t.reshape(-1).view(torch.uint8).numpy().data for t in host.values())]


def bucket_tensors(frames: Sequence[Frame]) -> dict[str, Tensor]:
    """Copies of a bucket's tensors in host memory. Raises WrongWeights where header and bytes do not agree."""
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
    """All tensors of an export. Raises Evicted."""
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
        """Receives this version from now on, in place of what was received before."""
        self.version, self._tensors, self._left, self._complete = version, {}, iter(blocks), False

    def receive(self) -> bool:
        """Takes in the next bucket; False if there was none left."""
        block = next(self._left, None)
        if block is None:
            self._complete = True
            return False
        self._tensors |= bucket_tensors(self.data.read(block))
        return True

    @torch.no_grad()
    def load(self, model: nn.Module, version: int, blocks: Sequence[Block]) -> None:
        """Puts a version into the model; what was not received yet is now. Raises WrongWeights for another model's."""
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
        """Lets go of what was received."""
        self.version, self._tensors, self._left, self._complete = 0, {}, iter(()), True
