"""From a checked configuration to a backend of workers on Ray: pools, actors, models; all of it ends with the backend.

driver ──configuration, number──▶ worker: what am I? ──▶ process groups ──▶ data, read by those that generate ──▶ models
"""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from braidrl.cluster.ray_cluster import RayCluster
from braidrl.config import Config
from braidrl.data.loader import Admissions
from braidrl.errors import UserError
from braidrl.models.role_settings import inference_layouts, layout_of
from braidrl.observe.progress import Progress
from braidrl.observe.trace import TraceWriter
from braidrl.placement.pools import Pool
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.hybrid.backend import HybridBackend
from braidrl.runtimes.hybrid.group import DriverTraffic, WorkerGroup
from braidrl.runtimes.hybrid.handles import Answer, Future
from braidrl.runtimes.hybrid.pool_worker import RunOrder, actor_name, hybrid_pools, method_class, sign_of
from braidrl.runtimes.hybrid.worker import HybridWorker
from braidrl.runtimes.prepare.setup import Prepared


def start_hybrid_backend(
    prepared: Prepared, progress: Progress, folder: Path | None, train: bool = True, cluster: RayCluster | None = None
) -> HybridBackend:
    """Start the workers and have them read the data and load their models.

    Args:
        prepared: A checked configuration with its flow.
        progress: What the driver shows.
        folder: The run's, for what workers write.
        train: False to evaluate alone.
        cluster: What workers start on; by default one that is connected to, or started, as the configuration says.

    Raises:
        UserError: A placement does not fit, the data cannot be used, or a class of the user's methods is not there.
    """
    config = prepared.config
    for role in config.roles:
        method_class(config, role)
    pools = hybrid_pools(prepared, train)
    with ExitStack() as resources:
        cluster = cluster or RayCluster(config.cluster, config.device)
        resources.callback(cluster.close)
        groups = start_groups(cluster, pools)
        first = next(iter(prepared.generating), None)
        home = next((group for group in groups if first in group.pool.generating), groups[0])
        order = groups[0].common(RunOrder.of(config, train, folder, cluster.family))
        joined = together(
            [(group, group.call("join_run", group.numbers, [order] * group.mesh.size)) for group in groups]
        )
        if any(answer.result != sign_of(prepared.stages) for answers in joined for answer in answers):
            raise UserError(
                "workers make other stages of this configuration than the driver, whose device is another; write dtype=float32 or "
                "dtype=bfloat16 in place of auto"
            )
        for group in groups:
            group.stages = prepared.stages
        form_process_groups(groups, prepared)
        admissions = read_data(home, config, progress) if train or config.data.evaluation_sources else None
        load_models(groups, prepared)
        for group in groups:
            group.limit_s = config.cluster.wait_limit_s
        flow = prepared.flow if train else prepared.evaluation
        executor = StageExecutor(config, flow, (), prepared.tokenizer, None, progress)
        roles = {role: group for group in groups for role in group.pool.roles}
        trace = TraceWriter(folder, "controller") if folder else None
        if trace is not None:
            resources.callback(trace.close)
        return HybridBackend(admissions, roles, home, executor, resources.pop_all(), trace)


def start_groups(cluster: RayCluster, pools: Sequence[Pool]) -> list[WorkerGroup]:
    """Start an actor for each rank of each pool. They know each other by name, and nothing of the run yet."""
    groups, traffic, number = [], DriverTraffic(), 0
    for pool, reserved in zip(pools, cluster.reserve(pools), strict=True):
        actors = [
            cluster.start(HybridWorker, place, name=actor_name(cluster.family, number + rank))
            for rank, place in enumerate(reserved)
        ]
        limit_s = cluster.config.start_limit_s
        groups.append(WorkerGroup(pool, actors, number, cluster, limit_s, traffic, cluster.names))
        cluster.names |= {actor._actor_id.hex(): f"{pool.name} rank {rank}" for rank, actor in enumerate(actors)}
        number += len(actors)
    return groups


def together(begun: Sequence[tuple[WorkerGroup, Sequence[Future]]]) -> list[list[Answer]]:
    """Wait for calls of several groups; return the answers of each."""
    return [group.wait(futures) for group, futures in begun]


def form_process_groups(groups: Sequence[WorkerGroup], prepared: Prepared) -> None:
    """Let the ranks of each pool form a process group, where they are several or divide a model."""
    begun = []
    for group in groups:
        others = inference_layouts(prepared.config, prepared.flow)
        layouts = [layout_of(role, prepared.config) for role in group.pool.models]
        layouts += [others[role] for role in group.pool.models if role in others]
        if group.mesh.size > 1 or any(layout.shard != "none" for layout in layouts):
            (answer,) = group.wait([group.call("rendezvous")])
            begun.append((group, group.call("join_process_group", answer.result)))
    together(begun)


def read_data(home: WorkerGroup, config: Config, progress: Progress) -> Admissions | None:
    """Let a group read the run's data; return which prompts come next, by their numbers, or None where nothing is trained."""
    counts = home.wait(home.call("read_data"))[0].result
    for _, report in counts:
        progress.print(report)
    weights = [source.weight for source in config.data.train]
    return Admissions([kept for kept, _ in counts], weights, config.seed, config.data.shuffle) if counts else None


def load_models(groups: Sequence[WorkerGroup], prepared: Prepared) -> None:
    """Let the ranks of each pool load their models."""
    together([(group, group.call("load_models")) for group in groups])
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
    sides = ((trains, 0), (generates, trains.mesh.size))
    together([(group, group.call("exchange_weights", role, answer.result, first, size)) for group, first in sides])
