"""Sizes that follow from device memory: slots, tokens of a micro-batch, and the memory share of a vLLM on the trainer's
device.

checked run ─▶ DeviceGroup: the roles of each device ─▶ Demand: bytes that they need
    ─fitting_sizes─▶ the configuration's open
sizes

free ─ reserve ─ resident ──▶ room ──┬── by the bytes of a row's keys and values ──▶ slots
                                     └── by the bytes of a token's activations ────▶ tokens of a micro-batch

Generation and training each take the whole room if they take turns on the device, else half of it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import floor
from typing import TypeVar

import psutil

from braidrl.cluster.devices import device_count, device_memory
from braidrl.cluster.world import World
from braidrl.config import Config
from braidrl.engines.deployment import MODES, Deployment
from braidrl.errors import UserError
from braidrl.runtimes.memory.budget import CACHE, ENGINE, GIB, RoleUse, footprint, in_units
from braidrl.runtimes.prepare.run_data import Prepared, longest, with_data
from braidrl.runtimes.prepare.setup import check_files, lacking, without_data
from braidrl.training.role_settings import MOST_SLOTS

T = TypeVar("T")

VLLM_SHARE = 0.9
"""vLLM's default share of a device."""
RESERVE = 0.1
"""Share of the free memory kept in reserve for fragmentation, kernel workspaces and CUDA graphs."""
SLOT_MULTIPLE, TOKEN_MULTIPLE = 16, 1024
MOST_TOKENS = 65_536
"""Tokens of a micro-batch beyond which training hardly gets faster."""
SAMPLED_TOKENS = 1024
"""Activations are counted at this many tokens and at twice as many; their memory grows linearly."""


@dataclass(frozen=True)
class Demand:
    """The bytes that roles need on a device."""

    stays: int
    """Always resident: weights, optimizers, gradients, an engine's separate weights."""
    training: int = 0
    """Needed by a micro-batch of any size, such as gathered weights."""
    token: int = 0
    """Per token of a micro-batch; 0 without inference and training."""
    slot: int = 0
    """Keys and values of the longest row; 0 without generation."""
    longest: int = 1
    """Tokens of the longest row."""
    rows: int = 1
    """Rows of a step."""
    together: bool = False
    """True if keys and values stay while roles train."""


def fitting_sizes(free: int, demand: Demand) -> tuple[int | None, int | None]:
    """Return the slots (at least 16) and micro-batch tokens (at least the longest row) that fit into free bytes; None
    without such work.
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
    return slots, tokens


def with_sizes(config: Config, slots: int | None, tokens: int | None) -> Config:
    """Return the configuration with these sizes, except those that it sets."""
    rollout, trainer = config.rollout, config.trainer
    # vLLM and servers with slots=auto start as many rows as fit into their memory.
    adapts = rollout.slots == "auto" and rollout.engine in ("vllm", "http")
    if rollout.slots in (None, "auto") and slots is not None and not adapts:
        rollout = rollout.model_copy(update={"slots": slots})
    if trainer.max_tokens_per_device is None and tokens is not None:
        trainer = trainer.model_copy(update={"max_tokens_per_device": tokens})
    return config.model_copy(update={"rollout": rollout, "trainer": trainer})


@dataclass(frozen=True)
class DeviceGroup:
    """Several devices with the same content."""

    devices: int
    uses: tuple[RoleUse, ...]
    kind: str | None = None
    """Kind of the devices, if the pool names one."""


def device_groups(deployment: Deployment) -> list[DeviceGroup]:
    """Return the devices of the pools' workers, or engines if a pool only generates, and the roles that they hold."""
    groups, flow = [], deployment.flow
    for pool in deployment.pools:
        # A role that is only a copy of another one (EMA) has no optimizer.
        uses = [RoleUse(role, role in flow.trained_roles, role in pool.generating) for role in pool.models]
        uses += [RoleUse(role, False, True, is_separate=True) for role in pool.generating if role not in pool.models]
        engines = 1 if pool.models else max(1, pool.engines * pool.engine_devices)
        groups.append(DeviceGroup(pool.workers * engines, tuple(uses), pool.kind))
    return groups


