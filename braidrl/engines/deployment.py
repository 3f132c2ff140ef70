"""The deployment of a run: the execution mode, the process pools, and the engines of each process that generates.

configuration, flow ──prepare.deployment.deploy──▶ Deployment ──▶ engines, publishers, backends, memory, `braid plan`

`deployment_checks` refuses parts that do not fit each other, the flow or the models.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from braidrl.cluster.devices import device_count, visible_devices
from braidrl.cluster.pools import GENERATE, Pool
from braidrl.config import Config
from braidrl.config.layout import ParallelLayout
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.flow import policies_of
from braidrl.training.names import supported
from braidrl.training.role_settings import inference_layouts, settings_of, sharing_base
from braidrl.weights.generation_layout import GenerationLayout


@dataclass(frozen=True)
class ExecutionMode:
    """An execution mode: how stages are called, and what follows from it."""

    name: str
    reads: frozenset[str]
    """The optional keys that have an effect."""
    sharded: bool = True
    """True if several processes can hold a role's model."""
    chained: bool = False
    """True if every rank executes the complete flow, one stage after the other."""
    placed: bool = False
    """True if a driver on Ray calls the workers of pools."""
    concurrent: bool = False
    """True if each role has separate processes, which compute concurrently."""

    @property
    def pools_ranks(self) -> bool:
        """Return True if the training processes of a role may generate together."""
        return self.sharded and not self.concurrent


MODES = {
    mode.name: mode
    for mode in (
        ExecutionMode("eager", frozenset({"trainer.resident_gib"}), sharded=False),
        ExecutionMode("hybrid", frozenset({"workers", "placement", "trainer.resident_gib"}), placed=True),
        ExecutionMode("distributed", frozenset({"workers", "cluster.launcher", "trainer.resident_gib"}), chained=True),
        ExecutionMode("streaming", frozenset({"streaming", "cluster.launcher"}), concurrent=True),
    )
}


@dataclass(frozen=True)
class Engines:
    """The engines of a process that generates."""

    kind: str
    """The name of `rollout.engine`."""
    home: Literal["process", "ranks", "processes", "servers"]
    """In this process, in this process and others of its role together, in `count` engine processes, or in servers."""
    count: int
    """Engine processes or servers that generate in place of this process; 0 if it generates."""
    layout: GenerationLayout
    mode: ExecutionMode
    nodes: int = 1

    @classmethod
    def of(cls, config: Config) -> "Engines":
        """Return the engines of a configuration."""
        rollout, layout, mode = config.rollout, GenerationLayout.of(config.rollout), MODES[config.runtime]
        if rollout.engine == "http":
            return cls(rollout.engine, "servers", len(rollout.servers.urls), layout, mode)
        hosted = rollout.engine == "vllm"
        count = int(hosted) if rollout.engines is None else rollout.engines
        together = layout.ranks > 1 or layout.grouping is not None or (hosted and mode.sharded)
        home: Literal["process", "ranks", "processes"] = "processes" if count else "ranks" if together else "process"
        return cls(rollout.engine, home, count, layout, mode, rollout.nodes or 1)

    @property
    def key(self) -> str:
        """Return the setting that divides an engine, or that runs vLLM in the training processes."""
        layout = self.layout
        axes = {"tensor": layout.tensor, "pipeline": layout.pipeline, "grouping": layout.grouping}
        hosting = f"rollout.engine=vllm on {'the ranks that train' if self.mode.sharded else 'this process'}"
        return next((f"rollout.{name}={value}" for name, value in axes.items() if value not in (1, None)), hosting)

    @property
    def started(self) -> int:
        """Return the number of engine processes that a generating process starts; servers are started by others."""
        return self.count if self.home == "processes" else 0

    @property
    def is_separate(self) -> bool:
        """Return True if engine processes or servers generate in place of this process."""
        return self.count > 0

    @property
    def pools_ranks(self) -> bool:
        """Return True if ranks decode together, each with a shard, or with vLLM a copy that takes turns."""
        return self.home == "ranks"

    @property
    def hosts_vllm(self) -> bool:
        """Return True if vLLM runs in the processes that train."""
        return self.kind == "vllm" and not self.is_separate

    @property
    def ranks(self) -> int:
        """Return the number of ranks that decode together: those of an engine process, or training ranks."""
        return self.layout.ranks if self.is_separate or self.pools_ranks else 1

    @property
    def ranks_per_node(self) -> int:
        """Return the number of an engine's ranks on each of its nodes."""
        return self.layout.ranks // self.nodes

    def in_pools(self, pools: Iterable[Pool]) -> tuple[Pool, ...]:
        """Return the pools with the number of engine processes that each generating pool starts."""
        started, ranks = self.started, self.ranks_per_node
        return tuple(
            replace(pool, engines=started, engine_devices=ranks) if pool.generating else pool for pool in pools
        )


