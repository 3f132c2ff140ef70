"""The plan of an existing configuration: deployments of its roles, and predicted seconds.

configuration ──runtime, workers, placement──▶ pools ──layouts──▶ a choice for each role ──▶ Plan
"""

from dataclasses import replace

from braidrl.cluster.pools import GENERATE, place
from braidrl.config.layout import ParallelLayout
from braidrl.engines.factory import generation_layout
from braidrl.flow import Kind, Stage
from braidrl.plan.choices import Choice
from braidrl.plan.problem import Problem
from braidrl.plan.search import Plan, Search
from braidrl.plan.sets import SetChoice
from braidrl.plan.streaming import StreamingSearch, members
from braidrl.runtimes.memory.budget import Deployment, at_once, role_memory
from braidrl.training.role_settings import checkpoints_activations, layout_of, max_tokens_of, slots_of

Pools = dict[tuple[str, ...], int]
"""The number of processes of each pool, by its roles; under streaming by its worker group's name."""


def predicted(problem: Problem) -> Plan:
    """Return the plan of a configuration, with predicted seconds."""
    sets = [configured_set(problem, pool, devices) for pool, devices in configured_pools(problem).items()]
    if problem.config.runtime == "streaming":
        return StreamingSearch(problem).plan(sets, problem.config.trainer.max_staleness)
    return Search(problem).plan(problem.config.runtime, sets)


def configured_pools(problem: Problem) -> Pools:
    """Return the pools of a configuration, each with its processes."""
    config = problem.config
    if config.runtime == "streaming":
        return {(one.name,): config.streaming.workers.get(one.name, 1) for one in members(problem)}
    if config.runtime == "hybrid":
        generating = [model.role for model in problem.models.values() if model.generates]
        pools = place(config.placement, problem.flow.roles, generating, config.workers)
        return {pool.roles: pool.workers for pool in pools}
    return {tuple(problem.models): config.workers if config.runtime == "distributed" else 1}


def configured_set(problem: Problem, pool: tuple[str, ...], devices: int) -> SetChoice:
    """Return the roles of one pool as the configuration deploys them."""
    roles = {name: configured_choice(problem, name, devices) for name in pool}
    costs = {stage: cost for choice in roles.values() for stage, cost in choice.costs.items()}
    memory = at_once([choice.resident for choice in roles.values()], max(choice.working for choice in roles.values()))
    return SetChoice(problem.cluster.groups[0], devices, roles, costs, memory)


def configured_choice(problem: Problem, name: str, devices: int) -> Choice:
    """Return one role of a pool with the seconds of its stages."""
    role = name.removesuffix(GENERATE)
    apart = any(role + GENERATE in pool for pool in configured_pools(problem))
    stages = [s for s in problem.models[role].stages if not apart or (s.kind is Kind.GENERATE) == (name != role)]
    uses = {stage: deployment(problem, stage, devices) for stage in stages}
    # Only generate stages have an engine in their deployment: prefer one of these.
    use = next((one for one in uses.values() if one.engine), next(iter(uses.values())))
    group = problem.cluster.groups[0]
    costs = {s.name: problem.stage_cost(s, one, group, devices, name != role) for s, one in uses.items()}
    resident, working = role_memory(use)
    return Choice(use, costs, resident, sum(working.values()))


def deployment(problem: Problem, stage: Stage, devices: int) -> Deployment:
    """Return the configured deployment of a stage's role."""
    config, role = problem.config, str(stage.role)
    generates_apart = stage.kind is Kind.GENERATE and any(role + GENERATE in pool for pool in configured_pools(problem))
    layout = (ParallelLayout() if generates_apart else layout_of(role, config)).resolve(devices)
    use = problem.use(role, layout, max_tokens_of(role, config), checkpoints_activations(role, config))
    if stage.kind is not Kind.GENERATE:
        return use
    engine = problem.engine(
        problem.models[role], slots_of(config), generation_layout(config).ranks, not layout.is_replicated
    )
    return replace(use, engine=engine)


def devices_of(problem: Problem, stage: Stage) -> int:
    """Return the number of processes that run a stage of a model."""
    pools, role = configured_pools(problem), str(stage.role)
    apart = stage.kind is Kind.GENERATE and any(role + GENERATE in pool for pool in pools)
    return next(devices for pool, devices in pools.items() if role + GENERATE * apart in pool)
