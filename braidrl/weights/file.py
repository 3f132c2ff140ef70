"""Weights in a safetensors file, in shared memory or on disk: the general fallback, and the only path to servers of
other projects.

rank 0  its blocks ╮
rank 1  its blocks ┼─▶ model.safetensors ──▶ an embedded engine of the machine uses its pages; others copy parts
rank 2  its blocks ╯        blocks missing on a machine come from another one, in rounds of bounded size

In shared memory the file is unlinked once it is complete: it disappears with the rank that created it.

A checkpoint is a set of files of whole tensors, each file written and hashed by one rank; blocks come to it in rounds:

rank 0   its blocks ╮          ╭──▶ rank 0 ──▶ model-00001-of-00002.safetensors, SHA-256
rank 1   its blocks ┴─ rounds ─┴──▶ rank 1 ──▶ model-00002-of-00002.safetensors, SHA-256
"""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from math import prod
from operator import mul
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from braidrl.cluster.shared_memory import machine, shared_folder, write_at
from braidrl.cluster.world import Ranks
from braidrl.weights.boxes import Box
from braidrl.weights.publisher import PublishedEngine, TransferVolume
from braidrl.weights.reshard_plan import TensorGroup, gather_shard_index, shared_blocks
from braidrl.weights.shards import Parts, WeightPart, check_parts, full_parts
from braidrl.weights.transfer import LIMIT_BYTES, WeightTransfer

WEIGHTS = "model.safetensors"
"""The name of the file in its folder."""
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names of an adapter's files in its folder, which are peft's."""
TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
TYPES |= {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8"}
TYPES |= {torch.uint8: "U8", torch.bool: "BOOL"}
"""The safetensors names of dtypes."""
DTYPES = {name: dtype for dtype, name in TYPES.items()}
METADATA = "__metadata__"
"""The header's entry with other names of tied tensors."""
WORD = 8
"""Bytes of the length at the start of the file."""
FILE_BYTES = 1 << 30
"""Bytes of the tensors in one file of a set; a larger tensor has its own."""
ALIGNED = 64
"""The alignment of torch's own memory in bytes.

The header is padded to it; tensors keep it while sizes are multiples of it.
"""


class WeightFile:
    """One version in a safetensors file, valid until it is closed; its metadata maps further names of tied tensors to
    the stored name.
    """

    def __init__(self, path: Path | str, close: Callable[[], object] = lambda: None) -> None:
        """Read the file at `path`; `close` frees it if this process created it."""
        self.path, self.close = Path(path), close
        self.folder = self.path.parent
        """The folder that servers read."""
        self.is_adapter = self.path.name == ADAPTER
        """True if the file holds the adapters of a model alone."""

    def parts(self) -> dict[str, WeightPart]:
        """Return the tensors as private writable views of the file: writes change this process's copy, not the file."""
        with open(self.path, "rb") as file:
            header: dict[str, Any] = json.loads(file.read(int.from_bytes(file.read(WORD), "little")))
            begin = file.tell()
        # safetensors makes a storage for each tensor; tensors that the decoder joins must share one.
        content = torch.from_file(str(self.path), shared=False, size=self.path.stat().st_size, dtype=torch.uint8)
        names = {name: [name] for name in header if name != METADATA}
        for name, same in header.get(METADATA, {}).items():
            names[same].append(name)
        parts = {}
        for name, every in names.items():
            (start, end), dtype = header[name]["data_offsets"], DTYPES[header[name]["dtype"]]
            tensor = content[begin + start : begin + end].view(dtype).view(header[name]["shape"])
            parts[name] = WeightPart(every, tensor)
        return parts

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, a tied one under each of its names; the file is read lazily."""
        for part in self.parts().values():
            yield from ((name, part.local) for name in part.names)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every tensor, a tied one under each of its names."""
        return {name: tensor.shape for name, tensor in self.tensors()}

    def put_into(self, parts: Mapping[str, WeightPart], ranks: Ranks | None = None) -> None:
        """Write this version into a model's parts, without communication. Raises ValueError, before any change, if they
        are another model's.
        """
        tensors = dict(self.tensors())
        check_parts({name: tensor.shape for name, tensor in tensors.items()}, parts)
        for name, part in parts.items():
            part.put_blocks(tensors[name])


