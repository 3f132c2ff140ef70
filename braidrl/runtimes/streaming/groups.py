"""The worker groups of a flow, their activity for metrics, and the check that a flow can stream.

actor.generate    engines with their own weights, one group per generating role; each process has, starts or calls
                  engines
actor, critic     the model of a role that changes: its inference and its updates, as the ranks of its layout
reference         a frozen role's model: independent workers, or the ranks of a layout that shards it
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from braidrl.config import Config
from braidrl.engines.deployment import Deployment
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind
from braidrl.flow.selecting import older_slots
from braidrl.observe.metrics import Sums
from braidrl.queue.samplers import Sampler, sampler_named
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.training.role_settings import settings_of

ROWS = "rows"
"""The process that makes rows and writes them to files."""


@dataclass(frozen=True)
class Group:
    """Processes with the same consumers.

    Processes that share a role's model, or its changes, are one worker; otherwise each process is a worker.
    """

    name: str
    kind: Literal["generate", "model", "rows"]
    role: str | None
    consumers: tuple[str, ...]
    processes: int
    trained: bool = False
    divided: bool = False
    """True if a layout says how processes hold the model together."""
    nodes: int = 1
    """Processes of a generating worker, one for each node that its engines span."""
    policies: tuple[str, ...] = ()
    """Further roles whose engines each process has, since they play together."""

    @property
    def ranks(self) -> int:
        """Return the number of processes that share a lease."""
        return self.processes if self.trained or self.divided else self.nodes


@dataclass
class Activity:
    """Sums since the last report."""

    seconds: dict[tuple[str, bool], float] = field(default_factory=dict)
    """Seconds of the workers of each group, with and without rows."""
    weight_bytes: int = 0
    """Bytes of new weights that engines have read."""
    drawn_again: int = 0
    """Rows that an engine started and that were forgotten with a lost trainer."""
    left_out: int = 0
    """Rows that are not generated any more, because several engines have died with them."""
    updates: Sums = field(default_factory=Sums)
    """Seconds that each engine paused to load weights, and that a rank took to write its shard."""
    _noted: float | None = None
    _state_of: dict[str, tuple[str, bool]] = field(default_factory=dict)
    """The group of each worker, and True if it has rows."""
    _workers: Counter[tuple[str, bool]] = field(default_factory=Counter)
    """Number of workers in each of these states."""

    def note(self, now: float, worker: str, group: str | None, has_rows: bool = False) -> None:
        """Record, at a time in seconds, a worker's group, and whether it has rows from now on; None if it has left."""
        self.advance(now)
        if (before := self._state_of.pop(worker, None)) is not None:
            self._workers[before] -= 1
        if group is not None:
            self._state_of[worker] = group, has_rows
            self._workers[group, has_rows] += 1

    def advance(self, now: float) -> None:
        """Add the time since the last call to the states of the workers."""
        passed = 0.0 if self._noted is None else now - self._noted
        for state, workers in self._workers.items():
            if workers:
                self.seconds[state] = self.seconds.get(state, 0.0) + passed * workers
        self._noted = now

    def take_sums(self) -> Mapping[str, float]:
        """Return the sums, each group's idle share and the seconds of an update since the last call."""
        sums: dict[str, float] = {}
        for name in dict.fromkeys(group for group, _ in self.seconds):
            idle, busy = self.seconds.get((name, False), 0.0), self.seconds.get((name, True), 0.0)
            if idle + busy:
                sums[f"streaming/idle/{name}"] = idle / (idle + busy)
        sums["streaming/weight_bytes"] = float(self.weight_bytes)
        sums["streaming/rows_drawn_again"] = float(self.drawn_again)
        sums["streaming/rows_left_out"] = float(self.left_out)
        sums |= self.updates.means()
        self.seconds, self.weight_bytes, self.drawn_again, self.left_out, self.updates = {}, 0, 0, 0, Sums()
        return sums


def worker_groups(deployment: Deployment) -> list[Group]:
    """Return the groups of a run: the consumers that each pool of processes runs."""
    config, changed = deployment.config, deployment.flow.changed_roles
    consumers_of: dict[str, list[str]] = {}
    for flow in filter(None, (deployment.flow, deployment.evaluation)):
        for consumer in Consumers(flow):
            # Later stages come first: their rows are closer to the end.
            consumers_of.setdefault(consumer.group, []).insert(0, consumer.name)
    groups = list[Group]()
    for pool in deployment.pools:
        names = tuple(consumers_of[pool.name])
        if pool.generating:
            role, *further = pool.generating
            nodes = deployment.engines.nodes
            if nodes > 1 and further:
                raise UserError(f"rollout.nodes={nodes} is for engines of one role, and {further[0]} plays with {role}")
            groups.append(Group(pool.name, "generate", role, names, pool.workers, nodes=nodes, policies=tuple(further)))
            continue
        (role,), layout = pool.roles, settings_of(pool.name, config).layout
        divided = not layout.is_replicated or (layout.data or 1) > 1
        groups.append(Group(role, "model", role, names, pool.workers, role in changed, divided))
    return groups


