"""Consistency checks between the parts of a run, before any model loads."""

from collections.abc import Iterable

import torch
from transformers import PreTrainedModel

from braidrl.cluster.devices import choose_device, has_bfloat16
from braidrl.config import Config, PlacementConfig, StreamingConfig
from braidrl.data.token_columns import ROUTED_EXPERTS, column_of
from braidrl.engines.deployment import MODES
from braidrl.engines.http.dialects import DIALECTS
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind
from braidrl.flow.signatures import columns_of
from braidrl.runtimes.prepare.names import user_code
from braidrl.sandbox.walls import walls_missing
from braidrl.training.acceptance import HALF, check_accepted
from braidrl.training.balance import RouterBalance
from braidrl.training.decoders.body import use_plan
from braidrl.training.decoders.proof import proven_plan
from braidrl.training.decoders.routing import experts_in, use_routing
from braidrl.training.lora import import_optional
from braidrl.training.memory.footprint import model_shape, on_meta
from braidrl.training.names import BACKENDS, supported
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.pretrained import read_model_config
from braidrl.training.role_settings import RoleSettings, inference_layouts, settings_of, sharing_base


def without_effect(config: Config) -> list[str]:
    """Return a line for each setting that the run ignores, or that has no effect; the run continues."""
    mode, trainer, launcher = MODES[config.runtime], config.trainer, config.cluster.launcher
    settings = {
        "workers": (f"workers={config.workers}", config.workers != 1),
        "streaming": ("streaming.*", config.streaming != StreamingConfig()),
        "placement": ("placement", config.placement != PlacementConfig()),
        "trainer.resident_gib": ("trainer.resident_gib", trainer.resident_gib is not None),
        "cluster.launcher": (f"cluster.launcher={launcher}", launcher is not None),
    }
    ignored = [shown for key, (shown, is_given) in settings.items() if is_given and key not in mode.reads]
    lines = [f"{shown} has no effect under runtime={mode.name}" for shown in ignored]
    for key, sandbox, name in user_code(config):
        if sandbox.sandbox != "none" and (reason := walls_missing(sandbox.sandbox == "bubblewrap")):
            lines.append(
                f"{key}.sandbox={sandbox.sandbox} holds limits, environment and results of {name}, but there are no "
                f"walls here ({reason}): its code could signal or read this run's processes and write its files"
            )
    if trainer.max_staleness and not mode.concurrent and trainer.surplus != "keep":
        lines.append(
            f"trainer.max_staleness={trainer.max_staleness} makes no row stale: only runtime=streaming and "
            "trainer.surplus=keep do; all that it changes here is that old log-probs are recomputed and corrected"
        )
    if config.evaluation.best and not (config.evaluation.every and config.data.evaluation_sources):
        lines.append(
            "evaluation.best keeps no checkpoint, since nothing is evaluated; name a set by data.eval, and set "
            "evaluation.every"
        )
    if config.flow == "distillation" and settings_of("reference", config).model == config.model:
        lines.append("the teacher is the model itself, from which it learns nothing; write roles.reference.model")
    return lines


def check_roles(config: Config, roles: Iterable[str], flow: str) -> None:
    """Raise UserError for settings of a role whose model no stage uses."""
    roles_of_flow = list(roles)
    for role in config.roles:
        if role not in roles_of_flow:
            raise UserError(f"roles.{role}: flow {flow} has no model of this role. {suggest(role, roles_of_flow)}")


def check_dtypes(config: Config, flow: Flow) -> None:
    """Raise UserError for a data type that the device, the model or a moving average of weights does not support."""
    for stage in flow.stages:
        decay = stage.params.get("decay", 0.0) if stage.kind is Kind.TRAIN else 0.0
        if not 0 <= decay < 1:
            raise UserError(f"{stage.name}: decay is a share of the old weights from 0 to below 1, got {decay:g}")
        if decay > 0.5 and settings_of(str(stage.role), config).dtype == torch.bfloat16:
            # A move of less than half the distance to the next number is rounded to zero at every step.
            raise UserError(
                f"{stage.name}: decay={decay:g} moves weights by less than bfloat16 can represent; write "
                f"roles.{stage.role}.dtype=float32"
            )
    on_cuda = choose_device(config.device).type == "cuda"
    for role in flow.roles:
        role_config = settings_of(role, config)
        if on_cuda and role_config.dtype == torch.bfloat16 and not has_bfloat16():
            key = role_config.key("dtype")
            raise UserError(f"{key}=bfloat16: {torch.cuda.get_device_name()} does not have it; write {key}=float32")
        path, half = role_config.model, role_config.dtype == torch.bfloat16
        if half and role_config.backend == "torch" and path.expanduser().is_dir():
            model_config = read_model_config(path)
            check_accepted(model_config, proven_plan(model_config, path), path, HALF, "dtype: write float32")


def check_token_columns(config: Config, flow: Flow) -> None:
    """Raise UserError for a column per token that the engine does not return."""
    rollout, dialect = config.rollout, DIALECTS.get(config.rollout.servers.dialect)
    for column in [column_of(name) for stage in flow.stages for name in columns_of(stage)]:
        if column.name == ROUTED_EXPERTS:
            setting, remedy = "replay=inference", "or replay=training"
        else:
            setting, remedy = f"a stage reads the column {column.name}", "or rollout.engine=vllm"
        if rollout.engine == "http" and dialect is not None and dialect.column(column) is None:
            raise UserError(
                f"{setting}: servers of rollout.servers.dialect={rollout.servers.dialect} do not return "
                f"{column.name}; write rollout.servers.dialect=vllm, {remedy}"
            )
        if rollout.engine in ("http", "vllm") and not rollout.is_reproducible:
            raise UserError(f"{setting}: vLLM returns {column.name} where Braid draws; write rollout.reproducible=true")
    if any(ROUTED_EXPERTS in stage.reads for stage in flow.stages):
        check_replay(config, flow)


