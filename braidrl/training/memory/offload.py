"""Offloading: the contents of tensors leave their device for a while and come back bit for bit.

CUDA    device memory ──▶ pinned host memory ──▶ device memory      asynchronous copies, in the order of the stream
CPU     memory        ──▶ an unnamed file    ──▶ memory             the system gets the pages back in the meantime

Only storages are emptied: every parameter, view and optimizer that refers to one finds it again as it was.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, UntypedStorage

from braidrl.errors import UserError
from braidrl.weights.shards import empty, storages

Restore = Callable[[], None]
"""Bring back one storage."""


class OffloadableTensors:
    """A set of tensors that can be offloaded. It is read anew at each move: an optimizer's state appears with its first step.

    A move that was interrupted is completed by the next one, in either direction.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        # By storage, which is kept so that no other takes its place.
        self._away: dict[int, tuple[UntypedStorage, int, Restore]] = {}
        self._file: UnnamedFile | None = None

    @property
    def away_bytes(self) -> int:
        """Return the number of bytes that are not on the device."""
        return sum(size for _, size, _ in self._away.values())

    def offload(self) -> None:
        """Offload everything that is on the device. Raises UserError where there is no room for it."""
        for storage in storages(self._tensors()):
            if (size := storage.nbytes()) and storage._cdata not in self._away:
                restore = to_pinned(storage) if storage.is_cuda else self._to_file(storage)
                self._away[storage._cdata] = storage, size, restore
                empty(storage)

    def onload(self) -> None:
        """Bring back everything that is offloaded."""
        while self._away:
            key, (_, _, restore) = next(iter(self._away.items()))
            restore()
            del self._away[key]
        self._file = None

    def _to_file(self, storage: UntypedStorage) -> Restore:
        self._file = self._file or UnnamedFile()
        return self._file.put(storage)


def to_pinned(storage: UntypedStorage) -> Restore:
    """Copy a storage to pinned host memory. Its device memory may be reused at once: the stream keeps the order."""
    size = storage.nbytes()

    def content() -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.copy_(content(), non_blocking=True)

    def restore() -> None:
        storage.resize_(size)
        content().copy_(host, non_blocking=True)

    return restore


def memory(storage: UntypedStorage) -> memoryview:
    """Return a view of a CPU storage's bytes."""
    return memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")


class UnnamedFile:
    """A file in TMPDIR that disappears with this process, however that ends."""

    def __init__(self) -> None:
        self._file: Any = tempfile.TemporaryFile(prefix="braid-", buffering=0)  # noqa: SIM115

    def put(self, storage: UntypedStorage) -> Restore:
        """Append a storage's bytes. Raises UserError where the disk is full."""
        number, size = self._file.fileno(), storage.nbytes()
        place = os.fstat(number).st_size
        try:
            transfer(lambda view, at: os.pwrite(number, view, at), storage, place)
        except OSError as error:
            raise UserError(
                f"trainer.resident_gib: {tempfile.gettempdir()} has no room for {size:,} bytes of weights ({error.strerror}); "
                "set TMPDIR to a folder on a larger disk"
            ) from error
        return lambda: self.take(storage, place)

    def take(self, storage: UntypedStorage, place: int) -> None:
        transfer(lambda view, at: os.preadv(self._file.fileno(), [view], at), storage, place)


def transfer(move: Callable[[memoryview, int], int], storage: UntypedStorage, place: int) -> None:
    """Move a storage's bytes to or from a place in a file. Raises OSError where the file ends early."""
    view, done = memory(storage), 0
    while done < len(view):
        count = move(view[done:], place + done)
        if not count:
            raise OSError(f"{len(view) - done} bytes of weights that were put away are not there")
        done += count
