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


class OffloadableTensors:
    """A set of tensors that can be offloaded.

    It is listed again at each move, as optimizer state appears with the first step. The next move, in either direction,
    completes an interrupted one.
    """

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        # By storage id, with the number of bytes: a copy in host memory, or the offset in the file. The storage is
        # referenced so that its id is not reused.
        self._away: dict[int, tuple[UntypedStorage, int, Tensor | int]] = {}
        self._file: IO[bytes] | None = None

    @property
    def away_bytes(self) -> int:
        return sum(size for _, size, _ in self._away.values())

    def offload(self) -> None:
        """Offload everything that is on the device. Raises UserError if there is no space for it."""
        for storage in storages(self._tensors()):
            size = storage.nbytes()
            if not size or storage._cdata in self._away:
                continue
            backup: Tensor | int
            if storage.is_cuda:
                # The device memory may be reused immediately, as the stream orders the copy.
                backup = torch.empty(size, dtype=torch.uint8, pin_memory=True)
                backup.copy_(bytes_of(storage), non_blocking=True)
            else:
                # In TMPDIR; the file disappears with this process whether or not it fails.
                self._file = self._file or tempfile.TemporaryFile(prefix="braid-", buffering=0)  # noqa: SIM115
                backup = os.fstat(self._file.fileno()).st_size
                try:
                    transfer(storage, self._file, backup, write=True)
                except OSError as error:
                    raise UserError(
                        f"trainer.resident_gib: {tempfile.gettempdir()} has no room for {size:,} bytes of weights "
                        f"({error.strerror}); set TMPDIR to a folder on a larger disk"
                    ) from error
            self._away[storage._cdata] = storage, size, backup
            empty(storage)

    def onload(self) -> None:
        while self._away:
            key, (storage, size, backup) = next(iter(self._away.items()))
            if isinstance(backup, Tensor):
                storage.resize_(size)
                bytes_of(storage).copy_(backup, non_blocking=True)
            else:
                assert self._file is not None
                transfer(storage, self._file, backup, write=False)
            del self._away[key]
        self._file = None


def bytes_of(storage: UntypedStorage) -> Tensor:
    """Return a storage's bytes as a tensor that shares them."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def transfer(storage: UntypedStorage, file: IO[bytes], offset: int, write: bool) -> None:
    """Write a storage's bytes to an offset in a file, or read them from there.

    Raises OSError if the file ends early.
    """
    view = memoryview((ctypes.c_ubyte * storage.nbytes()).from_address(storage.data_ptr())).cast("B")
    done = 0
    while done < len(view):
        rest, at = view[done:], offset + done
        count = os.pwrite(file.fileno(), rest, at) if write else os.preadv(file.fileno(), [rest], at)
        if not count:
            raise OSError(f"{len(rest)} bytes of offloaded weights are missing")
        done += count
