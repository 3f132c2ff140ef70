"""Processes on a Ray cluster: the connection to it, devices reserved for each pool, and actors there.

RayCluster ──▶ placement group for each pool ──▶ actor in each reservation
RayLauncher ──▶ an actor that starts a process beside itself, as on any machine     the process ends with its actor
            └─▶ on each node beside this one a service, which needs no device
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from braidrl.cluster.devices import devices_each
from braidrl.cluster.local import LOOPBACK
from braidrl.cluster.process import END_LIMIT_S, LocalProcess, Outcome, Process, ProcessSpec, spawn
from braidrl.config import ClusterConfig
from braidrl.errors import UserError
from braidrl.placement.pools import Pool, check_devices

INLINE_BYTES = 1 << 20
"""Up to this size rows come with the message that brings them; by default Ray has more than 100 KiB fetched from its object store."""


def import_ray(needed_by: str = "runtime=hybrid") -> Any:
    """The module. Raises UserError where Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{needed_by} needs Ray, which is not installed; run `pip install braidrl[ray]`")
    # Ray's own accounting of usage goes to its makers unless it is told not to.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The driver reports the first failure; those that follow from it would be printed besides.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    return importlib.import_module("ray")


@dataclass(frozen=True)
class Reservation:
    """A place for one actor: Ray's strategy for it, and what it takes there."""

    strategy: Any
    cpus: int = 1
    gpus: int = 0


class RayCluster:
    """A connection to a cluster, and what was started on it. `close` ends all of it, and the cluster too if it began here."""

    def __init__(self, config: ClusterConfig, device: str) -> None:
        """Uses the cluster that this process is connected to, else connects or starts one. Raises UserError if it cannot."""
        self.ray, self.config = import_ray(), config
        self.started = not self.ray.is_initialized()
        self.groups: list[Any] = []
        self.actors: list[Any] = []
        if self.started:
            self._connect()
        resources = self.ray.cluster_resources()
        self.kind = "GPU" if device == "cuda" or (device == "auto" and resources.get("GPU", 0) > 0) else "CPU"
        self.devices = int(resources.get(self.kind, 0))

    def _connect(self) -> None:
        address = self.config.address or os.environ.get("RAY_ADDRESS")
        inline = {"max_direct_call_object_size": INLINE_BYTES}
        local = {} if address else {"num_cpus": self.config.cpus, "include_dashboard": False, "_system_config": inline}
        try:
            self.ray.init(
                address or "local", log_to_driver=True, logging_level=logging.ERROR, configure_logging=True, **local
            )
        except (ConnectionError, ValueError, RuntimeError) as error:
            raise UserError(
                f"no Ray cluster at {address or 'this machine'} ({' '.join(str(error).split())}); check cluster.address"
            ) from error

    def reserve(self, pools: Sequence[Pool]) -> list[list[Reservation]]:
        """Return for each pool where its workers go. Raises UserError where there are too few devices, or none become free."""
        # A worker with a device takes a CPU too.
        check_devices(pools, int(self.ray.cluster_resources().get("CPU", 0)), "CPUs")
        each = devices_each(pools, self.devices, "the cluster") if self.kind == "GPU" else {}
        util = self.ray.util
        for pool in pools:
            gpus = {"GPU": each[pool.name]} if each.get(pool.name) else {}
            self.groups.append(util.placement_group([{"CPU": 1, **gpus}] * pool.workers, strategy="PACK"))
        for pool, group in zip(pools, self.groups, strict=True):
            if not group.wait(self.config.start_limit_s):
                raise UserError(
                    f"waited {self.config.start_limit_s:g} s for {pool.workers} free {self.kind}s for {pool.name}; "
                    "other work holds them: end it, or raise cluster.start_limit_s"
                )
        strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy
        return [
            [Reservation(strategy(group, n), 1, each.get(pool.name, 0)) for n in range(pool.workers)]
            for pool, group in zip(pools, self.groups, strict=True)
        ]

    def node_of(self, place: Reservation) -> str:
        """Return the id of the node that a reservation is on."""
        table = self.ray.util.placement_group_table(place.strategy.placement_group)
        return str(table["bundles_to_node_id"][place.strategy.placement_group_bundle_index])

    def start(self, worker: type, place: Reservation, *arguments: Any) -> Any:
        """Return an actor of class `worker` in a reservation; it answers `fetch` in threads of their own while another call runs."""
        options = {
            "num_cpus": place.cpus, "num_gpus": place.gpus, "scheduling_strategy": place.strategy,
            "concurrency_groups": {"rows": 2, "aside": 1}, "max_restarts": 0,
        }  # fmt: skip
        actor = self.ray.remote(**options)(worker).remote(*arguments)
        self.actors.append(actor)
        return actor

    def end(self, actor: Any) -> None:
        """Ends one actor at once; its seat is free again."""
        self.ray.kill(actor)
        self.actors = [other for other in self.actors if other is not actor]

    def close(self) -> None:
        """Lets every worker clean up for a moment, ends it, and frees its device."""
        if not self.ray.is_initialized():
            return
        leaving = [actor.close.options(concurrency_group="aside").remote() for actor in self.actors]
        self.ray.wait(leaving, num_returns=len(leaving), timeout=END_LIMIT_S) if leaving else None
        for actor in self.actors:
            self.ray.kill(actor)
        for group in self.groups:
            # Where the cluster is gone its placement groups are too.
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.util.remove_placement_group(group)
        self.actors, self.groups = [], []
        if self.started:
            self.ray.shutdown()


