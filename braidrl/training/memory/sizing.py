"""How many rows a device decodes at once, and how many tokens it computes at once, by the memory that is free.

free ─ reserve ─ what stays ──▶ room ──┬── by the bytes of a row's keys and values ──▶ slots
                                       └── by the bytes of a token's activations ────▶ tokens of a micro-batch

Both take the whole room where they take turns on the device, and half of it each where they are there together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from braidrl.config import Config
from braidrl.flow import Flow
from braidrl.training.memory.budget import CACHE, ENGINE, GIB, Footprint, RoleUse, footprint

RESERVE = 0.1
"""Share of the free memory that is left alone: fragments, workspaces of kernels, recorded steps."""
SLOT_MULTIPLE, TOKEN_MULTIPLE = 16, 1024
MOST_SLOTS, MOST_TOKENS = 1024, 65_536
"""Beyond these a device decodes, or trains, hardly faster."""
SAMPLED_TOKENS = 1024
"""Activations are counted for so many tokens and for twice as many; their memory grows evenly."""


@dataclass(frozen=True)
class Demand:
    """What roles need of a device, in bytes."""

    stays: int
    """What is there all the time: weights, optimizers, gradients, an engine's own weights."""
    training: int = 0
    """What a micro-batch needs whatever its size, such as gathered weights."""
    token: int = 0
    """Of each token of a micro-batch; 0 where nothing is inferred or trained."""
    slot: int = 0
    """Keys and values of the longest row; 0 where nothing is generated."""
    longest: int = 1
    """Tokens of the longest row."""
    rows: int = 1
    """Rows of a step."""
    together: bool = False
    """True where keys and values stay while roles train."""


class FittingSizes(NamedTuple):
    """What fits; None where a device does nothing of the kind."""

    slots: int | None
    tokens: int | None


def fitting_sizes(free: int, demand: Demand) -> FittingSizes:
    """Return the slots and the tokens of a micro-batch that a device has room for: at least 16 slots and the longest row.

    Args:
        free: Bytes of the device that nobody has.
        demand: What the roles on it need.
    """
    room = max(0, int(free * (1 - RESERVE)) - demand.stays)
    if demand.together and demand.slot and demand.token:
        room //= 2
    slots = tokens = None
    if demand.slot:
        most = min(MOST_SLOTS, -(-demand.rows // SLOT_MULTIPLE) * SLOT_MULTIPLE)
        slots = max(SLOT_MULTIPLE, min(most, room // demand.slot // SLOT_MULTIPLE * SLOT_MULTIPLE))
    if demand.token:
        most = max(demand.longest, min(MOST_TOKENS, demand.rows * demand.longest))
        fitting = min(most, max(0, room - demand.training) // demand.token)
        rounded = fitting // TOKEN_MULTIPLE * TOKEN_MULTIPLE or fitting
        tokens = max(demand.longest, rounded)
    return FittingSizes(slots, tokens)


def with_sizes(config: Config, slots: int | None, tokens: int | None) -> Config:
    """Return the configuration with these sizes where it says none itself."""
    rollout, trainer = config.rollout, config.trainer
    if rollout.slots is None and slots is not None:
        rollout = rollout.model_copy(update={"slots": slots})
    if trainer.max_tokens_per_device is None and tokens is not None:
        trainer = trainer.model_copy(update={"max_tokens_per_device": tokens})
    return config.model_copy(update={"rollout": rollout, "trainer": trainer})


def demand_of(
    uses: Sequence[RoleUse], config: Config, flow: Flow, devices: int, decoding_ranks: int = 1, longest: int = 1,
    engine_beside: bool = False,
) -> Demand:  # fmt: skip
    """Return what the roles of a device need; sizes that the configuration says itself are what stays, or what a micro-batch needs.

    Args:
        uses: The roles of one device.
        config: Of the run.
        flow: Of the run.
        devices: Devices that hold the same.
        decoding_ranks: Ranks that decode together.
        longest: Tokens of the longest row.
        engine_beside: True where an engine in a process of its own shares the device, and keeps its memory.
    """

    def counted(slots: int, tokens: int) -> list[Footprint]:
        sized = with_sizes(config, slots, tokens)
        return [footprint(use, sized, flow, devices, decoding_ranks) for use in uses]

    one, two = counted(1, SAMPLED_TOKENS), counted(1, 2 * SAMPLED_TOKENS)
    working = [(sum(a.working.values()), sum(b.working.values())) for a, b in zip(one, two, strict=True)]
    token = max((-(-(b - a) // SAMPLED_TOKENS) for a, b in working), default=0)
    training = max((max(0, a - token * SAMPLED_TOKENS) for a, _ in working), default=0)
    stays = sum(size for part in one for name, size in part.resident.items() if name != CACHE)
    cache = max((part.resident.get(CACHE, 0) for part in one), default=0)
    if config.trainer.resident_gib is not None:
        stays = min(stays, int(config.trainer.resident_gib * GIB))
    if engine_beside:
        own = (p.shape for p in one if p.use.generates and ENGINE not in p.resident)
        stays += training + sum(shape.parameters * shape.element_bytes for shape in own)
        stays, cache, training = (stays + cache, 0, 0) if config.rollout.slots else (stays, cache, 0)
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    return Demand(stays, training, token, cache, longest, rows, engine_beside)
