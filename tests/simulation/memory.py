"""Storage of a simulated run: segments in a dictionary, which may be full."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from braidrl.data.messages import Frame
from braidrl.queue.client import DataPlane
from braidrl.queue.storage import Place, StorageBackend

RUN = "51"


class Memory:
    """The segments of all processes, and the processes whose writes are refused."""

    def __init__(self) -> None:
        self.segments: dict[str, list[bytes]] = {}
        self.full: set[str] = set()


class MemoryStorage(StorageBackend):
    """One process's access to them."""

    def __init__(self, memory: Memory, writer: str) -> None:
        super().__init__(RUN, writer)
        self.memory = memory

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        name = self.next_name()
        if self.writer in self.memory.full:
            raise OSError(28, "no room")
        self.memory.segments[name] = [bytes(frame) for frame in frames]
        return name, sum(memoryview(frame).nbytes for frame in frames)

    def read(self, name: str) -> Sequence[Frame]:
        try:
            return self.memory.segments[name]
        except KeyError:
            raise FileNotFoundError(name) from None

    def unlink(self, names: Collection[str]) -> None:
        for name in names:
            self.memory.segments.pop(name, None)

    def names(self, writer: str | None = None) -> list[str]:
        prefix = self.pattern(writer).replace("*", "") if writer is None else self.pattern(writer)[:-1]
        return sorted(name for name in self.memory.segments if name.startswith(prefix.rstrip("-") + "-"))


class MemoryPlane(DataPlane):
    """The real data plane on this storage."""

    def __init__(self, memory: Memory, writer: str) -> None:
        super().__init__(Place("here", RUN, "here"), writer)
        self.segments = MemoryStorage(memory, writer)
