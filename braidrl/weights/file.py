"""Weights in a safetensors file, in shared memory or on disk: the general fallback, and the only path to servers of other projects.

rank 0   its blocks ╮
rank 1   its blocks ┼──▶ model.safetensors ──▶ every engine of the machine maps it and copies what it needs
rank 2   its blocks ╯         blocks missing on a machine come from another one, in rounds of bounded size

In shared memory the file is unlinked once it is complete: it disappears with the rank that created it.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from braidrl.cluster.shared_memory import machine, shared_folder
from braidrl.cluster.world import Ranks
from braidrl.weights.publisher import PublishedEngine, TransferVolume
from braidrl.weights.reshard_plan import gather_shard_index, shared_blocks
from braidrl.weights.shards import Parts, WeightPart, check_parts, full_parts
from braidrl.weights.transfer import WeightTransfer

WEIGHTS = "model.safetensors"
"""The name of the file in its folder."""
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
"""The names of an adapter's files in its folder, which are peft's."""
TYPES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
"""The safetensors names of dtypes."""
WORD = 8
"""Bytes of the length at the start of the file; the header is padded to a multiple of it."""


class WeightFile:
    """One version in a safetensors file, valid until it is closed; its metadata maps other names of tied tensors to the stored name."""

    def __init__(self, path: Path | str, close: Callable[[], object] = lambda: None) -> None:
        """Read the file at `path`; `close` frees it if this process created it."""
        self.path, self.close = Path(path), close
        self.folder = self.path.parent
        """The folder that servers read."""
        self.is_adapter = self.path.name == ADAPTER
        """True if the file holds the adapters of a model alone."""

    def parts(self) -> dict[str, WeightPart]:
        """Return the tensors as parts that are backed by the file."""
        with safe_open(self.path, "pt") as file:
            names = {name: [name] for name in file.keys()}  # noqa: SIM118
            for name, same in (file.metadata() or {}).items():
                names[same].append(name)
            return {name: WeightPart(every, file.get_tensor(name)) for name, every in names.items()}

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor, a tied one under each of its names; the file is read lazily."""
        for part in self.parts().values():
            yield from ((name, part.local) for name in part.names)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every tensor, a tied one under each of its names."""
        return {name: tensor.shape for name, tensor in self.tensors()}

    def put_into(self, parts: Mapping[str, WeightPart], ranks: Ranks | None = None) -> None:
        """Write this version into a model's parts, each rank alone. Raises ValueError, before any change, if they are another model's."""
        given = dict(self.tensors())
        check_parts({name: tensor.shape for name, tensor in given.items()}, parts)
        for name, part in parts.items():
            part.put(part.box.of(given[name]), part.box)


def stored_weights(
    tensors: Iterable[tuple[str, Tensor]], repeat: bool = False, within: Path | None = None
) -> WeightFile:
    """Return a file with copies of full tensors, placed as a `WeightWriter`'s. Raises OSError if its folder is missing or full."""
    parts = full_parts(tensors)
    return WeightWriter(parts, Ranks(), repeat, within).write(parts)


