"""One version of a role's weights in one file on each machine, written by all ranks there: each copies what it has into its place.

rank 0   its blocks ╮
rank 1   its blocks ┼──▶ safetensors in shared memory ──▶ every engine of the machine
rank 2   its blocks ╯         what no rank of a machine has comes to it from another machine, in rounds of bounded size

Readers are told of a file when all of it is there. It has no name in the file system by then, and is gone with the ranks that wrote it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.models.parallel.messages import gathered
from braidrl.models.parallel.replicated import DataParallel
from braidrl.models.weights.plan import Boxes, shared_out
from braidrl.models.weights.transfer import Holdings, TransferVolume, WeightPart, WeightTransfer, holdings
from braidrl.rollout.weights.shared_file import (
    CHECKSUM,
    WEIGHTS,
    ReadableFolder,
    UnnamedWeights,
    checksum,
    folder_for_all,
)
from braidrl.transfer.queue.storage import shared_folder

TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Of numbers, as safetensors calls them."""
NO_CHECKSUM = "00000000"
WORD = 8
"""Bytes of the number with which the file begins; what follows is filled up to a multiple of it."""


class WeightWriter:
    """What the ranks of a role know of a file that they write anew for each version."""

    def __init__(
        self, parts: Mapping[str, WeightPart], ranks: DataParallel, check: bool = False, repeat: bool = False
    ) -> None:
        """All ranks call this, and what it can do, at the same time.

        With `check` readers compare a checksum. Where they know nothing of tied tensors these are to `repeat` under each name.
        """
        self.ranks, self.check = ranks, check
        known = holdings(parts, ranks, machine())
        self.here = [rank for rank, where in enumerate(known.machines) if where == known.machines[ranks.rank]]
        self.layout = FileLayout.of(known, check, repeat)
        self.transfer = WeightTransfer(known, written_by(known), ranks)
        self.traffic = TransferVolume()

    @property
    def leads(self) -> bool:
        """True for the rank that makes its machine's file."""
        return self.ranks.rank == self.here[0]

    def in_memory(self, parts: Mapping[str, WeightPart]) -> UnnamedWeights:
        """This version in shared memory, for whoever closes it. Raises OSError, on every rank, where it is full on a machine."""
        with self._made(lambda: tempfile.TemporaryDirectory(prefix="braid-weights-", dir=shared_folder())) as folder:
            return UnnamedWeights(self._filled(self._begun(folder, mode=0o600), parts))

    def in_folder(self, parts: Mapping[str, WeightPart], within: Path | None) -> ReadableFolder:
        """This version in a folder of its machine's, which is there until the rank that made it has closed its own object.

        Raises OSError, on every rank, where `within` is full or not there on a machine.
        """
        with ExitStack() as until_closed:
            folder = until_closed.enter_context(self._made(lambda: folder_for_all(within)))
            path = self._begun(folder, mode=0o644)
            os.close(self._filled(path, parts))
            made = until_closed.pop_all()
        return JointFolder(path.parent, self.layout.shapes, made)

    @contextmanager
    def _made(self, make: Callable[[], tempfile.TemporaryDirectory[str]]) -> Iterator[Path | OSError | None]:
        """A folder on the rank that leads, which is removed at the end, or why there is none."""
        if not self.leads:
            yield None
            return
        try:
            folder = make()
        except OSError as error:
            yield error
            return
        with folder as name:
            yield Path(name)

    def _filled(self, path: Path, parts: Mapping[str, WeightPart]) -> int:
        """The handle of the file when everything is in it."""
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
        self._meet("what others write")
        if self.check or self.layout.repeated:
            if self.leads:
                for name, same in self.layout.repeated.items():
                    tensors[name].copy_(tensors[same])
                os.pwrite(handle, self.layout.header(checksum(tensors) if self.check else NO_CHECKSUM), 0)
            self._meet("the end of the file")

    def _begun(self, folder: Path | OSError | None, mode: int) -> Path:
        """The path of this machine's file, which the rank that leads makes."""
        said: dict[str, Any] = {}
        try:
            if isinstance(folder, OSError):
                raise folder
            if folder is not None:
                said = {"path": str(folder / WEIGHTS)}
                self.layout.make(folder / WEIGHTS, mode)
        except OSError as error:
            said = {"number": error.errno, "error": f"{error.filename or folder}: {error.strerror}"}
        of_all = self._meet("the file of a version", said)
        for failed in of_all:
            if "error" in failed:
                raise OSError(failed["number"], failed["error"])
        return Path(of_all[self.here[0]]["path"])

    def _meet(self, purpose: str, said: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What every rank says, when all are here."""
        if self.ranks.group is None:
            return [dict(said or {})]
        with self.ranks.meeting(purpose):
            message = bytearray(json.dumps(said or {}).encode())
            return [json.loads(bytes(part)) for part in gathered(message, self.ranks.group)]


class JointFolder(ReadableFolder):
    """A folder that the ranks of a machine have written together."""

    def __init__(self, path: Path, shapes: Mapping[str, torch.Size], made: ExitStack) -> None:
        """`made` has what this rank is to remove."""
        super().__init__(path, shapes)
        self._made = made

    def close(self) -> None:
        """Removes the folder where this rank has made it."""
        self._made.close()


def machine() -> str:
    """The same for processes that see the same shared memory, and for no others."""
    about = os.stat(shared_folder())
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.is_file() else os.uname().nodename} {about.st_dev} {about.st_ino}"


def written_by(known: Holdings) -> list[Boxes]:
    """The blocks that each rank writes into its machine's file: together, on each machine, everything once."""
    found: list[Boxes] = [{} for _ in known.boxes]
    for where in dict.fromkeys(known.machines):
        here = [rank for rank, other in enumerate(known.machines) if other == where]
        shares = shared_out(known.boxes, known.shapes, here)
        for rank in here:
            found[rank] = shares[rank]
    return found


@dataclass(frozen=True)
class FileLayout:
    """Where in a safetensors file each tensor lies."""

    notes: Mapping[str, str]
    """Further names of tied tensors, and the names that they are written under."""
    repeated: Mapping[str, str]
    """The same of tensors that are written under each."""
    tensors_at: Mapping[str, tuple[torch.dtype, torch.Size, int, int]]
    """Of each tensor type and shape, and from which byte to which behind the header."""
    check: bool

    @classmethod
    def of(cls, known: Holdings, check: bool, repeat: bool = False) -> FileLayout:
        """Larger numbers first, so that each tensor begins at a multiple of its numbers' size."""
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
        """Of every tensor that is written."""
        return {name: shape for name, (_, shape, *_) in self.tensors_at.items()}

    def header(self, check_sum: str) -> bytes:
        """What the file begins with; of the same length whatever the checksum."""
        notes = {**self.notes, **({CHECKSUM: check_sum} if self.check else {})}
        about: dict[str, Any] = {"__metadata__": notes} if notes else {}
        for name, (dtype, shape, start, end) in self.tensors_at.items():
            about[name] = {"dtype": TYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % WORD)
        return len(text).to_bytes(WORD, "little") + text

    def make(self, path: Path, mode: int) -> None:
        """A file with its header and room for everything. Raises OSError where there is none."""
        header = self.header(NO_CHECKSUM)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, mode)
        try:
            # All of it now: a page for which there is no memory when it is written to would end the process by a signal.
            os.posix_fallocate(handle, 0, self._size(header))
            os.pwrite(handle, header, 0)
        finally:
            os.close(handle)

    def tensors(self, handle: int) -> dict[str, Tensor]:
        """The file's tensors in memory that is the file's own, for as long as one of them is there."""
        header = self.header(NO_CHECKSUM)
        content = torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=self._size(header), dtype=torch.uint8)
        body = content[len(header) :]
        return {
            name: body[start:end].view(dtype).view(shape)
            for name, (dtype, shape, start, end) in self.tensors_at.items()
        }

    def _size(self, header: bytes) -> int:
        return len(header) + max((end for *_, end in self.tensors_at.values()), default=0)