def stored_weights(
    tensors: Iterable[tuple[str, Tensor]], repeat: bool = False, within: Path | None = None
) -> WeightFile:
    """Return a file with copies of full tensors, placed as a `WeightWriter`'s.

    Raises OSError if its folder is missing or full.
    """
    parts = full_parts(tensors)
    return WeightWriter(parts, Ranks(), repeat, within).write(parts)


class WeightWriter:
    """A weight file's plan, which ranks execute together for each version."""

    def __init__(
        self,
        parts: Mapping[str, WeightPart],
        ranks: Ranks,
        repeat: bool = False,
        within: Path | None = None,
        adapter: str | None = None,
    ) -> None:
        """Plan the file; all ranks call this, and `write`, at the same time.

        With `repeat` it is for servers: in a folder below `within`, with tied tensors under every name. Otherwise it is
        in shared memory. `adapter` is the text of `adapter_config.json`: the parts are adapters, in a folder in peft's
        format.
        """
        self.ranks, self.adapter = ranks, adapter
        self.in_folder, self.within = repeat or adapter is not None, within if adapter is None else shared_folder()
        index = gather_shard_index(parts, ranks, machine())
        ranks_on: dict[str, list[int]] = {}
        for rank, where in enumerate(index.machines):
            ranks_on.setdefault(where, []).append(rank)
        self.machines = sorted(ranks_on)
        """The machines that receive a file of each version."""
        self.leader = ranks_on[index.machines[ranks.rank]][0]
        self.is_leader = ranks.rank == self.leader
        """Whether this rank creates its machine's file."""
        others = {name: first for first, part in index.tensors.items() for name in part.names if name != first}
        self.repeated = others if repeat else {}
        """The other names of tied tensors that are stored under every name, and the first."""
        self.tensors = {name: part.local for name, part in index.tensors.items()}
        stored = self.tensors | {name: self.tensors[same] for name, same in self.repeated.items()}
        self.header, self.size = file_header(stored, others if not repeat else {})
        # The ranks of each machine write every element once.
        groups = [
            replace(group, wanted=[block for here in ranks_on.values() for block in shared_blocks(group, here)])
            for group in index.groups()
        ]
        # Readers map the file on the CPU, so blocks are exchanged there.
        self.transfer = WeightTransfer(index, groups, ranks, device=torch.device("cpu"))

    def write(self, parts: Mapping[str, WeightPart], named: Path | None = None) -> WeightFile:
        """Write this version; the machine's leader frees its file by `close`.

        `named` is the path of a file that outlives this process; by default the file is unlinked, or in a temporary
        folder. Raises OSError on every rank if a machine's memory is full or its folder is missing.
        """
        with ExitStack() as cleanup:
            path = self._create(cleanup, named)
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                begin, failed = os.fstat(handle).st_size - self.size, list[OSError]()
                starts: dict[str, list[int]] = {name: [] for name in self.tensors}
                for name in self.header.keys() - {METADATA}:
                    starts[self.repeated.get(name, name)].append(begin + self.header[name]["data_offsets"][0])
                into = {
                    name: FilePart([name], tensor, handle=handle, starts=starts[name], failed=failed)
                    for name, tensor in self.tensors.items()
                }
                self.transfer.run(parts, into)
                gathered(self.ranks, "blocks of other ranks", error_message(failed[0], path) if failed else {})
            except BaseException:
                os.close(handle)
                raise
            if named is None and not self.in_folder:
                # The folder is removed, so the file is unlinked; it exists while it is open.
                return WeightFile(f"/proc/{os.getpid()}/fd/{handle}", lambda: os.close(handle))
            os.close(handle)
            return WeightFile(path, cleanup.pop_all().close)

    def _create(self, cleanup: ExitStack, named: Path | None) -> Path:
        """Create the file on each machine's leader, with its header and space for all tensors; return the path here."""
        outcome, for_servers = dict[str, Any](), self.in_folder and self.adapter is None
        header = header_bytes(self.header)
        try:
            if self.is_leader:
                if named is None:
                    parent = self.within if self.in_folder else shared_folder()
                    folder = cleanup.enter_context(tempfile.TemporaryDirectory(prefix="braid-weights-", dir=parent))
                    if for_servers:
                        Path(folder).chmod(0o755)
                    named = Path(folder) / (WEIGHTS if self.adapter is None else ADAPTER)
                    if self.adapter is not None:
                        (Path(folder) / ADAPTER_CONFIG).write_text(self.adapter)
                else:
                    if self.in_folder:
                        named.parent.mkdir(mode=0o755)
                    cleanup.callback(remove_version, named)
                outcome = {"path": str(named)}
                mode, flags = 0o644 if for_servers else 0o600, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
                handle = os.open(named, flags, mode)
                try:
                    write_at(handle, memoryview(header), 0)
                    os.truncate(handle, len(header) + self.size)
                finally:
                    os.close(handle)
        except OSError as error:
            outcome = error_message(error, named or self.within)
        return Path(gathered(self.ranks, "creation of the weight file", outcome)[self.leader]["path"])


