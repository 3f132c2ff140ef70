"""Memory of a role on each of its devices, counted by `training.memory.footprint`; used by `--dry-run` and `braid
plan`.

configuration or candidate ──▶ RoleDeployment ──role_memory──▶ Footprint(resident, working) ──peak──▶ bytes of a device
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from braidrl.cluster.devices import choose_device
from braidrl.config import Config
from braidrl.config.layout import ParallelLayout
from braidrl.engines.deployment import Deployment
from braidrl.flow import Flow, Kind
from braidrl.native.linear import PACKED
from braidrl.runtimes.memory.residency import GIB, Asset, ResidencyPlan, residency_plan
from braidrl.training.memory.footprint import (
    Shape,
    activation_bytes,
    cache_bytes,
    model_shape,
    resident_bytes,
    working_bytes,
)
from braidrl.training.optimizer import MASTER_BYTES, moment_bytes
from braidrl.training.processors import load_vision
from braidrl.training.role_settings import dtype_named, merges_adapters, settings_of, slots_of

MIB = 1 << 20
ENGINE, CACHE, INFERENCE = "weights of the engine", "keys and values", "weights to infer with"
PANELS = "packed weights of the engine"
FREED = (CACHE, PANELS)
"""Parts that an engine has only while it generates."""
IMAGES = "encoded images, at most"
PART_OF = {"weights": "weights", ENGINE: "engine", CACHE: "engine", PANELS: "engine", INFERENCE: "inference"}


@dataclass(frozen=True)
class RoleUse:
    """A role on a device, and its work there."""

    role: str
    trained: bool
    generates: bool
    is_separate: bool = False
    """True if it generates in a separate pool."""


@dataclass(frozen=True)
class EngineUse:
    """An engine: `divisor` ranks shard it; without `own_weights` it decodes with the trainer's weights."""

    shape: Shape
    slots: int
    tokens: int
    """Tokens of the longest sequence."""
    divisor: int = 1
    own_weights: bool = False
    packs: bool = False
    """It decodes by compiled products, which read packed weights."""
    encodes: bool = False
    """It has a vision tower of its own weights, and keeps what that encodes, as its role does."""


@dataclass(frozen=True)
class RoleDeployment:
    """The layout and use of a role on its devices. `plain` is its model without adapters."""

    shape: Shape
    plain: Shape
    layout: ParallelLayout
    trained: bool
    scalar: bool
    computes: bool
    """True if it infers or trains."""
    tokens: int
    """Tokens of a micro-batch."""
    checkpointing: bool = False
    inference: ParallelLayout | None = None
    """Layout of a second copy for inference."""
    engine: EngineUse | None = None
    moment_bytes: float = MASTER_BYTES
    """Bytes of each of the optimizer's two moments of a float32 weight."""
    images: int = 0
    """Maximum bytes of encoded images that it keeps."""
    shares_engine: bool = False
    """Another role's engine also generates for it (`rollout.shared_base`)."""
    shares_base: bool = False
    """On that engine's devices, its adapters use the base weights of the other role."""


@dataclass(frozen=True)
class Footprint:
    """A role's bytes on its device by part: resident, and while it works."""

    use: RoleUse
    shape: Shape
    resident: dict[str, int]
    working: dict[str, int]


def role_memory(use: RoleDeployment) -> tuple[dict[str, int], dict[str, int]]:
    """Return the bytes on each device by part: the resident ones, and those needed while the role works."""
    resident = resident_bytes(use.shape, use.trained, use.layout, use.moment_bytes)
    if use.shares_base and use.engine is not None:
        resident["weights"] -= resident_bytes(use.plain, False, use.layout)["weights"]
    if use.inference is not None:
        resident[INFERENCE] = resident_bytes(use.plain, False, use.inference)["weights"]
    if use.engine is not None and not use.shares_engine:
        engine = use.engine
        if engine.own_weights:
            resident[ENGINE] = engine.shape.parameters * engine.shape.element_bytes // engine.divisor
        cached = engine.shape.cached_elements
        cache = cache_bytes(cached, engine.shape.element_bytes, engine.slots, engine.tokens)
        resident[CACHE] = cache // engine.divisor
        panels = engine.shape.parameters * torch.float32.itemsize // engine.divisor
        if engine.packs and panels <= PACKED:
            resident[PANELS] = panels
    if use.images:
        resident[IMAGES] = use.images * (2 if use.engine and use.engine.encodes and use.engine.own_weights else 1)
    uses = [use] if use.computes else []
    if use.computes and use.inference is not None:
        uses.append(replace(use, shape=use.plain, layout=use.inference, trained=False, inference=None))
    working: dict[str, int] = {}
    for role_use in uses:
        saved = (
            activation_bytes(role_use.shape, role_use.tokens, role_use.checkpointing, role_use.layout)
            if role_use.trained
            else 0
        )
        needed = working_bytes(
            role_use.shape, role_use.layout, role_use.tokens, role_use.trained, saved, role_use.scalar
        )
        working = {part: max(working.get(part, 0), needed.get(part, 0)) for part in {**working, **needed}}
    return resident, working


