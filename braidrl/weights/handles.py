"""One version of a model's weights as handles of the trainer's own tensors, which engines in other processes map and copy.

trainer ──handle of each tensor──▶ engine's process maps it, copies it, lets go ──answer──▶ only then may the tensors change

On CUDA a handle is CUDA's own for memory that processes of one device share (IPC): nothing is written in between. On a CPU it is an open
file of shared memory, into which the tensor is copied.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, UntypedStorage

from braidrl.engines.engine import EngineError


class Sharing(NamedTuple):
    """How memory of one kind of device gets from process to process."""

    export: Callable[[UntypedStorage], list[Any]]
    """Returns what another process maps the storage by: numbers and bytes. They are good for one process, while the storage is there."""
    map: Callable[[list[Any]], UntypedStorage]
    """Inverts it in another process."""
    finish: Callable[[], None]
    """Waits until what was begun with mapped memory is done."""


class LiveWeights:
    """The trainer's own tensors, which are a version's as long as `is_current` says so."""

    def __init__(self, tensors: Mapping[str, Tensor], is_current: Callable[[], bool] = lambda: True) -> None:
        """Take tensors by their names, a tied one under each of its names."""
        self._tensors, self._is_current = tensors, is_current

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        return self._tensors.items()

    @contextmanager
    def handles(self) -> Iterator[list[dict[str, Any]]]:
        """Yield a handle of each tensor as plain data, for one other process, which has to be done with them at the end.

        Raises EngineError where the tensors have changed, or left the device, since they were this version.
        """
        if not self._is_current():
            raise EngineError(
                "the trainer's weights have changed since that version; the next one is given to all engines"
            )
        # Storages of their own for the same memory: those of the tensors stay as they are, however often they are shared.
        kept = [torch.from_dlpack(tensor.detach().contiguous()) for tensor in self._tensors.values()]
        try:
            yield [handle_of(name, tensor) for name, tensor in zip(self._tensors, kept, strict=True)]
        finally:
            kept.clear()

    def close(self) -> None:
        """Do nothing: the memory is the trainer's."""


class MappedWeights:
    """The weights that handles of another process stand for."""

    def __init__(self, handles: Sequence[Mapping[str, Any]]) -> None:
        self.handles = handles

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor by its name; none may be kept after `finish`."""
        for handle in self.handles:
            yield handle["name"], mapped(handle)

    def shapes(self) -> dict[str, torch.Size]:
        """Return the shape of every tensor."""
        return {handle["name"]: torch.Size(handle["shape"]) for handle in self.handles}

    def finish(self) -> None:
        """Wait until every copy that was begun is made: the other process may change its tensors then."""
        for device in {handle["device"] for handle in self.handles}:
            SHARING[device].finish()


def handle_of(name: str, tensor: Tensor) -> dict[str, Any]:
    """Return a contiguous tensor's handle, which is plain data."""
    place = SHARING[tensor.device.type].export(tensor.untyped_storage())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {"name": name, "dtype": dtype, "shape": list(tensor.shape), "device": tensor.device.type, "place": place}


def mapped(handle: Mapping[str, Any]) -> Tensor:
    """Return the tensor in another process's memory that a handle stands for."""
    storage = SHARING[handle["device"]].map(handle["place"])
    tensor = torch.empty(0, dtype=getattr(torch, handle["dtype"]), device=storage.device)
    return tensor.set_(storage).view(handle["shape"])


def export_cuda(storage: UntypedStorage) -> list[Any]:
    """Return CUDA's handle of a storage."""
    found: list[Any] = list(storage._share_cuda_())
    return found


def map_cuda(place: list[Any]) -> UntypedStorage:
    """Return a storage of this process's own device, which is the other process's too, whatever number it has there."""
    torch.cuda.init()
    storage: UntypedStorage = UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *place[1:])
    return storage


def export_memory(storage: UntypedStorage) -> list[Any]:
    """Return the process and number of an open file into which the storage has been copied."""
    return [os.getpid(), *storage._share_fd_cpu_()]


def map_memory(place: list[Any]) -> UntypedStorage:
    """Return a storage in another process's open file."""
    process, number, size = place
    content = torch.from_file(f"/proc/{process}/fd/{number}", shared=True, size=size, dtype=torch.uint8)
    return content.untyped_storage()


SHARING = {
    "cuda": Sharing(export_cuda, map_cuda, torch.cuda.synchronize),
    "cpu": Sharing(export_memory, map_memory, lambda: None),
}
"""By kind of device."""
