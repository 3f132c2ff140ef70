"""`braid train CONFIG --dry-run`: what a run would take of each device, before any weights are read.

configuration ──prepare──▶ flow, data ──▶ devices and the roles on each ──▶ bytes by part, tokens and rows of a micro-batch
"""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from braidrl.cluster.devices import device_lines, device_memory
from braidrl.config import Config
from braidrl.engines.factory import generation_layout, pools_ranks
from braidrl.runtimes.memory.budget import CACHE, Footprint, footprint, in_units, moving, peak
from braidrl.runtimes.prepare.checks import lacking, without_effect
from braidrl.runtimes.prepare.fetching import with_fetched
from braidrl.runtimes.prepare.setup import Prepared, prepare
from braidrl.runtimes.saving.folders import check_output
from braidrl.runtimes.sizing import (
    DeviceGroup,
    check_engine_memory,
    device_groups,
    device_table,
    with_fitting_sizes,
)
from braidrl.runtimes.start import check_runtime
from braidrl.training.role_settings import usual_max_tokens


def dry_run(config: Config, console: Console | None = None) -> list[tuple[DeviceGroup, list[Footprint]]]:
    """Check a configuration as a run does, and print what each device would hold. Raises UserError as a run does."""
    check_output(config)
    config = with_fetched(config)
    prepared = prepare(config)
    check_runtime(config, prepared.flow, generates=True, trains=True, planned=True)
    prepared, chosen = with_fitting_sizes(prepared, device_memory(config.device))
    config = prepared.config
    check_engine_memory(prepared)
    groups = device_groups(prepared)
    together = generation_layout(config).ranks if pools_ranks(config) else 1
    found = [
        (group, [footprint(use, config, prepared.flow, group.devices, together) for use in group.uses])
        for group in groups
    ]
    show(prepared, found, chosen, console or Console())
    return found


def show(
    prepared: Prepared, found: list[tuple[DeviceGroup, list[Footprint]]], chosen: Sequence[str], console: Console
) -> None:
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
        resident, moved = moving(config, prepared.flow, footprints)
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
    here = [f"here the run would end: {line}" for line in lacking(config)]
    for line in [*device_lines(device_table(prepared)), *chosen, *without_effect(config), *batch_lines(config), *here]:
        console.print(line, soft_wrap=True)


def batch_lines(config: Config) -> list[str]:
    """Return the sizes of a step and of a micro-batch."""
    trainer, longest_row, tokens = config.trainer, config.max_sequence_tokens, usual_max_tokens(config)
    rows = trainer.prompts_per_step * config.rollout.samples_per_prompt
    return [
        f"a step: {trainer.prompts_per_step:,} prompts x {config.rollout.samples_per_prompt} samples = {rows:,} rows, "
        f"{-(-rows // (trainer.rows_per_update or rows)) * trainer.epochs} updates",
        f"a micro-batch: at most {tokens:,} tokens per device, {tokens // longest_row} rows of the longest ({longest_row:,} tokens)",
    ]
