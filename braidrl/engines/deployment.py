"""The deployment of a run: the execution mode, the process pools, and the engines of each process that generates.

configuration, flow ──prepare.deployment.deploy──▶ Deployment ──▶ engines, publishers, backends, memory, `braid plan`

`check` refuses parts that do not fit each other, the flow or the models.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal

from braidrl.cluster.devices import device_count, visible_devices
from braidrl.cluster.pools import GENERATE, Pool
from braidrl.config import Config
from braidrl.config.layout import ParallelLayout
from braidrl.engines.embedded.sharded_decoding import check_heads
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind, Stage
from braidrl.flow.flow import policies_of
from braidrl.training.acceptance import check_plan
from braidrl.training.backends import supported
from braidrl.training.decoders.shrink import EXPERTS
from braidrl.training.parallel.experts import check_experts
from braidrl.training.pretrained import model_settings
from braidrl.training.role_settings import inference_layouts, settings_of, sharing_base
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.publisher import TRANSPORTS


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

    def faults(self, config: Config, generating: Sequence[str], plays: bool) -> Iterator[str]:
        """Yield the settings that the execution mode, other settings or, if a stage `plays`, an environment do not
        support.
        """
        rollout, layout, way = config.rollout, self.layout, config.rollout.weights
        nodes, ranks, kind, divided = self.nodes, layout.ranks, self.kind, layout != GenerationLayout()
        if nodes > 1 and (kind != "vllm" or not self.mode.concurrent):
            yield (
                f"rollout.nodes={nodes} is for engines of vLLM under runtime=streaming, and this is "
                f"rollout.engine={kind} under runtime={self.mode.name}; remove it"
            )
        if ranks % nodes:
            yield f"rollout.nodes={nodes} does not divide an engine's {ranks} ranks; write a divisor of {ranks}"
        if nodes > 1 and way == "file":
            yield f"rollout.weights=file stays on one machine, and rollout.nodes={nodes}; write collective"
        if way not in (None, "file"):
            TRANSPORTS.check(way)
            if not (self.started or self.mode.concurrent):
                yield f"rollout.weights={way} is for engine processes; write rollout.engines=1, or remove it"
        if self.home == "servers" and len(generating) > 1:
            yield (
                f"rollout.servers have the weights of one role, and {' and '.join(generating)} generate; write "
                "rollout.engine=vllm or embedded"
            )
        if self.hosts_vllm:
            yield from self._hosting_faults(config, generating)
        elif kind in ("vllm", "http") and layout.grouping:
            yield (
                f"rollout.grouping is for ranks that train and generate, and rollout.engine={kind} has its own "
                "processes; remove it, or write rollout.engines=0 for vLLM on these ranks"
            )
        elif divided and kind not in ("embedded", "vllm", "http"):
            yield f"{self.key} shards the embedded engine, vLLM and servers, and rollout.engine is {kind}"
        elif divided and kind == "embedded" and (self.is_separate or not self.mode.pools_ranks):
            yield (
                f"{self.key} shards the embedded engine over ranks that train and generate; write runtime=distributed "
                "or hybrid without rollout.engines, or rollout.engine=vllm"
            )
        if self.pools_ranks and not self.mode.pools_ranks:
            yield f"{self.key} needs engine processes, or runtime=distributed or hybrid; write rollout.engines=1"
        at_once = rollout.environment.at_once
        if self.pools_ranks and plays and at_once < ranks:
            yield (
                f"rollout.environment.at_once={at_once} is less than the {ranks} ranks of an engine, which play "
                f"together; write {ranks}"
            )
        for path in (settings_of(role, config).model for role in generating if divided):
            settings = model_settings(path)
            heads, layers = settings.get("num_attention_heads"), settings.get("num_hidden_layers", layout.pipeline)
            if kind == "embedded":
                check_heads(settings, layout.tensor)
                check_plan(path, ParallelLayout(tensor=layout.tensor, pipeline=layout.pipeline), self.key)
            elif (heads or layout.tensor) % layout.tensor:
                yield f"{self.key} does not divide the model's {heads} attention heads; write a divisor of {heads}"
            if kind == "embedded" and layers % layout.pipeline:
                refused = f"does not divide the model's {layers} layers; write a divisor of {layers}"
                yield f"rollout.pipeline={rollout.pipeline} {refused}"

    def _hosting_faults(self, config: Config, generating: Sequence[str]) -> Iterator[str]:
        """Yield the settings that vLLM in the training processes does not support."""
        rollout = config.rollout
        if self.mode.concurrent:
            yield "rollout.engines=0: under streaming vLLM has its own processes; write rollout.engines=1"
        if rollout.python is not None:
            yield (
                "rollout.engines=0 runs vLLM in Braid's own interpreter, and rollout.python names another; start "
                "`braid` from the environment that has vLLM and remove rollout.python, or leave rollout.engines out"
            )
        if config.trainer.resident_gib is not None:
            yield "trainer.resident_gib does not move vLLM on ranks that train (rollout.engines=0); remove it"
        if rollout.vllm.get("enable_sleep_mode") is False:
            yield "rollout.vllm.enable_sleep_mode=false: vLLM on the ranks that train has to sleep; remove it"
        if rollout.pipeline > 1:
            beside = "vLLM on the ranks that train supports tensor parallelism alone; write rollout.tensor"
            yield f"rollout.pipeline={rollout.pipeline}: {beside}"
        if len(generating) > 1:
            yield "rollout.engines=0: vLLM on the ranks that train serves one role; leave rollout.engines out"

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

    def _sharing_faults(self) -> Iterator[str]:
        """Yield the reasons why policies cannot share the base weights of one engine."""
        key, roles = "rollout.shared_base", self.shared_base
        if self.config.rollout.shared_base and not roles:
            yield f"{key} is for roles that play together, by `policies` of a generate stage; remove it"
        settings_by_role = {role: settings_of(role, self.config) for role in roles}
        for role, settings in settings_by_role.items():
            if settings.lora is None or settings.lora.base_dtype is not None:
                yield f"{key}: {role} has no adapters on weights of its dtype; write roles.{role}.lora, or remove {key}"
            if settings.lora is not None and settings.lora.expert_targets:
                yield f"{key}: {role} adapts experts; remove it, or those lora.targets"
            if settings.model != settings_by_role[roles[0]].model:
                yield f"{key}: {role} and {roles[0]} have other models; write one for both, or remove {key}"
        for stage in self.flow.stages:
            source, role = stage.params.get("source"), str(stage.role)
            if role in roles and source is not None:
                yield from self._copying_faults(stage.name, role, str(source), stage.params.get("decay", 0.0))
            elif source in roles and self.mode.concurrent:
                yield f"{key}: {stage.name} takes the weights of {source}, which publishes adapters alone; remove it"
        home, kind = self.engines.home, self.engines.kind
        hosted = kind == "vllm" and home == "processes" and not self.mode.concurrent
        if roles and not hosted and (home, kind) != ("process", "embedded"):
            yield (
                f"{key}: policies share an embedded engine of the process that generates, or vLLM's processes of "
                "other runtimes than streaming; write rollout.engine=embedded without rollout.engines, or remove it"
            )
        if roles and self.resident_gib is not None:
            yield f"{key}: weights that roles share are not offloaded; remove it, or trainer.resident_gib"

    def _copying_faults(self, stage: str, role: str, source: str, decay: float) -> Iterator[str]:
        """Yield why a role that shares a base cannot take the adapters of another."""
        key = "rollout.shared_base"
        adapters = [settings_of(name, self.config).lora for name in (role, source)]
        shapes = [lora and lora.model_dump(exclude={"adapter"}) for lora in adapters]
        if source not in self.shared_base:
            yield f"{key}: {stage} takes the weights of {source}, which is not on the base of {role}; remove it"
        elif shapes[0] != shapes[1]:
            yield f"{key}: {stage} copies adapters, and those of {role} and {source} differ; write one `lora` for both"
        if decay:
            yield f"{key}: {stage} copies adapters, whose mean is not that of the weights; remove `decay`"

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

    def check(self, flow: Flow) -> None:
        """Raise UserError for engines, layouts or pools that processes or models do not support.

        `flow` is the training flow, even of a run that only evaluates.
        """
        plays = any("environment" in stage.params for stage in self.stages)
        pools = self.pools if self.mode.pools_ranks else ()
        faults = [self.engines.faults(self.config, self.generating, plays), self._sharing_faults()]
        faults.append(self._layout_faults(flow))
        for fault in chain(*faults, *(self._pool_faults(pool) for pool in pools)):
            raise UserError(fault)

    def fits(self, pool: Pool) -> bool:
        """Return True if the layouts and engines of a pool's roles can have its number of workers."""
        try:
            return not list(self._pool_faults(pool))
        except UserError:
            return False

    def layouts_of(self, role: str) -> dict[str, ParallelLayout]:
        """Return the layouts in which a role trains and infers, by their keys."""
        settings, inferring = settings_of(role, self.config), self.inference_layouts.get(role)
        layouts = {settings.key("layout"): settings.layout}
        return layouts if inferring is None else {**layouts, settings.key("inference_layout"): inferring}

    def _layout_faults(self, flow: Flow) -> Iterator[str]:
        """Yield layouts that the execution mode or the flow does not support.

        Raises UserError for layouts that a model does not support.
        """
        config, trained = self.config, flow.trained_roles
        infer = {stage.role for stage in flow.stages if stage.kind is Kind.INFER}
        for role in (role for role, role_config in config.roles.items() if role_config.inference_layout):
            if role not in trained:
                yield f"roles.{role}.inference_layout: {flow.name} does not train {role}; write roles.{role}.layout"
            if role not in infer:
                yield f"roles.{role}.inference_layout: no stage of {flow.name} infers with {role}; remove it"
        if config.trainer.inference_layout and not infer & set(trained):
            yield f"trainer.inference_layout: no stage of {flow.name} infers with a trained role; remove it"
        for role in flow.roles:
            settings = settings_of(role, config)
            sizes = model_settings(settings.model)
            heads, layers = sizes.get("num_attention_heads", 1), sizes.get("num_hidden_layers", 1)
            for key, layout in self.layouts_of(role).items():
                if layout != ParallelLayout() and not self.mode.sharded:
                    yield f"{key} is for runtime=distributed, hybrid or streaming; remove it, or write another runtime"
                if layout.token_ranks > 1 and config.trainer.share_prompts:
                    axis = "sequence" if layout.sequence > 1 else "context"
                    yield f"{key}: {axis} divides rows apart; write {axis}=1, or trainer.share_prompts=false"
                layout.check_model(heads, sizes.get("num_key_value_heads", heads), layers, key)
                if layout.expert > 1:
                    check_experts(next((sizes[name] for name in EXPERTS if sizes.get(name)), None), layout.expert, key)
                if settings.backend == "torch":
                    check_plan(settings.model, layout, key)

    def _pool_faults(self, pool: Pool) -> Iterator[str]:
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