def check_replay(config: Config, flow: Flow) -> None:
    """Raise UserError for a run that cannot record or replay the routes of a mixture of experts: those of the engine or
    of recomputed log-probs.
    """
    rollout = config.rollout
    if rollout.pipeline > 1 and any(ROUTED_EXPERTS in columns_of(stage) for stage in flow.stages):
        raise UserError(
            "replay=inference: only an engine that holds all layers records routes; write rollout.pipeline=1, or "
            "replay=training"
        )
    for role in {str(stage.role) for stage in flow.stages if ROUTED_EXPERTS in stage.reads}:
        role_config = settings_of(role, config)
        if not experts_in(read_model_config(role_config.model.expanduser())):
            raise UserError(f"replay: the model of {role} has no experts; remove `replay`")
        if role_config.backend != "torch":
            raise UserError(f"replay: the backend {role_config.backend} of {role} replays no routes; write replay=none")
        use_routing(without_weights(role_config))


def check_balance(config: Config, flow: Flow) -> None:
    """Raise UserError if `trainer.balance` applies to a role without routers that it can balance."""
    if config.trainer.balance is None:
        return
    if config.trainer.balance.routing_gap and all(stage.params.get("replay") != "inference" for stage in flow.stages):
        raise UserError(
            "trainer.balance.routing_gap compares log-probs with and without the engine's routes, and no stage "
            "replays these; write algorithm.replay=inference and algorithm.old=recompute, or remove routing_gap"
        )
    for role in sorted(set(flow.trained_roles) - set(flow.scalar_roles)):
        role_config = settings_of(role, config)
        if not experts_in(read_model_config(role_config.model.expanduser())):
            raise UserError(f"trainer.balance: the model of {role} has no experts; remove trainer.balance")
        if role_config.lora is not None:
            raise UserError(
                f"trainer.balance: adapters of {role} leave its routers as they are; remove trainer.balance"
            )
        if role_config.backend == "torch":
            RouterBalance(without_weights(role_config), config.trainer.balance, DataParallel())


def without_weights(role_config: RoleSettings) -> PreTrainedModel:
    """Return a role's model on the meta device, prepared for its forward plan."""
    path = role_config.model.expanduser()
    model_config = read_model_config(path)
    model = on_meta(model_config, role_config.dtype)
    use_plan(model, proven_plan(model_config, path))
    return model


def check_backends(config: Config, flow: Flow) -> None:
    """Raise UserError for an unknown training backend, and for features that it does not support."""
    for role in flow.roles:
        role_config = settings_of(role, config)
        BACKENDS.check(role_config.backend)
        features, layout = supported(role_config.backend), role_config.layout
        follows = [s.name for s in flow.stages if "source" in s.params and role in (s.role, s.params["source"])]
        copied, at = role in inference_layouts(config, flow), role_config.key("layout")
        used = [
            *(
                (axis, f"{at}.{axis}", getattr(layout, axis) > 1)
                for axis in ("tensor", "pipeline", "sequence", "context", "expert")
            ),
            ("shard", f"{at}.shard", layout.shard != "none"),
            ("copies", role_config.key("inference_layout"), copied),
            ("copies", f"stage {', '.join(follows)}", bool(follows)),
            ("lora", "trainer.lora", role_config.lora is not None),
            ("offload", "trainer.resident_gib", config.trainer.resident_gib is not None),
            ("checkpoint_async", "trainer.checkpoint_async", config.trainer.checkpoint_async),
            ("optimizers", "trainer.optimizer", config.trainer.optimizer != "adamw"),
            ("streaming", "runtime=streaming", MODES[config.runtime].concurrent),
        ]
        if key := next((key for feature, key, is_set in used if is_set and feature not in features), None):
            raise UserError(
                f"{key} is not supported by the backend {role_config.backend} of {role}; remove it, or write "
                "trainer.backend=torch"
            )


def check_adapters(config: Config, flow: Flow) -> None:
    """Raise UserError for adapters of a role that is not trained, or whose model does not support them."""
    adapted = dict.fromkeys((*flow.trained_roles, *sharing_base(config, flow.stages)))
    for role, role_config in config.roles.items():
        if role_config.lora and role not in adapted:
            raise UserError(f"roles.{role}.lora: flow {flow.name} does not train {role}; remove it")
    for role in adapted:
        resolved = settings_of(role, config)
        at = resolved.key("layout")
        if lora := resolved.lora:
            model_shape(resolved.model, torch.float32, role in flow.scalar_roles, lora)
            if lora.base_dtype:
                key = f"{resolved.key('lora')}.base_dtype={lora.base_dtype}"
                import_optional("bitsandbytes", key, "bits")
                if resolved.dtype == torch.float64:
                    raise UserError(f"{key}: float64 weights are not kept in 4 bits; write dtype=bfloat16 or float32")
                if not resolved.layout.is_replicated:
                    raise UserError(
                        f"{key}: ranks cannot divide 4-bit weights, and {at} divides {role}; remove one of them"
                    )
        if config.trainer.optimizer == "adamw8bit" and not resolved.layout.is_replicated:
            raise UserError(
                f"trainer.optimizer=adamw8bit keeps moments that ranks cannot divide, and {at} divides {role}; write "
                "trainer.optimizer=adamw, or remove the layout"
            )
