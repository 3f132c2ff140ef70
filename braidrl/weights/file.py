"""Weights in a safetensors folder, in shared memory or on a disk: the general fallback, and the way to servers that know nothing else.

rank 0   its blocks ╮
rank 1   its blocks ┼──▶ model.safetensors ──▶ every engine of the machine maps it, and copies what it needs
rank 2   its blocks ╯         blocks that no rank of a machine has come from another machine, in rounds of bounded size

In shared memory the file has no name once it is complete: it is gone with the rank that made it.
"""

import json
import os
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from braidrl.cluster.process_groups import all_gather_bytes
from braidrl.cluster.world import Ranks
from braidrl.queue.storage import shared_folder
from braidrl.weights.collective import Parts, WeightTransfer
from braidrl.weights.publisher import PublishedEngine, TransferVolume
from braidrl.weights.reshard_plan import TensorGroup, shared_blocks
from braidrl.weights.shard_index import ShardIndex, WeightPart, check_parts, full_parts, gather_shard_index

CHECKSUM = "checksum"
WEIGHTS = "model.safetensors"
"""The file in a folder."""
TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""Names of dtypes in safetensors."""
NO_CHECKSUM = "00000000"
WORD = 8
"""Bytes of the number with which the file begins; the header is padded to a multiple of it."""


class WeightFile:
    """One version in a safetensors file, until it is closed.

    Its metadata maps the further names of tied tensors to the name under which they are written.
    """

    def __init__(self, path: Path | str, close: Callable[[], object] = lambda: None) -> None:
        """Read the file at `path`; `close` frees it, where this process made it."""
        self.path, self.close = Path(path), close

    @property
    def folder(self) -> Path:
        """Return the folder that servers read."""
        return self.path.parent

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

    def parts(self) -> dict[str, WeightPart]:
        """Return the tensors as parts that lie in the file."""
        with safe_open(self.path, "pt") as file:
            names = {name: [name] for name in file.keys()}  # noqa: SIM118
            for name, same in self._ties(file).items():
                names[same].append(name)
            return {name: WeightPart(every, file.get_tensor(name)) for name, every in names.items()}

    def put_into(self, parts: Mapping[str, WeightPart]) -> None:
        """Put this version into parts of a model. Raises ValueError, before anything changes, for another model's."""
        given = {alias: part for part in self.parts().values() for alias in part.names}
        check_parts({alias: part.shape for alias, part in given.items()}, parts)
        for name, part in parts.items():
            part.put(given[name].block(part.box), part.box)

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


def stored_in_memory(tensors: Iterable[tuple[str, Tensor]], check: bool = False) -> WeightFile:
    """Return a file in shared memory with copies of full tensors. Raises OSError where memory is full."""
    parts = full_parts(tensors)
    return WeightWriter(parts, Ranks(), check).write(parts)


def stored_in_folder(tensors: Iterable[tuple[str, Tensor]], within: Path | None = None) -> WeightFile:
    """Return a file in a folder that servers read, with copies of full tensors. Raises OSError where it is full or missing."""
    parts = full_parts(tensors)
    return WeightWriter(parts, Ranks(), repeat=True, within=within).write(parts)


class WeightWriter:
    """The ranks' plan of a file that they write anew for each version."""

    def __init__(
        self, parts: Mapping[str, WeightPart], ranks: Ranks, check: bool = False, repeat: bool = False,
        within: Path | None = None,
    ) -> None:  # fmt: skip
        """Plan the file; all ranks call this, and `write`, at the same time.

        Args:
            parts: This rank's parts; none where it writes what others have.
            ranks: The ranks that write together.
            check: Write a checksum for readers to compare.
            repeat: Write a folder for servers that know nothing of ties: tied tensors are in it under each name. Else shared memory.
            within: Where such folders are made.
        """
        self.ranks, self.check, self.in_folder, self.within = ranks, check, repeat, within
        known = gather_shard_index(parts, ranks, machine())
        self.machines = sorted(set(known.machines))
        """The machines that have a file of each version."""
        self.here = [rank for rank, where in enumerate(known.machines) if where == known.machines[ranks.rank]]
        self.layout = FileLayout.of(known, check, repeat)
        # Readers are on the CPU, and so is every exchange.
        self.transfer = WeightTransfer(known, blocks_to_write(known), ranks, device=torch.device("cpu"))
        self.traffic = TransferVolume()

    @property
    def is_leader(self) -> bool:
        """Return True for the rank that creates its machine's file."""
        return self.ranks.rank == self.here[0]

    def write(self, parts: Mapping[str, WeightPart], named: Path | None = None) -> WeightFile:
        """Write this version; the rank that made its machine's file frees it by `close`.

        Args:
            parts: This rank's parts.
            named: The path of a file that outlives this process; by default one without a name, or a folder of its own.

        Raises:
            OSError: On every rank, where a machine's memory is full or its folder missing.
        """
        with ExitStack() as made:
            path = self._create(made, named)
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._fill(handle, parts)
            except BaseException:
                os.close(handle)
                raise
            if named is not None:
                os.close(handle)
                made.pop_all()
                return WeightFile(path, lambda: path.unlink(missing_ok=True))
            if self.in_folder:
                os.close(handle)
                return WeightFile(path, made.pop_all().close)
        # The folder is removed: the open file has no name any more.
        return WeightFile(f"/proc/{os.getpid()}/fd/{handle}", lambda: os.close(handle))

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

    def _create(self, made: ExitStack, named: Path | None) -> Path:
        """Have each machine's leader create its file; return this machine's path."""
        said: dict[str, Any] = {}
        try:
            if self.is_leader:
                if named is None:
                    place = self.within if self.in_folder else shared_folder()
                    folder = made.enter_context(tempfile.TemporaryDirectory(prefix="braid-weights-", dir=place))
                    if self.in_folder:
                        Path(folder).chmod(0o755)
                    named = Path(folder) / WEIGHTS
                elif self.in_folder:
                    named.parent.mkdir(mode=0o755)
                said = {"path": str(named)}
                self.layout.make(named, 0o644 if self.in_folder else 0o600)
        except OSError as error:
            said = {"number": error.errno, "error": f"{error.filename or self.within}: {error.strerror}"}
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


class FilePublisher:
    """Writes a file on each machine, which its engines and servers read; ranks without an engine write with the others."""

    def __init__(self, writer: WeightWriter, parts: Parts, engine: PublishedEngine | None) -> None:
        self.writer, self.parts, self.engine = writer, parts, engine
        self._file: WeightFile | None = None

    def publish(self, version: int) -> TransferVolume:
        # An engine that comes back later reads the file of now, so that the one before goes when the next is there.
        before, self._file = self._file, self.writer.write(self.parts())
        try:
            if self.engine is not None:
                self.engine.publish(version, self._file)
        finally:
            if before is not None:
                before.close()
        return self.writer.traffic

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def machine() -> str:
    """Return a value that is equal for processes with the same shared memory, and for no others."""
    about = os.stat(shared_folder())
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{boot.read_text().strip() if boot.is_file() else os.uname().nodename} {about.st_dev} {about.st_ino}"


def blocks_to_write(known: ShardIndex) -> list[TensorGroup]:
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
    def of(cls, known: ShardIndex, check: bool, repeat: bool = False) -> "FileLayout":
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


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Return a checksum over names, dtypes, shapes and values."""
    found = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        found = zlib.crc32(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode(), found)
        found = zlib.crc32(tensor.contiguous().view(-1).view(torch.uint8).numpy().data, found)
    return f"{found:08x}"