class WeightWriter:
    """A weight file's plan, which ranks execute together for each version."""

    def __init__(
        self, parts: Mapping[str, WeightPart], ranks: Ranks, repeat: bool = False, within: Path | None = None,
        adapter: str | None = None,
    ) -> None:  # fmt: skip
        """Plan the file; all ranks call this, and `write`, at the same time.

        With `repeat` it is for servers: in a folder below `within`, with tied tensors under every name. Else it is in shared memory, with
        `adapter`, the text of `adapter_config.json`, in a folder there in peft's format: the parts are adapters.
        """
        self.ranks, self.adapter = ranks, adapter
        self.in_folder, self.within = repeat or adapter is not None, within if adapter is None else shared_folder()
        known = gather_shard_index(parts, ranks, machine())
        ranks_on: dict[str, list[int]] = {}
        for rank, where in enumerate(known.machines):
            ranks_on.setdefault(where, []).append(rank)
        self.machines = sorted(ranks_on)
        """The machines that receive a file of each version."""
        self.leader = ranks_on[known.machines[ranks.rank]][0]
        self.is_leader = ranks.rank == self.leader
        """Whether this rank creates its machine's file."""
        others = {other: first for first, part in known.tensors.items() for other in part.names if other != first}
        self.repeated = others if repeat else {}
        """The other names of tied tensors that are stored under every name, and the first."""
        self.header: dict[str, Any] = {"__metadata__": others} if others and not repeat else {}
        """The file's header: the bytes of each tensor in `tensors`, counted from its end."""
        self.tensors, self.size = {name: part.local for name, part in known.tensors.items()}, 0
        self.tensors |= {name: self.tensors[same] for name, same in self.repeated.items()}
        # By descending element size, so that each is aligned.
        for name, tensor in sorted(self.tensors.items(), key=lambda one: (-one[1].itemsize, one[0])):
            start, self.size = self.size, self.size + tensor.nbytes
            offsets = [start, self.size]
            self.header[name] = {"dtype": TYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        # The ranks of each machine write every element once.
        groups = [
            replace(group, wanted=[block for here in ranks_on.values() for block in shared_blocks(group, here)])
            for group in known.groups()
        ]
        # Readers map the file on the CPU, so blocks are exchanged there.
        self.transfer = WeightTransfer(known, groups, ranks, device=torch.device("cpu"))

    def write(self, parts: Mapping[str, WeightPart], named: Path | None = None) -> WeightFile:
        """Write this version; the machine's leader frees its file by `close`.

        `named` is the path of a file that outlives this process; by default the file is unlinked, or in a temporary folder. Raises OSError
        on every rank if a machine's memory is full or its folder is missing.
        """
        with ExitStack() as made:
            path = self._create(made, named)
            handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                # The file's tensors are mapped while any of them is alive.
                size = os.fstat(handle).st_size
                content = torch.from_file(f"/proc/self/fd/{handle}", shared=True, size=size, dtype=torch.uint8)
                body = content[size - self.size :]
                tensors = {
                    name: body[slice(*self.header[name]["data_offsets"])].view(tensor.dtype).view(tensor.shape)
                    for name, tensor in self.tensors.items()
                }
                self.transfer.run(parts, {name: WeightPart([name], own) for name, own in tensors.items()})
                self.ranks.all_gather("blocks of other ranks", None)
                if self.repeated:
                    for name, same in self.repeated.items() if self.is_leader else ():
                        tensors[name].copy_(tensors[same])
                    self.ranks.all_gather("tied tensors of the weight file", None)
            except BaseException:
                os.close(handle)
                raise
            if named is None and not self.in_folder:
                # The folder is removed, so the file is unlinked; it lives while it is open.
                return WeightFile(f"/proc/{os.getpid()}/fd/{handle}", lambda: os.close(handle))
            os.close(handle)
            remove = made.pop_all().close
        return WeightFile(path, remove if named is None else lambda: path.unlink(missing_ok=True))

    def _create(self, made: ExitStack, named: Path | None) -> Path:
        """Create the file on each machine's leader, with its header and space for all tensors; return this machine's path."""
        said, for_servers = dict[str, Any](), self.in_folder and self.adapter is None
        header = json.dumps(self.header).encode()
        header += b" " * (-len(header) % WORD)
        header = len(header).to_bytes(WORD, "little") + header
        try:
            if self.is_leader:
                if named is None:
                    place = self.within if self.in_folder else shared_folder()
                    folder = made.enter_context(tempfile.TemporaryDirectory(prefix="braid-weights-", dir=place))
                    if for_servers:
                        Path(folder).chmod(0o755)
                    named = Path(folder) / (WEIGHTS if self.adapter is None else ADAPTER)
                    if self.adapter is not None:
                        (Path(folder) / ADAPTER_CONFIG).write_text(self.adapter)
                elif self.in_folder:
                    named.parent.mkdir(mode=0o755)
                said = {"path": str(named)}
                mode, flags = 0o644 if for_servers else 0o600, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC
                handle = os.open(named, flags, mode)
                try:
                    # Allocate all pages now: a write to a mapped page without memory would kill the process by SIGBUS.
                    os.posix_fallocate(handle, 0, len(header) + self.size)
                    os.pwrite(handle, header, 0)
                except OSError:
                    os.unlink(named)
                    raise
                finally:
                    os.close(handle)
        except OSError as error:
            said = {"number": error.errno, "error": f"{error.filename or named or self.within}: {error.strerror}"}
        of_all = self.ranks.all_gather("creation of the weight file", said)
        for failed in of_all:
            if "error" in failed:
                raise OSError(failed["number"], failed["error"])
        return Path(of_all[self.leader]["path"])


@dataclass
class FilePublisher:
    """A publisher that writes a file per machine for its engines and servers; ranks without an engine write too."""

    writer: WeightWriter
    parts: Parts
    engine: PublishedEngine | None
    _file: WeightFile | None = None

    def publish(self, version: int) -> TransferVolume:
        # An engine that restarts reads the current file, so the previous one is freed only after the next is published.
        before, self._file = self._file, self.writer.write(self.parts())
        try:
            if self.engine is not None:
                self.engine.publish(version, self._file)
        finally:
            if before is not None:
                before.close()
        return self.writer.transfer.traffic

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
