"""`braid train CONFIG --dry-run`: what a run would take of each device, before any weights are read.

configuration ──prepare──▶ flow, data ──▶ devices and the roles on each ──▶ bytes by part, tokens and rows of a micro-batch
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from braidrl.config import Config
from braidrl.flow import Kind
from braidrl.models.footprint import (
    Shape,
    activation_bytes,
    cache_bytes,
    gathered_bytes,
    logits_bytes,
    model_shape,
    resident_bytes,
)
from braidrl.models.role_worker import DTYPES, layout_of, lora_of, model_path
from braidrl.placement.pools import place
from braidrl.runtimes.crews import check_runtime
from braidrl.runtimes.setup import Prepared, prepare
from braidrl.runtimes.streaming.groups import worker_groups

GIB, MIB = 1 << 30, 1 << 20


@dataclass(frozen=True)
class Seat:
    """A role on a device, and what it does there."""

    role: str
    trained: bool
    generates: bool


@dataclass(frozen=True)
class DeviceGroup:
    """So many devices that hold the same."""

    devices: int
    seats: tuple[Seat, ...]


@dataclass(frozen=True)
class Footprint:
    """What a role takes of its device, in bytes by part: all the time, and while it works."""

    seat: Seat
    shape: Shape
    resident: dict[str, int]
    working: dict[str, int]


def dry_run(config: Config, console: Console | None = None) -> list[tuple[DeviceGroup, list[Footprint]]]:
    """Checks a configuration as a run does, and prints what each device would hold. Raises UserError as a run does."""
    prepared = prepare(config)
    check_runtime(config, prepared.flow, generates=True, trains=True)
    groups = device_groups(prepared)
    found = [(group, [footprint(seat, prepared, group.devices) for seat in group.seats]) for group in groups]
    show(prepared, found, console or Console())
    return found


def device_groups(prepared: Prepared) -> list[DeviceGroup]:
    """Every process of the run that has a device, with the roles whose models it holds."""
    config, roles, trained = prepared.config, prepared.roles(), prepared.flow.trained_roles

    def seat(role: str) -> Seat:
        return Seat(role, role in trained, role in prepared.generating)

    if config.runtime == "streaming":
        groups = worker_groups(config, prepared.flow, prepared.evaluation if prepared.eval_sources else None)
        # Engines have weights of their own there.
        return [
            DeviceGroup(group.processes, (Seat(group.role, group.trained, group.kind == "generate"),))
            for group in groups
            if group.role
        ]
    if config.runtime == "hybrid":
        pools = place(config.placement, roles, prepared.generating, config.workers)
        return [DeviceGroup(pool.workers, tuple(map(seat, pool.roles))) for pool in pools]
    workers = config.workers if config.runtime == "distributed" else 1
    return [DeviceGroup(workers, tuple(map(seat, roles)))]


def footprint(seat: Seat, prepared: Prepared, devices: int) -> Footprint:
    """One role's parts on each of its devices. Raises UserError for a layout that does not fit them or the model."""
    config, role = prepared.config, seat.role
    trainer, rollout, own = config.trainer, config.rollout, config.roles.get(role)
    dtype = DTYPES[(own and own.dtype) or config.dtype]
    lora = lora_of(role, config) if seat.trained else None
    shape = model_shape(model_path(role, config), dtype, role in prepared.flow.scalar_roles, lora)
    layout = layout_of(role, config).over(devices)
    sizes = shape.config
    layout.check_model(sizes.num_attention_heads, sizes.num_key_value_heads, sizes.num_hidden_layers)
    resident, working = resident_bytes(shape, seat.trained, layout), {}
    if seat.generates:
        engine = replace(shape, dtype=DTYPES[rollout.dtype]) if rollout.dtype else shape
        if engine.dtype != dtype or lora or not layout.copies:
            resident["weights of the engine"] = engine.parameters * engine.element_bytes
        resident["keys and values"] = cache_bytes(engine, rollout.slots, config.max_sequence_tokens)
    if any(stage.role == role and stage.kind in (Kind.INFER, Kind.TRAIN) for stage in prepared.flow.stages):
        tokens = trainer.max_tokens_per_device
        if gathered := gathered_bytes(shape, layout):
            working["weights gathered"] = gathered
        if seat.trained:
            working["activations"] = activation_bytes(shape, tokens, trainer.activation_checkpointing, layout)
        if role not in prepared.flow.scalar_roles:
            working["logits"] = logits_bytes(shape, tokens, layout)
    return Footprint(seat, shape, resident, working)


def peak(footprints: list[Footprint]) -> int:
    """Bytes of one device: what stays there, and the most that any role needs while it works; roles take turns."""
    return sum(sum(f.resident.values()) for f in footprints) + max(sum(f.working.values()) for f in footprints)


def show(prepared: Prepared, found: list[tuple[DeviceGroup, list[Footprint]]], console: Console) -> None:
    """Prints a table for each group of devices, and the sizes of a batch."""
    config = prepared.config
    console.print(f"flow {prepared.flow.name}, runtime {config.runtime}: nothing was trained, no weights were read")
    for group, footprints in found:
        table = Table(
            "role",
            "part",
            "memory",
            title=f"{group.devices} device{'s' * (group.devices > 1)}, on each",
            title_justify="left",
        )
        table.columns[2].justify = "right"
        for one in footprints:
            name = f"{one.seat.role}: {one.shape.name}, {one.shape.parameters / 1e9:,.3f}B parameters"
            for part, size in {**one.resident, **one.working}.items():
                table.add_row(name, part, in_units(size))
                name = ""
        table.add_row("together, at its peak", "", in_units(peak(footprints)), style="bold")
        console.print(table)
    for line in batch_lines(config):
        console.print(line, soft_wrap=True)


def in_units(size: int) -> str:
    """Bytes as people say them."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"


def batch_lines(config: Config) -> list[str]:
    """The sizes of a step and of a micro-batch."""
    trainer, longest = config.trainer, config.max_sequence_tokens
    rows = trainer.prompts_per_step * config.rollout.samples_per_prompt
    return [
        f"a step: {trainer.prompts_per_step:,} prompts x {config.rollout.samples_per_prompt} samples = {rows:,} rows, "
        f"{-(-rows // (trainer.rows_per_update or rows)) * trainer.epochs} updates",
        f"a micro-batch: at most {trainer.max_tokens_per_device:,} tokens per device, "
        f"{trainer.max_tokens_per_device // longest} rows of the longest ({longest:,} tokens)",
    ]
