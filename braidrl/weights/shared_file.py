"""One version of a model's weights in memory that other processes of this machine can read.

trainer ──▶ safetensors in shared memory ──▶ every engine's process maps it, and copies what it needs

Once written the memory has no name in the file system: it is gone with the process that made it, however that ends.
"""

import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from braidrl.queue.storage import shared_folder

CHECKSUM = "checksum"
WEIGHTS = "model.safetensors"
"""The file in a folder."""


class WeightFile:
    """Weights in a safetensors file. Its metadata maps the further names of tied tensors to the name they are written under."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, a tied one under each of its names; the file is read lazily."""
        with safe_open(self.path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)
            for name, same in self._ties(file).items():
                yield name, file.get_tensor(same)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every tensor, a tied one under each of its names."""
        with safe_open(self.path, "pt") as file:
            found = {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            return found | {name: found[same] for name, same in self._ties(file).items()}

    def verify(self) -> None:
        """Raise ValueError where a checksum was written and does not match."""
        with safe_open(self.path, "pt") as file:
            expected = (file.metadata() or {}).get(CHECKSUM)
            if expected is None:
                return
            found = checksum({name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118
        if found != expected:
            raise ValueError(f"the weights that arrived have checksum {found}, and {expected} was sent")

    @staticmethod
    def _ties(file: Any) -> dict[str, str]:
        return {name: same for name, same in (file.metadata() or {}).items() if name != CHECKSUM}


class UnnamedWeights(WeightFile):
    """Weights in an open file that may have no name any more: they exist until this object is closed."""

    def __init__(self, handle: int) -> None:
        """Take over the handle of an open file."""
        self._handle = handle
        super().__init__(f"/proc/{os.getpid()}/fd/{handle}")

    def close(self) -> None:
        """Free the memory once nobody reads it any more."""
        os.close(self._handle)


class SharedWeights(UnnamedWeights):
    """Copies of tensors that exist until this object is closed. With `check` readers compare a checksum."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], check: bool = False) -> None:
        """Write the copies. Raises OSError where memory is full."""
        kept, notes = without_ties(tensors)
        if check:
            notes[CHECKSUM] = checksum(kept)
        with tempfile.TemporaryDirectory(prefix="braid-weights-", dir=shared_folder()) as folder:
            named = Path(folder) / "weights.safetensors"
            save_file(kept, named, notes)
            handle = os.open(named, os.O_RDONLY | os.O_CLOEXEC)
        super().__init__(handle)


class ReadableFolder:
    """One version on disk: a folder with a safetensors file, until its maker closes this object."""

    def __init__(self, path: Path, shapes: Mapping[str, torch.Size]) -> None:
        """`shapes` has every tensor, a tied one under each of its names."""
        self.path, self._shapes = path, shapes

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        return WeightFile(self.path / WEIGHTS).tensors()

    def shapes(self) -> Mapping[str, torch.Size]:
        return self._shapes

    def close(self) -> None:
        """Do nothing: the process that made the folder removes it."""


class WeightFolder(ReadableFolder):
    """Copies of tensors in a folder of this object's."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]], within: Path | None = None) -> None:
        """Write the copies `within` a folder that the readers see too. Raises OSError where it is full or missing."""
        kept, ties = without_ties(tensors)
        # Who reads only one of a tied tensor's names would keep the old values under the other.
        kept |= {name: kept[same].clone() for name, same in ties.items()}
        self._folder = folder_for_all(within)
        super().__init__(Path(self._folder.name), {name: tensor.shape for name, tensor in kept.items()})
        save_file(kept, self.path / WEIGHTS)

    def close(self) -> None:
        self._folder.cleanup()


def folder_for_all(within: Path | None) -> tempfile.TemporaryDirectory[str]:
    """Make a temporary folder that other users' servers can read."""
    folder = tempfile.TemporaryDirectory(prefix="braid-weights-", dir=within)
    Path(folder.name).chmod(0o755)
    return folder


def without_ties(tensors: Iterable[tuple[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return each tensor once, on the CPU, and for every further name the name that it is kept under."""
    kept: dict[str, Tensor] = {}
    names: dict[tuple[int, torch.Size], str] = {}
    notes: dict[str, str] = {}
    for name, tensor in tensors:
        first = names.setdefault((tensor.data_ptr(), tensor.shape), name)
        if first == name:
            kept[name] = tensor.detach().cpu().contiguous()
        else:
            notes[name] = first
    return kept, notes


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum over names, dtypes, shapes and values."""
    found = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"
