"""Consistency checks between the parts of a run, before any model loads."""

import importlib.util
from collections.abc import Iterable

import torch

from braidrl.cluster.devices import choose_device, has_bfloat16
from braidrl.cluster.pools import NAMES as PLACEMENTS
from braidrl.config import Config, PlacementConfig, StreamingConfig
from braidrl.config.section import SandboxConfig
from braidrl.data.token_columns import ROUTED_EXPERTS, column_of
from braidrl.engines.deployment import MODES
from braidrl.engines.engine import ENGINES
from braidrl.engines.factory import training_sampling
from braidrl.engines.http.dialects import DIALECTS, vllm_log_prob_modes
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind
from braidrl.observe.trackers import TRACKERS
from braidrl.rewards.pool import check_requirements
from braidrl.rewards.verifier import resolve
from braidrl.rewards.verifiers import VERIFIERS
from braidrl.sandbox.hosts import check_walls
from braidrl.sandbox.walls import walls_missing
from braidrl.training.acceptance import HALF, check_accepted
from braidrl.training.backends import BACKENDS, supported
from braidrl.training.decoders.proof import proven_plan
from braidrl.training.decoders.routing import experts_in
from braidrl.training.loading import read_model_config
from braidrl.training.lora import import_optional
from braidrl.training.memory.footprint import model_shape
from braidrl.training.optimizer import check_optimizer
from braidrl.training.role_settings import inference_layouts, settings_of

EARLY_DRAWS = {
    "speculative_config": "draws several tokens at once, and rollout.reproducible=true draws each by its own number",
    "async_scheduling=true": (
        "draws a token before the one before it is known, and rollout.reproducible=true counts them"
    ),
}
"""Settings of vLLM that `rollout.reproducible` does not allow, with the reason."""


def check_names(config: Config) -> None:
    """Raise UserError for a configured name that does not exist, under any runtime."""
    engine, placement = config.rollout.engine, config.placement.name
    check_engine(config)
    for key, sandbox, _ in own_code(config):
        check_walls(key, sandbox)
    if placement not in PLACEMENTS:
        raise UserError(f"no placement is called {placement!r}. {suggest(placement, PLACEMENTS)}")
    if config.rollout.engine_settings and engine in ENGINES:
        raise UserError(f"rollout.engine_settings are for your own engine, and rollout.engine is {engine}; remove them")
    check_optimizer(config.trainer)
    sources = [*config.data.training_sources, *config.data.evaluation_sources.values()]
    for verifier in [*config.reward.verify, *(named for source in sources for named in source.verify or ())]:
        check_requirements(verifier.name, verifier.params, config.reward)
        resolve(verifier.name, verifier.params)
    for tracker in config.trackers:
        TRACKERS.check_settings(tracker.name, tracker.params)
        TRACKERS.check(tracker.name, settings=tracker.params)
        # A built-in tracker has the name of its package.
        if tracker.name in TRACKERS and importlib.util.find_spec(tracker.name) is None:
            raise UserError(f"trackers={tracker.name} is not installed; write pip install 'braidrl[{tracker.name}]'")


def check_engine(config: Config) -> None:
    """Raise UserError for an unknown engine, and for server or sampling settings that contradict other settings."""
    rollout = config.rollout
    engine, servers = rollout.engine, rollout.servers
    # Another interpreter may have packages that this one lacks.
    ENGINES.check(engine, load=rollout.python is None)
    if servers.dialect not in DIALECTS:
        raise UserError(
            f"rollout.servers.dialect: there is none called {servers.dialect!r}. {suggest(servers.dialect, DIALECTS)}"
        )
    if engine != "http" and servers.urls:
        raise UserError(f"rollout.servers are asked with rollout.engine=http, and rollout.engine is {engine}")
    if engine == "http":
        if not servers.urls:
            raise UserError("rollout.engine=http asks servers; name them, as in rollout.servers=http://127.0.0.1:8000")
        if rollout.engines is not None:
            raise UserError("rollout.engines are processes, and rollout.engine=http asks servers; remove it")
        if servers.folder is not None and not servers.folder.is_dir():
            raise UserError(f"rollout.servers.folder: there is no folder {servers.folder}")
        if servers.weights == "network" and DIALECTS[servers.dialect].receive is None:
            raise UserError(f"rollout.servers.weights=network: {servers.dialect} reads a folder; remove it")
        if importlib.util.find_spec("aiohttp") is None:
            raise UserError("rollout.engine=http needs aiohttp; install it with `pip install 'braidrl[endpoint]'`")
    if engine != "vllm" and (engine != "http" or servers.dialect != "vllm"):
        return
    for setting, reason in EARLY_DRAWS.items() if rollout.is_reproducible else ():
        if rollout.vllm.get(setting.partition("=")[0]):
            raise UserError(f"rollout.vllm.{setting} {reason}; remove one of the two")
    if not rollout.is_reproducible and not vllm_log_prob_modes(training_sampling(config)):
        raise UserError(
            f"rollout.reproducible=false: vLLM gives log-probs of temperature {rollout.temperature:g} of the tokens "
            "alone that top_p and "
            "top_k keep; write rollout.temperature=1, remove top_p and top_k, or write rollout.reproducible=true"
        )


