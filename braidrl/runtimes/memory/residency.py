"""Residency: which assets of the roles are in device memory at each stage, if not all fit at once; the plan, and its
execution.

    stage       actor.generate   reference.log_probs  actor.update        publish
    resident    engine           reference weights    weights, optimizer  weights, engine  + all kept assets

The plan follows from the order of stages alone. An asset is loaded before the first of consecutive stages that need it,
and offloaded after the last; this continues from one iteration to the next. An asset that fits in addition to every
stage's needs is kept and never moves. A kept engine sleeps while others work and then holds only its separate weights,
without keys and values. `Residency` makes the moves:

    stage ──needs──▶ Residency ──offload, onload──▶ weights and optimizers of roles, engines' copies of weights
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

from braidrl.engines.deployment import Deployment
from braidrl.engines.routing.router import RoleEngine
from braidrl.errors import UserError
from braidrl.flow.flow import Flow, is_optimized, policies_of, touched_weights
from braidrl.flow.stage import Kind, Stage
from braidrl.runtimes.generating.generation import WeightMoves
from braidrl.training.backends import ShardedBackend, TrainingBackend
from braidrl.training.memory.offload import OffloadableTensors, storages
from braidrl.weights.in_place import GenerationWeights

GIB = 1 << 30
PUBLISH = "publish"
"""The step after the last stage, in which trained weights go to engines with their own copy."""
EVALUATION = "evaluation of "
"""Prefix of the step in which a role generates for evaluations alone."""


AssetPart = Literal["weights", "optimizer", "engine", "inference"]


class Asset(NamedTuple):
    """A part of a role in device memory; `optimizer` includes gradients, `inference` is a copy in another layout."""

    role: str
    part: AssetPart


@dataclass(frozen=True)
class ResidencyPlan:
    """The residency of one process's assets through an iteration.

    Moves belong to a stage's position: they are made even in an iteration in which `when` skips the stage.
    """

    kept: frozenset[Asset]
    """The assets that never move; all others are loaded before the first of consecutive stages that need them, and
    offloaded after the last.
    """
    moved: Mapping[str, int]
    """Bytes that are loaded and offloaded before each stage, and before PUBLISH."""
    most: int
    """The peak of resident bytes."""


def residency_plan(
    flow: Flow,
    sizes: Mapping[Asset, int],
    budget: int | None,
    shared: frozenset[str] = frozenset(),
    copied: frozenset[str] = frozenset(),
    asleep: Mapping[Asset, int] | None = None,
    generating: Collection[str] = (),
) -> ResidencyPlan:
    """Return the plan of one process for its assets, given by `sizes` in bytes; without a budget in bytes it keeps
    everything.

    Engines of `shared` roles use the trainer's weights; `copied` roles infer with a copy of theirs. `asleep` has the
    bytes of sleeping engines, by default as many as awake, and `generating` further roles that generate only in
    evaluations. Raises UserError if a single stage exceeds the budget.
    """
    during = sizes_during(flow, sizes, asleep or {}, generating)
    needs = {step: needed & sizes.keys() for step, needed in needed_assets(flow, shared, copied, generating).items()}

    def resident(step: str, kept: frozenset[Asset]) -> int:
        return sum(during[step][asset] for asset in kept | needs[step])

    # Each step and the previous one; the last step of an iteration precedes the first of the next.
    steps = list(zip(needs, [PUBLISH, *needs], strict=False))
    kept: frozenset[Asset] = frozenset(sizes) if budget is None else frozenset()
    if budget is not None:
        for step, needed in needs.items():
            if (total := resident(step, kept)) > budget:
                parts = ", ".join(f"{asset.role} {asset.part} {during[step][asset]:,}" for asset in sorted(needed))
                raise UserError(
                    f"{step} needs {total:,} bytes on a device ({parts}) and {budget:,} are there; "
                    "place its role on more devices, or its generation in its own pool"
                )
        # Keep the assets that fit in addition to every step's needs. Those that would be loaded most often come first:
        # an asset is loaded once for each run of steps that need it.
        runs = {asset: sum(asset in needs[step] - needs[before] for step, before in steps) for asset in sizes}
        for asset in sorted(sizes, key=lambda asset: (-runs[asset], sizes[asset], asset)):
            if all(resident(step, kept | {asset}) <= budget for step in needs):
                kept |= {asset}
    moved = {step: sum(sizes[asset] for asset in (needs[step] ^ needs[before]) - kept) for step, before in steps}
    return ResidencyPlan(kept, moved, max(resident(step, kept) for step in needs))


def sizes_during(
    flow: Flow, sizes: Mapping[Asset, int], asleep: Mapping[Asset, int], generating: Collection[str] = ()
) -> dict[str, dict[Asset, int]]:
    """Return the bytes of each loaded asset in each step: an engine is awake only in steps that generate with it."""
    steps = {stage.name: policies_of(stage) for stage in flow.stages}
    steps |= {**{EVALUATION + role: (role,) for role in generating}, PUBLISH: ()}
    return {
        step: {asset: size if asset.role in roles else asleep.get(asset, size) for asset, size in sizes.items()}
        for step, roles in steps.items()
    }


def needed_assets(
    flow: Flow,
    shared: frozenset[str] = frozenset(),
    copied: frozenset[str] = frozenset(),
    generating: Collection[str] = (),
) -> dict[str, frozenset[Asset]]:
    """Return the assets that stages need on the device, including evaluations by roles that generate in no stage, and
    the publication.
    """
    needs = {stage.name: stage_needs(stage, shared, copied) for stage in flow.stages}
    of_stages = {role for stage in flow.stages for role in policies_of(stage)}
    needs |= {EVALUATION + role: engine_needs(role, shared) for role in generating if role not in of_stages}
    # Every engine with separate weights receives them, including those of a role that does not change.
    published = {*of_stages, *generating} - shared
    parts: tuple[AssetPart, ...] = ("weights", "engine")
    return {**needs, PUBLISH: frozenset(Asset(role, part) for role in published for part in parts)}


def engine_needs(role: str, shared: frozenset[str]) -> frozenset[Asset]:
    """Return the assets with which a role generates."""
    engine = Asset(role, "engine")
    return frozenset({engine, Asset(role, "weights")} if role in shared else {engine})


def stage_needs(stage: Stage, shared: frozenset[str], copied: frozenset[str]) -> frozenset[Asset]:
    """Return the assets that a stage needs on the device; empty if it uses no model."""
    if stage.role is None or stage.kind in (Kind.COMPUTE, Kind.SELECT):
        return frozenset()
    if stage.kind is Kind.GENERATE:
        return frozenset().union(*(engine_needs(role, shared) for role in policies_of(stage)))
    weights = frozenset(Asset(role, "weights") for role in touched_weights(stage))
    if stage.kind is Kind.INFER and stage.role in copied:
        # The weights too, because the copy is updated from them.
        return weights | {Asset(stage.role, "inference")}
    return weights | {Asset(stage.role, "optimizer")} if is_optimized(stage) else weights


@dataclass(frozen=True)
class Held:
    """An offloadable part of a role, its bytes, and callbacks around its moves."""

    size: int
    offloadable: OffloadableTensors
    before_leaving: Callable[[], object] = lambda: None
    asleep: int | None = None
    """Bytes of a sleeping engine."""


class Residency:
    """The residency of one process's roles.

    Without `trainer.resident_gib` everything stays loaded, except weights that a role trains and generates with in the
    same memory: they take turns.
    """

    def __init__(self, deployment: Deployment, moves: WeightMoves) -> None:
        self.flow, self.moves = deployment.flow, moves
        self.engines: dict[str, RoleEngine] = {}
        self.asleep: set[str] = set()
        self.phases: dict[str, GenerationWeights] = {}
        gib = deployment.resident_gib
        self.budget = None if gib is None else int(gib * GIB)
        self.held: dict[Asset, Held] = {}
        self.shared = frozenset[str]()
        self.copied = frozenset[str]()
        self.resident: set[Asset] = set()
        self.kept, self.current = frozenset[Asset](), frozenset[Asset]()
        # A checkpoint may be written while a stage runs.
        self._lock = threading.RLock()

    def add(self, worker: TrainingBackend, engine: RoleEngine | None, inferring: ShardedBackend | None = None) -> None:
        """Register a new role with its inference copy, and offload it to make space for the next one."""
        if engine is not None:
            self.engines[worker.role] = engine
        if engine is not None and engine.phases is not None:
            self.phases[worker.role] = engine.phases
        if self.budget is None:
            return
        assert isinstance(worker, ShardedBackend), f"check_backends lets {worker.role} have no other here"
        parts = held_by(worker)
        if engine is not None and (memory := engine.memory) is not None:
            shared = memory.model is worker.shared_model
            parameters = [] if shared else list(memory.model.parameters())
            weights = sum(storage.nbytes() for storage in storages(parameters))
            offloadable = OffloadableTensors(lambda: parameters)
            parts[Asset(worker.role, "engine")] = Held(memory.cache_bytes + weights, offloadable, engine.clear, weights)
            if shared:
                self.shared |= {worker.role}
        if inferring is not None:
            parts[Asset(worker.role, "inference")] = held_by(inferring)[Asset(worker.role, "weights")]
            self.copied |= {worker.role}
        self.held |= parts
        self.resident |= parts.keys()
        self.move(frozenset())

    def begin(self) -> None:
        """Load the kept assets, once all roles are registered.

        Raises UserError for a single stage that exceeds the budget.
        """
        sizes = {asset: held.size for asset, held in self.held.items()}
        asleep = {asset: held.asleep for asset, held in self.held.items() if held.asleep is not None}
        plan = residency_plan(self.flow, sizes, self.budget, self.shared, self.copied, asleep, self.engines)
        self.kept = plan.kept
        self.move(frozenset())

    def before_publication(self) -> None:
        """Load the engines that have a separate copy of the weights, and the weights that they receive."""
        if sent := needed_assets(self.flow, self.shared, generating=self.engines)[PUBLISH]:
            self.move(sent)

    def before(self, stage: Stage) -> None:
        """Load the assets that a stage needs; a stage without a model moves nothing."""
        if needed := stage_needs(stage, self.shared, self.copied):
            self._provide(needed, set(policies_of(stage)))

    def before_training(self, role: str) -> None:
        """Load the assets that a role's training needs."""
        self._provide(frozenset({Asset(role, "weights"), Asset(role, "optimizer")}), set())

    def _provide(self, needed: frozenset[Asset], generates: set[str]) -> None:
        # Engines sleep while the stage uses the device for other work; the one that generates wakes.
        for role in sorted(self.engines.keys() - self.asleep - generates):
            self.engines[role].sleep()
            self.asleep.add(role)
        for role in generates & self.asleep:
            self.engines[role].wake()
            self.asleep.remove(role)
        self.move(needed)
        for role, weights in self.phases.items():
            if Asset(role, "weights") in needed:
                weights.leave()
            elif Asset(role, "engine") in needed:
                self.moves.note(role, weights.enter())

    @contextmanager
    def all_of(self, role: str) -> Iterator[None]:
        """Keep a role's weights and optimizer on the device in addition to the current stage's assets; no stage starts
        in the meantime.
        """
        with self._lock:
            if role in self.phases:
                self.phases[role].leave()
            before = self.current
            self.move(before | {Asset(role, "weights"), Asset(role, "optimizer")})
            yield
            self.move(before)

    def move(self, needed: frozenset[Asset]) -> None:
        """Move assets so that the kept and the needed ones are on the device; offloads come first."""
        if self.budget is None:
            return
        with self._lock:
            on_device = (self.kept | needed) & self.held.keys()
            for asset in sorted(self.held.keys() - on_device):
                # Recorded first: an interrupted move is repeated completely.
                self.resident.discard(asset)
                self.held[asset].before_leaving()
                self.held[asset].offloadable.offload()
            for asset in sorted(on_device - self.resident):
                self.held[asset].offloadable.onload()
                self.resident.add(asset)
            self.current = needed


def held_by(worker: ShardedBackend) -> dict[Asset, Held]:
    """Return a role's weights and, if it is trained, its master weights, moments and gradients."""
    parts: tuple[AssetPart, ...] = ("weights", "optimizer")
    return {
        Asset(worker.role, part): Held(worker.bytes_of(part), worker.offloadable[part])
        for part in parts
        if part in worker.offloadable
    }
