"""The launcher for a Ray cluster: an actor in each reserved bundle starts one local process beside itself.

RayLauncher ──▶ ProcessActor ──Spawned──▶ process        the process ends with its actor, and the actor with the run
            └─▶ on each other node a service, which needs no device
"""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from braidrl.cluster.local import Spawned
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import BEAT_S, END_LIMIT_S, LOOPBACK, Launcher, Outcome, Process, ProcessSpec
from braidrl.cluster.ray_cluster import RayCluster, Reservation, import_ray
from braidrl.cluster.watchdog import heartbeat_limit
from braidrl.config import ClusterConfig


class ProcessActor:
    """An actor that starts a process on its node, receives its outcome, and ends it."""

    def __init__(self, spec: ProcessSpec, silence_s: float) -> None:
        """Start the process. It is killed after `silence_s` seconds without a heartbeat."""
        self.process, self.silence_s = Spawned(spec), silence_s

    def pid(self) -> int:
        return self.process.pid

    def wait_for_outcome(self) -> Outcome | None:
        """Wait for the outcome of the process; None if it ends without one."""
        while self.process.outcome is None and not self.process.hung_up:
            self.process.connection.poll(BEAT_S)
            self.process.end_if_silent(heartbeat_limit(self.silence_s))
        return self.process.outcome

    def perform(self, method: str) -> Any:
        """Call a method of the process: describe_end, interrupt, hang_up or kill."""
        return getattr(self.process, method)()

    def close(self) -> None:
        """End the process if it still runs."""
        self.process.hang_up()
        self.process.close(END_LIMIT_S / 2)


class RayProcess(Process):
    """A process started by an actor."""

    def __init__(self, cluster: RayCluster, reservation: Reservation, spec: ProcessSpec) -> None:
        self.name, self._cluster, self._ray, self._silent = spec.name, cluster, cluster.ray, ""
        self._actor = actor = cluster.start(ProcessActor, reservation, spec, cluster.config.silence_s)
        self._pid = actor.pid.remote()
        self._perform = actor.perform.options(concurrency_group="aside").remote
        self.ended = actor.wait_for_outcome.remote()

    @property
    def pid(self) -> int:
        return self._ray.get(self._pid, timeout=self._cluster.config.start_limit_s)

    @property
    def alive(self) -> bool:
        self._cluster.look()
        return not self._silent and not self._ray.wait([self.ended], timeout=0)[0]

    @property
    def outcome(self) -> Outcome | None:
        if self.alive or self._silent:
            return None
        try:
            outcome: Outcome | None = self._ray.get(self.ended)
        except self._ray.exceptions.RayError:  # not RayActorError: Ray killed it for memory
            return None
        return outcome

    def end_if_silent(self, limit_s: float, folder: Path | None = None) -> bool:
        """Check the actor; the actor checks its process."""
        silence = 0.0 if self._silent else self._cluster.silence(self._actor)
        if silence <= limit_s:
            return False
        self._silent = f"said nothing for {silence:.0f} s, nor did its actor, and was killed"
        self.kill()
        return True

    def describe_end(self) -> str:
        if self._silent:
            return self._silent
        try:
            return str(self._ray.get(self._perform("describe_end"), timeout=2 * END_LIMIT_S))
        except self._ray.exceptions.RayError as error:
            return " ".join(str(error).split())

    def interrupt(self) -> None:
        self._perform("interrupt")

    def hang_up(self) -> None:
        self._perform("hang_up")

    def kill(self) -> None:
        # The process ends with its actor, when its connection closes.
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._perform("kill"), timeout=END_LIMIT_S)
        self._cluster.end([self._actor])

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        self._ray.wait([self.ended], timeout=limit_s)
        self.kill()


class RayLauncher(Launcher):
    """Starts processes on the nodes of a cluster."""

    def __init__(self, config: ClusterConfig, device: str) -> None:
        """Connect to or start a cluster. Raises UserError if Ray is not installed, or there is no cluster."""
        ray = import_ray("cluster.launcher=ray")
        self.cluster = RayCluster(config, device)
        self.node = self.cluster.own_node
        self._reserved: dict[str, list[Reservation]] = {}
        nodes = [node for node in ray.nodes() if node["Alive"]]
        self._ips = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in nodes}
        if len(set(self._ips.values())) == 1:  # On a single machine the loopback address is enough.
            self._ips = dict.fromkeys(self._ips, LOOPBACK)
        if self.cluster.kind == "GPU":
            self.devices_of_node = max(int(node["Resources"].get("GPU", 0)) for node in nodes)
        self.ip = self._ips[self.node]

    def reserve(self, pools: Sequence[Pool]) -> None:
        """Assign devices as every launcher does; Ray sets each actor's share of the machine's threads."""
        self._reserved = {
            pool.name: reservations for pool, reservations in zip(pools, self.cluster.reserve(pools), strict=True)
        }

    def has_room(self, pool: str, number: int) -> bool:
        return number < len(self._reserved[pool])

    def node_of(self, pool: str, number: int) -> str:
        return self._reserved[pool][number].node

    def serve(self, service: type, *arguments: Any) -> list[Any]:
        nodes = sorted(
            {bundle.node for reservations in self._reserved.values() for bundle in reservations} - {self.node}
        )
        services = [self.cluster.start_on(node, service, node, self._ips[node], *arguments) for node in nodes]
        answers = [started.place.remote() for started in services]
        return self.cluster.ray.get(answers, timeout=self.cluster.config.start_limit_s)

    def start(self, pool: str, number: int, spec: ProcessSpec) -> Process:
        """Start a process; it inherits devices and threads from its actor's environment."""
        bundle = self._reserved[pool][number]
        none = self.cluster.kind == "GPU" and not bundle.gpus
        # If an actor dies, only its process dies with it; the run and its shared memory stay.
        spec = replace(spec, orphaned="", devices=() if none else None)
        return RayProcess(self.cluster, bundle, spec)

    def answered(self, processes: Sequence[Process], seconds: float) -> list[Process]:
        ended = {process.ended: process for process in processes if isinstance(process, RayProcess)}
        self.cluster.look()
        return [ended[reference] for reference in self.cluster.ray.wait(list(ended), timeout=seconds)[0]]

    def close(self) -> None:
        self.cluster.close()
