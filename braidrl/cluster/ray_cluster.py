"""A Ray cluster: connection, a placement group per pool, and an actor in each of its bundles."""

import contextlib
import importlib
import importlib.util
import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from braidrl.cluster.devices import devices_each
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import BEAT_S, END_LIMIT_S
from braidrl.cluster.watchdog import ASLEEP_S, NEEDED_BY_RAY, descendants, has_ended, heartbeat_limit, name_of
from braidrl.config import ClusterConfig
from braidrl.errors import LostProcess, UserError, WorkerError

REACH_S = 3.0
"""Seconds in which a node's daemon has to take a connection."""
BEATS = "beats"
"""Concurrency group of every actor's heartbeat."""
KIND, SOME = "accelerator_type:", 0.001
"""Prefix of the resource by which Ray names a node's kind of device, and the share of it that a bundle takes."""
INLINE_BYTES = 1 << 20
"""Rows up to this size travel inside the message; by default Ray sends more than 100 KiB through its object store."""


def import_ray(needed_by: str = "runtime=hybrid") -> Any:
    """Import Ray and return the module. Raises UserError if Ray is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise UserError(f"{needed_by} needs Ray, which is not installed; run `pip install braidrl[ray]`")
    # Ray sends usage statistics to its makers by default.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # The driver reports the first failure; Ray would print the consequent ones too.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # By default Ray lowers its workers' priority: with two other busy programs they got a thirtieth of two cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    return importlib.import_module("ray")


@dataclass(frozen=True)
class Reservation:
    """The location of one actor: Ray's scheduling strategy, and the resources that it takes."""

    node: str
    strategy: Any
    cpus: int = 1
    gpus: int = 0


