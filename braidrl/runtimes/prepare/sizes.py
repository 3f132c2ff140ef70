"""Sizes of a run by the memory of its devices: slots, tokens of a micro-batch, and the share of a vLLM that is on the trainer's device.

checked run ──▶ the roles of each device ──▶ bytes that they need ──fitting_sizes──▶ the configuration, with what it did not say
"""

from dataclasses import replace
from math import floor

from braidrl.cluster.devices import device_count, device_memory, free_memory
from braidrl.config import Config
from braidrl.engines.factory import generation_layout, own_engines, pools_ranks
from braidrl.errors import UserError
from braidrl.runtimes.prepare.devices import DeviceGroup, device_groups, pools_of_run
from braidrl.runtimes.prepare.setup import Prepared, longest
from braidrl.training.memory.budget import CACHE, ENGINE, RoleUse, footprint, in_units
from braidrl.training.memory.sizing import RESERVE, Demand, demand_of, fitting_sizes, with_sizes

VLLM_SHARE = 0.9
"""What vLLM takes of a device unless told otherwise."""


def with_fitting_sizes(prepared: Prepared, memory: int | None) -> tuple[Prepared, list[str]]:
    """Return a run with the sizes that fit into the memory of its devices, where the configuration says none, and a line that says which.

    Args:
        prepared: The run.
        memory: Bytes of a device that the run may take; None where it has no CUDA device.
    """
    given = prepared.config
    if memory is None:
        return prepared, []
    found = [fitting_sizes(memory, demand) for demand in demands(prepared)]
    slots, tokens = ([n for n in numbers if n is not None] for numbers in zip(*found, strict=True))
    sized = replace(prepared, config=with_sizes(given, min(slots, default=None), min(tokens, default=None)))
    if shares_devices(prepared):
        sized = replace(sized, config=with_vllm_share(sized, memory))
    return sized, size_lines(given, sized.config, memory)


def memory_to_take(config: Config) -> int | None:
    """Return the bytes of a CUDA device that a run may take, or None without one: what is free, where this process itself computes."""
    return free_memory(config.device) if config.runtime in ("eager", "distributed") else device_memory(config.device)


def demands(prepared: Prepared) -> list[Demand]:
    """Return what the roles on each kind of the run's devices need."""
    config, shared = prepared.config, shares_devices(prepared)
    longest_row = max(config.max_sequence_tokens, longest(prepared.sources, config.rollout.max_response_tokens))
    together = generation_layout(config).ranks if pools_ranks(config) else 1
    beside = shared and not config.rollout.vllm.get("enable_sleep_mode")
    apart = own_engines(config) and not shared
    return [
        demand_of(group.uses, config, prepared.flow, group.devices, together, longest_row, beside)
        for group in (groups_with_engines(prepared) if apart else device_groups(prepared))
        if group.uses
    ]


def with_vllm_share(prepared: Prepared, memory: int) -> Config:
    """Return the configuration with what training leaves of a device for a vLLM that shares it, unless it says that itself."""
    config = prepared.config
    if config.rollout.engine != "vllm" or "gpu_memory_utilization" in config.rollout.vllm:
        return config
    left = min(1 - RESERVE - training / memory for training in beside_vllm(prepared))
    if left <= 0:
        return config
    share = min(VLLM_SHARE, floor(100 * left) / 100)
    vllm = {**config.rollout.vllm, "gpu_memory_utilization": share}
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"vllm": vllm})})


def size_lines(given: Config, sized: Config, memory: int) -> list[str]:
    """Return a line that says which sizes the memory of a device has chosen, where it has chosen any."""
    chosen = []
    if given.rollout.slots != sized.rollout.slots:
        chosen.append(f"rollout.slots={sized.rollout.slots}")
    if given.trainer.max_tokens_per_device != sized.trainer.max_tokens_per_device:
        chosen.append(f"trainer.max_tokens_per_device={sized.trainer.max_tokens_per_device}")
    if given.rollout.vllm != sized.rollout.vllm:
        chosen.append(f"rollout.vllm.gpu_memory_utilization={sized.rollout.vllm['gpu_memory_utilization']:g}")
    return [f"chosen for a device with {in_units(memory)} to take: {', '.join(chosen)}"] if chosen else []


def shares_devices(prepared: Prepared) -> bool:
    """Return True where engine processes take turns with training on the devices that this process sees."""
    available, pools = device_count(prepared.config.device), pools_of_run(prepared)
    each = [(pool.workers * pool.device, pool.engines * pool.engine_devices) for pool in pools]
    together = sum(ranks * max(1, engines) for ranks, engines in each)
    return available is not None and together <= available < sum(ranks * (1 + engines) for ranks, engines in each)


def groups_with_engines(prepared: Prepared) -> list[DeviceGroup]:
    """Return the devices of the run where engine processes have devices of their own."""
    groups = device_groups(prepared)
    generating = dict.fromkeys(use.role for group in groups for use in group.uses if use.generates)
    found = [replace(g, uses=tuple(replace(use, generates=False) for use in g.uses if not use.apart)) for g in groups]
    return [*found, *(DeviceGroup(1, (RoleUse(role, False, True, apart=True),)) for role in generating)]


def beside_vllm(prepared: Prepared) -> list[int]:
    """Return the bytes that training takes of each kind of device while a vLLM that shares it has its own memory there."""
    config, found = prepared.config, []
    for group in device_groups(prepared):
        parts = [footprint(use, config, prepared.flow, group.devices) for use in group.uses]
        stays = sum(size for one in parts for part, size in one.resident.items() if part not in (ENGINE, CACHE))
        working = max((sum(one.working.values()) for one in parts), default=0)
        # One that sleeps has given its memory back while roles work.
        found.append(stays if config.rollout.vllm.get("enable_sleep_mode") else stays + working)
    return found


def check_engine_memory(prepared: Prepared) -> None:
    """Raise UserError where a vLLM that shares a device with training asks for more memory than training leaves there."""
    config = prepared.config
    if config.rollout.engine != "vllm" or config.trainer.resident_gib is not None:
        return
    if (total := device_memory(config.device)) is None or not shares_devices(prepared):
        return
    share = float(config.rollout.vllm.get("gpu_memory_utilization", VLLM_SHARE))
    for training in beside_vllm(prepared):
        if share * total > total - training:
            raise UserError(
                f"rollout.vllm.gpu_memory_utilization={share:g} asks for {in_units(int(share * total))} of a device of {in_units(total)}, "
                f"and training takes {in_units(training)} of it; write {max(0.0, 1 - training / total):.2f} at most, set "
                "trainer.resident_gib so that they take turns, or leave the engine a device of its own"
            )
