"""`braid train CONFIG --dry-run`: what a run would take of each device, before any weights are read.

configuration ──prepare──▶ flow, data ──▶ devices and the roles on each ──▶ bytes by part, tokens and rows of a micro-batch
"""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from braidrl.cluster.devices import Devices, assign_devices, device_count, device_lines, device_memory
from braidrl.config import Config
from braidrl.errors import UserError
from braidrl.placement.memory import CACHE, ENGINE, GIB, INFERENCE, Footprint, RoleUse, asleep, assets, footprint, peak
from braidrl.placement.pools import Pool, place
from braidrl.placement.residency import Asset, needed_assets, residency_plan, sizes_during
from braidrl.runtimes.generating.engines import generation_layout, pools_ranks, with_engines
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.prepare.setup import Prepared, prepare
from braidrl.runtimes.saving.folders import check_output
from braidrl.runtimes.start import check_runtime
from braidrl.runtimes.streaming.groups import Group, pools_of, worker_groups

MIB = 1 << 20
VLLM_SHARE = 0.9
"""What vLLM takes of a device unless told otherwise."""


@dataclass(frozen=True)
class DeviceGroup:
    """So many devices that hold the same."""

    devices: int
    uses: tuple[RoleUse, ...]


def dry_run(config: Config, console: Console | None = None) -> list[tuple[DeviceGroup, list[Footprint]]]:
    """Check a configuration as a run does, and print what each device would hold. Raises UserError as a run does."""
    check_output(config)
    config = with_fetched(config)
    prepared = prepare(config)
    check_runtime(config, prepared.flow, generates=True, trains=True, planned=True)
    check_engine_memory(prepared)
    groups = device_groups(prepared)
    together = generation_layout(config).ranks if pools_ranks(config) else 1
    found = [
        (group, [footprint(use, config, prepared.flow, group.devices, together) for use in group.uses])
        for group in groups
    ]
    show(prepared, found, console or Console())
    return found


def check_engine_memory(prepared: Prepared) -> None:
    """Raise UserError where a vLLM that shares a device with training asks for more memory than training leaves there."""
    config = prepared.config
    if config.rollout.engine != "vllm" or config.trainer.resident_gib is not None:
        return
    if (total := device_memory(config.device)) is None or not any(
        devices.every[0] in engine for devices in device_table(prepared).values() for engine in devices.engines
    ):
        return
    share = float(config.rollout.vllm.get("gpu_memory_utilization", VLLM_SHARE))
    for group in device_groups(prepared):
        found = [footprint(use, config, prepared.flow, group.devices) for use in group.uses]
        own = sum(one.resident.get(part, 0) for one in found for part in (ENGINE, CACHE))
        training = peak(found) - own
        if group.uses and share * total > total - training:
            raise UserError(
                f"rollout.vllm.gpu_memory_utilization={share:g} asks for {in_units(int(share * total))} of a device of {in_units(total)}, "
                f"and training takes {in_units(training)} of it; write {max(0.0, 1 - training / total):.2f} at most, set "
                "trainer.resident_gib so that they take turns, or leave the engine a device of its own"
            )


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


def moving(prepared: Prepared, footprints: list[Footprint]) -> tuple[int | None, list[Asset]]:
    """Return, under `trainer.resident_gib`, the most bytes that are on a device at a time, and what has to leave it for others.

    Raises UserError for a stage that alone needs more.
    """
    gib = prepared.config.trainer.resident_gib
    if gib is None:
        return None, []
    sizes = {asset: size for one in footprints for asset, size in assets(one.use.role, one.resident).items()}
    shared = frozenset(one.use.role for one in footprints if one.use.generates and ENGINE not in one.resident)
    copied = frozenset(one.use.role for one in footprints if INFERENCE in one.resident)
    sleeping = {asset: size for one in footprints for asset, size in asleep(one.use.role, one.resident).items()}
    plan = residency_plan(prepared.flow, sizes, int(gib * GIB), shared, copied, sleeping)
    during, needs = sizes_during(prepared.flow, sizes, sleeping), needed_assets(prepared.flow, shared, copied)
    most = max(
        sum(during[step][asset] for asset in plan.kept | (needed & sizes.keys())) for step, needed in needs.items()
    )
    return most, sorted(sizes.keys() - plan.kept)


def show(prepared: Prepared, found: list[tuple[DeviceGroup, list[Footprint]]], console: Console) -> None:
    """Print a table for each group of devices, and the sizes of a batch."""
    config = prepared.config
    console.print(f"flow {prepared.flow.name}, runtime {config.runtime}: nothing was trained, no weights were read")
    for group, footprints in found:
        title = f"{group.devices} device{'s' * (group.devices > 1)}, on each"
        table = Table("role", "part", "memory", title=title, title_justify="left")
        table.columns[2].justify = "right"
        for one in footprints:
            name = f"{one.use.role}: {one.shape.name}, {one.shape.parameters / 1e9:,.3f}B parameters"
            for part, size in {**one.resident, **one.working}.items():
                table.add_row(name, part, in_units(size))
                name = ""
        resident, moved = moving(prepared, footprints)
        table.add_row("together, at its peak", "", in_units(peak(footprints, resident)), style="bold")
        console.print(table)
        if resting := [
            one for one in footprints if CACHE in one.resident and any(other.working for other in footprints)
        ]:
            names = ", ".join(f"{one.use.role} {in_units(one.resident[CACHE])}" for one in resting)
            console.print(f"keys and values that leave while roles infer or train: {names}", soft_wrap=True)
        if moved:
            names = ", ".join(f"{asset.role} {asset.part}" for asset in moved)
            console.print(f"waits in host memory while other roles need the room: {names}", soft_wrap=True)
    for line in [*device_lines(device_table(prepared)), *batch_lines(config)]:
        console.print(line, soft_wrap=True)


def in_units(size: int) -> str:
    """Return the bytes as people say them."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def batch_lines(config: Config) -> list[str]:
    """Return the sizes of a step and of a micro-batch."""
    trainer, longest = config.trainer, config.max_sequence_tokens
    rows = trainer.prompts_per_step * config.rollout.samples_per_prompt
    return [
        f"a step: {trainer.prompts_per_step:,} prompts x {config.rollout.samples_per_prompt} samples = {rows:,} rows, "
        f"{-(-rows // (trainer.rows_per_update or rows)) * trainer.epochs} updates",
        f"a micro-batch: at most {trainer.max_tokens_per_device:,} tokens per device, "
        f"{trainer.max_tokens_per_device // longest} rows of the longest ({longest:,} tokens)",
    ]