def footprint(use: RoleUse, deployment: Deployment, devices: int) -> Footprint:
    """Return the bytes of one role on each device, by part, in its layout."""
    deployed = role_deployment(use, deployment, devices)
    return Footprint(use, deployed.shape, *role_memory(deployed))


def role_deployment(use: RoleUse, deployment: Deployment, devices: int) -> RoleDeployment:
    """Return a role's configured deployment on this number of devices. Raises UserError if its layout does not fit."""
    config, decoding_ranks, placed = deployment.config, deployment.engines.ranks, undeployed(use, deployment)
    role, rollout, layout = use.role, config.rollout, placed.layout
    if deployment.engines.is_separate and use.is_separate:
        # Each process that generates starts its own engines.
        devices = decoding_ranks
    if use.is_separate:
        layout = ParallelLayout(pipeline=rollout.pipeline, tensor=decoding_ranks // rollout.pipeline)
    layout, sizes = layout.resolve(devices), placed.shape.sizes
    if rollout.engine != "vllm" or not use.is_separate:
        layout.check_model(sizes.num_attention_heads, sizes.num_key_value_heads, sizes.num_hidden_layers)
    inferring = deployment.inference_layouts.get(role) if use.trained else None
    engine = None
    if use.generates:
        engine = engine_use(role, placed.shape, layout, config, slots_of(config), decoding_ranks)
        # An engine on separate devices has the role's weights there, counted as engine weights.
        engine = engine and replace(engine, own_weights=engine.own_weights and not use.is_separate)
    return replace(placed, layout=layout, inference=inferring and inferring.resolve(devices), engine=engine)


def undeployed(use: RoleUse, deployment: Deployment) -> RoleDeployment:
    """Return the model and the use of a role in its configured layout, without devices and engine."""
    config, flow = deployment.config, deployment.flow
    settings, scalar = settings_of(use.role, config), use.role in flow.scalar_roles
    plain = model_shape(settings.model, settings.dtype, scalar)
    # An engine in a pool of its own has merged weights, unless it shares a base.
    adapted = use.trained or (use.role in deployment.shared_base and not use.is_separate)
    lora = settings.lora if adapted else None
    if not settings.trains_vision:
        plain = replace(plain, trained=plain.trained - plain.tower)
    keeps = not settings.trains_vision and load_vision(settings.model.expanduser(), config.data.images) is not None
    kinds = {stage.kind for stage in flow.stages if stage.role == use.role}
    shares = use.role in deployment.shared_base[1:]
    return RoleDeployment(
        model_shape(settings.model, settings.dtype, scalar, lora) if lora else plain,
        plain,
        settings.layout,
        use.trained,
        scalar,
        computes=not use.is_separate and not kinds.isdisjoint((Kind.INFER, Kind.TRAIN)),
        tokens=settings.max_tokens,
        checkpointing=settings.activation_checkpointing,
        moment_bytes=moment_bytes(config.trainer),
        images=int(config.data.images.kept_mib * MIB) if keeps else 0,
        shares_engine=shares,
        shares_base=shares and config.rollout.engine == "embedded",
    )


def engine_use(
    role: str, shape: Shape, layout: ParallelLayout, config: Config, slots: int, divisor: int
) -> EngineUse | None:
    """Return the engine of a role, of `divisor` ranks, on the devices that train it; None for servers, which have
    separate devices.

    `shape` is the role's model with adapters, and `layout` the one in which the devices hold it.
    """
    rollout = config.rollout
    if rollout.engine == "http":
        return None
    decoder = replace(shape, dtype=dtype_named(rollout.dtype)) if rollout.dtype else shape
    lora = settings_of(role, config).lora if shape.trained < shape.parameters else None
    shares = rollout.engine == "embedded" and decoder.dtype == shape.dtype and layout.is_replicated and divisor == 1
    own_weights = not shares or (merges_adapters(lora, config) and not rollout.shared_base)
    on_cpu = rollout.engine == "embedded" and rollout.compile and choose_device(config.device).type == "cpu"
    packs = on_cpu and decoder.dtype == torch.float32 and (lora is None or own_weights)
    encodes = rollout.engine == "embedded" and not settings_of(role, config).trains_vision
    return EngineUse(decoder, slots, config.max_sequence_tokens, divisor, own_weights, packs, encodes)


def peak(footprints: Sequence[Footprint], resident: int | None = None) -> int:
    """Return the peak bytes of one device: the resident ones, plus the largest working bytes of a role.

    Roles take turns, and engines sleep while others work: keys and values exist while their role generates, and not
    while one infers or trains. `resident` gives the bytes of the resident assets if assets are offloaded.
    """
    working, parts = max(sum(f.working.values()) for f in footprints), [f.resident for f in footprints]
    return at_once(parts, working) if resident is None else resident + working + kept_images(parts)


def kept_images(resident: Iterable[Mapping[str, int]]) -> int:
    """Return the bytes of encoded images that roles keep. They are not offloaded."""
    return sum(parts.get(IMAGES, 0) for parts in resident)


def at_once(resident: Sequence[Mapping[str, int]], working: int) -> int:
    """Return the peak bytes of resident roles that take turns: keys and values never coexist with `working` bytes."""
    generating = max(sum(parts.get(part, 0) for part in FREED) for parts in resident)
    stays = sum(size for parts in resident for part, size in parts.items() if part not in FREED)
    return stays + max(working, generating)


def assets(role: str, resident: dict[str, int]) -> dict[Asset, int]:
    """Return a role's bytes by asset, the unit that moves between device and host."""
    sizes: dict[Asset, int] = {}
    for name, size in resident.items():
        if name == IMAGES:
            continue
        asset = Asset(role, PART_OF.get(name, "optimizer"))  # type: ignore[arg-type]
        sizes[asset] = sizes.get(asset, 0) + size
    return sizes


def moving(deployment: Deployment, footprints: Sequence[Footprint]) -> tuple[int | None, list[Asset]]:
    """Return, under a memory budget, a device's peak bytes and the offloaded assets. Raises as `residency_plan`."""
    if (gib := deployment.resident_gib) is None:
        return None, []
    resident = {footprint.use.role: footprint.resident for footprint in footprints}
    generating = [footprint.use.role for footprint in footprints if footprint.use.generates]
    plan = taking_turns(deployment.flow, resident, generating, int(gib * GIB))
    every = {asset for role, parts in resident.items() for asset in assets(role, parts)}
    return plan.most, sorted(every - plan.kept)


def taking_turns(
    flow: Flow, resident: Mapping[str, dict[str, int]], generating: Collection[str], budget: int
) -> ResidencyPlan:
    """Plan offloading for colocated roles so that resident bytes stay within the budget, from their resident bytes by
    part.

    Raises as `residency_plan`.
    """
    sizes = {asset: size for role, parts in resident.items() for asset, size in assets(role, parts).items()}
    shared = frozenset(role for role in generating if ENGINE not in resident[role])
    copied = frozenset(role for role, parts in resident.items() if INFERENCE in parts)
    # A sleeping engine has only its separate weights, without keys and values.
    sleeping = {
        Asset(role, "engine"): parts.get(ENGINE, 0)
        for role, parts in resident.items()
        if {ENGINE, CACHE} & parts.keys()
    }
    return residency_plan(flow, sizes, budget, shared, copied, sleeping, generating)


def in_units(size: int) -> str:
    return f"{size / GIB:,.2f} GiB" if size >= GIB else f"{size / MIB:,.1f} MiB"
