"""One version of a role's weights in one file per machine, which all of its ranks write together, each its own blocks.

rank 0   its blocks ╮
rank 1   its blocks ┼──▶ safetensors in shared memory ──▶ every engine of the machine
rank 2   its blocks ╯         blocks that no rank of a machine has come from another machine, in rounds of bounded size

Readers are told of a file when it is complete. It has no name in the file system by then, and is gone with the ranks that wrote it.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.queue.storage import shared_folder
from braidrl.training.parallel.replicated import DataParallel, all_gather_bytes
from braidrl.weights.reshard_plan import TensorGroup, shared_blocks
from braidrl.weights.shared_file import (
    CHECKSUM,
    WEIGHTS,
    ReadableFolder,
    UnnamedWeights,
    checksum,
    folder_for_all,
)
from braidrl.weights.transfer import TransferVolume, WeightTransfer
from braidrl.weights.weight_index import WeightIndex, WeightPart, gather_weight_index

TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in safetensors."""
NO_CHECKSUM = "00000000"
WORD = 8
"""Bytes of the number with which the file begins; the header is padded to a multiple of it."""


class WeightWriter:
    """The ranks' plan of a file that they write anew for each version."""

    def __init__(
        self, parts: Mapping[str, WeightPart], ranks: DataParallel, check: bool = False, repeat: bool = False
    ) -> None:
        """Plan the file; all ranks call this, and the methods, at the same time.

        Args:
            parts: This rank's parts.
            ranks: The ranks that write together.
            check: Write a checksum for readers to compare.
            repeat: Write tied tensors under each name, for readers that know nothing of ties.
        """
        self.ranks, self.check = ranks, check
        known = gather_weight_index(parts, ranks, machine())
        self.here = [rank for rank, where in enumerate(known.machines) if where == known.machines[ranks.rank]]
        self.layout = FileLayout.of(known, check, repeat)
        self.transfer = WeightTransfer(known, blocks_to_write(known), ranks)
        self.traffic = TransferVolume()

    @property
    def is_leader(self) -> bool:
        """Return True for the rank that creates its machine's file."""
        return self.ranks.rank == self.here[0]

    def in_memory(self, parts: Mapping[str, WeightPart]) -> UnnamedWeights:
        """Write this version to shared memory; the caller closes it. Raises OSError, on every rank, where a machine's memory is full."""
        with self._temporary_folder(
            lambda: tempfile.TemporaryDirectory(prefix="braid-weights-", dir=shared_folder())
        ) as folder:
            return UnnamedWeights(self._write(self._create(folder, mode=0o600), parts))

    def in_folder(self, parts: Mapping[str, WeightPart], within: Path | None) -> ReadableFolder:
        """Write this version to a folder of each machine, which exists until the rank that made it closes its object.

        Raises OSError, on every rank, where `within` is full or missing on a machine.
        """
        with ExitStack() as until_closed:
            folder = until_closed.enter_context(self._temporary_folder(lambda: folder_for_all(within)))
            path = self._create(folder, mode=0o644)
            os.close(self._write(path, parts))
            made = until_closed.pop_all()
        return JointFolder(path.parent, self.layout.shapes, made)

    @contextmanager
    def _temporary_folder(
        self, make: Callable[[], tempfile.TemporaryDirectory[str]]
    ) -> Iterator[Path | OSError | None]:
        """Yield the leader's new folder, removed at the end, or the error of making it; None on other ranks."""
        if not self.is_leader:
            yield None
            return
        try:
            folder = make()
        except OSError as error:
            yield error
            return
        with folder as name:
            yield Path(name)

    def _write(self, path: Path, parts: Mapping[str, WeightPart]) -> int:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._fill(handle, parts)
        except BaseException:
            os.close(handle)
            raise
        return handle

    def _fill(self, handle: int, parts: Mapping[str, WeightPart]) -> None:
        tensors = self.layout.tensors(handle)
        self.traffic = self.transfer.run(parts, {name: WeightPart([name], own) for name, own in tensors.items()})
        self._all_gather("what others write")
        if self.check or self.layout.repeated:
            if self.is_leader:
                for name, same in self.layout.repeated.items():
                    tensors[name].copy_(tensors[same])
                os.pwrite(handle, self.layout.header(checksum(tensors) if self.check else NO_CHECKSUM), 0)
            self._all_gather("the end of the file")

    def _create(self, folder: Path | OSError | None, mode: int) -> Path:
        said: dict[str, Any] = {}
        try:
            if isinstance(folder, OSError):
                raise folder
            if folder is not None:
                said = {"path": str(folder / WEIGHTS)}
                self.layout.make(folder / WEIGHTS, mode)
        except OSError as error:
            said = {"number": error.errno, "error": f"{error.filename or folder}: {error.strerror}"}
        of_all = self._all_gather("the file of a version", said)
        for failed in of_all:
            if "error" in failed:
                raise OSError(failed["number"], failed["error"])
        return Path(of_all[self.here[0]]["path"])

    def _all_gather(self, purpose: str, said: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        if self.ranks.group is None:
            return [dict(said or {})]
        with self.ranks.meeting(purpose):
            message = bytearray(json.dumps(said or {}).encode())
            return [json.loads(bytes(part)) for part in all_gather_bytes(message, self.ranks.group)]


class JointFolder(ReadableFolder):
    """A folder that the ranks of a machine have written together."""

    def __init__(self, path: Path, shapes: Mapping[str, torch.Size], made: ExitStack) -> None:
        """Take over `made`, which this rank is to remove."""
        super().__init__(path, shapes)
        self._made = made

    def close(self) -> None:
        self._made.close()


def machine() -> str:
    """Return a value that is equal for processes with the same shared memory, and for no others."""
    about = os.stat(shared_folder())
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.is_file() else os.uname().nodename} {about.st_dev} {about.st_ino}"


