"""Publishers: bring a version of a role's weights to its engines, in three ways behind one protocol.

in_place      engine and trainer share a process      the same tensors if dtype and slices are equal, else copied in
              rounds
collective    they share a process group              each worker receives its own slices, device to device
file          they share a folder                     ranks write safetensors together; engines and servers read it

Every runtime and every engine uses these. A publisher sends the parts of a whole model, or of its adapters alone.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from braidrl.cluster.world import Ranks


@dataclass
class TransferVolume:
    """Bytes that a rank sent, received and copied (`stayed`), its largest buffer (`peak`), rounds and seconds."""

    sent: int = 0
    received: int = 0
    stayed: int = 0
    peak: int = 0
    rounds: int = 0
    seconds: float = 0.0


class WeightSource(Protocol):
    """One version of a model's weights, in a form that any engine can load."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every tensor of the model by name, a tied one under each of its names."""


@dataclass(frozen=True)
class ModelWeights:
    """The weights of a module in this process."""

    model: nn.Module

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.model.state_dict().items()


@dataclass(frozen=True)
class PolicyWeights:
    """The adapters of one of several policies, for an engine that holds the base weights of all."""

    role: str
    source: WeightSource

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self.source.tensors()


class PublishedEngine(Protocol):
    """The part of an engine that a publisher uses."""

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        """Generate with the weights of `source` from now on; without a source, with those already copied into the
        engine's tensors.
        """


@dataclass(frozen=True)
class OnePolicy:
    """One of several policies of an engine, which loads adapters under its name."""

    engine: PublishedEngine
    role: str

    def publish(self, version: int, source: WeightSource | None = None) -> None:
        self.engine.publish(version, None if source is None else PolicyWeights(self.role, source))


class Publisher(Protocol):
    """A publisher of versions; all ranks that hold or receive weights call it at the same time."""

    def publish(self, version: int) -> TransferVolume | None:
        """Give the engine the current weights; return the bytes that this rank moved, or None if none moved yet."""

    def close(self) -> None:
        """Free the last version."""


class WeightTransport(Protocol):
    """A mover of bytes between the processes of one transfer: training ranks and engine workers.

    Braid plans which bytes go where; a transport moves one round after another.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        """Connect the processes, by `ranks.all_gather(purpose, value)` or the gloo group `ranks.group`; `device` is
        that of the bytes.
        """

    def exchange(self, received: Tensor, sent: Tensor, sizes_in: list[int], sizes_out: list[int]) -> None:
        """Send each process its bytes, and receive from each; all processes call this at the same time.

        `sent` holds `sizes_out` bytes to each process, in their order, and may change once this returns; `received` is
        filled with `sizes_in` bytes from each. Raises RuntimeError if a process has died.
        """

    def close(self) -> None:
        """Disconnect, including after a failure."""


def check_shapes(shapes: Mapping[str, torch.Size], expected: Mapping[str, torch.Size]) -> None:
    """Raise ValueError if the shapes are not exactly those of the model."""
    differing = sorted(expected.keys() ^ shapes.keys()) or [n for n, shape in shapes.items() if shape != expected[n]]
    if differing:
        raise ValueError(f"the weights are not those of this model: {', '.join(differing[:3])} differ")
