"""Launch of a distributed run: ranks are started here or on a Ray cluster, or joined if `torchrun` has started them."""

import os
from collections.abc import Mapping
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from braidrl.cluster.child import end_at_once, failure_of
from braidrl.cluster.devices import choose_device, device_count, devices_each
from braidrl.cluster.local import LocalLauncher
from braidrl.cluster.pools import Pool
from braidrl.cluster.ranks import run_ranks, tell
from braidrl.cluster.ray_processes import RayLauncher
from braidrl.cluster.world import World, join
from braidrl.config import Config, PlacementConfig
from braidrl.engines.factory import generation_layout, own_engines
from braidrl.errors import LostPeers, UserError, WorkerError
from braidrl.flow import Flow, Kind
from braidrl.runtimes.prepare.checks import check_divided_engines, check_layouts
from braidrl.runtimes.prepare.run_flow import build_flow


def in_ranks(config: Config, entry: str, options: Mapping[str, Any]) -> Any:
    """Run `module:function(world, task)` on every rank; return rank 0's result, a JSON value.

    Under `torchrun` every rank calls this, and gets the result. A rank that only noticed another's failure prints one
    line and ends. Raises UserError, before anything starts, for a configuration that the ranks cannot run, and
    WorkerError if a rank fails.
    """
    launcher = launcher_of(config)
    given = {name: str(value) if isinstance(value, Path) else value for name, value in options.items()}
    cuda = choose_device(config.device).type == "cuda"
    task = {"config": config.model_dump(mode="json"), "options": given, "cuda": cuda}
    if launcher != "torchrun":
        check_ranks(config, build_flow(config), config.workers)
        cluster, pool = config.cluster, pool_of_ranks(config, config.workers)
        starter = RayLauncher(cluster, config.device) if launcher == "ray" else LocalLauncher(config.device)
        return run_ranks(entry, task, pool, cluster.wait_limit_s, starter, cluster.silence_s)
    # This process is a rank already.
    world = joined_world(config)
    try:
        result = world.share("the end of the run", resolve_name(entry)(world, task))
    except (UserError, KeyboardInterrupt):
        raise
    except LostPeers as error:
        tell(f"rank {world.rank}: {error}")
        # Other ranks may be stuck, so the process group cannot be left in order.
        end_at_once()
    except Exception as error:
        failure = failure_of(f"rank {world.rank} failed in {world.place}{world.rows}", error)
        raise WorkerError(failure.message) from error
    world.close()
    return result


def launcher_of(config: Config) -> str:
    """Return the launcher of the ranks. Raises UserError if the configuration contradicts the environment."""
    wanted, started = config.cluster.launcher, "RANK" in os.environ and "WORLD_SIZE" in os.environ
    if wanted == "torchrun" and not started:
        raise UserError("cluster.launcher=torchrun, but torchrun has not started this command; leave it out")
    if wanted not in (None, "torchrun") and started:
        raise UserError(f"cluster.launcher={wanted}, but torchrun has started this command; leave cluster.launcher out")
    return wanted or ("torchrun" if started else "local")


def joined_world(config: Config) -> World:
    """Return the world of the ranks started by `torchrun`.

    Raises UserError if there are none, or their number is wrong.
    """
    if launcher_of(config) != "torchrun":
        raise UserError("a session under runtime=distributed runs in every rank: start the script by `torchrun`")
    size = int(os.environ["WORLD_SIZE"])
    if "workers" in config.model_fields_set and config.workers != size:
        raise UserError(f"workers={config.workers}, but torchrun has started {size}; leave `workers` out")
    check_ranks(config, build_flow(config), size)
    cuda = choose_device(config.device).type == "cuda"
    return join(config.cluster.wait_limit_s, cuda, own_engines(config), generation_layout(config).ranks)


def check_ranks(config: Config, flow: Flow, size: int) -> None:
    """Raise UserError if roles or devices do not fit `size` ranks."""
    if config.placement != PlacementConfig():
        raise UserError("runtime=distributed has all roles on every rank; write placement=colocate, or runtime=hybrid")
    generating = {stage.role for stage in flow.stages if stage.kind is Kind.GENERATE}
    check_divided_engines(config, flow.stages)
    check_layouts(config, flow, flow.roles, Pool(tuple(flow.roles), size, generating=tuple(map(str, generating))))
    # Ray's cluster knows its devices.
    available = None if launcher_of(config) == "ray" else device_count(config.device)
    if available is not None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        devices_each([pool_of_ranks(config, local)], available, "this machine")


def pool_of_ranks(config: Config, size: int) -> Pool:
    """Return ranks, with the engine processes that each starts."""
    return Pool(("rank",), size, engines=own_engines(config), engine_devices=generation_layout(config).ranks)
