"""Assignment of devices: the only place that chooses CUDA devices for the processes of a run.

process pools and the engines that each process starts ──▶ {process: its own device, the devices of each of its engines}

A process sees only its own devices: CUDA_VISIBLE_DEVICES is set before it imports torch, so `cuda` is always its own.
If there are enough devices, engine processes get their own; otherwise they share those of their parent. Under Ray the
cluster picks the devices, and the counts come from here. Ranks started by `torchrun` see all devices of their node and
take a share by LOCAL_RANK. torch is imported only inside functions: a process that only starts others need not load it.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING

from braidrl.cluster.device_kinds import Cluster
from braidrl.cluster.pools import Pool
from braidrl.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Devices:
    """The devices of a process, numbered as its parent sees them."""

    every: tuple[int, ...]
    """All devices that it sees; the first is for its computations."""
    engines: tuple[tuple[int, ...], ...] = ()
    """Devices of each engine process that it starts."""


PLANNED: ContextVar[Cluster | None] = ContextVar("PLANNED", default=None)
"""The devices that are asked in place of this machine's, for a dry run of a configuration of another machine."""


@contextmanager
def planned_for(cluster: Cluster | None) -> Iterator[None]:
    """Answer the queries below for a planned cluster, by the vendors' figures; None means this machine."""
    token = PLANNED.set(cluster)
    try:
        yield
    finally:
        PLANNED.reset(token)


def here() -> str:
    """Return the name of the machine that the queries below refer to."""
    return str(PLANNED.get() or "this machine")


def choose_device(name: str) -> "torch.device":
    """Resolve the configured `device`: `auto` is CUDA if there is a device."""
    import torch

    if name == "auto" and (planned := PLANNED.get()):
        name = planned.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def has_bfloat16() -> bool:
    """Return True if CUDA devices support bfloat16 natively, or if there are none."""
    import torch

    if planned := PLANNED.get():
        return all("bfloat16" in kind.peak for kind in planned.kinds.values())
    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def device_count(name: str) -> int | None:
    """Return the number of CUDA devices that this process sees, or that are planned; None if `device` is not CUDA."""
    import torch

    if choose_device(name).type != "cuda":
        return None
    planned = PLANNED.get()
    return torch.cuda.device_count() if planned is None else planned.size


def device_memory(name: str, free: bool = False) -> int | None:
    """Return the bytes of this process's CUDA device, or its `free` bytes; None without the configured `device`."""
    import torch

    if not device_count(name):
        return None
    if planned := PLANNED.get():
        return min(kind.memory for kind in planned.kinds.values())
    return int(torch.cuda.mem_get_info()[0] if free else torch.cuda.get_device_properties(0).total_memory)


def devices_each(pools: Sequence[Pool], available: int, where: str) -> dict[str, int]:
    """Return the devices per process of each pool, with its engines'.

    Raises UserError, which says `where`, if fewer are `available`.
    """
    apart = {p.name: p.device * (1 + p.engines * p.engine_devices) for p in pools}
    shared = {p.name: p.device * max(1, p.engines * p.engine_devices) for p in pools}
    for devices_of in (apart, shared):
        needed = sum(p.workers * devices_of[p.name] for p in pools)
        if needed <= available:
            return devices_of
    sizes = ", ".join(f"{p.name}: {p.workers * shared[p.name]}" for p in pools if p.device)
    raise UserError(
        f"the processes of the run need {needed} CUDA devices ({sizes}) and {where} has {available}; lower `workers`, "
        "`streaming.workers`, `rollout.engines` or `rollout.tensor`, place more roles in one pool, or write device=cpu"
    )


def assign_devices(pools: Sequence[Pool], available: int) -> dict[str, Devices]:
    """Return the devices of each process on one node, named POOL-NUMBER, in the order of pools.

    Raises as `devices_each`.
    """
    shared, table, first = devices_each(pools, available, here()), dict[str, Devices](), 0
    for pool in pools:
        for number in range(pool.workers):
            block = tuple(range(first, first + shared[pool.name]))
            # Engines take devices from the end of the block, so that the process's device is shared last.
            size = pool.engine_devices
            engine_block = block[len(block) - pool.engines * size :] if block else ()
            engines = (
                tuple(engine_block[n * size : (n + 1) * size] for n in range(pool.engines)) if engine_block else ()
            )
            table[f"{pool.name}-{number}"] = Devices(block, engines)
            first += shared[pool.name]
    return table


def visible_devices(available: int, engines: int = 0, engine_devices: int = 1) -> Devices:
    """Return the devices of this process and its engines: all visible ones, or its share of them under `torchrun`."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(os.environ["LOCAL_RANK"]) if local > 1 else 0
    pool = Pool(("rank",), local, engines=engines, engine_devices=engine_devices)
    return assign_devices([pool], available)[f"rank-{rank}"]


def device_lines(table: Mapping[str, Devices]) -> list[str]:
    """Return a line per process and per engine process with its devices."""
    lines = []
    for name, devices in table.items():
        engines = {
            f"{name}, engine {number}": numbers_of_engine for number, numbers_of_engine in enumerate(devices.engines)
        }
        for entry, numbers in {name: devices.every[:1], **engines}.items():
            lines.append(f"{entry}: {' '.join(f'cuda:{number}' for number in numbers) or 'no device'}")
    return lines
