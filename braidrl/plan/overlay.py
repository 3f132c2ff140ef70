"""A plan as a configuration overlay: `braid train CONFIG overlay.yaml`.

Plan ──▶ {runtime, workers, placement, streaming.workers, roles.ROLE.layout ..., rollout.slots, trainer.resident_gib}
"""

from typing import Any

from braidrl.config.layout import ParallelLayout
from braidrl.plan.choices import Choice
from braidrl.plan.problem import Problem
from braidrl.plan.search import Plan

GIB = 1 << 30


def overlay_of(plan: Plan, problem: Problem) -> dict[str, Any]:
    """Return a plan's configuration keys as nested dicts and lists of plain values."""
    tree: dict[str, Any] = {
        "runtime": plan.runtime, "device": problem.cluster.device, "roles": {}, "rollout": {"engines": None},
        "trainer": {"layout": {}, "inference_layout": None, "max_staleness": plan.staleness},
    }  # fmt: skip
    for one in plan.sets:
        for name, choice in one.roles.items():
            role = name.removesuffix(".generate")
            own = role_settings(choice, role in problem.flow.trained_roles, plan.runtime)
            if name == role:
                tree["roles"][role] = own
            engine = choice.use.engine
            if engine is not None:
                # Engines of several roles share one setting: the smallest fits everywhere.
                slots = tree["rollout"].get("slots", engine.slots)
                tree["rollout"] |= {"slots": min(slots, engine.slots), "tensor": engine.divisor}
    tree |= processes(plan)
    budgets = [one.budget for one in plan.sets if one.budget is not None]
    tree["trainer"]["resident_gib"] = round(min(budgets) / GIB, 3) if budgets else None
    return tree


def role_settings(choice: Choice, trained: bool, runtime: str) -> dict[str, Any]:
    """Return a role's configuration; layouts only if the runtime supports them."""
    found: dict[str, Any] = {"max_tokens_per_device": choice.use.tokens}
    if trained:
        found["activation_checkpointing"] = choice.use.checkpointing
    if runtime in ("hybrid", "distributed"):
        found["layout"] = written(choice.use.layout)
        if choice.use.inference is not None:
            found["inference_layout"] = written(choice.use.inference)
    return found


def written(layout: ParallelLayout) -> dict[str, Any]:
    """Return a layout's values that are not defaults."""
    found: dict[str, Any] = layout.model_dump(exclude_defaults=True)
    return found


def processes(plan: Plan) -> dict[str, Any]:
    """Return the configuration of a plan's processes."""
    if plan.runtime == "streaming":
        counts = {name: one.devices for one in plan.sets for name in one.roles}
        return {"streaming": {"workers": counts}, "placement": "colocate"}
    if plan.runtime == "hybrid":
        pools = [{"roles": list(one.roles), "workers": one.devices} for one in plan.sets]
        return {"placement": pools, "cluster": {"cpus": plan.devices}}
    return {"workers": plan.devices, "placement": "colocate"}
