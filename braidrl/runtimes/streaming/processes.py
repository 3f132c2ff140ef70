"""The worker processes of a streaming run: started, watched, replaced when they are killed, and ended with the run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch.distributed as dist

from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.ray_cluster import import_ray
from braidrl.cluster.workers import END_LIMIT_S, Launcher, Worker, WorkerFailed
from braidrl.cluster.world import LostPeers
from braidrl.config import Config
from braidrl.placement.pools import Pool
from braidrl.runtimes.streaming.groups import Group
from braidrl.runtimes.streaming.worker import orphaned, work
from braidrl.transfer.queue.control import ControlPlane
from braidrl.transfer.queue.data_plane import Place
from braidrl.transfer.queue.node import StorageNode

READY_LIMIT_S = 600.0
"""How long a worker may take until its models are loaded."""
PEERS_LIMIT_S = 2.0
"""How long a rank that has lost its peers waits for them to say why."""
RESTARTS = 5
"""How often a worker may be killed before the run ends: what kills it again and again is no accident."""


@dataclass
class Member:
    """One process of a group; `holder` is its name at the queue, another one each time that it is started."""

    group: Group
    number: int
    starts: int
    process: Worker
    started: float = field(default_factory=time.monotonic)

    def is_late(self, control: ControlPlane) -> bool:
        """True if it should long have said hello; ranks that do not lead say nothing to the queue."""
        leads = not self.group.trained or self.number == 0
        return leads and self.holder not in control.holders and time.monotonic() - self.started > READY_LIMIT_S

    @property
    def holder(self) -> str:
        return f"{self.group.name}.{self.number}.{self.starts}"


def worker_launcher(config: Config) -> Launcher:
    """Who starts the workers: this process, or Ray. Raises UserError where there is no Ray, or no cluster."""
    if config.cluster.launcher != "ray":
        return LocalLauncher()
    import_ray("cluster.launcher=ray")
    # Imported here: Ray is an extra, and importing it takes a second.
    from braidrl.cluster.ray_workers import RayLauncher

    return RayLauncher(config.cluster, config.device)


class Processes:
    """All worker processes of a run."""

    def __init__(self, config: Config, folder: Path, control: ControlPlane, launcher: Launcher, place: Place) -> None:
        """`place` is the main program's, where the queue is."""
        self.config, self.folder, self.control, self.launcher = config, folder, control, launcher
        self.queue = place.address
        self.places = {place.host: place}
        """Of every node that has workers, and of this one."""
        self.members: list[Member] = []
        self._store: dist.TCPStore | None = None

    def start(self, groups: Sequence[Group]) -> None:
        """Starts every process of these groups. Raises UserError where there is no room for them."""
        pools = [Pool((group.name,), group.processes, device=group.kind != "compute") for group in groups]
        threads = self.launcher.reserve(pools)
        self.config = self.config.model_copy(update={"threads": self.config.threads or threads})
        self.places |= {place.host: place for place in self.launcher.serve(StorageNode)}
        self._store = dist.TCPStore(self.launcher.ip, 0, is_master=True, wait_for_workers=False)
        for group in groups:
            for number in range(group.processes):
                self.members.append(Member(group, number, 0, self._start(group, number, 0)))

    def trainers(self) -> dict[str, str]:
        """Who leads which trained role, by the name at the queue."""
        return {m.holder: str(m.group.role) for m in self.members if m.group.trained and m.number == 0}

    def watch(self) -> None:
        """Replaces a worker that was killed, and kills one that hangs.

        Raises what a worker has raised, and WorkerFailed for a trainer that is gone or a worker that does not get ready.
        """
        settings = self.config.streaming
        silent = self.control.silent(settings.lease_s + settings.wait_s)
        for member in self.members:
            if member.process.alive and member.holder in silent:
                member.process.kill()
            if member.process.alive and member.is_late(self.control):
                raise WorkerFailed(f"{member.process.name} was not ready within {READY_LIMIT_S:g} s")
            if member.process.alive:
                continue
            self._raise_failure(member)
            self.control.fail(member.holder)
            name = f"{member.group.name} {member.number}"
            if member.group.trained:
                raise WorkerFailed(
                    f"{name}, which holds weights that have changed, is gone ({member.process.describe_end()}); "
                    "go on from the last checkpoint"
                )
            if member.starts == RESTARTS:
                raise WorkerFailed(f"{name} is gone for the {RESTARTS + 1}th time ({member.process.describe_end()})")
            member.process.close()
            member.starts, member.started = member.starts + 1, time.monotonic()
            member.process = self._start(member.group, member.number, member.starts)

    def _raise_failure(self, member: Member) -> None:
        """Raises what a process has raised; where it only lost its peers, what one of those raised."""
        failure, limit = member.process.failure, time.monotonic() + PEERS_LIMIT_S
        while failure is not None and LostPeers.__name__ in failure["text"] and time.monotonic() < limit:
            for peer in self.members:
                cause = None if peer.process.alive else peer.process.failure
                if cause is not None and LostPeers.__name__ not in cause["text"]:
                    peer.process.raise_failure()
            time.sleep(0.05)
        member.process.raise_failure()

    def close(self) -> None:
        """Waits for all to end, which the queue tells them to, and kills those that do not in time."""
        limit = time.monotonic() + END_LIMIT_S
        while self.members:
            self.members[-1].process.close(max(0.0, limit - time.monotonic()))
            self.members.pop()

    def kill(self) -> None:
        """Ends those that are left at once."""
        for member in self.members:
            member.process.close(0.0)
        # A traceback would keep the store, and with it its port.
        self._store = None

    def _start(self, group: Group, number: int, starts: int) -> Worker:
        assert self._store is not None
        arguments = {
            "config": self.config.model_dump(mode="json"), "group": asdict(group), "rank": number if group.trained else 0,
            "name": f"{group.name}-{number}", "holder": f"{group.name}.{number}.{starts}", "queue": self.queue,
            "folder": str(self.folder.resolve()), "meeting": [self.launcher.ip, self._store.port],
        }  # fmt: skip
        return self.launcher.start(
            group.name, number, work, lambda node: {**arguments, "place": self.places[node]}, orphaned
        )