def after_first(world: World, check: Callable[[], T]) -> T:
    """Call `check` on the first rank, then on the others; raise the first rank's UserError on all of them."""
    refused, result = "", None
    if world.first:
        try:
            result = check()
        except UserError as error:
            refused = str(error)
    if refused := world.share("checked", refused):
        raise UserError(refused)
    return check() if result is None else result


def prepared_to_fit(config: Config, world: World, train: bool = True) -> tuple[Prepared, list[str]]:
    """Return a prepared run with sizes that fit its devices, and log lines about them; all ranks call this together.

    All use the sizes of the device with the least memory: ranks that share a model must pack the same micro-batches.
    Raises UserError also for resources missing on this machine.
    """
    mode = MODES[config.runtime]
    if mode.placed:
        # Its generating workers read the data, and this process only checks that it exists.
        check_files(config, train)
    # Proofs of a model by the first rank are cached for the others on its machine.
    prepared = after_first(world, lambda: without_data(config, train))
    if lines := lacking(config):
        raise UserError(lines[0])
    if not mode.placed:
        # Ranks that join later have no share of a file that is still being read.
        opens = not mode.concurrent and world.elastic is None
        # A process that waits to become a rank reads the data alone.
        prepared = with_data(prepared, ranks=World() if world.is_waiting else world, opens=opens)
    # A process that computes on the device may use its free memory; others start later. Streaming evaluates in this
    # process.
    free = not mode.placed and not (mode.concurrent and train)
    memory_of_ranks = world.gather("memory of the devices", device_memory(config.device, free=free))
    return with_fitting_sizes(prepared, None if None in memory_of_ranks else min(memory_of_ranks))


def with_fitting_sizes(prepared: Prepared, memory: int | None) -> tuple[Prepared, list[str]]:
    """Fill in unset sizes from device memory; also return a log line.

    `memory` are the bytes of a device that the run may use; None without a CUDA device, where only `rollout.slots=auto`
    is chosen.
    """
    config_before = prepared.config
    on_cpu = memory is None
    if memory is None:
        if config_before.rollout.slots != "auto" or config_before.rollout.engine in ("vllm", "http"):
            return prepared, []
        # The same on all ranks of a machine, unlike its free memory.
        memory = psutil.virtual_memory().total // 2
    sizes = [fitting_sizes(memory, demand) for demand in demands(prepared)]
    slots, tokens = ([n for n in numbers if n is not None] for numbers in zip(*sizes, strict=True))
    fitting = None if on_cpu else min(tokens, default=None)
    sized = replace(prepared, config=with_sizes(config_before, min(slots, default=None), fitting))
    if shares_devices(prepared) or prepared.deployment.engines.hosts_vllm:
        config = sized.config
        if config.rollout.engine == "vllm" and "gpu_memory_utilization" not in config.rollout.vllm:
            # The share that training leaves for a vLLM on the same device.
            left = min(1 - RESERVE - training / memory for training in training_bytes(sized))
            if left > 0:
                vllm = {**config.rollout.vllm, "gpu_memory_utilization": min(VLLM_SHARE, floor(100 * left) / 100)}
                rollout = config.rollout.model_copy(update={"vllm": vllm})
                sized = replace(sized, config=config.model_copy(update={"rollout": rollout}))
    before, after = (
        {
            "rollout.slots": c.rollout.slots,
            "trainer.max_tokens_per_device": c.trainer.max_tokens_per_device,
            "rollout.vllm.gpu_memory_utilization": c.rollout.vllm.get("gpu_memory_utilization"),
        }
        for c in (config_before, sized.config)
    )
    chosen = [f"{key}={value}" for key, value in after.items() if value != before[key]]
    return sized, [f"chosen for a device with {in_units(memory)} to take: {', '.join(chosen)}"] if chosen else []


