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
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.models.data_parallel import DataParallel
from braidrl.models.messages import gathered
from braidrl.models.resharding import Boxes, shared_out
from braidrl.models.weight_transfer import Holdings, Traffic, WeightPart, WeightTransfer, holdings
from braidrl.rollout.shared_weights import CHECKSUM, UnnamedWeights, checksum
from braidrl.transfer.queue.segments import shared_folder

TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Of numbers, as safetensors calls them."""
WORD = 8
"""Bytes of the number with which the file begins; what follows is filled up to a multiple of it."""


class WeightWriter:
    """What the ranks of a role know of a file that they write anew for each version."""

    def __init__(self, parts: Mapping[str, WeightPart], ranks: DataParallel, check: bool = False) -> None:
        """With `check` readers compare a checksum. All ranks call this, and `write`, at the same time."""
        self.ranks, self.check = ranks, check
        known = holdings(parts, ranks, machine())
        self.here = [rank for rank, where in enumerate(known.machines) if where == known.machines[ranks.rank]]
        self.layout = FileLayout.of(known, check)
        self.transfer = WeightTransfer(known, written_by(known), ranks)
        self.traffic = Traffic()

    @property
    def leads(self) -> bool:
        """True for the rank that makes its machine's file."""
        return self.ranks.rank == self.here[0]

    def write(self, parts: Mapping[str, WeightPart]) -> UnnamedWeights:
        """This version's file, which whoever has it closes. Raises OSError, on every rank, where memory is full on a machine."""
        folder = tempfile.TemporaryDirectory(prefix="braid-weights-", dir=shared_folder()) if self.leads else None
        try:
            path = self._begun(None if folder is None else Path(folder.name) / "weights.safetensors")
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            tensors = self.layout.tensors(handle)
            self.traffic = self.transfer.run(parts, tensors)
            self._meet("what others write")
            if self.check:
                if self.leads:
                    os.pwrite(handle, self.layout.header(checksum(tensors)), 0)
                self._meet("the checksum")
            return UnnamedWeights(handle)
        finally:
            if folder is not None:
                folder.cleanup()

    def _begun(self, path: Path | None) -> str:
        """The path of this machine's file, which is made by the rank that leads it."""
        said: dict[str, Any] = {}
        if path is not None:
            try:
                self.layout.make(path)
                said = {"path": str(path)}
            except OSError as error:
                said = {"number": error.errno, "error": f"{path.parent}: {error.strerror}"}
        of_all = self._meet("the file of a version", said)
        for failed in of_all:
            if "error" in failed:
                raise OSError(failed["number"], failed["error"])
        return str(of_all[self.here[0]]["path"])

    def _meet(self, purpose: str, said: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """What every rank says, when all are here."""
        if self.ranks.group is None:
            return [dict(said or {})]
        with self.ranks.meeting(purpose):
            message = bytearray(json.dumps(said or {}).encode())
            return [json.loads(bytes(part)) for part in gathered(message, self.ranks.group)]


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
    tensors_at: Mapping[str, tuple[torch.dtype, tuple[int, ...], int, int]]
    """Of each tensor type and shape, and from which byte to which behind the header."""
    check: bool

    @classmethod
    def of(cls, known: Holdings, check: bool) -> FileLayout:
        """Larger numbers first, so that each tensor begins at a multiple of its numbers' size."""
        at, places = 0, {}
        for name in sorted(known.shapes, key=lambda name: (-known.dtypes[name].itemsize, name)):
            dtype, shape = known.dtypes[name], known.shapes[name]
            size = dtype.itemsize * torch.Size(shape).numel()
            places[name] = (dtype, shape, at, at + size)
            at += size
        notes = {other: first for first, names in known.names.items() for other in names if other != first}
        return cls(notes, places, check)

    def header(self, check_sum: str = "00000000") -> bytes:
        """What the file begins with; of the same length whatever the checksum."""
        notes = {**self.notes, **({CHECKSUM: check_sum} if self.check else {})}
        about: dict[str, Any] = {"__metadata__": notes} if notes else {}
        for name, (dtype, shape, start, end) in self.tensors_at.items():
            about[name] = {"dtype": TYPES[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(about).encode()
        text += b" " * (-len(text) % WORD)
        return len(text).to_bytes(WORD, "little") + text

    def make(self, path: Path) -> None:
        """A file with its header and room for everything. Raises OSError where there is none."""
        header = self.header()
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            # All of it now: a page for which there is no memory when it is written to would end the process by a signal.
            os.posix_fallocate(handle, 0, self._size(header))
            os.pwrite(handle, header, 0)
        finally:
            os.close(handle)

    def tensors(self, handle: int) -> dict[str, Tensor]:
        """The file's tensors in memory that is the file's own, for as long as one of them is there."""
        header = self.header()
        content = torch.from_file(
            f"/proc/self/fd/{handle}", shared=True, size=self._size(header), dtype=torch.uint8
        )  # fmt: skip
        body = content[len(header) :]
        return {
            name: body[start:end].view(dtype).view(shape)
            for name, (dtype, shape, start, end) in self.tensors_at.items()
        }

    def _size(self, header: bytes) -> int:
        return len(header) + max((end for *_, end in self.tensors_at.values()), default=0)
