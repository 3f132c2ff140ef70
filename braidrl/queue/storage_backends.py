"""Storage by name: `open_storage` makes the storage of a run's segments.

shared_memory            files under /dev/shm, read as views                    the default
file:/path               the same files on a disk                               holds what memory cannot
redis://host:port/0      values of a Redis server, read as copies               needs the package redis
"""

from collections.abc import Collection, Sequence
from pathlib import Path

from braidrl.data.messages import Frame, join, split
from braidrl.errors import UserError
from braidrl.queue.client import DataPlane
from braidrl.queue.storage import Named, Place, Segments, StorageBackend, allowed


def open_storage(storage: str, run: str, writer: str) -> StorageBackend:
    """Return a process's access to a run's segments.

    Args:
        storage: `shared_memory`, `file:/path` or `redis://host:port/0`.
        run: The run's name, hexadecimal.
        writer: The process's name.

    Raises:
        UserError: The storage is unknown, or it cannot be reached.
    """
    if storage == "shared_memory":
        return Segments(run, writer)
    if storage.startswith("file:"):
        folder = Path(storage.removeprefix("file:"))
        if not folder.is_dir():
            raise UserError(f"storage {storage}: there is no folder {folder}; make it")
        return Segments(run, writer, folder)
    if storage.startswith("redis://"):
        return RedisStorage(run, writer, storage)
    raise UserError(f"no storage is called {storage!r}; write shared_memory, file:/path or redis://host:port/0")


def data_plane(place: Place, writer: str, limit_s: float = 60.0, secret: str | None = None) -> DataPlane:
    """Return a process's view of payload on its node.

    Args:
        place: The process's node.
        writer: The process's name.
        limit_s: Time limit for answers of other nodes, in seconds.
        secret: Sent to other nodes.

    Raises:
        UserError: As for `open_storage`.
    """
    segments = open_storage(place.storage, place.run, writer)
    return DataPlane(segments, place.address, place.host, limit_s, secret)


class RedisStorage(Named):
    """Segments as values of a Redis server; each process has one connection."""

    def __init__(self, run: str, writer: str, address: str) -> None:
        """Connect. Raises UserError if the package, or a server at the address, is missing."""
        super().__init__(run, writer)
        try:
            # Imported here: Redis is optional.
            import redis
        except ImportError:
            raise UserError("storage redis:// needs the package redis; pip install 'braidrl[redis]'") from None
        self._server = redis.Redis.from_url(address)
        try:
            self._server.ping()
        except redis.ConnectionError as error:
            raise UserError(f"storage {address}: no Redis server answers there ({error})") from None

    def write(self, frames: Sequence[Frame]) -> tuple[str, int]:
        content, name = join(frames), self.next_name()
        self._server.set(name, memoryview(content))
        return name, len(content)

    def read(self, name: str) -> list[memoryview]:
        content = self._server.get(allowed(name))
        if content is None:
            raise FileNotFoundError(name)
        assert isinstance(content, bytes)
        return split(memoryview(content))

    def unlink(self, names: Collection[str]) -> None:
        if wanted := [allowed(name) for name in names]:
            self._server.unlink(*wanted)

    def names(self, writer: str | None = None) -> list[str]:
        return sorted(name.decode() for name in self._server.scan_iter(match=self.pattern(writer)))


def check_storage(storage: str) -> None:
    """Contract test of a storage backend; call it from the backend's own test. Raises AssertionError if it fails."""
    one, two = (open_storage(storage, "c0ffee", writer) for writer in ("one", "two/slash"))
    frames = [b"", b"first", bytes(range(256)) * 300]
    try:
        name, size = one.write(frames)
        other, _ = two.write([b"other"])
        assert size >= sum(map(len, frames)) and name != other, "segments have names of their own, and their size"
        assert [bytes(frame) for frame in two.read(name)] == frames, "what one process wrote another reads"
        assert one.names() == sorted([name, other]) and one.names("two/slash") == [other], (
            "a writer's segments are found"
        )
        read = two.read(name)
        one.unlink([name, name])
        assert [bytes(frame) for frame in read] == frames, "what was read stays when the segment is unlinked"
        assert one.names() == [other], "an unlinked segment is gone"
        for call in (lambda: two.read(name), lambda: two.read("../etc/passwd"), lambda: two.unlink(["../etc/passwd"])):
            try:
                call()
            except (FileNotFoundError, ValueError):
                continue
            raise AssertionError("a segment that is gone, or what is no segment's name, is refused")
    finally:
        one.unlink(one.names())
