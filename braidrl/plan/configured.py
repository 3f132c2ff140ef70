"""The plan of an existing configuration, and a plan as a configuration overlay: `braid train CONFIG overlay.yaml`.

configuration ──runtime, workers, placement──▶ pools ──layouts──▶ a choice for each role ──▶ Plan
Plan ──▶ {runtime, workers, placement, streaming.workers, roles.ROLE.layout ..., rollout.slots, trainer.resident_gib}
"""

from dataclasses import replace
from typing import Any

from braidrl.cluster.pools import GENERATE, place
from braidrl.config.layout import ParallelLayout
from braidrl.engines.factory import generation_layout, own_engines, ranks_per_node
from braidrl.flow import Kind, Stage
from braidrl.plan.choices import Choice, all_resident, in_turns
from braidrl.plan.problem import USABLE, Problem
from braidrl.plan.search import Plan, streaming_plan, synchronous_plan
from braidrl.runtimes.memory.budget import CACHE, GIB, Deployment, engine_use, role_memory
from braidrl.runtimes.streaming.groups import worker_groups
from braidrl.training.role_settings import inference_layouts, settings_of, slots_of

Pools = dict[tuple[str, ...], int]
"""The number of devices of each pool, by its roles; under streaming by its worker group's name."""


def predicted(problem: Problem) -> Plan:
    """Return the plan of a configuration, with predicted seconds; roles are offloaded as its budget says."""
    config, group, pools = problem.config, problem.cluster.groups[0], configured_pools(problem)
    sets = []
    for pool, devices in pools.items():
        roles: dict[str, Choice] = {}
        for name in pool:
            role = name.removesuffix(GENERATE)
            apart = any(role + GENERATE in other for other in pools)
            stages = [
                s for s in problem.models[role].stages if not apart or (s.kind is Kind.GENERATE) == (name != role)
            ]
            uses = {stage: deployment(problem, stage)[0] for stage in stages}
            # Only generate stages have an engine in their deployment: prefer one of these.
            use = next((one for one in uses.values() if one.engine), next(iter(uses.values())))
            seconds = {s.name: problem.stage_cost(s, one, group, devices, name != role) for s, one in uses.items()}
            resident, working = role_memory(use)
            roles[name] = Choice(use, seconds, resident, sum(working.values()))
        found = None
        if config.trainer.resident_gib is not None and config.runtime != "streaming":
            found = in_turns(problem, roles, group, devices, int(config.trainer.resident_gib * GIB))
        sets.append(found or all_resident(roles, group, devices))
    if config.runtime == "streaming":
        return streaming_plan(problem, sets, config.trainer.max_staleness)
    return synchronous_plan(problem, config.runtime, sets)


def configured_pools(problem: Problem) -> Pools:
    """Return the pools of a configuration, each with its devices."""
    config = problem.config
    if config.runtime == "streaming":
        groups = [group for group in worker_groups(config, problem.flow, None) if group.role]
        each = max(1, own_engines(config) * ranks_per_node(config))
        return {(g.name,): g.processes * (each if g.kind == "generate" else 1) for g in groups}
    if config.runtime == "hybrid":
        generating = [model.role for model in problem.models.values() if model.generates]
        pools = place(config.placement, problem.flow.roles, generating, config.workers)
        return {pool.roles: pool.workers for pool in pools}
    return {tuple(problem.models): config.workers if config.runtime == "distributed" else 1}