class ProcessActor:
    """An actor that starts one process beside itself, hears its last word, and ends it."""

    def __init__(self) -> None:
        self.process: LocalProcess | None = None

    def start(self, spec: ProcessSpec) -> int:
        """Start the process and return its id."""
        self.process = spawn(spec)
        return self.process.pid

    def last_word(self) -> Outcome | None:
        """Wait for the outcome of the process; None where it ends without one."""
        assert self.process is not None
        self.process.connection.poll(None)
        return self.process.outcome

    def perform(self, method: str) -> Any:
        """Call a method of the process's handle: describe_end, interrupt, hang_up or kill."""
        return getattr(self.process, method)() if self.process else None

    def close(self) -> None:
        """End the process if it still runs."""
        if self.process is not None:
            self.process.hang_up()
            self.process.close(END_LIMIT_S / 2)


class RayProcess(Process):
    """A process that an actor has started."""

    def __init__(self, cluster: RayCluster, actor: Any, spec: ProcessSpec) -> None:
        self.name, self._cluster, self._ray, self._actor = spec.name, cluster, cluster.ray, actor
        self._pid = actor.start.remote(spec)
        self.ended = actor.last_word.remote()
        """Ray's reference to the last word."""

    @property
    def pid(self) -> int:
        process: int = self._ray.get(self._pid, timeout=self._cluster.config.start_limit_s)
        return process

    @property
    def alive(self) -> bool:
        return not self._ray.wait([self.ended], timeout=0)[0]

    @property
    def outcome(self) -> Outcome | None:
        if self.alive:
            return None
        try:
            outcome: Outcome | None = self._ray.get(self.ended)
        except self._ray.exceptions.RayActorError:
            return None
        return outcome

    def describe_end(self) -> str:
        try:
            return str(self._ray.get(self._perform("describe_end"), timeout=2 * END_LIMIT_S))
        except self._ray.exceptions.RayError as error:
            return " ".join(str(error).split())

    def interrupt(self) -> None:
        self._perform("interrupt")

    def hang_up(self) -> None:
        self._perform("hang_up")

    def kill(self) -> None:
        # Where the actor is gone, so is the process: it ends with its connection.
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.get(self._perform("kill"), timeout=END_LIMIT_S)
        self._cluster.end(self._actor)

    def close(self, limit_s: float = END_LIMIT_S) -> None:
        self._ray.wait([self.ended], timeout=limit_s)
        self.kill()

    def _perform(self, method: str) -> Any:
        return self._actor.perform.options(concurrency_group="aside").remote(method)


class RayLauncher:
    """Starts processes on the nodes of a cluster."""

    def __init__(self, config: ClusterConfig, device: str) -> None:
        """Raises UserError where Ray is not installed, or there is no cluster."""
        ray = import_ray("cluster.launcher=ray")
        self.cluster = RayCluster(config, device)
        self.node = str(ray.get_runtime_context().get_node_id())
        self._reserved: dict[str, list[Reservation]] = {}
        self._ips = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes() if node["Alive"]}

    @property
    def ip(self) -> str:
        return self._reached_at(self.node)

    def reserve(self, pools: Sequence[Pool]) -> int | None:
        """See to devices as every launcher does; Ray tells each actor how many threads its share of a machine is."""
        self._reserved = {pool.name: places for pool, places in zip(pools, self.cluster.reserve(pools), strict=True)}
        return None

    def node_of(self, pool: str, number: int) -> str:
        return self.cluster.node_of(self._reserved[pool][number])

    def serve(self, service: type) -> list[Any]:
        ray, places = self.cluster.ray, [place for pool in self._reserved.values() for place in pool]
        affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
        services = [
            self.cluster.start(service, Reservation(affinity(node, soft=False), 0), node, self._reached_at(node))
            for node in sorted({self.cluster.node_of(place) for place in places} - {self.node})
        ]
        answers = [each.place.remote() for each in services]
        found: list[Any] = ray.get(answers, timeout=self.cluster.config.start_limit_s)
        return found

    def start(self, pool: str, number: int, spec: ProcessSpec, copied: bool = False) -> Process:
        """Start a process; Ray has told its actor, and so tells it, its devices and its threads."""
        # An actor that dies alone takes its process with it: the run, and what it has in shared memory, goes on.
        spec = replace(spec, orphaned="")
        return RayProcess(self.cluster, self.cluster.start(ProcessActor, self._reserved[pool][number]), spec)

    def answered(self, processes: Sequence[Process], seconds: float) -> list[Process]:
        ended = {each.ended: each for each in processes if isinstance(each, RayProcess)}
        return [ended[one] for one in self.cluster.ray.wait(list(ended), timeout=seconds)[0]]

    def close(self) -> None:
        self.cluster.close()

    def _reached_at(self, node: str) -> str:
        """Return a node's address; where all of them are one machine nobody else has to reach it."""
        return self._ips[node] if len(set(self._ips.values())) > 1 else LOOPBACK
