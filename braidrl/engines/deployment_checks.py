"""Checks of a deployment: engines, layouts and pools that processes, the flow or the models do not support.

Each function yields its faults in one line each; a model's layouts are proven on a tiny model (`check_plan`).
"""

from collections.abc import Iterator, Sequence
from itertools import chain

from braidrl.config import Config
from braidrl.config.layout import ParallelLayout
from braidrl.engines.deployment import Deployment, Engines
from braidrl.engines.embedded.sharded_decoding import check_heads
from braidrl.errors import UserError
from braidrl.flow import Flow, Kind
from braidrl.training.acceptance import check_plan
from braidrl.training.decoders.shrink import EXPERTS
from braidrl.training.parallel.experts import check_experts
from braidrl.training.pretrained import model_settings
from braidrl.training.role_settings import settings_of
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.names import TRANSPORTS


def check_deployment(deployment: Deployment, flow: Flow) -> None:
    """Raise UserError for engines, layouts or pools that processes or models do not support.

    `flow` is the training flow, even of a run that only evaluates.
    """
    plays = any("environment" in stage.params for stage in deployment.stages)
    pools = deployment.pools if deployment.mode.pools_ranks else ()
    faults = [
        engine_faults(deployment.engines, deployment.config, deployment.generating, plays),
        sharing_faults(deployment),
        layout_faults(deployment, flow),
    ]
    for fault in chain(*faults, *(deployment.pool_faults(pool) for pool in pools)):
        raise UserError(fault)


def engine_faults(engines: Engines, config: Config, generating: Sequence[str], plays: bool) -> Iterator[str]:
    """Yield the settings that the execution mode, other settings or, if a stage `plays`, an environment do not
    support.
    """
    rollout, layout, way = config.rollout, engines.layout, config.rollout.weights
    nodes, ranks, kind, divided = engines.nodes, layout.ranks, engines.kind, layout != GenerationLayout()
    if nodes > 1 and (kind != "vllm" or not engines.mode.concurrent):
        yield (
            f"rollout.nodes={nodes} is for engines of vLLM under runtime=streaming, and this is "
            f"rollout.engine={kind} under runtime={engines.mode.name}; remove it"
        )
    if ranks % nodes:
        yield f"rollout.nodes={nodes} does not divide an engine's {ranks} ranks; write a divisor of {ranks}"
    if nodes > 1 and way == "file":
        yield f"rollout.weights=file stays on one machine, and rollout.nodes={nodes}; write collective"
    if way not in (None, "file"):
        TRANSPORTS.check(way)
        if not (engines.started or engines.mode.concurrent):
            yield f"rollout.weights={way} is for engine processes; write rollout.engines=1, or remove it"
    if engines.home == "servers" and len(generating) > 1:
        yield (
            f"rollout.servers have the weights of one role, and {' and '.join(generating)} generate; write "
            "rollout.engine=vllm or embedded"
        )
    if engines.hosts_vllm:
        yield from hosting_faults(engines, config, generating)
    elif kind in ("vllm", "http") and layout.grouping:
        yield (
            f"rollout.grouping is for ranks that train and generate, and rollout.engine={kind} has its own "
            "processes; remove it, or write rollout.engines=0 for vLLM on these ranks"
        )
    elif divided and kind not in ("embedded", "vllm", "http"):
        yield f"{engines.key} shards the embedded engine, vLLM and servers, and rollout.engine is {kind}"
    elif divided and kind == "embedded" and (engines.is_separate or not engines.mode.pools_ranks):
        yield (
            f"{engines.key} shards the embedded engine over ranks that train and generate; write runtime=distributed "
            "or hybrid without rollout.engines, or rollout.engine=vllm"
        )
    if engines.pools_ranks and not engines.mode.pools_ranks:
        yield f"{engines.key} needs engine processes, or runtime=distributed or hybrid; write rollout.engines=1"
    at_once = rollout.environment.at_once
    if engines.pools_ranks and plays and at_once < ranks:
        yield (
            f"rollout.environment.at_once={at_once} is less than the {ranks} ranks of an engine, which play "
            f"together; write {ranks}"
        )
    for path in (settings_of(role, config).model for role in generating if divided):
        settings = model_settings(path)
        heads, layers = settings.get("num_attention_heads"), settings.get("num_hidden_layers", layout.pipeline)
        if kind == "embedded":
            check_heads(settings, layout.tensor)
            check_plan(path, ParallelLayout(tensor=layout.tensor, pipeline=layout.pipeline), engines.key)
        elif (heads or layout.tensor) % layout.tensor:
            yield f"{engines.key} does not divide the model's {heads} attention heads; write a divisor of {heads}"
        if kind == "embedded" and layers % layout.pipeline:
            refused = f"does not divide the model's {layers} layers; write a divisor of {layers}"
            yield f"rollout.pipeline={rollout.pipeline} {refused}"


