"""The processes of a checked run, the devices that each would get, and the roles whose models lie on these."""

from dataclasses import dataclass

from braidrl.cluster.devices import Devices, assign_devices, device_count
from braidrl.cluster.pools import Pool, place
from braidrl.engines.factory import with_engines
from braidrl.runtimes.prepare.setup import Prepared
from braidrl.runtimes.streaming.groups import Group, pools_of, worker_groups
from braidrl.training.memory.budget import RoleUse


@dataclass(frozen=True)
class DeviceGroup:
    """So many devices that hold the same."""

    devices: int
    uses: tuple[RoleUse, ...]


def device_groups(prepared: Prepared) -> list[DeviceGroup]:
    """Return every process of the run that has a device, with the roles whose models it holds."""
    config, roles, trained = prepared.config, prepared.roles(), prepared.flow.trained_roles

    def uses_of(pool: Pool) -> tuple[RoleUse, ...]:
        models = [RoleUse(role, role in trained, role in pool.generating) for role in pool.models]
        apart = [RoleUse(role, False, True, apart=True) for role in pool.generating if role not in pool.models]
        return (*models, *apart)

    if config.runtime == "streaming":
        groups = worker_groups(config, prepared.flow, prepared.evaluation if config.data.evaluation_sources else None)
        return [DeviceGroup(group.processes, (use_of(group),)) for group in groups if group.role]
    if config.runtime == "hybrid":
        pools = place(config.placement, roles, prepared.generating, config.workers)
        return [DeviceGroup(pool.workers, uses_of(pool)) for pool in pools]
    workers = config.workers if config.runtime == "distributed" else 1
    return [DeviceGroup(workers, uses_of(Pool(roles, workers, generating=prepared.generating)))]


def use_of(group: Group) -> RoleUse:
    """Return what the processes of a streaming run's group have of their role; engines have weights of their own there."""
    generates = group.kind == "generate"
    return RoleUse(str(group.role), group.trained, generates, apart=generates)


def pools_of_run(prepared: Prepared) -> list[Pool]:
    """Return the processes of a run, with the engine processes that they start."""
    config = prepared.config
    if config.runtime == "streaming":
        evaluation = prepared.evaluation if config.data.evaluation_sources else None
        return pools_of(worker_groups(config, prepared.flow, evaluation), config)
    if config.runtime == "hybrid":
        pools = place(config.placement, prepared.roles(), prepared.generating, config.workers)
        return list(with_engines(pools, config))
    name, workers = ("rank", config.workers) if config.runtime == "distributed" else ("eager", 1)
    return list(with_engines([Pool((name,), workers, generating=(name,))], config))


def device_table(prepared: Prepared) -> dict[str, Devices]:
    """Return which CUDA devices each process would get; nothing where the run uses none. Raises UserError for too few of them.

    On a machine without any, where a run is only planned, there are as many as it needs.
    """
    available = device_count(prepared.config.device)
    if available is None:
        return {}
    pools = pools_of_run(prepared)
    return assign_devices(pools, available or sum(p.workers * (1 + p.engines * p.engine_devices) for p in pools))
