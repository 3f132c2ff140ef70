"""The owner of a run's shared memory on a node: serves it to other nodes, and frees all of it at the end.

/dev/shm/braid-<run>.owner     locked by the run's main process for its lifetime

The name of a segment contains its run, so the owner can remove all segments at the end, whichever process wrote them. A
later run that finds an unlocked owner file removes the segments of the killed run.
"""

import fcntl
import os
import secrets
from contextlib import suppress
from pathlib import Path

from braidrl.cluster.shared_memory import PREFIX, shared_folder
from braidrl.errors import UserError
from braidrl.queue.calls import NodeRequest
from braidrl.queue.client import DataPlane
from braidrl.queue.storage import Place, open_storage
from braidrl.queue.transport import QueueServer


class StorageNode:
    """The memory of a run on one node, its lock, and the thread that serves it to other nodes, for the run's lifetime.

    Each node's memory has a unique name, even if two nodes are on one machine.
    """

    def __init__(self, host: str, ip: str, secret: str | None = None, storage: str = "shared_memory") -> None:
        """Remove the remains of killed runs, then serve a node.

        `host` is its name in the run, `ip` its address for clients, which must know the secret. `storage` holds the
        run's segments. Raises UserError for an unusable storage.
        """
        remove_abandoned()
        self.run, self.storage = secrets.token_hex(6), storage
        self.data = DataPlane(Place(host, self.run, "", storage), "node", secret=secret)
        self.path = lock_of(self.run)
        self._handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        # A later run that finds the file unlocked reads the segments' location from it.
        os.write(self._handle, storage.encode())
        self.server = QueueServer(
            self.data.answer, NodeRequest, address=f"tcp://{ip}:*", secret=secret, remembers=False
        )
        self.data.address = self.server.address

    def place(self) -> Place:
        """Return the description with which this node's processes read and write its payload."""
        return Place(self.data.host, self.run, self.server.address, self.storage)

    def close(self) -> None:
        """Free the port, and every segment of the run, whichever process wrote it.

        The run's processes on this node must have ended.
        """
        self.server.close()
        self.data.close()
        remove_run(self.run, self.storage)
        os.close(self._handle)


def lock_of(run: str) -> Path:
    """Return the path of the file that the run's owner locks."""
    return shared_folder() / f"{PREFIX}{run}.owner"


def remove_run(run: str, storage: str) -> None:
    """Free everything with the run's name."""
    segments = open_storage(storage, run, "remover")
    segments.unlink(segments.names())
    lock_of(run).unlink(missing_ok=True)


def remove_abandoned() -> list[str]:
    """Free the remains of runs without an owner; return their names."""
    removed = []
    for path in shared_folder().glob(f"{PREFIX}*.owner"):
        run = path.name.removeprefix(PREFIX).removesuffix(".owner")
        try:
            handle = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            continue  # The run has ended since the listing, and removed its own files.
        except PermissionError:
            continue  # Another user's run: only that user's next run can remove its files.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue  # Its owner holds the lock, so nothing is abandoned.
        else:
            with suppress(UserError):  # A storage that is unreachable now is cleaned up later.
                remove_run(run, os.read(handle, 4096).decode() or "shared_memory")
                removed.append(run)
        finally:
            os.close(handle)
    return removed
