"""Start of a hybrid backend: pools, actors and models from a checked configuration. Everything ends with the backend.

driver ──configuration, number──▶ worker: derives its part ──▶ process groups ──▶ data, read by generating workers ──▶ models
"""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import ray

from braidrl.cluster.ray_cluster import RayCluster
from braidrl.cluster.watchdog import mute_after
from braidrl.data.loader import Admissions
from braidrl.errors import UserError, WorkerError
from braidrl.importing import import_function
from braidrl.observe.progress import Progress
from braidrl.observe.trace import TraceWriter
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.hybrid.driver import HybridBackend
from braidrl.runtimes.hybrid.group import WorkerGroup, wait_all
from braidrl.runtimes.hybrid.hybrid_worker import RunOrder, hybrid_pools, sign_of
from braidrl.runtimes.prepare.setup import Prepared
from braidrl.training.role_settings import inference_layouts, settings_of


def start_hybrid_backend(
    prepared: Prepared, progress: Progress, folder: Path | None, train: bool = True, cluster: RayCluster | None = None
) -> HybridBackend:
    """Start the workers and have them read the data and load their models; without `train` the backend only evaluates.

    `folder` is the run's, for files of workers. The cluster is by default connected or started as configured. Raises UserError if a
    placement does not fit, the data cannot be used, or a user's class of methods is missing.
    """
    config = prepared.config
    for own in config.roles.values():
        if own.methods:
            import_function(own.methods)
    pools = hybrid_pools(prepared, train)
    with ExitStack() as resources:
        cluster = cluster or RayCluster(config.cluster, config.device)
        resources.callback(cluster.close)
        # An actor for each rank of each pool: they know each other by name, and nothing of the run yet.
        groups, number = list[WorkerGroup](), 0
        for pool, places in zip(pools, cluster.reserve(pools), strict=True):
            groups.append(WorkerGroup(pool, places, number, cluster))
            groups[-1].start()
            number += len(places)
        first = next(iter(prepared.generating), None)
        home = next((group for group in groups if first in group.pool.generating), groups[0])
        settings = config.model_dump(mode="json", exclude_unset=True)
        order = RunOrder(settings, train, folder.resolve() if folder else None, cluster.family)
        workers = RunWorkers(groups, home, prepared, order)
        counts, admissions = workers.begin(groups), None
        for _, report in counts:
            progress.print(report)
        if counts:
            weights = [source.weight for source in config.data.train]
            admissions = Admissions([kept for kept, _ in counts], weights, config.seed, config.data.shuffle)
        flow = prepared.flow if train else prepared.evaluation
        executor = StageExecutor(config, flow, (), prepared.tokenizer, None, progress)
        roles = {role: group for group in groups for role in group.pool.roles}
        trace = TraceWriter(folder, "controller") if folder else None
        if trace is not None:
            resources.callback(trace.close)
        return HybridBackend(admissions, roles, home, executor, resources.pop_all(), workers.replace_lost, trace)


@dataclass(frozen=True)
class RunWorkers:
    """The worker groups of a run, from actors to loaded models; also restarts lost groups."""

    groups: Sequence[WorkerGroup]
    home: WorkerGroup
    """The group that reads the data."""
    prepared: Prepared
    order: RunOrder

    def begin(self, fresh: Sequence[WorkerGroup]) -> list[tuple[int, str]]:
        """Let groups with `fresh` actors join the run, form process groups, read the data and load their models.

        Returns the number of prompts and a message per source; nothing if `home` is not among them, or reads none. Raises UserError
        if a worker refuses the configuration or the data, and WorkerError if one fails or sends no answer for too long.
        """
        config = self.prepared.config
        for group in fresh:
            group.limit_s = config.cluster.start_limit_s
        order = ray.put(self.order)
        joined = wait_all((group, group.call("join_run", group.numbers, [order] * group.mesh.size)) for group in fresh)
        if any(answer.result != sign_of(self.prepared) for answers in joined for answer in answers):
            raise UserError(
                "workers make other stages of this configuration than the driver, whose device is another; write dtype=float32 or "
                "dtype=bfloat16 in place of auto"
            )
        # The ranks of a pool form a process group if there are several or a model is sharded.
        formed, others = [], inference_layouts(config, self.prepared.flow)
        for group in fresh:
            layouts = [settings_of(role, config).layout for role in group.pool.models]
            layouts += [others[role] for role in group.pool.models if role in others]
            if group.mesh.size > 1 or any(layout.shard != "none" for layout in layouts):
                (answer,) = group.wait([group.call("rendezvous")])
                formed.append((group, group.call("join_process_group", answer.result)))
        wait_all(formed)
        reads = self.home in fresh and (self.order.train or config.data.evaluation_sources)
        counts = self.home.wait(self.home.call("read_data"))[0].result if reads else []
        loaded = wait_all((group, group.call("load_models")) for group in fresh)
        for group, answers in zip(fresh, loaded, strict=True):
            found = [answer.result for answer in answers]
            group.processes = [process if node == group.cluster.own_node else None for process, node, _ in found]
            group.device = found[0][2]
        # Plan the transfer of weights from the pool that trains a role to another that generates for it, if one is new.
        for role in self.prepared.generating:
            trains = next((group for group in self.groups if role in group.pool.models), None)
            generates = next(group for group in self.groups if role in group.pool.generating)
            if trains is None or trains is generates or not (trains in fresh or generates in fresh):
                continue
            check_devices_alike(role, trains.device, generates.device)
            (answer,) = trains.wait([trains.call("rendezvous")])
            sides, size = ((trains, 0), (generates, trains.mesh.size)), trains.mesh.size + generates.mesh.size
            wait_all((group, group.call("exchange_weights", role, answer.result, n, size)) for group, n in sides)
        for group in fresh:
            group.limit_s = config.cluster.wait_limit_s
        return counts

    def replace_lost(self) -> None:
        """Restart the groups that lost a worker, and those that do not finish; all others forget their rows.

        A rank of the others may wait in a collective for a failed one. They have `cluster.silence_s` to finish. Raises WorkerError
        if the restart failed.
        """
        cluster = self.home.cluster
        cluster.look()
        actors, limit_s = [a for group in self.groups for a in group.actors], mute_after(cluster.config.silence_s)
        mute = [actor for actor in actors if cluster.silence(actor) > limit_s]
        dead, silent = cluster.dead_and_silent([actor for actor in actors if actor not in mute], limit_s)
        lost = set(map(id, [*mute, *dead, *silent]))
        fresh = [group for group in self.groups if lost & set(map(id, group.actors))]
        for group in fresh:
            group.end()
        others = [group for group in self.groups if group not in fresh]
        for group, futures in [(group, group.call("forget_rows")) for group in others]:
            group.limit_s = cluster.config.silence_s
            try:
                group.wait(futures)
            except WorkerError:
                group.end()
                fresh.append(group)
            group.limit_s = cluster.config.wait_limit_s
        for group in fresh:
            group.start()
        if fresh:
            self.begin(fresh)


def check_devices_alike(role: str, trains: str, generates: str) -> None:
    """Raise UserError if a role trains on another kind of device than it generates on."""
    if trains != generates:
        raise UserError(
            f"placement: {role} trains on {trains} and generates on {generates}, and its weights cannot go from one to the other; "
            "write device=cpu, or give both pools devices of one kind"
        )