@dataclass(frozen=True)
class Deployment:
    """The processes, engines and weights of a run, for its configuration and flow."""

    config: Config
    flow: Flow
    """The flow that the processes execute."""
    evaluation: Flow | None
    """The flow that evaluates the policy; None without evaluation sets."""
    mode: ExecutionMode
    pools: tuple[Pool, ...]
    """The processes, by the roles that they hold, with the engine processes that they start."""
    engines: Engines
    launcher: str
    """The launcher of the processes: `local`, `ray` or `torchrun`."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """Return the stages of both flows."""
        return self.flow.stages + (self.evaluation.stages if self.evaluation else ())

    @cached_property
    def generating(self) -> tuple[str, ...]:
        """Return the roles that need an engine."""
        return tuple(dict.fromkeys(role for stage in self.stages for role in policies_of(stage)))

    @cached_property
    def roles(self) -> tuple[str, ...]:
        """Return the roles that need a model."""
        return tuple(dict.fromkeys([*self.flow.roles, *self.generating]))

    @cached_property
    def inference_layouts(self) -> dict[str, ParallelLayout]:
        """Return the inference layouts of trained roles that differ from their training layouts."""
        return inference_layouts(self.config, self.flow)

    @cached_property
    def shared_base(self) -> tuple[str, ...]:
        """Return the roles whose adapters one engine serves on a base model; empty if each role has its own engine."""
        return sharing_base(self.config, self.stages)

    @property
    def resident_gib(self) -> float | None:
        """Return the memory budget of roles that share a device; None without a budget, or if roles share none."""
        return self.config.trainer.resident_gib if "trainer.resident_gib" in self.mode.reads else None

    @property
    def trains_on_stale_rows(self) -> bool:
        """Return True if rows may be older than the weights that they train."""
        trainer = self.config.trainer
        return trainer.max_staleness > 0 and (self.mode.concurrent or trainer.surplus == "keep")

    @cached_property
    def transport(self) -> str | None:
        """Return the transport that brings weights to engines outside this process; None for a file.

        Engines with separate devices get them over a process group, unless configured otherwise. Raises UserError if a
        process group is requested and engines share the trainer's device, which NCCL refuses.
        """
        config, way, available = self.config, self.config.rollout.weights, device_count(self.config.device)
        if self.engines.home == "servers":
            return "collective" if config.rollout.servers.weights == "network" else None
        if self.engines.nodes > 1:
            return way or "collective"
        if way not in (None, "collective"):
            return None if way == "file" else way
        if not available:
            return way
        if self.mode.concurrent:
            # Each process has a separate device, unless the machine has only one.
            return "collective" if way or available > 1 else None
        devices = visible_devices(available, self.engines.count, self.engines.ranks_per_node)
        shared = any(set(devices_of_engine) & set(devices.every[:1]) for devices_of_engine in devices.engines)
        if way and shared:
            raise UserError(
                "rollout.weights=collective: NCCL needs a CUDA device for each process, and an engine shares the "
                "trainer's; write rollout.weights=file"
            )
        return None if shared else "collective"

    def fits(self, pool: Pool) -> bool:
        """Return True if the layouts and engines of a pool's roles can have its number of workers."""
        try:
            return not list(self.pool_faults(pool))
        except UserError:
            return False

    def layouts_of(self, role: str) -> dict[str, ParallelLayout]:
        """Return the layouts in which a role trains and infers, by their keys."""
        settings, inferring = settings_of(role, self.config), self.inference_layouts.get(role)
        layouts = {settings.key("layout"): settings.layout}
        return layouts if inferring is None else {**layouts, settings.key("inference_layout"): inferring}

    def pool_faults(self, pool: Pool) -> Iterator[str]:
        """Yield weights that cannot reach a pool. Raises UserError for layouts that do not match its ranks."""
        engines = self.engines
        for stage in self.stages:
            if stage.role in pool.generating and (apart := [r for r in policies_of(stage) if r not in pool.generating]):
                yield (
                    f"{stage.name} plays with engines of one process; put {stage.role} and {apart[0]}, or "
                    f"{stage.role}{GENERATE} and {apart[0]}{GENERATE}, into one pool, as placement=colocate does"
                )
        for stage in self.flow.stages:
            source = stage.params.get("source") if stage.kind is Kind.TRAIN else None
            if source is not None and stage.role in pool.roles and source not in pool.roles:
                yield f"{stage.name} copies weights within one process; put {stage.role} and {source} into one pool"
        for role in (role for role in pool.generating if role not in pool.models):
            backend = settings_of(role, self.config).backend
            if "streaming" not in supported(backend):
                yield (
                    f"placement: {role} and {role}{GENERATE} are in different pools, and the backend {backend} cannot "
                    f"send weights to another pool; remove {role}{GENERATE}, or write backend=torch"
                )
            if engines.layout.grouping:
                yield f"rollout.grouping is for ranks that train {role}, which generates elsewhere; remove it"
        for role in pool.models:
            for key, layout in self.layouts_of(role).items():
                layout.resolve(pool.workers, key)
        for role in pool.generating if engines.pools_ranks else ():
            chosen = settings_of(role, self.config)
            layout = chosen.layout if role in pool.models else ParallelLayout()
            engines.layout.check(layout.resolve(pool.workers, chosen.key("layout")), pool.workers)
