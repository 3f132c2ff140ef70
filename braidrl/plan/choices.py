"""Choices: the layouts, micro-batches and engines of a role on a number of devices, and of sets of roles that share
devices.

layouts × micro-batch tokens × checkpointing × engine ──memory, seconds──▶ Choice, reduced to a Pareto front
choices of each role ──in order of seconds──▶ together: the offloading that memory requires
    ──▶ SetChoice, cached by set and size
"""

import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from braidrl.cluster.device_kinds import NodeGroup
from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError
from braidrl.flow import Kind
from braidrl.plan.problem import USABLE, Model, Problem
from braidrl.plan.rates import Cost
from braidrl.runtimes.memory.budget import (
    ENGINE,
    FREED,
    EngineUse,
    RoleDeployment,
    assets,
    at_once,
    engine_use,
    kept_images,
    role_memory,
    taking_turns,
)
from braidrl.runtimes.memory.residency import PUBLISH, Asset, AssetPart
from braidrl.runtimes.sizing import MOST_SLOTS
from braidrl.training.memory.footprint import Shape
from braidrl.training.role_settings import USUAL_TOKENS, slots_of

RolePart = Literal["all", "model", "generate"]
PARTS: tuple[AssetPart, ...] = ("weights", "optimizer", "engine", "inference")
LONG = 8192
"""Tokens from which a row is worth sequence or context parallelism."""
FEWEST_SLOTS = 16
MOST_TRIED = 20_000
"""Most combinations of choices that are tried per set and size; a tenth of this once one fits."""


@dataclass(frozen=True)
class Choice:
    """One deployment of a role, with the seconds of its stages and the bytes on each device."""

    use: RoleDeployment
    costs: Mapping[str, Cost]
    resident: Mapping[str, int]
    working: int

    @cached_property
    def busy(self) -> float:
        """Return the seconds of all its stages."""
        return sum(cost.seconds for cost in self.costs.values())

    @cached_property
    def peak(self) -> int:
        """Return the peak bytes on a device, with working memory."""
        return at_once([self.resident], self.working)


@dataclass(frozen=True)
class SetChoice:
    """A choice for each role of a set. `budget` limits resident bytes if not everything fits at once."""

    group: NodeGroup
    devices: int
    roles: Mapping[str, Choice]
    costs: Mapping[str, Cost]
    memory: int
    budget: int | None = None

    @cached_property
    def busy(self) -> float:
        """Return the busy seconds of the devices in an iteration."""
        return sum(cost.seconds for cost in self.costs.values())


