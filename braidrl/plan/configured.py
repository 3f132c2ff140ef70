"""The plan of an existing configuration, and a plan as a configuration overlay: `braid train CONFIG overlay.yaml`.

configuration ──runtime, workers, placement──▶ pools ──layouts──▶ a choice for each role ──▶ Plan
Plan ──▶ {runtime, workers, placement, streaming.workers, roles.ROLE.layout ..., rollout.slots, trainer.resident_gib}
"""

from dataclasses import replace
from typing import Any

from braidrl.cluster.pools import GENERATE
from braidrl.flow import Kind
from braidrl.plan.choices import Choice, SetChoice, all_resident, in_turns
from braidrl.plan.problem import USABLE, Problem
from braidrl.plan.search import Plan, streaming_plan, synchronous_plan
from braidrl.runtimes.memory.budget import CACHE, GIB, role_deployment, role_memory
from braidrl.runtimes.sizing import device_groups


def predicted(problem: Problem) -> Plan:
    """Return the plan of a configuration, with predicted seconds."""
    sets = configured_sets(problem)
    if problem.deployment.mode.concurrent:
        return streaming_plan(problem, sets, problem.config.trainer.max_staleness)
    return synchronous_plan(problem, problem.config.runtime, sets)


def configured_sets(problem: Problem) -> list[SetChoice]:
    """Return the configured deployments of the roles of each pool, under streaming by the worker group's name.

    Roles are offloaded as the configuration's budget says.
    """
    models, deployment = problem.models, problem.deployment
    groups, sets = device_groups(deployment), list[SetChoice]()
    # Roles whose generation has a separate pool.
    split = {use.role for group in groups for use in group.uses if use.is_separate}
    for group in groups:
        roles: dict[str, Choice] = {}
        kind = next((g for g in problem.cluster.groups if g.kind == group.kind), problem.cluster.groups[0])
        for use_asked in group.uses:
            use = role_deployment(use_asked, deployment, group.devices)
            costs = {
                s.name: problem.stage_cost(use_asked.role, s, use, kind, group.devices, use_asked.is_separate)
                for s in models[use_asked.role].stages
                if use_asked.role not in split or (s.kind is Kind.GENERATE) == use_asked.is_separate
            }
            resident, working = role_memory(use)
            name = use_asked.role + GENERATE * use_asked.is_separate
            roles[name] = Choice(use, costs, resident, sum(working.values()))
        every_asset, turns = all_resident(roles, kind, group.devices), None
        if deployment.resident_gib is not None:
            turns = in_turns(problem, every_asset, int(deployment.resident_gib * GIB))
        sets.append(turns or every_asset)
    return sets


def overlay_of(plan: Plan, problem: Problem) -> dict[str, Any]:
    """Return a plan's configuration keys as nested dicts and lists of plain values."""
    rollout = problem.config.rollout
    tree: dict[str, Any] = {
        "runtime": plan.runtime,
        "device": problem.cluster.device,
        "roles": {},
        "rollout": {},
        "trainer": {"layout": {}, "inference_layout": None, "max_staleness": plan.staleness},
    }
    has_kinds = len({group.kind for group in problem.cluster.groups}) > 1
    engines, devices = {}, sum(set_choice.devices for set_choice in plan.sets)
    for set_choice in plan.sets:
        for name, choice in set_choice.roles.items():
            role = name.removesuffix(GENERATE)
            if name == role:
                tree["roles"][role] = role_settings(choice, role, problem, plan.runtime)
            if choice.use.engine is not None:
                engines[name] = choice.use.engine
    if engines:
        # Engines of several roles share one setting: the smallest fits everywhere.
        shape = problem.generation(next(iter(engines.values())).divisor)
        slots = min(engine.slots for engine in engines.values())
        tree["rollout"] = {"engines": None, "slots": slots, "tensor": shape.tensor, "pipeline": shape.pipeline}
    if engines and rollout.engine == "vllm" and problem.cluster.device == "cuda":
        room = min(problem.cluster.kinds[set_choice.group.kind].memory for set_choice in plan.sets)
        weight_bytes = max(e.shape.parameters * e.shape.element_bytes // e.divisor for e in engines.values())
        pages = max(
            role_memory(replace(c.use, computes=False))[0].get(CACHE, 0)
            for s in plan.sets
            for c in s.roles.values()
            if c.use.engine
        )
        share = min(USABLE, round((weight_bytes + pages) / room + 0.05, 2))
        sleeps = {"enable_sleep_mode": True} if any(not name.endswith(GENERATE) for name in engines) else {}
        tree["rollout"]["vllm"] = {"gpu_memory_utilization": share, **sleeps}
    if plan.runtime == "streaming":
        divisors = {name: engine.divisor for name, engine in engines.items()}
        # Each set is a worker group, named first; roles that play in it have no separate count.
        named = {next(iter(set_choice.roles)): set_choice for set_choice in plan.sets}
        counts: dict[str, Any] = {
            name: set_of_group.devices // divisors.get(name, 1) for name, set_of_group in named.items()
        }
        if has_kinds:
            kinds = {name: set_of_group.group.kind for name, set_of_group in named.items()}
            counts = {name: {"workers": count, "kind": kinds[name]} for name, count in counts.items()}
            tree["cluster"] = {"launcher": "ray"}
        tree |= {"streaming": {"workers": counts}, "placement": "colocate"}
    elif plan.runtime == "hybrid":
        pools = [{"roles": list(set_choice.roles), "workers": set_choice.devices} for set_choice in plan.sets]
        if has_kinds:
            pools = [{**pool, "kind": set_choice.group.kind} for pool, set_choice in zip(pools, plan.sets, strict=True)]
        tree |= {"placement": pools, "cluster": {"cpus": devices}}
    else:
        tree |= {"workers": devices, "placement": "colocate"}
    budgets = [set_choice.budget for set_choice in plan.sets if set_choice.budget is not None]
    tree["trainer"]["resident_gib"] = round(min(budgets) / GIB, 3) if budgets else None
    return tree


def role_settings(choice: Choice, role: str, problem: Problem, runtime: str) -> dict[str, Any]:
    """Return a role's configuration; layouts only if the runtime supports them."""
    settings: dict[str, Any] = {"max_tokens_per_device": choice.use.tokens}
    if role in problem.flow.trained_roles:
        settings["activation_checkpointing"] = choice.use.checkpointing
    if runtime == "eager":
        return settings
    settings["layout"] = choice.use.layout.model_dump(exclude_defaults=True)
    if runtime == "streaming" and role not in problem.flow.changed_roles and choice.use.layout.is_replicated:
        # Without a configured number, each process of a frozen role takes rows independently.
        settings["layout"] = {}
    if choice.use.inference is not None:
        settings["inference_layout"] = choice.use.inference.model_dump(exclude_defaults=True)
    return settings