def own_code(config: Config) -> list[tuple[str, SandboxConfig, str]]:
    """Return the sandboxes of user code: the section's name, the section, and a description of the code."""
    environment = config.rollout.environment
    verifiers = [verifier.name for verifier in config.reward.verify if verifier.name not in VERIFIERS]
    sections: list[tuple[str, SandboxConfig, str]] = [("reward", config.reward, name) for name in verifiers[:1]]
    return [*sections, *([("rollout.environment", environment, environment.name)] if environment.name else [])]


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
    for key, sandbox, name in own_code(config):
        if sandbox.sandbox != "none" and (reason := walls_missing(sandbox.sandbox == "bubblewrap")):
            lines.append(
                f"{key}.sandbox={sandbox.sandbox} holds limits, environment and results of {name}, but there are no "
                f"walls here ({reason}): "
                "its code could signal or read this run's processes and write its files"
            )
    if trainer.max_staleness and not mode.concurrent and trainer.surplus != "keep":
        lines.append(
            f"trainer.max_staleness={trainer.max_staleness} makes no row stale: only runtime=streaming and "
            "trainer.surplus=keep do; "
            "all that it changes here is that old log-probs are recomputed and corrected"
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
    """Raise UserError for a column per token that the engine cannot compute."""
    rollout = config.rollout
    names = [name for stage in flow.stages for name in stage.params.get("columns", ())]
    computed = [column.name for column in map(column_of, names) if column.function is not None]
    if any(ROUTED_EXPERTS in stage.reads for stage in flow.stages):
        check_replay(config, flow, ROUTED_EXPERTS in names)
    if computed and rollout.engine == "http":
        raise UserError(
            f"servers do not return the column {computed[0]}, which a stage reads; write rollout.engine=vllm"
        )
    if computed and rollout.engine == "vllm" and not rollout.is_reproducible:
        raise UserError(
            f"a stage reads the column {computed[0]}, computed where Braid draws; write rollout.reproducible=true"
        )


def check_replay(config: Config, flow: Flow, of_engine: bool) -> None:
    """Raise UserError for a run that cannot record or replay the routes of a mixture of experts: those of the engine or
    of recomputed log-probs.
    """
    if of_engine and (config.rollout.engine != "embedded" or config.rollout.pipeline > 1):
        raise UserError(
            "replay=inference: only a whole embedded engine records routes; write rollout.engine=embedded, or "
            "replay=training"
        )
    for role in {str(stage.role) for stage in flow.stages if ROUTED_EXPERTS in stage.reads}:
        role_config = settings_of(role, config)
        if not experts_in(read_model_config(role_config.model.expanduser())):
            raise UserError(f"replay: the model of {role} has no experts; remove `replay`")
        if role_config.backend != "torch":
            raise UserError(f"replay: the backend {role_config.backend} of {role} replays no routes; write replay=none")


def check_balance(config: Config, flow: Flow) -> None:
    """Raise UserError if `trainer.balance` applies to a role without routers that it can balance."""
    if config.trainer.balance is None:
        return
    for role in sorted(set(flow.trained_roles) - set(flow.scalar_roles)):
        role_config = settings_of(role, config)
        if not experts_in(read_model_config(role_config.model.expanduser())):
            raise UserError(f"trainer.balance: the model of {role} has no experts; remove trainer.balance")
        if role_config.lora is not None:
            raise UserError(
                f"trainer.balance: adapters of {role} leave its routers as they are; remove trainer.balance"
            )


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
    for role, role_config in config.roles.items():
        if role_config.lora and role not in flow.trained_roles:
            raise UserError(f"roles.{role}.lora: flow {flow.name} does not train {role}; remove it")
    for role in flow.trained_roles:
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