def blocks_to_write(known: WeightIndex) -> list[TensorGroup]:
    """Return the tensors with the blocks that each rank writes into its machine's file: together, on each machine, everything once."""
    machines: dict[str, list[int]] = {}
    for rank, where in enumerate(known.machines):
        machines.setdefault(where, []).append(rank)
    return [
        replace(group, wanted=[block for here in machines.values() for block in shared_blocks(group, here)])
        for group in known.groups()
    ]


@dataclass(frozen=True)
class FileLayout:
    """Where each tensor lies in a safetensors file."""

    notes: Mapping[str, str]
    """Further names of tied tensors, and the names that they are written under."""
    repeated: Mapping[str, str]
    """The same for tied tensors that are written under each name."""
    tensors_at: Mapping[str, tuple[torch.dtype, torch.Size, int, int]]
    """Type, shape, and first and last byte after the header of each tensor."""
    check: bool

    @classmethod
    def of(cls, known: WeightIndex, check: bool, repeat: bool = False) -> "FileLayout":
        """Lay out the tensors, larger element sizes first, so that each tensor is aligned."""
        others = {other: first for first, names in known.names.items() for other in names if other != first}
        repeated = others if repeat else {}
        at, places = 0, {}
        for name, same in sorted(
            {**{name: name for name in known.shapes}, **repeated}.items(),
            key=lambda pair: (-known.dtypes[pair[1]].itemsize, pair[0]),
        ):
            dtype, shape = known.dtypes[same], torch.Size(known.shapes[same])
            end = at + dtype.itemsize * shape.numel()
            places[name] = (dtype, shape, at, end)
            at = end
        return cls({} if repeat else others, repeated, places, check)

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every tensor that is written."""
        return {name: shape for name, (_, shape, *_) in self.tensors_at.items()}

    def header(self, check_sum: str) -> bytes:
        """Return the file's header; its length does not depend on the checksum."""
        notes = {**self.notes, **({CHECKSUM: check_sum} if self.check else {})}
        about: dict[str, Any] = {"__metadata__": notes} if notes else {}
        for name, (dtype, shape, start, end) in self.tensors_at.items():
            about[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % WORD)
        return len(text).to_bytes(WORD, "little") + text

    def make(self, path: Path, mode: int) -> None:
        """Create a file with its header and room for all tensors. Raises OSError where there is no room."""
        header = self.header(NO_CHECKSUM)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
        try:
            # All of it now: a page for which there is no memory when it is written to would end the process by a signal.
            os.posix_fallocate(handle, 0, self._size(header))
            os.pwrite(handle, header, 0)
        finally:
            os.close(handle)

    def tensors(self, handle: int) -> dict[str, Tensor]:
        """Return the file's tensors, mapped into memory for as long as one of them is alive."""
        header = self.header(NO_CHECKSUM)
        content = torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=self._size(header), dtype=torch.uint8)
        body = content[len(header) :]
        return {
            name: body[start:end].view(dtype).view(shape)
            for name, (dtype, shape, start, end) in self.tensors_at.items()
        }

    def _size(self, header: bytes) -> int:
        return len(header) + max((end for *_, end in self.tensors_at.values()), default=0)
