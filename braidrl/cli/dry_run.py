"""`braid train CONFIG --dry-run`: the memory that a run would need on each device, before any weights are read.

configuration ──prepare─▶ flow, data ─▶ devices and the roles on each ─▶ bytes by part, tokens and rows of a micro-batch
"""

import os
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from braidrl.cluster.device_kinds import read_cluster
from braidrl.cluster.devices import (
    assign_devices,
    choose_device,
    device_count,
    device_lines,
    device_memory,
    planned_for,
)
from braidrl.config import Config
from braidrl.errors import CollectedErrors, UserError
from braidrl.observe.progress import Terminal
from braidrl.runtimes.memory.budget import CACHE, ENGINE, FREED, PANELS, Footprint, footprint, in_units, moving, peak
from braidrl.runtimes.prepare.checks import without_effect
from braidrl.runtimes.prepare.fetching import with_data_here, with_fetched
from braidrl.runtimes.prepare.names import check_names
from braidrl.runtimes.prepare.run_data import Prepared, vocabulary_lines
from braidrl.runtimes.prepare.run_flow import build_flow
from braidrl.runtimes.prepare.setup import check_files, lacking, prepare
from braidrl.runtimes.saving.folders import check_output
from braidrl.runtimes.sizing import DeviceGroup, check_engine_memory, device_groups, with_fitting_sizes
from braidrl.runtimes.start import check_runtime
from braidrl.training.memory.footprint import Shape
from braidrl.training.pretrained import load_tokenizer
from braidrl.training.role_settings import USUAL_TOKENS


def dry_run(
    config: Config, console: Console | None = None, devices: str | None = None
) -> list[tuple[DeviceGroup, list[Footprint]]]:
    """Check as a run does, and print the memory of each device and a verdict.

    `devices`, in the form of `braid plan --devices`, are those of the machine that will run it; by default this
    machine's. Raises Problems with all independent errors, a line each.
    """
    cluster = None if devices is None else read_cluster(devices)
    if cluster is not None and config.device not in ("auto", cluster.device):
        raise UserError(f"device={config.device}: --devices {devices} are not such devices; write device=auto")
    with planned_for(cluster):
        return checked_and_shown(config, console or Terminal())


def checked_and_shown(config: Config, console: Console) -> list[tuple[DeviceGroup, list[Footprint]]]:
    """Do a dry run for the requested devices."""
    noted = CollectedErrors()
    noted(lambda: check_output(config))
    fetched = noted(lambda: with_fetched(config))
    config = fetched or config
    # A failed download is already reported.
    prepared = noted(lambda: prepare(config, check=noted) if fetched else None)
    if prepared is None:
        # The flow or the tokenizer is missing; these checks need neither.
        if fetched:
            noted(lambda: load_tokenizer(config.model))
        else:
            noted(lambda: with_data_here(config.data))
        noted(lambda: build_flow(config))
        noted(lambda: check_names(config))
        noted(lambda: check_files(config, train=True))
    else:
        noted(lambda: check_runtime(prepared.deployment, generates=True, trains=True, planned=True))
    noted.raise_any()
    prepared, chosen = with_fitting_sizes(prepared, device_memory(config.device))
    config = prepared.config
    check_engine_memory(prepared)
    groups = device_groups(prepared.deployment)
    footprints = [
        (group, [footprint(use, prepared.deployment, group.devices) for use in group.uses]) for group in groups
    ]
    show(prepared, footprints, chosen, console)
    for line in verdict(prepared, footprints):
        console.print(line, soft_wrap=True, style="bold")
    return footprints


REMEDIES = {
    CACHE: "lower rollout.slots or rollout.max_response_tokens",
    PANELS: "write rollout.compile=false",
    ENGINE: "give the engine devices of its own, or divide it by rollout.tensor",
    "logits": "lower trainer.max_tokens_per_device",
    "activations": "set trainer.activation_checkpointing=true, or lower trainer.max_tokens_per_device",
}
"""Remedies by the part of memory to reduce."""
STATE = (
    "divide it over more devices by trainer.layout={shard: full}, train adapters by trainer.lora={}, or set "
    "trainer.resident_gib"
)


