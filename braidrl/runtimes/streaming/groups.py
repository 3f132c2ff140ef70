"""Which worker groups a flow needs, and whether it can stream at all.

actor.generate    engines with weights of their own, one group per generating role
compute           verifiers, computations, selection
actor, critic     the model of a role that changes: its inference and its updates, as data-parallel ranks
reference         a frozen role's model: workers that know nothing of each other
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from braidrl.config import Config
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind, Stage
from braidrl.placement.pools import Pool
from braidrl.runtimes.generating.engines import engine_processes, with_engines
from braidrl.transfer.queue.samplers import Sampler, sampler_named

COMPUTE = "compute"


@dataclass(frozen=True)
class Group:
    """Processes that do the same stages. The ranks of a role that changes are one worker; elsewhere each process is one."""

    name: str
    kind: Literal["generate", "compute", "model"]
    role: str | None
    stages: tuple[str, ...]
    processes: int
    trained: bool = False

    @property
    def ranks(self) -> int:
        """Return how many processes share a lease."""
        return self.processes if self.trained else 1


def pools_of(groups: Sequence[Group], config: Config) -> list[Pool]:
    """Return the groups' processes as pools; those that generate start the engine processes of `rollout`."""
    pools = [
        Pool((g.name,), g.processes, g.kind != "compute", generating=(g.name,) if g.kind == "generate" else ())
        for g in groups
    ]
    return list(with_engines(pools, config))


def worker_groups(config: Config, flow: Flow, evaluation: Flow | None) -> list[Group]:
    """Return the groups of a run. Raises UserError for a worker count of a group that there is none of."""
    every = [*flow.stages, *(evaluation.stages if evaluation else ())]
    stages: dict[str, list[Stage]] = {}
    for stage in every:
        stages.setdefault(group_of(stage), []).append(stage)
    for name in config.streaming.workers:
        if name not in stages:
            raise UserError(f"streaming.workers: the flow has no worker group {name!r}. {suggest(name, list(stages))}")
    return [_group(name, many, flow, config.streaming.workers.get(name, 1)) for name, many in stages.items()]


def group_of(stage: Stage) -> str:
    """Return the name of the group that does a stage."""
    if stage.kind is Kind.GENERATE:
        return f"{stage.role}.generate"
    return str(stage.role) if stage.kind in (Kind.INFER, Kind.TRAIN) else COMPUTE


def _group(name: str, stages: Sequence[Stage], flow: Flow, processes: int) -> Group:
    # The later a stage, the closer its rows are to their end: it goes first.
    names = tuple(stage.name for stage in reversed(stages))
    first = stages[0]
    if first.kind is Kind.GENERATE:
        return Group(name, "generate", first.role, names, processes)
    if name == COMPUTE:
        return Group(name, "compute", None, names, processes)
    return Group(name, "model", first.role, names, processes, first.role in flow.changed_roles)


def samplers_of(config: Config, flow: Flow) -> dict[str, Sampler]:
    """Return the sampler of each stage of a flow. Raises UserError for one, or a stage, that there is none of."""
    wanted = config.streaming.sampler
    stages = [stage.name for stage in flow.stages]
    if isinstance(wanted, str):
        return dict.fromkeys(stages, sampler_named(wanted))
    for name in wanted:
        if name not in stages:
            raise UserError(f"streaming.sampler: the flow has no stage {name!r}. {suggest(name, stages)}")
    return {name: sampler_named(sampler) for name, sampler in wanted.items()}


def check_streaming(config: Config, flow: Flow) -> None:
    """Raise UserError, before anything starts, for what this runtime cannot run."""
    if not any(stage.kind is Kind.GENERATE for stage in flow.stages):
        raise UserError(
            f"runtime=streaming streams rows from generation, and flow {flow.name} generates none; write runtime=eager"
        )
    if config.cluster.launcher == "torchrun":
        raise UserError(
            "runtime=streaming starts its workers itself; write cluster.launcher=local or cluster.launcher=ray"
        )
    if config.streaming.storage != "shared_memory" and config.cluster.launcher == "ray":
        raise UserError(
            f"streaming.storage={config.streaming.storage} is one machine's; write cluster.launcher=local or shared_memory"
        )
    if engine_processes(config):
        raise UserError(
            "runtime=streaming generates in workers of its own, as many as streaming.workers says; write rollout.engine=embedded "
            "and no rollout.engines"
        )
    modelled = {stage.role for stage in flow.stages if stage.kind in (Kind.INFER, Kind.TRAIN)}
    for stage in flow.stages:
        source = stage.params.get("source") if stage.kind is Kind.TRAIN else None
        if source is not None and source not in modelled:
            raise UserError(
                f"runtime=streaming cannot run {stage.name}: no process but engines has the weights of {source}, which neither "
                "infers nor trains; write runtime=eager, hybrid or distributed"
            )
    worker_groups(config, flow, None)
    samplers_of(config, flow)