def hosting_faults(engines: Engines, config: Config, generating: Sequence[str]) -> Iterator[str]:
    """Yield the settings that vLLM in the training processes does not support."""
    rollout = config.rollout
    if engines.mode.concurrent:
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


def sharing_faults(deployment: Deployment) -> Iterator[str]:
    """Yield the reasons why policies cannot share the base weights of one engine."""
    key, roles = "rollout.shared_base", deployment.shared_base
    if deployment.config.rollout.shared_base and not roles:
        yield f"{key} is for roles that play together, by `policies` of a generate stage; remove it"
    settings_by_role = {role: settings_of(role, deployment.config) for role in roles}
    for role, settings in settings_by_role.items():
        if settings.lora is None or settings.lora.base_dtype is not None:
            yield f"{key}: {role} has no adapters on weights of its dtype; write roles.{role}.lora, or remove {key}"
        if settings.lora is not None and settings.lora.expert_targets:
            yield f"{key}: {role} adapts experts; remove it, or those lora.targets"
        if settings.model != settings_by_role[roles[0]].model:
            yield f"{key}: {role} and {roles[0]} have other models; write one for both, or remove {key}"
    for stage in deployment.flow.stages:
        source, role = stage.params.get("source"), str(stage.role)
        if role in roles and source is not None:
            yield from copying_faults(deployment, stage.name, role, str(source), stage.params.get("decay", 0.0))
        elif source in roles and deployment.mode.concurrent:
            yield f"{key}: {stage.name} takes the weights of {source}, which publishes adapters alone; remove it"
    home, kind = deployment.engines.home, deployment.engines.kind
    hosted = kind == "vllm" and home == "processes" and not deployment.mode.concurrent
    if roles and not hosted and (home, kind) != ("process", "embedded"):
        yield (
            f"{key}: policies share an embedded engine of the process that generates, or vLLM's processes of "
            "other runtimes than streaming; write rollout.engine=embedded without rollout.engines, or remove it"
        )
    if roles and deployment.resident_gib is not None:
        yield f"{key}: weights that roles share are not offloaded; remove it, or trainer.resident_gib"


def copying_faults(deployment: Deployment, stage: str, role: str, source: str, decay: float) -> Iterator[str]:
    """Yield why a role that shares a base cannot take the adapters of another."""
    key = "rollout.shared_base"
    adapters = [settings_of(name, deployment.config).lora for name in (role, source)]
    shapes = [lora and lora.model_dump(exclude={"adapter"}) for lora in adapters]
    if source not in deployment.shared_base:
        yield f"{key}: {stage} takes the weights of {source}, which is not on the base of {role}; remove it"
    elif shapes[0] != shapes[1]:
        yield f"{key}: {stage} copies adapters, and those of {role} and {source} differ; write one `lora` for both"
    if decay:
        yield f"{key}: {stage} copies adapters, whose mean is not that of the weights; remove `decay`"


def layout_faults(deployment: Deployment, flow: Flow) -> Iterator[str]:
    """Yield layouts that the execution mode or the flow does not support.

    Raises UserError for layouts that a model does not support.
    """
    config, trained = deployment.config, flow.trained_roles
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
        for key, layout in deployment.layouts_of(role).items():
            if layout != ParallelLayout() and not deployment.mode.sharded:
                yield f"{key} is for runtime=distributed, hybrid or streaming; remove it, or write another runtime"
            if layout.token_ranks > 1 and config.trainer.share_prompts:
                axis = "sequence" if layout.sequence > 1 else "context"
                yield f"{key}: {axis} divides rows apart; write {axis}=1, or trainer.share_prompts=false"
            layout.check_model(heads, sizes.get("num_key_value_heads", heads), layers, key)
            if layout.expert > 1:
                check_experts(next((sizes[name] for name in EXPERTS if sizes.get(name)), None), layout.expert, key)
            if settings.backend == "torch":
                check_plan(settings.model, layout, key)
