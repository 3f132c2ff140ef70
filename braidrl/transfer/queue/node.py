"""A node's part in the data plane: owns the run's shared memory there, and serves it to the other nodes."""

from __future__ import annotations

from braidrl.transfer.queue.data_plane import DataPlane, Place
from braidrl.transfer.queue.segments import Owner, Segments
from braidrl.transfer.queue.server import QueueServer


class StorageNode:
    """Lives as long as the run. Each node's memory has a name of its own, also where two of them are one machine."""

    def __init__(self, host: str, ip: str) -> None:
        """`host` is what the run calls the node, `ip` where others reach it."""
        self.owner = Owner()
        self.data = DataPlane(Segments(self.owner.run, "node"), "", host)
        self.server = QueueServer(lambda request, frames: self.data.answer(request), address=f"tcp://{ip}:*")
        self.data.address = self.server.address

    def place(self) -> Place:
        """What processes of this node have to know."""
        return Place(self.data.host, self.owner.run, self.server.address)

    def close(self) -> None:
        """Leaves neither memory nor port. The run's processes on this node must have ended."""
        self.server.close()
        self.data.close()
        self.owner.close()
