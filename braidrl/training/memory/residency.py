"""What of several roles lies in a process's device memory at each stage, where not everything has room at once.

    stage       actor.generate   reference.log_probs   actor.update          publish
    resident    engine           reference weights     weights, optimizer    weights, engine      + whatever is kept throughout

Derived from the order of stages alone: an asset is brought before the first of a run of stages that need it and put away after the
last; the runs go on from one iteration to the next. What has room beside every stage's needs is kept and never moves. An engine that
is kept sleeps while others work: then it takes its own weights alone, without keys and values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from braidrl.errors import UserError
from braidrl.flow.flow import Flow, is_optimized, touched_weights
from braidrl.flow.stage import Kind, Stage

PUBLISH = "publish"
"""The step after the last stage, in which trained weights go to engines of their own."""


Part = Literal["weights", "optimizer", "engine", "inference"]


class Asset(NamedTuple):
    """Something of a role that takes device memory: `optimizer` includes gradients, `engine` its cache and weights of its own.

    `inference` is the copy of a trained role's weights in the layout in which it infers, where that is another.
    """

    role: str
    part: Part


class ResidencyMove(NamedTuple):
    """`onload` and `offload` move weights and optimizers between device and host; engines `wake` and `sleep`."""

    verb: Literal["onload", "offload", "wake", "sleep"]
    asset: Asset


@dataclass(frozen=True)
class ResidencyPlan:
    """`kept` never moves; `before` has the moves before each step (the stages, then PUBLISH), first those that make room.

    The moves belong to the step's place: they are made also in an iteration in which `when` skips the stage.
    """

    kept: frozenset[Asset]
    before: Mapping[str, tuple[ResidencyMove, ...]]


def residency_plan(
    flow: Flow,
    sizes: Mapping[Asset, int],
    budget: int | None,
    shared: frozenset[str] = frozenset(),
    copied: frozenset[str] = frozenset(),
    asleep: Mapping[Asset, int] | None = None,
) -> ResidencyPlan:
    """Return the plan of one process.

    Args:
        flow: Its stages.
        sizes: The process's assets with their bytes.
        budget: The bytes that they may take; None keeps everything.
        shared: Roles whose engines read the trainer's own weights.
        copied: Roles that infer with a copy of their weights.
        asleep: The bytes of engines while they sleep; by default as many as awake.

    Raises:
        UserError: A stage alone is over the budget.
    """
    needs = needed_assets(flow, shared, copied)
    needs = {step: needed & set(sizes) for step, needed in needs.items()}
    if budget is None:
        return ResidencyPlan(frozenset(sizes), dict.fromkeys(needs, ()))
    during = sizes_during(flow, sizes, asleep or {})
    for step, needed in needs.items():
        _check_fits(step, {asset: during[step][asset] for asset in needed}, budget)
    kept = _kept(needs, during, sizes, budget)
    steps = list(needs)
    before: dict[str, tuple[ResidencyMove, ...]] = {}
    for number, step in enumerate(steps):
        now, last = needs[step] - kept, needs[steps[number - 1]] - kept
        put_away = [
            ResidencyMove("sleep" if asset.part == "engine" else "offload", asset) for asset in sorted(last - now)
        ]
        bring = [ResidencyMove("wake" if asset.part == "engine" else "onload", asset) for asset in sorted(now - last)]
        before[step] = (*put_away, *bring)
    return ResidencyPlan(kept, before)


def sizes_during(flow: Flow, sizes: Mapping[Asset, int], asleep: Mapping[Asset, int]) -> dict[str, dict[Asset, int]]:
    """Return the bytes of each asset in each step, if it is there: an engine is awake in the stages that generate with it alone."""
    generating = {stage.name: stage.role for stage in flow.stages if stage.kind is Kind.GENERATE}
    return {
        step: {
            asset: size if generating.get(step) == asset.role else asleep.get(asset, size)
            for asset, size in sizes.items()
        }
        for step in (*(stage.name for stage in flow.stages), PUBLISH)
    }


def needed_assets(
    flow: Flow, shared: frozenset[str] = frozenset(), copied: frozenset[str] = frozenset()
) -> dict[str, frozenset[Asset]]:
    """Return what each stage, and publication after the last one, needs on the device."""
    needs = {stage.name: stage_needs(stage, shared, copied) for stage in flow.stages}
    generating = {stage.role for stage in flow.stages if stage.kind is Kind.GENERATE}
    published = [role for role in flow.trained_roles if role in generating and role not in shared]
    parts: tuple[Part, ...] = ("weights", "engine")
    return {**needs, PUBLISH: frozenset(Asset(role, part) for role in published for part in parts)}


def stage_needs(
    stage: Stage, shared: frozenset[str] = frozenset(), copied: frozenset[str] = frozenset()
) -> frozenset[Asset]:
    """Return what a stage needs on the device; nothing where it uses no model."""
    if stage.role is None or stage.kind in (Kind.COMPUTE, Kind.SELECT):
        return frozenset()
    if stage.kind is Kind.GENERATE:
        own = Asset(stage.role, "engine")
        return frozenset({own, Asset(stage.role, "weights")} if stage.role in shared else {own})
    weights = frozenset(Asset(role, "weights") for role in touched_weights(stage))
    if stage.kind is Kind.INFER and stage.role in copied:
        # The weights too: the copy is brought up to date from them.
        return weights | {Asset(stage.role, "inference")}
    return weights | {Asset(stage.role, "optimizer")} if is_optimized(stage) else weights


def _kept(
    needs: Mapping[str, frozenset[Asset]],
    during: Mapping[str, Mapping[Asset, int]],
    sizes: Mapping[Asset, int],
    budget: int,
) -> frozenset[Asset]:
    """Return the assets that fit beside every step's needs, first those that would move most often."""
    steps = list(needs.values())
    kept: frozenset[Asset] = frozenset()
    for asset in sorted(sizes, key=lambda asset: (-_runs(steps, asset), sizes[asset], asset)):
        wider = kept | {asset}
        if all(sum(during[step][asset] for asset in needed | wider) <= budget for step, needed in needs.items()):
            kept = wider
    return kept


def _runs(steps: Sequence[frozenset[Asset]], asset: Asset) -> int:
    """Return how often in an iteration the asset would be brought: the runs of steps that need it."""
    return sum(asset in step and asset not in steps[number - 1] for number, step in enumerate(steps))


def _check_fits(step: str, needed: Mapping[Asset, int], budget: int) -> None:
    if sum(needed.values()) > budget:
        parts = ", ".join(f"{asset.role} {asset.part} {size:,}" for asset, size in sorted(needed.items()))
        raise UserError(
            f"{step} needs {sum(needed.values()):,} bytes on a device at once ({parts}) and {budget:,} are there; "
            "place its role on more devices, or its generation in a pool of its own"
        )
