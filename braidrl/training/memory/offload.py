"""Offloading: move the contents of tensors off their device and back, bit for bit.

CUDA    device memory ──▶ pinned host memory ──▶ device memory      asynchronous copies, in the order of the stream
CPU     memory        ──▶ an unlinked file   ──▶ memory             the system gets the pages in the meantime

Only storages are emptied: parameters, views and optimizers keep their references to them.
"""

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterable
from typing import IO

import torch
from torch import Tensor, UntypedStorage

from braidrl.errors import UserError
from braidrl.weights.shards import empty, storages

Restore = Callable[[], None]
"""Restores one storage."""


class OffloadableTensors:
    """A set of tensors that can be offloaded. It is listed again at each move, as optimizer state appears with the first step.

    The next move, in either direction, completes an interrupted one.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        # By storage id; the storage is referenced so that its id is not reused.
        self._away: dict[int, tuple[UntypedStorage, int, Restore]] = {}
        self._file: IO[bytes] | None = None

    @property
    def away_bytes(self) -> int:
        """Return the number of offloaded bytes."""
        return sum(size for _, size, _ in self._away.values())

    def offload(self) -> None:
        """Offload everything that is on the device. Raises UserError if there is no space for it."""
        for storage in storages(self._tensors()):
            if (size := storage.nbytes()) and storage._cdata not in self._away:
                if storage.is_cuda:
                    restore = to_pinned(storage)
                else:
                    # In TMPDIR; it disappears with this process however it ends.
                    self._file = self._file or tempfile.TemporaryFile(prefix="braid-", buffering=0)  # noqa: SIM115
                    restore = to_file(storage, self._file)
                self._away[storage._cdata] = storage, size, restore
                empty(storage)

    def onload(self) -> None:
        """Restore everything that is offloaded."""
        while self._away:
            key, (_, _, restore) = next(iter(self._away.items()))
            restore()
            del self._away[key]
        self._file = None


def to_pinned(storage: UntypedStorage) -> Restore:
    """Copy a storage to pinned host memory. Its device memory may be reused at once, as the stream orders the copy."""
    size = storage.nbytes()

    def content() -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    host.copy_(content(), non_blocking=True)

    def restore() -> None:
        storage.resize_(size)
        content().copy_(host, non_blocking=True)

    return restore


def to_file(storage: UntypedStorage, file: IO[bytes]) -> Restore:
    """Append a storage's bytes to an unlinked file. Raises UserError if the disk is full."""
    place = os.fstat(file.fileno()).st_size
    try:
        transfer(lambda view, at: os.pwrite(file.fileno(), view, at), storage, place)
    except OSError as error:
        raise UserError(
            f"trainer.resident_gib: {tempfile.gettempdir()} has no room for {storage.nbytes():,} bytes of weights ({error.strerror}); "
            "set TMPDIR to a folder on a larger disk"
        ) from error
    return lambda: transfer(lambda view, at: os.preadv(file.fileno(), [view], at), storage, place)


def transfer(move: Callable[[memoryview, int], int], storage: UntypedStorage, place: int) -> None:
    """Move a storage's bytes to or from an offset in a file. Raises OSError if the file ends early."""
    view = memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
    done = 0
    while done < len(view):
        count = move(view[done:], place + done)
        if not count:
            raise OSError(f"{len(view) - done} bytes of offloaded weights are missing")
        done += count
