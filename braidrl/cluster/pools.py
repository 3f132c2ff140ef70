"""Process pools: a partition of the roles over groups of processes.

colocate     [actor reference critic]             roles take turns, hand-over in place
standalone   [actor] [reference] [critic]         each starts as soon as its inputs exist
split        [actor] [reference critic]           generating roles, and the others
lists        [actor.generate] [actor] [...]       any partition; a role may generate in another pool than it trains in
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from braidrl.config import PlacementConfig, PoolConfig
from braidrl.errors import UserError, suggest

NAMES = ("colocate", "standalone", "split")
GENERATE = ".generate"
"""Suffix of a role's generation as a member of a pool."""


@dataclass(frozen=True)
class Pool:
    """Roles in the same processes: `workers` processes, each with its own device unless they need none.

    `ROLE.generate` stands for a role's generation alone, with the model in another pool.
    """

    roles: tuple[str, ...]
    workers: int
    device: bool = True
    """False for work that runs on any CPU."""
    engines: int = 0
    engine_devices: int = 1
    generating: tuple[str, ...] = ()
    kind: str | None = None
    """Required kind of its devices, if any."""
    nodes: int | None = None
    """Number of nodes that share its processes equally, if set."""

    @property
    def name(self) -> str:
        """Return the name of its workers in traces and errors."""
        return "+".join(self.roles)

    @property
    def models(self) -> tuple[str, ...]:
        """Return the roles that train or infer here."""
        return tuple(role for role in self.roles if not role.endswith(GENERATE))


def place(
    placement: PlacementConfig, roles: Sequence[str], generating: Collection[str], workers: int
) -> tuple[Pool, ...]:
    """Return the pools of a run; `workers` is the default size. Raises UserError for an unknown name, and a role in no
    or two pools.
    """
    if placement.pools:
        check_partition(placement.pools, roles, generating)
        parts = [(tuple(pool.roles), pool.workers or workers, pool.kind, pool.nodes) for pool in placement.pools]
        for pool_roles, size, _, nodes in parts:
            check_nodes("placement", "+".join(pool_roles), size, nodes)
    elif placement.name not in NAMES:
        raise UserError(f"no placement is called {placement.name!r}. {suggest(placement.name, NAMES)}")
    else:
        generate, others = (
            tuple(role for role in roles if (role in generating) is generates) for generates in (True, False)
        )
        named: dict[str, list[tuple[str, ...]]] = {
            "colocate": [tuple(roles)],
            "standalone": [(role,) for role in roles],
            "split": [generate, others],
        }
        parts = [(pool_roles, workers, None, None) for pool_roles in named[placement.name] if pool_roles]
    apart = {name for pool_roles, *_ in parts for name in pool_roles if name.endswith(GENERATE)}
    pool_names = {role: role + GENERATE if role + GENERATE in apart else role for role in generating}
    return tuple(
        Pool(
            pool_roles,
            size,
            generating=tuple(role for role, name in pool_names.items() if name in pool_roles),
            kind=kind,
            nodes=nodes,
        )
        for pool_roles, size, kind, nodes in parts
    )


def check_nodes(key: str, name: str, workers: int, nodes: int | None) -> None:
    """Raise UserError unless a pool's workers divide over its nodes."""
    if nodes and workers % nodes:
        raise UserError(f"{key}: {name} has {workers} workers, which nodes={nodes} does not divide; write another")


def check_partition(pools: Sequence[PoolConfig], roles: Sequence[str], generating: Collection[str]) -> None:
    """Raise UserError unless each role is in exactly one pool, and its generation in one pool at most."""
    placed: dict[str, int] = {}
    names = [*roles, *(role + GENERATE for role in generating)]
    for number, pool in enumerate(pools):
        for role in pool.roles:
            model = role.removesuffix(GENERATE)
            if role not in names:
                raise UserError(
                    f"placement: pool {number} names {role!r}, which is no model of this flow. {suggest(role, names)}"
                )
            if role != model and model in pool.roles:
                raise UserError(
                    f"placement: pool {number} has {role} with {model}, which generates there anyway; remove {role}"
                )
            if role in placed:
                raise UserError(
                    f"placement: pools overlap: {role} is in pool {placed[role]} and in pool {number}; "
                    "each role needs one pool"
                )
            placed[role] = number
    if missing := [role for role in roles if role not in placed]:
        raise UserError(f"placement: {missing[0]} is in no pool; add it to one, or write placement=colocate")