def demands(prepared: Prepared) -> list[Demand]:
    """Return the memory needs of the roles on each kind of the run's devices; configured sizes count as resident, or as
    a micro-batch's.
    """
    config, engines, shared = prepared.config, prepared.deployment.engines, shares_devices(prepared)
    longest_row = max(config.max_sequence_tokens, longest(prepared.sources, config.rollout.max_response_tokens))
    beside = shared and not config.rollout.vllm.get("enable_sleep_mode")
    groups = device_groups(prepared.deployment)
    if engines.started and not shared:
        # Engine processes have separate devices.
        generating = dict.fromkeys(use.role for group in groups for use in group.uses if use.generates)
        groups = [
            replace(g, uses=tuple(replace(u, generates=False) for u in g.uses if not u.is_separate)) for g in groups
        ]
        groups += [DeviceGroup(engines.ranks, (RoleUse(role, False, True, is_separate=True),)) for role in generating]
    rows = config.trainer.prompts_per_step * config.rollout.samples_per_prompt
    if not prepared.train:
        # Under hybrid the workers count the prompts.
        prompts = max(map(len, prepared.eval_sources.values()), default=MOST_SLOTS)
        rows = min(prompts, config.evaluation.max_prompts or prompts) * config.evaluation.samples
    configs = [with_sizes(config, 1, SAMPLED_TOKENS), with_sizes(config, 1, 2 * SAMPLED_TOKENS)]
    sizes, demands_of_groups = [replace(prepared.deployment, config=sized) for sized in configs], []
    for group in groups:
        first, second = ([footprint(use, size, group.devices) for use in group.uses] for size in sizes)
        working = [(sum(a.working.values()), sum(b.working.values())) for a, b in zip(first, second, strict=True)]
        token = max((-(-(b - a) // SAMPLED_TOKENS) for a, b in working), default=0)
        training = max((max(0, a - token * SAMPLED_TOKENS) for a, _ in working), default=0)
        stays = sum(size for part in first for name, size in part.resident.items() if name != CACHE)
        cache = max((part.resident.get(CACHE, 0) for part in first), default=0)
        if config.trainer.resident_gib is not None:
            stays = min(stays, int(config.trainer.resident_gib * GIB))
        if beside:
            # An engine process shares the device, and keeps its memory.
            shapes = (p.shape for p in first if p.use.generates and ENGINE not in p.resident)
            stays += training + sum(shape.parameters * shape.element_bytes for shape in shapes)
            stays, cache, training = (stays + cache, 0, 0) if config.rollout.slots else (stays, cache, 0)
        demands_of_groups += [Demand(stays, training, token, cache, longest_row, rows, beside)] if group.uses else []
    return demands_of_groups


def shares_devices(prepared: Prepared) -> bool:
    """Return True if engine processes share this process's devices with training."""
    available, pools = device_count(prepared.config.device), prepared.deployment.pools
    ranks_and_engines = [(pool.workers * pool.device, pool.engines * pool.engine_devices) for pool in pools]
    together = sum(ranks * max(1, engines) for ranks, engines in ranks_and_engines)
    return available is not None and together <= available < sum(
        ranks * (1 + engines) for ranks, engines in ranks_and_engines
    )


def training_bytes(prepared: Prepared) -> list[int]:
    """Return the bytes that training uses of each kind of device while a vLLM on it keeps its memory."""
    config, trained_bytes = prepared.config, []
    for group in device_groups(prepared.deployment):
        parts = [footprint(use, prepared.deployment, group.devices) for use in group.uses]
        stays = sum(size for part in parts for name, size in part.resident.items() if name not in (ENGINE, CACHE))
        working = max((sum(part.working.values()) for part in parts), default=0)
        # A sleeping engine has freed its memory while roles work; on the ranks that train it always sleeps then.
        sleeps = config.rollout.vllm.get("enable_sleep_mode") or prepared.deployment.engines.hosts_vllm
        trained_bytes.append(stays if sleeps else stays + working)
    return trained_bytes


def check_engine_memory(prepared: Prepared) -> None:
    """Raise UserError if a vLLM that shares a device with training requests more memory than training leaves."""
    config = prepared.config
    if config.rollout.engine != "vllm" or config.trainer.resident_gib is not None:
        return
    beside = shares_devices(prepared) or prepared.deployment.engines.hosts_vllm
    if (total := device_memory(config.device)) is None or not beside:
        return
    share = float(config.rollout.vllm.get("gpu_memory_utilization", VLLM_SHARE))
    for training in training_bytes(prepared):
        if share * total > total - training:
            raise UserError(
                f"rollout.vllm.gpu_memory_utilization={share:g} asks for {in_units(int(share * total))} of a device of "
                f"{in_units(total)}, and training takes {in_units(training)} of it; write "
                f"{max(0.0, 1 - training / total):.2f} at most, set trainer.resident_gib so that they take turns, or "
                "leave the engine a device of its own"
            )
