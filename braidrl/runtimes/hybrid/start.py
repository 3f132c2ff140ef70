"""From a checked configuration to a backend of workers on Ray: pools, actors, models; all of it ends with the backend."""

import pickle
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from braidrl.cluster.ray_cluster import RayCluster
from braidrl.data.loader import PromptLoader
from braidrl.models.role_settings import inference_layouts, layout_of
from braidrl.observe.progress import Progress
from braidrl.placement.pools import GENERATE, Pool, place
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.engines import with_engines
from braidrl.runtimes.hybrid.backend import HybridBackend
from braidrl.runtimes.hybrid.group import DriverTraffic, WorkerGroup
from braidrl.runtimes.hybrid.handles import Future
from braidrl.runtimes.hybrid.pool_worker import WorkerSpec, method_class
from braidrl.runtimes.hybrid.worker import HybridWorker
from braidrl.runtimes.prepare.setup import Prepared


def start_hybrid_backend(
    prepared: Prepared,
    loader: PromptLoader | None,
    progress: Progress,
    folder: Path | None,
    cluster: RayCluster | None = None,
) -> HybridBackend:
    """Start the workers and have them load their models.

    Args:
        prepared: A checked configuration with its flow and data.
        loader: Where prompts come from; None for evaluation alone.
        progress: What the driver shows.
        folder: The run's, for what workers write.
        cluster: What workers start on; by default one that is connected to, or started, as the configuration says.

    Raises:
        UserError: A placement does not fit, or a class of the user's methods is not there.
    """
    config = prepared.config
    for role in config.roles:
        method_class(config, role)
    pools = place(config.placement, prepared.roles(), prepared.generating, config.workers)
    pools = with_engines(pools, config)
    if loader is None:
        pools = only(pools, prepared.roles(train=False))
    with ExitStack() as resources:
        cluster = cluster or RayCluster(config.cluster, config.device)
        resources.callback(cluster.close)
        groups = start_groups(cluster, pools, config.cluster.wait_limit_s, folder)
        first = next(iter(prepared.generating), None)
        home = next((group for group in groups if first in group.pool.generating), groups[0])
        load(groups, home, prepared if loader else replace(prepared, flow=prepared.evaluation))
        for group in groups:
            group.limit_s = config.cluster.wait_limit_s
        executor = StageExecutor(config, prepared.flow, (), prepared.tokenizer, None, progress)
        roles = {role: group for group in groups for role in group.pool.roles}
        return HybridBackend(loader, roles, home, executor, resources.pop_all())


def only(pools: Sequence[Pool], roles: Collection[str]) -> tuple[Pool, ...]:
    """Return the pools with these roles alone, without those that are empty then."""
    kept = [replace(pool, roles=tuple(r for r in pool.roles if r.removesuffix(GENERATE) in roles)) for pool in pools]
    return tuple(pool for pool in kept if pool.roles)


def start_groups(cluster: RayCluster, pools: Sequence[Pool], limit_s: float, folder: Path | None) -> list[WorkerGroup]:
    """Start an actor for each rank of each pool, and let every worker know the others."""
    groups, traffic, names = [], DriverTraffic(), cluster.names
    specs: list[WorkerSpec] = []
    name_of: list[str] = []
    for pool, reserved in zip(pools, cluster.reserve(pools), strict=True):
        actors = [cluster.start(HybridWorker, place_) for place_ in reserved]
        groups.append(WorkerGroup(pool, actors, len(specs), cluster, cluster.config.start_limit_s, traffic, names))
        for rank, actor in enumerate(actors):
            names[actor._actor_id.hex()] = f"{pool.name} rank {rank}"
            name_of.append(f"{pool.name} rank {rank}")
            specs.append(WorkerSpec(len(specs), pool, rank, folder.resolve() if folder else None, limit_s))
    everybody = [actor for group in groups for actor in group.actors]
    # Put once, and fetched by a worker when it first asks another for rows.
    peers = cluster.ray.put((everybody, name_of))
    for actor, spec in zip(everybody, specs, strict=True):
        traffic.sent += len(pickle.dumps(spec))
        actor.configure.remote(spec, [peers])
    return groups


def load(groups: Sequence[WorkerGroup], home: WorkerGroup, prepared: Prepared) -> None:
    """Let the ranks of each pool form a process group and load their models; those of `home` read the data."""
    begun: list[tuple[WorkerGroup, list[Future]]] = []
    without_data = home.common(replace(prepared, sources=[], eval_sources={}, texts=None))
    kept = home.common(prepared.kept)
    for group in groups:
        others = inference_layouts(prepared.config, prepared.flow)
        layouts = [layout_of(role, prepared.config) for role in group.pool.models]
        layouts += [others[role] for role in group.pool.models if role in others]
        shards = any(layout.shard != "none" for layout in layouts)
        if group.mesh.size > 1 or shards:
            (answer,) = group.wait([group.call("rendezvous")])
            begun.append((group, group.call("join_process_group", answer.result)))
    for group in groups:
        begun.append((group, group.call("load_models", without_data, kept if group is home else None)))
    for group, futures in begun:
        group.wait(futures)
    for group in groups:
        group.stages = prepared.stages
    for role in prepared.generating:
        exchange_weights(groups, role)


def exchange_weights(groups: Sequence[WorkerGroup], role: str) -> None:
    """Let the ranks that train a role and those of another pool that generate for it plan the way of its weights."""
    trains = next((group for group in groups if role in group.pool.models), None)
    generates = next(group for group in groups if role in group.pool.generating)
    if trains is None or trains is generates:
        return
    (answer,) = trains.wait([trains.call("rendezvous")])
    size = trains.mesh.size + generates.mesh.size
    begun = [
        (group, group.call("exchange_weights", role, answer.result, first, size))
        for group, first in ((trains, 0), (generates, trains.mesh.size))
    ]
    for group, futures in begun:
        group.wait(futures)
