"""Who gets which device: the one place that chooses CUDA devices for the processes of a run.

pools of processes, and the engines that each of them starts ──▶ {process: its own device, those of each of its engines}

A process sees its devices alone: CUDA_VISIBLE_DEVICES is set before it imports torch, so that `cuda` is its own in all of its code. Where
there are enough, engine processes have devices of their own; otherwise they take turns on those of the process that starts them. Under
Ray the cluster chooses which devices these are, by the counts that are computed here. Ranks that `torchrun` has started see all devices
of their node, and take their share by LOCAL_RANK. torch is imported where it is asked: a process that only starts others need not load it.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from braidrl.cluster.pools import Pool
from braidrl.errors import UserError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Devices:
    """The devices of a process, by their numbers among those that its starter sees."""

    every: tuple[int, ...]
    """All that it sees; the first is its own."""
    engines: tuple[tuple[int, ...], ...] = ()
    """Of each engine process that it starts."""


def choose_device(name: str) -> "torch.device":
    """Return the device that the configuration's `device` means: `auto` is CUDA where there is a device."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def has_bfloat16() -> bool:
    """Return True where CUDA devices compute in bfloat16 by themselves, and where there are none, so that nobody can tell."""
    import torch

    return not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)


def device_count(name: str) -> int | None:
    """Return how many CUDA devices this process sees, or None where the configuration's `device` is not CUDA."""
    import torch

    return torch.cuda.device_count() if choose_device(name).type == "cuda" else None


def device_memory(name: str) -> int | None:
    """Return the bytes of this process's CUDA device, or None where the configuration's `device` means none that is here."""
    import torch

    return int(torch.cuda.get_device_properties(0).total_memory) if device_count(name) else None


def free_memory(name: str) -> int | None:
    """Return the bytes of this process's CUDA device that nobody has, or None as for `device_memory`."""
    import torch

    return int(torch.cuda.mem_get_info()[0]) if device_count(name) else None


def devices_each(pools: Sequence[Pool], available: int, where: str) -> dict[str, int]:
    """Return how many devices a process of each pool gets, its engines' included.

    Args:
        pools: The processes of a run.
        available: Devices that there are.
        where: Whose these are, for the error.

    Raises:
        UserError: There are too few.
    """
    apart = {p.name: p.device * (1 + p.engines * p.engine_devices) for p in pools}
    shared = {p.name: p.device * max(1, p.engines * p.engine_devices) for p in pools}
    for each in (apart, shared):
        needed = sum(p.workers * each[p.name] for p in pools)
        if needed <= available:
            return each
    sizes = ", ".join(f"{p.name}: {p.workers * shared[p.name]}" for p in pools if p.device)
    raise UserError(
        f"the processes of the run need {needed} CUDA devices ({sizes}) and {where} has {available}; "
        "lower `workers`, `streaming.workers`, `rollout.engines` or `rollout.tensor`, place more roles in one pool, or write device=cpu"
    )


def assign_devices(pools: Sequence[Pool], available: int, where: str = "this machine") -> dict[str, Devices]:
    """Return the devices of every process, named POOL-NUMBER, in the order of pools and numbers.

    Args:
        pools: The processes of a run on one node.
        available: Devices of the node.
        where: As for `devices_each`, which says what is raised.
    """
    each, table, first = devices_each(pools, available, where), dict[str, Devices](), 0
    for pool in pools:
        for number in range(pool.workers):
            block = tuple(range(first, first + each[pool.name]))
            table[f"{pool.name}-{number}"] = Devices(block, engine_blocks(block, pool.engines, pool.engine_devices))
            first += each[pool.name]
    return table


def engine_blocks(block: Sequence[int], engines: int, devices: int) -> tuple[tuple[int, ...], ...]:
    """Return the devices of each engine: the last of its starter's, so that the starter's own is among them only if it has to be."""
    own = block[len(block) - engines * devices :] if block else ()
    return tuple(tuple(own[n * devices : (n + 1) * devices]) for n in range(engines)) if own else ()


def own_devices(available: int, engines: int = 0, engine_devices: int = 1) -> Devices:
    """Return the devices of this process: those that it sees, or its share of them where `torchrun` has started it.

    Args:
        available: Devices that this process sees.
        engines: Engine processes that it starts.
        engine_devices: Devices of each of those.

    Raises:
        UserError: There are too few.
    """
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    rank = int(os.environ["LOCAL_RANK"]) if local > 1 else 0
    pool = Pool(("rank",), local, engines=engines, engine_devices=engine_devices)
    return assign_devices([pool], available)[f"rank-{rank}"]


def see_only(number: int) -> None:
    """Hide all CUDA devices but one from this process, which must not have used any: `cuda` is that one from now on.

    Args:
        number: Which of those that the process sees.
    """
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen[number] if seen != [""] else str(number)


def device_lines(table: Mapping[str, Devices]) -> list[str]:
    """Return a line for each process and for each engine process: which devices it gets."""
    lines = []
    for name, devices in table.items():
        lines.append(f"{name}: {named(devices.every[:1])}")
        lines += [f"{name}, engine {n}: {named(own)}" for n, own in enumerate(devices.engines)]
    return lines


def named(devices: Sequence[int]) -> str:
    """Return devices as people say them."""
    return " ".join(f"cuda:{number}" for number in devices) or "no device"