class Choices:
    """The cached choices of a problem's roles, and of sets of them."""

    def __init__(
        self,
        problem: Problem,
        allowed: Callable[[Choice], bool] | None = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare an empty cache; `allowed` filters choices, None allows all. No further choice is tried once the
        search `is_over`.
        """
        self.problem, self.allowed, self.is_over = problem, allowed, is_over
        self._roles: dict[tuple[str, str, int, str], list[Choice]] = {}
        self._sets: dict[tuple[tuple[str, ...], str, int, str], SetChoice | None] = {}

    def of_role(self, role: str, group: NodeGroup, devices: int, part: RolePart = "all") -> list[Choice]:
        """Return the Pareto front of a role's choices that fit the devices; `part` names the half of a role on separate
        devices.
        """
        key = (role, group.kind, devices, part)
        if key not in self._roles:
            keep = list if self.allowed else best
            every = self.every_choice(self.problem.models[role], group, devices, part, keep)
            self._roles[key] = best(filter(self.allowed, every) if self.allowed else every)
        return self._roles[key]

    def of_set(
        self, roles: tuple[str, ...], group: NodeGroup, devices: int, part: RolePart = "all"
    ) -> SetChoice | None:
        """Return the fastest choices of roles that share these devices; None if they do not fit.

        Combinations are tried in order of seconds without offloading. The search stops once the remaining ones cannot
        beat the best, or after MOST_TRIED if memory is too tight for that.
        """
        key = (roles, group.kind, devices, part)
        if key not in self._sets:
            options = [self.of_role(role, group, devices, part) for role in roles]
            quickest: SetChoice | None = None
            limit, most = math.inf, MOST_TRIED
            for tried, (busy, picked) in enumerate(in_order(options)):
                if busy >= limit or tried >= most or self.is_over():
                    break
                choice_of_set = self.together(dict(zip(roles, picked, strict=True)), group, devices, limit - busy)
                if choice_of_set is not None and choice_of_set.busy < limit:
                    quickest, limit, most = choice_of_set, choice_of_set.busy, MOST_TRIED // 10
            self._sets[key] = quickest
        return self._sets[key]

    def every_choice(
        self,
        model: Model,
        group: NodeGroup,
        devices: int,
        part: RolePart = "all",
        keep: Callable[[Iterable[Choice]], list[Choice]] = list,
    ) -> Iterator[Choice]:
        """Yield each choice of a role that fits.

        `keep` reduces the choices of one layout, where micro-batch and engine are independent.
        """
        problem, longest = self.problem, self.problem.config.max_sequence_tokens
        configured = problem.config.trainer.max_tokens_per_device or USUAL_TOKENS
        if part == "generate":
            # Engines on separate devices, with separate weights.
            layout = ParallelLayout(data=devices)
            alone = replace(model.use, shape=model.use.plain, layout=layout, trained=False, tokens=configured)
            engines = [
                engine and replace(engine, shape=replace(model.use.plain, dtype=engine.shape.dtype), own_weights=True)
                for engine in self.engines(model, group, devices)
            ]
            uses = [replace(alone, engine=engine) for engine in engines]
            yield from self._fitting(model, group, uses, devices, part, True)
            return
        tried = sorted({longest, max(longest, configured), max(longest, configured * 4)})
        every = layouts(model.use.shape, devices, group, model.use.trained, longest)
        allowed = [layout for layout in every if problem.allows(model.role, layout)]
        for layout in itertools.takewhile(lambda _: not self.is_over(), allowed):
            # If training gathers its weights, inference may use a copy in a layout that does not.
            copies: list[ParallelLayout | None] = [None]
            if model.infers and model.use.trained and layout.shard == "full":
                copies += [
                    layout_of
                    for layout_of in allowed
                    if layout_of.shard == "none" and layout_of.pipeline == layout_of.token_ranks == 1
                ][:2]
            checkpointing = (False, True) if model.use.trained else (False,)
            uses = [
                replace(model.use, layout=layout, tokens=tokens, checkpointing=again, inference=inference)
                for tokens, again, inference in itertools.product(tried, checkpointing, copies)
            ]
            models = keep(self._fitting(model, group, uses, devices, "model"))
            if not model.generates or part == "model":
                yield from models
                continue
            unsharded, order = replace(model.use, layout=layout, tokens=1), [s.name for s in problem.flow.stages]
            decoding = [replace(unsharded, engine=engine) for engine in self.engines(model, group, devices, layout)]
            decoders = keep(self._fitting(model, group, decoding, devices, "generate"))
            for layout_of, decoder in itertools.product(models, decoders):
                costs = {**decoder.costs, **layout_of.costs}
                costs = {name: costs[name] for name in order if name in costs}
                use = replace(layout_of.use, engine=decoder.use.engine)
                yield Choice(use, costs, {**layout_of.resident, **decoder.resident}, layout_of.working)

    def _fitting(
        self,
        model: Model,
        group: NodeGroup,
        uses: Iterable[RoleDeployment],
        devices: int,
        part: RolePart,
        apart: bool = False,
    ) -> Iterator[Choice]:
        """Yield the choices that fit their devices without other roles, with the seconds of this part's stages."""
        room = self.problem.cluster.kinds[group.kind].memory * USABLE
        stages = [stage for stage in model.stages if (stage.kind is Kind.GENERATE) == (part == "generate")]
        for use in uses:
            resident, working = role_memory(use)
            if part == "generate":
                # The trainer's memory is counted with its model part.
                resident, working = {name: size for name, size in resident.items() if name in (ENGINE, *FREED)}, {}
            if largest_stage(resident) + sum(working.values()) > room:
                continue
            costs = {s.name: self.problem.stage_cost(model.role, s, use, group, devices, apart) for s in stages}
            yield Choice(use, costs, resident, sum(working.values()))

    def engines(
        self, model: Model, group: NodeGroup, devices: int, layout: ParallelLayout | None = None
    ) -> Iterator[EngineUse | None]:
        """Yield the engines to try, with slots for all rows, halves of that, and the configured count; None stands for
        servers.
        """
        problem, engine = self.problem, self.problem.config.rollout.engine
        if engine == "http":
            yield None
            return
        sizes = model.use.shape.sizes
        heads = sizes.num_attention_heads
        if engine == "embedded":
            heads = math.gcd(heads, sizes.num_key_value_heads)
        # An engine stays within a node. The embedded one shards over ranks that train alone, which do not support
        # environments.
        plays = any("environment" in s.params for s in model.stages)
        alone = plays or layout is None if engine == "embedded" else engine != "vllm"
        for divisor in [1] if alone else divisors(math.gcd(heads, math.gcd(devices, group.devices))):
            if layout is not None and not alone:
                try:
                    problem.generation(divisor).check(layout, devices)
                except UserError:  # a grouping fits only some layouts
                    continue
            rows = math.ceil(problem.rows * problem.lengths.generated / max(1, devices // divisor))
            enough = min(-(-rows // FEWEST_SLOTS) * FEWEST_SLOTS, MOST_SLOTS)
            halves = {(enough >> power) // FEWEST_SLOTS * FEWEST_SLOTS for power in range(enough.bit_length())} - {0}
            for slots in sorted({min(slots_of(problem.config), enough), *halves}):
                yield engine_use(
                    model.role, model.use.shape, layout or ParallelLayout(), problem.config, slots, divisor
                )

    def together(
        self, roles: Mapping[str, Choice], group: NodeGroup, devices: int, limit: float = math.inf
    ) -> SetChoice | None:
        """Combine choices on shared devices with the offloading that memory requires; None if none fits, or if it takes
        `limit` seconds.
        """
        kind = self.problem.cluster.kinds[group.kind]
        room = int(kind.memory * USABLE)
        resident, working = all_resident(roles, group, devices), max(choice.working for choice in roles.values())
        working += kept_images(choice.resident for choice in roles.values())
        if resident.memory <= room:
            return resident
        if max(largest_stage(choice.resident) for choice in roles.values()) + working > room:
            return None
        # Lower bound: the excess is offloaded and loaded at least once.
        if 2 * (resident.memory - room) / (kind.host * self.problem.rates[group.kind].host) >= limit:
            return None
        return in_turns(self.problem, resident, room - working)


def best(choices: Iterable[Choice]) -> list[Choice]:
    """Return the Pareto front of the choices, fastest first: of their seconds, and of the bytes of each part."""
    measured: list[tuple[tuple[float, ...], Choice]] = []
    for choice in choices:
        bytes_of = assets("", dict(choice.resident))
        weights = choice.resident.get(ENGINE, 0)  # the part of an engine that stays resident while it sleeps
        parts = (bytes_of.get(Asset("", part), 0) for part in PARTS)
        measured.append(((choice.busy, *parts, weights, choice.working), choice))
    measured.sort(key=lambda pair: pair[0])
    front: list[Choice] = []
    fastest = np.empty((len(measured), len(measured[0][0]) if measured else 0))
    for numbers, choice in measured:
        if not (fastest[: len(front)] <= numbers).all(axis=1).any():
            fastest[len(front)] = numbers
            front.append(choice)
    return front


def all_resident(roles: Mapping[str, Choice], group: NodeGroup, devices: int) -> SetChoice:
    """Return these choices on shared devices, without offloading."""
    costs = dict[str, Cost]()
    for choice in roles.values():
        # Roles that play together share a stage.
        costs |= {name: costs.get(name, Cost()).plus(cost) for name, cost in choice.costs.items()}
    working = max(choice.working for choice in roles.values())
    memory = at_once([choice.resident for choice in roles.values()], working)
    return SetChoice(group, devices, roles, costs, memory)


def in_turns(problem: Problem, choice_of_set: SetChoice, budget: int) -> SetChoice | None:
    """Return choices with the moves under a budget of resident bytes; None if a single stage needs more."""
    roles, kind = choice_of_set.roles, choice_of_set.group.kind
    generating = [role for role, role_choice in roles.items() if role_choice.use.engine]
    resident = {role: dict(role_choice.resident) for role, role_choice in roles.items()}
    try:
        plan = taking_turns(problem.flow, resident, generating, budget)
    except UserError:
        return None
    host, moved = problem.cluster.kinds[kind].host * problem.rates[kind].host, dict(choice_of_set.costs)
    for step, size in plan.moved.items():
        # Loads before publication are charged to the next generation.
        name = next(iter(moved)) if step == PUBLISH else step
        if name in moved and size:
            moved[name] = moved[name].plus(Cost(moves=size / host))
    working = max(choice.working for choice in roles.values()) + kept_images(resident.values())
    return replace(choice_of_set, costs=moved, memory=plan.most + working, budget=budget)


def in_order(options: Sequence[Sequence[Choice]]) -> Iterator[tuple[float, tuple[Choice, ...]]]:
    """Yield every combination of one choice per list, in order of total seconds; each list is sorted by seconds."""
    if not all(options):
        return
    first = (0,) * len(options)
    waiting = [(sum(candidates[0].busy for candidates in options), first)]
    queued = {first}
    while waiting:
        busy, indices = heapq.heappop(waiting)
        yield busy, tuple(candidates[rank] for candidates, rank in zip(options, indices, strict=True))
        for i, candidates in enumerate(options):
            later = (*indices[:i], indices[i] + 1, *indices[i + 1 :])
            if later[i] < len(candidates) and later not in queued:
                queued.add(later)
                heapq.heappush(waiting, (sum(o[p].busy for o, p in zip(options, later, strict=True)), later))


def largest_stage(resident: Mapping[str, int]) -> int:
    """Return the maximum bytes that one stage of a role needs: to train, to infer, or to decode."""
    sizes = assets("", dict(resident))
    needed: tuple[tuple[AssetPart, ...], ...] = (("weights", "optimizer"), ("weights", "inference"), ("engine",))
    return max(sum(sizes.get(Asset("", part), 0) for part in parts) for parts in needed)


def layouts(shape: Shape, devices: int, group: NodeGroup, trained: bool, longest: int) -> Iterator[ParallelLayout]:
    """Yield the layouts of a model on `devices` devices, with `data` filled in.

    Tensor, sequence and context parallelism stay within a node; the latter two need rows of at least LONG tokens, and
    `context` is tried where the heads allow no wider `sequence`.
    """
    config = shape.sizes
    heads = math.gcd(config.num_attention_heads, config.num_key_value_heads)
    within = math.gcd(devices, group.devices) if devices > group.devices else devices
    for tensor, sequence in itertools.product(divisors(math.gcd(heads, within)), repeat=2):
        if within % (tensor * sequence) or heads % (tensor * sequence) or (sequence > 1 and longest < LONG):
            continue
        left = within // (tensor * sequence)
        is_widest = longest >= LONG and all(heads % (tensor * sequence * more) for more in divisors(left)[1:])
        contexts = divisors(left) if is_widest else [1]
        depths = divisors(math.gcd(config.num_hidden_layers, devices // (tensor * sequence)))
        for context, pipeline in itertools.product(contexts, depths):
            if devices % (tensor * sequence * context * pipeline):
                continue
            data = devices // (tensor * sequence * context * pipeline)
            plain = ParallelLayout(pipeline=pipeline, tensor=tensor, data=data, sequence=sequence, context=context)
            yield plain
            # Experts stay within a node, as all tokens go there.
            near = math.gcd(shape.num_experts, within, data * plain.token_ranks * tensor) if shape.experts else 1
            for expert in divisors(near)[1:]:
                shared = plain.model_copy(update={"expert": expert})
                yield shared
                if data * plain.token_ranks > 1:
                    yield shared.model_copy(update={"shard": "full"})
            if data * plain.token_ranks > 1:
                yield plain.model_copy(update={"shard": "full"})
                nodes = devices // group.devices
                if nodes > 1 and data % nodes == 0:
                    yield plain.model_copy(update={"shard": "full", "nodes": nodes})
                if trained and pipeline == 1:
                    yield plain.model_copy(update={"shard": "optimizer"})


def divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]