def deployment(problem: Problem, stage: Stage) -> tuple[Deployment, int]:
    """Return the configured deployment of a stage's role, and the number of devices that run the stage."""
    config, role, pools = problem.config, str(stage.role), configured_pools(problem)
    target, shape = generation_layout(config), problem.models[role].use.shape
    own = settings_of(role, config)
    tokens, again = own.max_tokens, own.activation_checkpointing
    apart = stage.kind is Kind.GENERATE and any(role + GENERATE in pool for pool in pools)
    devices = next(devices for pool, devices in pools.items() if role + GENERATE * apart in pool)
    if apart:
        # Engines alone hold their role's weights, by their own layout, without adapters.
        layout = ParallelLayout(pipeline=target.pipeline, tensor=target.tensor).resolve(devices)
        use = problem.models[role].deployed(layout, tokens, again)
        engine = engine_use(role, shape, layout, config, slots_of(config), target.ranks)
        engine = engine and replace(engine, shape=replace(use.plain, dtype=engine.shape.dtype), own_weights=False)
        return replace(use, shape=use.plain, trained=False, computes=False, engine=engine), devices
    layout = own.layout.resolve(devices)
    use = problem.models[role].deployed(layout, tokens, again)
    if problem.models[role].use.trained and (other := inference_layouts(config, problem.flow).get(role)):
        use = replace(use, inference=other.resolve(devices))
    if stage.kind is Kind.GENERATE:
        use = replace(use, engine=engine_use(role, shape, layout, config, slots_of(config), target.ranks))
    return use, devices


def overlay_of(plan: Plan, problem: Problem) -> dict[str, Any]:
    """Return a plan's configuration keys as nested dicts and lists of plain values."""
    rollout = problem.config.rollout
    tree: dict[str, Any] = {
        "runtime": plan.runtime, "device": problem.cluster.device, "roles": {}, "rollout": {},
        "trainer": {"layout": {}, "inference_layout": None, "max_staleness": plan.staleness},
    }  # fmt: skip
    engines, devices = {}, sum(one.devices for one in plan.sets)
    for one in plan.sets:
        for name, choice in one.roles.items():
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
        room = min(problem.cluster.kinds[one.group.kind].memory for one in plan.sets)
        held = max(e.shape.parameters * e.shape.element_bytes // e.divisor for e in engines.values())
        pages = max(
            role_memory(replace(c.use, computes=False))[0][CACHE]
            for s in plan.sets
            for c in s.roles.values()
            if c.use.engine
        )
        share = min(USABLE, round((held + pages) / room + 0.05, 2))
        sleeps = {"enable_sleep_mode": True} if any(not name.endswith(GENERATE) for name in engines) else {}
        tree["rollout"]["vllm"] = {"gpu_memory_utilization": share, **sleeps}
    if plan.runtime == "streaming":
        each = {name: engine.divisor for name, engine in engines.items()}
        counts = {name: one.devices // each.get(name, 1) for one in plan.sets for name in one.roles}
        tree |= {"streaming": {"workers": counts}, "placement": "colocate"}
    elif plan.runtime == "hybrid":
        pools = [{"roles": list(one.roles), "workers": one.devices} for one in plan.sets]
        if len({group.kind for group in problem.cluster.groups}) > 1:
            pools = [{**pool, "kind": one.group.kind} for pool, one in zip(pools, plan.sets, strict=True)]
        tree |= {"placement": pools, "cluster": {"cpus": devices}}
    else:
        tree |= {"workers": devices, "placement": "colocate"}
    budgets = [one.budget for one in plan.sets if one.budget is not None]
    tree["trainer"]["resident_gib"] = round(min(budgets) / GIB, 3) if budgets else None
    return tree


def role_settings(choice: Choice, role: str, problem: Problem, runtime: str) -> dict[str, Any]:
    """Return a role's configuration; layouts only if the runtime supports them."""
    found: dict[str, Any] = {"max_tokens_per_device": choice.use.tokens}
    if role in problem.flow.trained_roles:
        found["activation_checkpointing"] = choice.use.checkpointing
    if runtime == "eager":
        return found
    found["layout"] = choice.use.layout.model_dump(exclude_defaults=True)
    if runtime == "streaming" and role not in problem.flow.changed_roles and choice.use.layout.is_replicated:
        # Without a number of its own, each process of a frozen role takes rows alone.
        found["layout"] = {}
    if choice.use.inference is not None:
        found["inference_layout"] = choice.use.inference.model_dump(exclude_defaults=True)
    return found