def file_header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> tuple[dict[str, Any], int]:
    """Return a file's header, with byte offsets counted from the header's end, and the bytes of all tensors."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    size = 0
    # By descending element size, so that each is aligned; then in the model's order: a decoder joins neighbours without
    # a copy.
    for name, tensor in sorted(tensors.items(), key=lambda pair: -pair[1].itemsize):
        start, size = size, size + tensor.nbytes
        header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, size]}
    return header, size


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Return a header as it starts a file, with its length before it."""
    text = json.dumps(header).encode()
    text += b" " * (-(WORD + len(text)) % ALIGNED)
    return len(text).to_bytes(WORD, "little") + text


class SetWriter:
    """A set of safetensors files that ranks write together: each file by one rank, of full tensors in the order of the
    model.

    In addition to its parts, a rank holds at most `limit_bytes` that come from other ranks or go to them.
    """

    def __init__(
        self, parts: Mapping[str, WeightPart], ranks: Ranks, stem: str = "model", limit_bytes: int = LIMIT_BYTES
    ) -> None:
        """Plan the files, which begin with `stem`; all ranks call this, and `write`, at the same time."""
        self.ranks, index = ranks, gather_shard_index(parts, ranks, machine())
        self.tensors = {name: part.local for name, part in index.tensors.items()}
        files, filled = list[list[str]](), FILE_BYTES
        for name, tensor in self.tensors.items():
            if filled + tensor.nbytes > FILE_BYTES:
                files.append([])
                filled = 0
            files[-1].append(name)
            filled += tensor.nbytes
        names = [f"{stem}-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)]
        self.files = dict(zip(names if len(files) > 1 else [f"{stem}.safetensors"], files, strict=True))
        """The names of the tensors in each file."""
        self.writers = {file: n * ranks.size // len(self.files) for n, file in enumerate(self.files)}
        """The rank that writes each file."""
        self.index = f"{stem}.safetensors.index.json"
        """The name of the file that says where each tensor is, if there are several files."""
        writer_of = {name: self.writers[file] for file, some in self.files.items() for name in some}
        order, groups = list(self.tensors), list[TensorGroup]()
        for group in index.groups():
            by_writer: dict[int, list[int]] = {}
            for number in group.tensors:
                by_writer.setdefault(writer_of[order[number]], []).append(number)
            groups += [
                replace(group, tensors=numbers, wanted=[(rank, Box.whole(group.shape))])
                for rank, numbers in by_writer.items()
            ]
        self.transfer = WeightTransfer(index, groups, ranks, limit_bytes, torch.device("cpu"))

    def write(self, parts: Mapping[str, WeightPart], folder: Path) -> dict[str, list[Any]]:
        """Write the set into a folder; return the size in bytes and the SHA-256 of each file, on every rank.

        Raises OSError on every rank if one of them cannot write.
        """
        files_here = [file for file, rank in self.writers.items() if rank == self.ranks.rank]
        handles, failed, into = dict[str, int](), list[OSError](), dict[str, WeightPart]()
        with ExitStack() as opened:
            for file in files_here:
                try:
                    handles[file] = self._create(folder / file, opened)
                except OSError as error:
                    failed.append(error)
                begin = os.fstat(handles[file]).st_size - self._header(file)[1] if file in handles else 0
                for name in self.files[file]:
                    start = begin + self._header(file)[0][name]["data_offsets"][0]
                    handle = handles.get(file, -1)
                    into[name] = FilePart([name], self.tensors[name], handle=handle, starts=[start], failed=failed)
            self.transfer.run(parts, into)
            outcome: dict[str, Any] = error_message(failed[0], folder) if failed else {}
            try:
                for handle in handles.values() if not failed else ():
                    os.fsync(handle)
                outcome = outcome or {"files": {file: digest(folder / file) for file in files_here}}
            except OSError as error:
                outcome = error_message(error, folder)
        written = gathered(self.ranks, "files of a checkpoint", outcome)
        return {file: about for answer in written for file, about in answer["files"].items()}

    def write_index(self, folder: Path) -> dict[str, list[Any]]:
        """Write the index of several files, on one rank; return its size and SHA-256, keyed by its name."""
        if len(self.files) == 1:
            return {}
        where = {name: file for file, names in self.files.items() for name in names}
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        text = json.dumps({"metadata": {"total_size": size}, "weight_map": where}, indent=1)
        (folder / self.index).write_text(text)
        return {self.index: digest(folder / self.index)}

    def _header(self, file: str) -> tuple[dict[str, Any], int]:
        return file_header({name: self.tensors[name] for name in self.files[file]}, {"format": "pt"})

    def _create(self, path: Path, opened: ExitStack) -> int:
        """Create a file with its header and space for all tensors; return its handle."""
        header, size = self._header(path.name)
        text = header_bytes(header)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o644)
        opened.callback(os.close, handle)
        write_at(handle, memoryview(text), 0)
        os.truncate(handle, len(text) + size)
        return handle


def digest(path: Path) -> list[Any]:
    """Return the size in bytes and the SHA-256 of a file."""
    with path.open("rb") as file:
        return [path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()]


def gathered(ranks: Ranks, purpose: str, outcome: dict[str, Any]) -> list[dict[str, Any]]:
    """Gather a message from every rank. Raises OSError if one of them is an error."""
    of_all = ranks.all_gather(purpose, outcome)
    for failed in of_all:
        if "error" in failed:
            raise OSError(failed["number"], failed["error"])
    return of_all


def remove_version(path: Path) -> None:
    """Remove the named file of a version, if it exists, and the folder that was made for servers."""
    path.unlink(missing_ok=True)
    if path.name == WEIGHTS and path.parent.is_dir():
        path.parent.rmdir()


def error_message(error: OSError, path: Path | None) -> dict[str, Any]:
    """Return an error as a message to other ranks."""
    return {"number": error.errno, "error": f"{error.filename or path}: {error.strerror}"}


@dataclass(frozen=True, kw_only=True)
class FilePart(WeightPart):
    """A tensor in an open file, which a transfer fills."""

    handle: int
    starts: Sequence[int]
    """The byte offset of the tensor under each of its names."""
    failed: list[OSError]
    """Errors of writes. The rank continues after an error, because other ranks exchange blocks with it."""

    def put(self, block: Tensor, box: Box) -> None:
        """Write a block of the tensor."""
        data = block.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
        # The block is a run of bytes for each index along the dimensions before the last partially covered one.
        cut = max((axis for axis, size in enumerate(self.shape) if box.sizes[axis] < size), default=0)
        strides = [prod(self.shape[axis + 1 :]) for axis in range(len(self.shape))]
        run = prod(box.sizes[cut:]) * block.itemsize
        ranges = [
            range(at, at + (size if axis < cut else 1))
            for axis, (at, size) in enumerate(zip(box.offsets, box.sizes, strict=True))
        ]
        try:
            for number, coordinates in enumerate(product(*ranges)):
                at = sum(map(mul, coordinates, strides)) * block.itemsize
                for start in self.starts:
                    write_at(self.handle, data[number * run : (number + 1) * run], start + at)
        except OSError as error:
            self.failed.append(error)


@dataclass
class FilePublisher:
    """A publisher that writes a file per machine for its engines and servers; ranks without an engine write too.

    Under streaming it keeps the versions that engines may still load.
    """

    writer: WeightWriter
    parts: Parts
    engine: PublishedEngine | None
    files: dict[int, WeightFile] = field(default_factory=dict)
    """The files of the versions that are kept."""

    def write(self, version: int, parts: Mapping[str, WeightPart], named: Path | None = None) -> WeightFile:
        """Write a version and keep the previous ones; the arguments are those of `WeightWriter.write`."""
        file = self.files[version] = self.writer.write(parts, named)
        return file

    def publish(self, version: int) -> TransferVolume:
        # An engine that restarts reads the current file, so the previous one is freed only after the next is published.
        before, self.files = self.files, {version: self.writer.write(self.parts())}
        try:
            if self.engine is not None:
                self.engine.publish(version, self.files[version])
        finally:
            for file in before.values():
                file.close()
        return self.writer.transfer.traffic

    def forget(self, versions: Iterable[int]) -> None:
        """Free versions that no engine loads any more."""
        for version in versions:
            if (file := self.files.pop(version, None)) is not None:
                file.close()

    def close(self) -> None:
        self.forget(list(self.files))