def room_for(
    nodes: Mapping[str, Mapping[str, float]], taken: Sequence[Reservation], cpus: int = 1, gpus: int = 0
) -> int:
    """Return how many more workers of `cpus` and `gpus` each fit on the nodes, beside the reservations in `taken`."""
    free = {node: [resources.get(kind, 0.0) for kind in ("CPU", "GPU")] for node, resources in nodes.items()}
    for reservation in taken:
        if reservation.node in free:
            free[reservation.node][0] -= reservation.cpus
            free[reservation.node][1] -= reservation.gpus
    rooms = (min(int(c // cpus), int(g // gpus) if gpus else int(c // cpus)) for c, g in free.values())
    return sum(max(0, room) for room in rooms)


def is_reachable(address: str, port: int) -> bool:
    """Return True if a process listens at an address."""
    try:
        socket.create_connection((address, port), REACH_S).close()
    except OSError:
        return False
    return True


class RayCluster:
    """A connection to a cluster, and all actors started on it.

    `close` ends them, and the cluster if it was started here.
    """

    def __init__(self, config: ClusterConfig, device: str) -> None:
        """Use the current connection, or connect to a cluster, or start one. Raises UserError if that fails."""
        self.ray, self.config = import_ray(), config
        self.started = not self.ray.is_initialized()
        self.groups: list[Any] = []
        self.actors: list[Any] = []
        self.names: dict[str, str] = {}
        self.family = secrets.token_hex(4)
        """Prefix of the actor names of this run."""
        self._looked = time.monotonic()
        self._beats: dict[Any, tuple[float | None, Any]] = {}
        """The time of each actor's last heartbeat, and the reference of the next."""
        self.needed: dict[int, str] = {}
        """Ray's own processes, for a cluster started here."""
        if self.started:
            address = config.address or os.environ.get("RAY_ADDRESS")
            system_config = {"max_direct_call_object_size": INLINE_BYTES}
            local = (
                {}
                if address
                else {"num_cpus": config.cpus, "include_dashboard": False, "_system_config": system_config}
            )
            try:
                self.ray.init(address or "local", logging_level=logging.ERROR, **local)
            except Exception as error:
                # A plain Exception: a node of this machine took more than 30 s to start.
                if type(error) is not Exception and not isinstance(error, ConnectionError | ValueError | RuntimeError):
                    raise
                where, remedy = f"no Ray cluster at {address}", "check cluster.address"
                if not address:
                    where = "Ray does not start on this machine"
                    remedy = "end other work here, or start it with `ray start --head` and write cluster.address=auto"
                raise UserError(f"{where} ({' '.join(str(error).split())}); {remedy}") from error
            names = {process: name_of(process) for process in descendants(os.getpid())}
            self.needed = {process: name for process, name in names.items() if name in NEEDED_BY_RAY}
        self.own_node = str(self.ray.get_runtime_context().get_node_id())
        resources = self.ray.cluster_resources()
        self.kind = "GPU" if device == "cuda" or (device == "auto" and resources.get("GPU", 0) > 0) else "CPU"
        self.devices = int(resources.get(self.kind, 0))

    def reserve(self, pools: Sequence[Pool]) -> list[list[Reservation]]:
        """Return the reservation of each rank of each pool, in the order of nodes.

        Raises UserError if devices are missing or stay occupied.
        """
        resources, util = self.ray.cluster_resources(), self.ray.util
        kinds = {name.removeprefix(KIND) for name in resources if name.startswith(KIND)}
        kind_of_pool = {pool.name: pool.kind.partition("-")[0] for pool in pools if pool.kind and pool.kind != "cpu"}
        for pool in pools:
            if kind_of_pool.get(pool.name, "") not in {"", *kinds}:
                raise UserError(
                    f"placement: {pool.name} needs devices of kind {pool.kind}, and the cluster has "
                    f"{', '.join(sorted(kinds)) or 'none'}; "
                    "make a plan for these (`braid plan --devices`), or remove kind"
                )
        # A worker with a device takes a CPU too.
        if (needed := sum(pool.workers for pool in pools)) > (cpus := int(resources.get("CPU", 0))):
            sizes = ", ".join(f"{pool.name}: {pool.workers}" for pool in pools)
            raise UserError(
                f"the pools ask for {needed} CPUs ({sizes}) and the cluster has {cpus}; "
                "lower `workers` or `streaming.workers`, or place more roles in one pool"
            )
        devices_by_pool = devices_each(pools, self.devices, "the cluster") if self.kind == "GPU" else {}
        largest = max(int(node["Resources"].get("GPU", 0)) for node in self.ray.nodes() if node["Alive"])
        for pool in pools:
            if devices_by_pool.get(pool.name, 0) > largest:
                raise UserError(
                    f"{pool.name} needs {devices_by_pool[pool.name]} CUDA devices on one node, and the largest has "
                    f"{largest}; lower rollout.tensor or rollout.engines, or let engines of vLLM span nodes "
                    "(runtime=streaming, rollout.nodes=2)"
                )
        for pool in pools:
            # Ranks that share a node of a pinned pool share one bundle.
            together = pool.workers // pool.nodes if pool.nodes else 1
            bundle: dict[str, float] = {"CPU": together}
            if devices_by_pool.get(pool.name):
                bundle["GPU"] = together * devices_by_pool[pool.name]
            if pool.name in kind_of_pool:
                bundle[KIND + kind_of_pool[pool.name]] = SOME
            bundles = [bundle] * (pool.workers // together)
            self.groups.append(util.placement_group(bundles, strategy="STRICT_SPREAD" if pool.nodes else "PACK"))
        reserved = []
        for pool, group in zip(pools, self.groups[-len(pools) :], strict=True):
            if not group.wait(self.config.start_limit_s):
                raise UserError(
                    f"waited {self.config.start_limit_s:g} s for {pool.workers} free {self.kind}s for {pool.name}; "
                    "other work holds them: end it, or raise cluster.start_limit_s"
                )
            strategy = util.scheduling_strategies.PlacementGroupSchedulingStrategy
            nodes: dict[int, str] = util.placement_group_table(group)["bundles_to_node_id"]
            # The bundles of a node are neighbours, nodes in the order of their first bundles.
            firsts = list(dict.fromkeys(nodes[bundle] for bundle in sorted(nodes)))
            order = sorted(nodes, key=lambda bundle: (firsts.index(nodes[bundle]), bundle))
            reservations = [
                Reservation(nodes[n], strategy(group, n), 1, devices_by_pool.get(pool.name, 0)) for n in order
            ]
            reserved.append([slot for slot in reservations for _ in range(pool.workers // len(order))])
        return reserved

    def living_nodes(self) -> dict[str, dict[str, float]]:
        """Return the resources of each node whose Ray daemon answers, by node id; Ray notices a lost node later."""
        nodes = [node for node in self.ray.nodes() if node["Alive"]]
        return {
            node["NodeID"]: node["Resources"]
            for node in nodes
            if is_reachable(node["NodeManagerAddress"], node["NodeManagerPort"])
        }

    def release(self, reservations: Sequence[Reservation]) -> None:
        """Release the reservations of a pool."""
        for group in {id(g): g for reservation in reservations if (g := reservation.strategy.placement_group)}.values():
            self.ray.util.remove_placement_group(group)
            self.groups = [remaining for remaining in self.groups if remaining.id != group.id]

    def start(self, worker: type, reservation: Reservation, *arguments: Any, name: str | None = None) -> Any:
        """Start an actor of class `worker` in a reservation. It answers `fetch` in separate threads while another call
        runs.

        Other actors of the run find it by `name`.
        """
        options = {
            "name": name,
            "num_cpus": reservation.cpus,
            "num_gpus": reservation.gpus,
            "scheduling_strategy": reservation.strategy,
            "concurrency_groups": {"rows": 2, "aside": 1, BEATS: 1},
            "max_restarts": 0,
        }
        actor = self.ray.remote(**options)(worker).remote(*arguments)
        self.actors.append(actor)
        return actor

    def start_on(self, node: str, service: type, *arguments: Any) -> Any:
        """Start an actor without CPUs on the node with this id."""
        strategy = self.ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        return self.start(service, Reservation(node, strategy, 0), *arguments)

    @property
    def lost(self) -> str:
        """Describe a dead Ray process in a line; return an empty string while a cluster started here is complete."""
        gone = [f"{name} (process {pid})" for pid, name in self.needed.items() if has_ended(pid)]
        return f"Ray's {' and '.join(gone)} died, and the cluster with it; resume with --resume" if gone else ""

    def look(self) -> bool:
        """Record heartbeats and request new ones, at most once a second; return True if this was done now.

        Raises WorkerError if one of Ray's processes has ended.
        """
        if self.lost:
            raise WorkerError(self.lost)
        now = time.monotonic()
        if now - self._looked < BEAT_S:
            return False
        was_asleep, self._looked = now - self._looked > ASLEEP_S, now  # this process was itself stopped or busy
        beats_awaited = [reference for _, reference in self._beats.values()]
        answered = (
            set(self.ray.wait(beats_awaited, num_returns=len(beats_awaited), timeout=0)[0]) if beats_awaited else set()
        )
        beats = {}
        for actor in self.actors:
            heard, reference = self._beats.get(actor._actor_id, (None, None))
            if reference in answered or (was_asleep and heard is not None):
                heard = now
            if reference is None or reference in answered:
                reference = actor.__ray_ready__.options(concurrency_group=BEATS).remote()
            beats[actor._actor_id] = heard, reference
        self._beats = beats
        return True

    def silence(self, actor: Any) -> float:
        """Return the seconds since the last heartbeat of an actor that has sent one."""
        heard, _ = self._beats.get(actor._actor_id, (None, None))
        return 0.0 if heard is None else max(0.0, self._looked - heard)

    def ready(self, references: Sequence[Any], limit_s: float) -> list[Any]:
        """Wait for the first reference and return all that are ready; none after `limit_s` seconds.

        Raises WorkerError for a loss.
        """
        deadline = time.monotonic() + limit_s
        while True:
            left = max(0.0, deadline - time.monotonic())
            done: list[Any] = self.ray.wait(list(references), timeout=min(BEAT_S, left))[0]
            # Not after each answer: a stage has as many answers as workers.
            for actor in self.actors if self.look() else ():
                if (silence := self.silence(actor)) > heartbeat_limit(self.config.silence_s):
                    name = self.names.get(actor._actor_id.hex(), "an actor")
                    raise LostProcess(
                        f"{name} has sent no heartbeat for {silence:.0f} s; go on with `braid train --resume`"
                    )
            if done:
                # One call for all references: many workers answer together, and each call scans all of them.
                done = self.ray.wait(list(references), num_returns=len(references), timeout=0)[0]
            if done or left <= BEAT_S:
                return done

    def dead_and_silent(self, actors: Sequence[Any], limit_s: float) -> tuple[list[Any], list[Any]]:
        """Request heartbeats of actors; return the dead actors, and those without an answer in time, which may only be
        busy.
        """
        actor_of = {actor.__ray_ready__.options(concurrency_group=BEATS).remote(): actor for actor in actors}
        answered, silent = (
            self.ray.wait(list(actor_of), num_returns=len(actor_of), timeout=limit_s) if actor_of else ([], [])
        )
        dead = []
        for reference in answered:
            try:
                self.ray.get(reference)
            except self.ray.exceptions.RayError:  # not RayActorError: Ray killed it for memory
                dead.append(actor_of[reference])
        return dead, [actor_of[reference] for reference in silent]

    def end(self, actors: Sequence[Any], processes: Sequence[int] = (), names: Sequence[str] = ()) -> None:
        """Kill actors, free their bundles, and wait until their `names` are free.

        Raises WorkerError if a name stays taken. `processes` are those of the actors, if known and on this machine: Ray
        alone cannot end a process that a signal has stopped.
        """
        for actor in actors:
            self.ray.kill(actor)
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.actors = [remaining for remaining in self.actors if not any(remaining is actor for actor in actors)]
        deadline = time.monotonic() + self.config.start_limit_s
        for name in names:
            while True:
                try:
                    self.ray.get_actor(name)
                except ValueError:
                    break
                if time.monotonic() > deadline:
                    limit_s = self.config.start_limit_s
                    raise WorkerError(f"waited {limit_s:g} s for the end of the actor {name}")
                time.sleep(0.05)

    def close(self) -> None:
        """Give every worker time to clean up, then end it, and free its device."""
        if not self.ray.is_initialized():
            return
        if self.lost:
            # The cluster does not answer, so Ray's own shutdown would hang. Workers and agents are children of the
            # raylet.
            for process in {descendant for root in self.needed for descendant in descendants(root)}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            return
        leaving = [actor.close.options(concurrency_group="aside").remote() for actor in self.actors]
        self.ray.wait(leaving, num_returns=len(leaving), timeout=END_LIMIT_S) if leaving else None
        for actor in self.actors:
            self.ray.kill(actor)
        for group in self.groups:
            # If the cluster has ended, so have its placement groups.
            with contextlib.suppress(self.ray.exceptions.RayError):
                self.ray.util.remove_placement_group(group)
        self.actors, self.groups = [], []
        if self.started:
            self.ray.shutdown()