def samplers_of(config: Config, flow: Flow) -> dict[str, Sampler]:
    """Return the sampler of each stage of a flow. Raises UserError for an unknown sampler or stage."""
    configured = config.streaming.sampler
    stages = [stage.name for stage in flow.stages]
    if isinstance(configured, str):
        return dict.fromkeys(stages, sampler_named(configured))
    for name in configured:
        if name not in stages:
            raise UserError(f"streaming.sampler: the flow has no stage {name!r}. {suggest(name, stages)}")
    return {name: sampler_named(sampler) for name, sampler in configured.items()}


def check_streaming(deployment: Deployment) -> None:
    """Raise UserError, before anything starts, for a flow or configuration that streaming does not support."""
    config, flow = deployment.config, deployment.flow
    if not any(stage.kind is Kind.GENERATE for stage in flow.stages):
        raise UserError(
            f"runtime=streaming streams rows from generation, and flow {flow.name} generates none; write runtime=eager"
        )
    if deployment.launcher == "torchrun":
        raise UserError(
            "runtime=streaming starts its workers itself; write cluster.launcher=local or cluster.launcher=ray"
        )
    if config.streaming.storage != "shared_memory" and deployment.launcher == "ray":
        raise UserError(
            f"streaming.storage={config.streaming.storage} is one machine's; write cluster.launcher=local or "
            "shared_memory"
        )
    modelled = {stage.role for stage in flow.stages if stage.kind in (Kind.INFER, Kind.TRAIN)}
    for stage in flow.stages:
        source = stage.params.get("source") if stage.kind is Kind.TRAIN else None
        if source is not None and source not in modelled:
            raise UserError(
                f"runtime=streaming cannot run {stage.name}: no process but engines has the weights of {source}, which "
                "neither infers nor trains; write runtime=eager, hybrid or distributed"
            )
    groups = worker_groups(deployment)
    for group in groups:
        check_group(group, deployment)
    max_draining(config, groups)
    older_groups(config)
    samplers_of(config, flow)


def older_groups(config: Config) -> int | None:
    """Return how many groups of a batch may be stale; None means all.

    Raises UserError for a share without effect, or one that cannot be met.
    """
    share, trainer = config.streaming.on_policy_share, config.trainer
    slots = older_slots(share, trainer.prompts_per_step)
    if slots is None:
        return None
    if trainer.max_staleness == 0:
        raise UserError(
            f"streaming.on_policy_share={share:g} limits off-policy rows, and with trainer.max_staleness=0 there are "
            "none; write trainer.max_staleness=1, or remove it"
        )
    if trainer.surplus == "keep":
        raise UserError(
            f"streaming.on_policy_share={share:g} limits the off-policy groups of a batch, and trainer.surplus=keep "
            "adds others; write trainer.surplus=drop"
        )
    if slots == 0:
        raise UserError(
            f"streaming.on_policy_share={share:g} leaves none of the {trainer.prompts_per_step} prompts of a batch "
            "off-policy; write trainer.max_staleness=0 in its place, or a smaller share"
        )
    return slots


def max_draining(config: Config, groups: Sequence[Group]) -> int:
    """Return how many engines may be draining at a time: half of them under `rolling`.

    Raises UserError for a single engine.
    """
    engines = sum(group.processes // group.ranks for group in groups if group.kind == "generate")
    if config.streaming.weights != "rolling":
        return engines
    if engines == 1:
        raise UserError(
            "streaming.weights=rolling lets some engines generate while others load, and there is one; "
            "write streaming.workers.actor.generate=2, or streaming.weights=interrupt"
        )
    return engines // 2


def check_group(group: Group, deployment: Deployment) -> None:
    """Raise UserError for a group with too many or too few processes for its work."""
    key, servers = f"streaming.workers.{group.name}", deployment.engines.count
    if group.kind == "generate" and deployment.engines.home == "servers" and group.processes > servers:
        raise UserError(
            f"{key}={group.processes} and rollout.servers are {servers}: each process uses separate servers; "
            f"write {key}={servers}, or name more of them"
        )
    if group.kind == "model":
        for name, layout in deployment.layouts_of(group.name).items():
            layout.resolve(group.processes, name, key)