def verdict(prepared: Prepared, groups: list[tuple[DeviceGroup, list[Footprint]]]) -> Iterator[str]:
    """Yield, for each kind of device, whether the run fits, the largest part of memory, and a remedy."""
    config = prepared.config
    memory, where = device_memory(config.device), "a device"
    if memory is None and choose_device(config.device).type == "cpu":
        memory, where = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), "this machine"
    for group, footprints in groups:
        if not footprints:
            continue
        resident, _ = moving(prepared.deployment, footprints)
        # On a CPU all processes share this machine's memory.
        needed = peak(footprints, resident) * (group.devices if where == "this machine" else 1)
        size, name, part = max(
            (size, f"{usage.use.role}: {part}", part)
            for usage in footprints
            for part, size in {**usage.resident, **usage.working}.items()
        )
        largest = f"largest is {name} ({in_units(size)})"
        if memory is None:
            here = f"on each of {group.devices} devices" if group.devices > 1 else "on a device"
            yield f"verdict: needs {in_units(needed)} {here}, and there is none here to compare with; {largest}"
        elif needed <= memory:
            yield f"verdict: fits, {in_units(needed)} of the {in_units(memory)} of {where}; {largest}"
        else:
            yield (
                f"verdict: does not fit, {in_units(needed)} are more than the {in_units(memory)} of {where}; "
                f"{largest}: {REMEDIES.get(part, STATE)}"
            )
    if lacking(config):
        yield "verdict: not on this machine, see `here the run would end`"


def parameters_of(shape: Shape) -> str:
    """Return the number of a model's parameters in words, and for a mixture those that a token uses."""
    every, active = (
        f"{number / 1e9:,.3f}B" if number >= 5e7 else f"{number / 1e6:,.3f}M"
        for number in (shape.parameters, shape.parameters - shape.idle)
    )
    return f"{every} parameters" + f", {active} active" * bool(shape.idle)


def show(
    prepared: Prepared, groups: list[tuple[DeviceGroup, list[Footprint]]], chosen: Sequence[str], console: Console
) -> None:
    """Print a table for each group of devices, and the sizes of a batch."""
    config = prepared.config
    console.print(f"flow {prepared.flow.name}, runtime {config.runtime}: nothing was trained, no weights were read")
    for group, footprints in groups:
        title = f"{group.devices} device{'s' * (group.devices > 1)}, on each"
        table = Table("role", "part", "memory", title=title, title_justify="left")
        table.columns[2].justify = "right"
        for usage in footprints:
            name = f"{usage.use.role}: {usage.shape.name}, {parameters_of(usage.shape)}"
            for part, size in {**usage.resident, **usage.working}.items():
                table.add_row(name, part, in_units(size))
                name = ""
        resident, moved = moving(prepared.deployment, footprints)
        table.add_row("together, at its peak", "", in_units(peak(footprints, resident)), style="bold")
        console.print(table)
        computes = any(usage.working for usage in footprints)
        if resting := [usage for usage in footprints if computes and CACHE in usage.resident]:
            sizes = [(usage.use.role, sum(usage.resident.get(part, 0) for part in FREED)) for usage in resting]
            names = ", ".join(f"{role} {in_units(size)}" for role, size in sizes)
            console.print(f"an engine's memory that leaves while roles infer or train: {names}", soft_wrap=True)
        if moved:
            names = ", ".join(f"{asset.role} {asset.part}" for asset in moved)
            console.print(f"waits in host memory while other roles need the room: {names}", soft_wrap=True)
    here = [f"here the run would end: {line}" for line in lacking(config)]
    here = [*vocabulary_lines(prepared), *here]
    trainer, longest_row = config.trainer, config.max_sequence_tokens
    tokens = trainer.max_tokens_per_device or USUAL_TOKENS
    rows = trainer.prompts_per_step * config.rollout.samples_per_prompt
    batch = [
        f"a step: {trainer.prompts_per_step:,} prompts x {config.rollout.samples_per_prompt} samples = {rows:,} rows, "
        f"{-(-rows // (trainer.rows_per_update or rows)) * trainer.epochs} updates",
        f"a micro-batch: at most {tokens:,} tokens per device, {tokens // longest_row} rows of the longest "
        f"({longest_row:,} tokens)",
    ]
    pools, available, devices = prepared.deployment.pools, device_count(config.device), list[str]()
    if available is not None:
        # On a machine without devices as many as needed are assumed.
        needed = sum(pool.workers * (1 + pool.engines * pool.engine_devices) for pool in pools)
        devices = device_lines(assign_devices(pools, available or needed))
    for line in [*devices, *chosen, *without_effect(config), *batch, *here]:
        console.print(line, soft_wrap=True)
