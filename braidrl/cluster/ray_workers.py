"""Workers on a Ray cluster: Ray chooses nodes and devices, an actor on each reserved seat does the work.

RayLauncher ──▶ placement group for each pool ──▶ actor ──▶ worker's main function      ends when the actor is killed
            └─▶ on each node beside this one a service, which needs no device
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from braidrl.cluster.rank_process import LOOPBACK
from braidrl.cluster.ray_cluster import RayCluster
from braidrl.cluster.workers import END_LIMIT_S, Arguments, Main, RankFailure, Worker, failure_of
from braidrl.config import ClusterConfig
from braidrl.placement.pools import Pool


class WorkerActor:
    """An actor that does one worker's work."""

    def work(self, main: Main, arguments: Arguments) -> RankFailure | None:
        """What the work raised, when it has ended."""
        return failure_of(main, arguments)

    def process(self) -> int:
        """Its number on its machine."""
        return os.getpid()

    def close(self) -> None:
        """Work that is still going on ends with the actor."""


class RayWorker(Worker):
    """A worker that is an actor."""

    def __init__(self, name: str, cluster: RayCluster, actor: Any, main: Main, arguments: Arguments) -> None:
        self.name, self.cluster, self.actor = name, cluster, actor
        self._end = actor.work.remote(main, dict(arguments))

    @property
    def pid(self) -> int:
        process: int = ray.get(self.actor.process.options(concurrency_group="aside").remote())
        return process

    @property
    def alive(self) -> bool:
        return not ray.wait([self._end], timeout=0)[0]

    @property
    def failure(self) -> RankFailure | None:
        if self.alive:
            return None
        try:
            failure: RankFailure | None = ray.get(self._end)
        except RayActorError:
            return None
        return failure

    def describe_end(self) -> str:
        try:
            ray.get(self._end)
        except RayActorError as error:
            return " ".join(str(error).split())
        return "it has ended"

    def kill(self) -> None:
        self.cluster.end(self.actor)
        ray.wait([self._end], timeout=END_LIMIT_S)

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        ray.wait([self._end], timeout=limit_s)
        # Also where the work is over: the actor itself waits for more.
        self.cluster.end(self.actor)


class RayLauncher:
    """Workers on the nodes of a cluster."""

    def __init__(self, config: ClusterConfig, device: str) -> None:
        """Raises UserError where there is no cluster."""
        self.cluster = RayCluster(config, device)
        self.node = str(ray.get_runtime_context().get_node_id())
        self._seats: dict[str, tuple[Pool, list[Any]]] = {}
        self._ips = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}

    @property
    def ip(self) -> str:
        return self._reached_at(self.node)

    def reserve(self, pools: Sequence[Pool]) -> int | None:
        """Ray tells each worker how many threads its share of a machine is."""
        self._seats = {p.name: (p, seats) for p, seats in zip(pools, self.cluster.seats(pools), strict=True)}
        return None

    def serve(self, service: type) -> list[Any]:
        nodes = {self.cluster.node_of(seat) for _, seats in self._seats.values() for seat in seats} - {self.node}
        services = [
            self.cluster.start(
                service, NodeAffinitySchedulingStrategy(node, soft=False), node, self._reached_at(node),
                num_cpus=0, num_gpus=0,
            )
            for node in sorted(nodes)
        ]  # fmt: skip
        answers = [each.place.remote() for each in services]
        places: list[Any] = ray.get(answers, timeout=self.cluster.config.start_limit_s)
        return places

    def start(
        self, pool: str, number: int, main: Main, arguments: Callable[[str], Arguments], orphaned: Main | None
    ) -> Worker:
        """Ray ends an actor with the process that started it; `orphaned` has no moment to be called in."""
        room, seats = self._seats[pool]
        actor = self.cluster.start(WorkerActor, seats[number], **({} if room.device else {"num_gpus": 0}))
        given = arguments(self.cluster.node_of(seats[number]))
        return RayWorker(f"{pool}-{number}", self.cluster, actor, main, given)

    def close(self) -> None:
        self.cluster.close()

    def _reached_at(self, node: str) -> str:
        """A node's address; where all of them are one machine nobody else has to reach it."""
        return self._ips[node] if len(set(self._ips.values())) > 1 else LOOPBACK
