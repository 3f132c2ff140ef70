"""Fixed placements of other frameworks, evaluated by our cost functions: `braid plan CONFIG --like NAME`.

deepspeed-chat   all roles on all devices; ZeRO-3 to train, tensor parallelism within a node to generate     arXiv 2308.01320
openrlhf         separate devices for each role and for engines; ZeRO-3                                       arXiv 2405.11143
nemo-aligner     actor and reference on one half, critic and reward on the other; one layout for all         arXiv 2405.01481
verl             all roles on all devices; separate layouts to train, infer and generate                     arXiv 2409.19256
"""

from collections.abc import Callable
from dataclasses import replace

from braidrl.cluster.pools import GENERATE
from braidrl.errors import UserError, suggest
from braidrl.plan.choices import Choice
from braidrl.plan.problem import Problem
from braidrl.plan.search import Plan, RoleSets, Search, allocations, unit_of
from braidrl.plan.sets import Sets

NAMES = ("deepspeed-chat", "openrlhf", "nemo-aligner", "verl")
Allowed = Callable[[Choice], bool]


def like(problem: Problem, name: str) -> Plan:
    """Return the best plan within another framework's placement.

    Raises:
        UserError: The name is unknown, or the models do not fit in that placement.
    """
    if name not in NAMES:
        raise UserError(f"--like: unknown placement {name!r}. {suggest(name, NAMES)}")
    search = Search(problem)
    roles = tuple(problem.flow.roles)
    plan = {
        "deepspeed-chat": lambda: fixed(search, (roles,), sharded),
        "openrlhf": lambda: apart(search),
        "nemo-aligner": lambda: fixed(search, halves(problem), same_layout),
        "verl": lambda: fixed(search, (roles,), lambda choice: True),
    }[name]()
    if plan is None:
        raise UserError(
            f"--like {name}: the models of flow {problem.flow.name} do not fit in this placement on {problem.cluster}"
        )
    return plan


def sharded(choice: Choice) -> bool:
    """Return whether the layout is plain ZeRO-3."""
    layout = choice.use.layout
    return (
        layout.tensor == layout.pipeline == layout.sequence == 1 and layout.shard == "full" and not choice.use.inference
    )


def same_layout(choice: Choice) -> bool:
    """Return whether a role uses only tensor and pipeline parallelism, and generates in its training layout."""
    layout, engine = choice.use.layout, choice.use.engine
    plain = layout.shard in ("none", "optimizer") and layout.sequence == 1 and not choice.use.inference
    return plain and (engine is None or engine.divisor == layout.tensor)


def halves(problem: Problem) -> RoleSets:
    """Split the roles: those that generate or provide frozen log-probs, and the others."""
    models = problem.models
    first = tuple(role for role, model in models.items() if model.generates or (not model.trained and not model.scalar))
    second = tuple(role for role in models if role not in first)
    return (first, second) if second else (first,)


def fixed(search: Search, partition: RoleSets, allowed: Allowed) -> Plan | None:
    """Return the best plan of one partition whose sets have equal numbers of devices.

    Raises:
        UserError: The devices do not divide equally among the sets.
    """
    group = max(search.problem.cluster.groups, key=lambda group: group.size)
    size, left = divmod(group.size, len(partition))
    if left:
        names = " | ".join("+".join(roles) for roles in partition)
        raise UserError(
            f"--devices: {group.size} devices do not divide into {len(partition)} equal parts for {names}; "
            f"write a multiple of {len(partition)}"
        )
    known = Sets(search.problem, allowed)
    sets = [known.of_set(roles, group, size) for roles in partition]
    if any(one is None for one in sets):
        return None
    return search.plan("hybrid", [one for one in sets if one is not None])


def apart(search: Search) -> Plan | None:
    """Return the fastest plan with separate devices for each role and for engines."""
    problem = search.problem
    group = max(problem.cluster.groups, key=lambda group: group.size)
    members = [(role, False) for role in problem.models]
    members += [(role, True) for role, model in problem.models.items() if model.generates]
    models, engines = Sets(problem, sharded, "model"), Sets(problem, part="generate")
    unit = unit_of(group)
    while group.size % (unit * 2) == 0 and group.size // (unit * 2) >= 2 * len(members):
        unit *= 2
    quickest: Plan | None = None
    for sizes in allocations(group.size, len(members), unit):
        whole = []
        for (role, generates), size in zip(members, sizes, strict=True):
            found = (engines if generates else models).of_set((role,), group, size)
            if found is not None:
                named = {role + GENERATE * generates: found.roles[role]}
                whole.append(replace(found, roles=named))
        if len(whole) < len(members):
            continue
        plan = search.plan("hybrid", whole)
        quickest = plan if quickest is None or plan.seconds < quickest.seconds else quickest
    return quickest
