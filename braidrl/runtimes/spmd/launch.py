"""Launch of a distributed run: ranks are started here or on a Ray cluster, or joined if `torchrun` has started them."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from braidrl.cluster.child import exit_now, failure_of
from braidrl.cluster.devices import choose_device, device_count, devices_each
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.membership import RepairBudget
from braidrl.cluster.pools import Pool
from braidrl.cluster.ranks import run_ranks, tell
from braidrl.cluster.ray_processes import RayLauncher
from braidrl.cluster.row_deaths import RowDeaths
from braidrl.cluster.world import World, join
from braidrl.config import Config, PlacementConfig
from braidrl.engines.deployment import Deployment
from braidrl.engines.deployment_checks import check_deployment
from braidrl.errors import LostPeers, UserError, WorkerError
from braidrl.runtimes.prepare.deployment import deploy, started_by_torchrun
from braidrl.runtimes.prepare.run_flow import build_flow


def in_ranks(
    config: Config,
    entry: str,
    options: Mapping[str, Any],
    repairs: RepairBudget | None = None,
    deaths: RowDeaths | None = None,
) -> Any:
    """Run `module:function(world, task)` on every rank; return rank 0's result, a JSON value.

    The remaining ranks continue after a loss while `repairs` are left, unless `torchrun` has started them. Rows with
    which ranks die are recorded in `deaths`. Under `torchrun` every rank calls this, and gets the result. A rank that
    only noticed another's failure prints one line and ends. Raises UserError, before anything starts, for a
    configuration that the ranks cannot run, and WorkerError if a rank fails.
    """
    check_launcher(config)
    plain_options = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    cuda = choose_device(config.device).type == "cuda"
    task = {"config": config.model_dump(mode="json"), "options": plain_options, "cuda": cuda}
    if not started_by_torchrun():
        deployment, cluster = checked_ranks(config), config.cluster
        starter = RayLauncher(cluster, config.device) if deployment.launcher == "ray" else LocalLauncher(config.device)
        limits = cluster.wait_limit_s, starter, cluster.silence_s, repairs, deaths
        return run_ranks(entry, task, rank_pool(deployment), *limits)
    # This process is already a rank.
    world = joined_world(config)
    try:
        result = world.share("the end of the run", resolve_name(entry)(world, task))
    except (UserError, KeyboardInterrupt):
        raise
    except LostPeers as error:
        tell(f"rank {world.rank}: {error}")
        # Other ranks may be stuck, so the process group cannot be left in order.
        exit_now()
    except Exception as error:
        failure = failure_of(f"rank {world.rank} failed in {world.place}{world.rows}", error)
        raise WorkerError(failure.message) from error
    world.close()
    return result


def check_launcher(config: Config) -> None:
    """Raise UserError if the configured launcher contradicts the environment."""
    launcher, started = config.cluster.launcher, started_by_torchrun()
    if launcher == "torchrun" and not started:
        raise UserError("cluster.launcher=torchrun, but torchrun has not started this command; leave it out")
    if launcher not in (None, "torchrun") and started:
        raise UserError(
            f"cluster.launcher={launcher}, but torchrun has started this command; leave cluster.launcher out"
        )


def joined_world(config: Config) -> World:
    """Return the world of the ranks started by `torchrun`.

    Raises UserError if there are none, or their number is wrong.
    """
    check_launcher(config)
    if not started_by_torchrun():
        raise UserError("a session under runtime=distributed runs in every rank: start the script by `torchrun`")
    size = int(os.environ["WORLD_SIZE"])
    if "workers" in config.model_fields_set and config.workers != size:
        raise UserError(f"workers={config.workers}, but torchrun has started {size}; leave `workers` out")
    engines, cuda = checked_ranks(config).engines, choose_device(config.device).type == "cuda"
    return join(config.cluster.wait_limit_s, cuda, engines.started, engines.layout.ranks)


def checked_ranks(config: Config) -> Deployment:
    """Return the devices of a run's ranks. Raises UserError if roles or devices do not fit them."""
    if config.placement != PlacementConfig():
        raise UserError("runtime=distributed has all roles on every rank; write placement=colocate, or runtime=hybrid")
    flow = build_flow(config)
    deployment = deploy(config, flow)
    check_deployment(deployment, flow)
    # Ray's cluster knows its devices.
    available = None if deployment.launcher == "ray" else device_count(config.device)
    if available is not None:
        pool = rank_pool(deployment)
        local = int(os.environ.get("LOCAL_WORLD_SIZE", pool.workers))
        devices_each([replace(pool, workers=local)], available, "this machine")
    return deployment


def rank_pool(deployment: Deployment) -> Pool:
    """Return the pool of the ranks, with the engine processes that each starts, and its name in errors."""
    (pool,) = deployment.pools
    return replace(pool, roles=("rank",))
