"""Resolution of the deployment: the only place that derives pools, engines and launcher from configuration and flow."""

import os
from dataclasses import replace

from braidrl.cluster.pools import GENERATE, Pool, check_nodes, place
from braidrl.config import Config
from braidrl.config.config import WorkersConfig
from braidrl.engines.deployment import MODES, Deployment, Engines
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind
from braidrl.flow.flow import policies_of
from braidrl.training.role_settings import settings_of


def deploy(config: Config, flow: Flow, evaluation: Flow | None = None, train: bool = True) -> Deployment:
    """Return the deployment of a run; without `train` only that of its evaluation.

    Raises UserError for pools and worker groups that the flow does not have.
    """
    mode, engines, launcher = MODES[config.runtime], Engines.of(config), launcher_of(config)
    beside = evaluation if config.data.evaluation_sources else None
    complete = Deployment(config, flow, beside, mode, (), engines, launcher)
    deployment = complete if train or evaluation is None else replace(complete, flow=evaluation, evaluation=None)
    roles, ranks = deployment.roles, 1
    if mode.placed:
        # A placement names all roles of training; an evaluation starts only those that it needs.
        placed = place(config.placement, complete.roles, complete.generating, config.workers)
        kept = [replace(p, roles=tuple(r for r in p.roles if r.removesuffix(GENERATE) in roles)) for p in placed]
        pools = [pool for pool in kept if pool.roles]
    elif mode.concurrent and train:
        pools = worker_pools(complete)
    else:
        # Streaming evaluates in this process.
        if mode.chained:
            ranks = int(os.environ.get("WORLD_SIZE", config.workers)) if launcher == "torchrun" else config.workers
        pools = [Pool(roles, ranks, generating=deployment.generating)]
    return replace(deployment, pools=engines.in_pools(pools))


def worker_pools(deployment: Deployment) -> list[Pool]:
    """Return the processes of streaming: those with a role's engines, then those of each model, frozen ones first.

    Raises UserError for a worker count of an unknown group.
    """
    config, changed = deployment.config, deployment.flow.changed_roles
    settings, pools = config.streaming.workers, list[Pool]()
    playing: dict[str, dict[str, None]] = {}
    for stage in deployment.stages:
        if stage.kind is Kind.GENERATE:
            playing.setdefault(str(stage.role), {}).update(dict.fromkeys(policies_of(stage)))
    for role, together in playing.items():
        pools.append(Pool((role + GENERATE,), deployment.engines.nodes, generating=tuple(together)))
    computing = dict.fromkeys(str(s.role) for s in deployment.stages if s.kind in (Kind.INFER, Kind.TRAIN))
    for role in sorted(computing, key=changed.__contains__):
        layout = settings_of(role, config).layout
        pools.append(Pool((role,), layout.ranks_per_replica * (layout.data or 1)))
    names = [pool.name for pool in pools]
    for name, group in settings.items():
        if name not in names:
            raise UserError(f"streaming.workers: the flow has no worker group {name!r}. {suggest(name, names)}")
        key = next((key for key in ("kind", "nodes") if getattr(group, key) is not None), None)
        if key is not None and deployment.launcher != "ray":
            raise UserError(
                f"streaming.workers.{name}.{key} is for the nodes of a Ray cluster; write cluster.launcher=ray"
            )
    return [with_workers(pool, settings[pool.name]) if pool.name in settings else pool for pool in pools]


def with_workers(pool: Pool, settings: WorkersConfig) -> Pool:
    """Return the processes of a worker group with its configured settings; an engine of several nodes has one process
    on each.

    Raises UserError if they do not divide over the nodes.
    """
    processes = pool.workers if pool.generating else 1
    workers = pool.workers if settings.workers is None else settings.workers * processes
    check_nodes("streaming.workers", pool.name, workers, settings.nodes)
    return replace(pool, workers=workers, kind=settings.kind, nodes=settings.nodes)


def launcher_of(config: Config) -> str:
    """Return the launcher of a run: the configured one, otherwise `torchrun` if it has started this rank."""
    mode = MODES[config.runtime]
    if mode.placed:
        return "ray"
    if config.cluster.launcher is not None or not mode.chained:
        return config.cluster.launcher or "local"
    return "torchrun" if started_by_torchrun() else "local"


def started_by_torchrun() -> bool:
    """Return True if `torchrun` has started this process as a rank."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ
