"""Consistency checks between the parts of a run, before any model loads."""

import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from braidrl.cluster.devices import choose_device, has_bfloat16
from braidrl.cluster.pools import GENERATE, Pool
from braidrl.cluster.pools import NAMES as PLACEMENTS
from braidrl.config import Config, PlacementConfig, StreamingConfig
from braidrl.config.layout import ParallelLayout
from braidrl.config.section import SandboxConfig
from braidrl.engines.embedded.sharded_decoding import check_heads
from braidrl.engines.engine import ENGINES
from braidrl.engines.factory import engine_processes, generation_layout, hosts_vllm, pools_ranks, training_sampling
from braidrl.engines.http.dialects import DIALECTS, vllm_log_prob_modes
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind, Stage
from braidrl.observe.trackers import TRACKERS
from braidrl.rewards.pool import check_requirements
from braidrl.rewards.verifier import resolve
from braidrl.rewards.verifiers import VERIFIERS
from braidrl.sandbox.hosts import check_walls
from braidrl.sandbox.walls import walls_missing
from braidrl.training.acceptance import AXES, FILES, HALF, check_accepted
from braidrl.training.backends import BACKENDS, supported
from braidrl.training.decoders.proof import proven_plan
from braidrl.training.loading import read_model_config, read_object
from braidrl.training.lora import import_optional
from braidrl.training.memory.footprint import model_shape
from braidrl.training.optimizer import check_optimizer
from braidrl.training.role_settings import inference_layouts, settings_of
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.publisher import TRANSPORTS

POOLED = ("distributed", "hybrid")
"""Runtimes whose training processes of a role may generate together."""
LAID_OUT = (*POOLED, "streaming")
"""Runtimes that can shard a role's model over processes."""
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
    if engine == "vllm" and config.rollout.engines == 0 and config.runtime == "streaming":
        raise UserError("rollout.engines=0: under streaming vLLM has its own processes; write rollout.engines=1")
    if placement not in PLACEMENTS:
        raise UserError(f"no placement is called {placement!r}. {suggest(placement, PLACEMENTS)}")
    if config.rollout.engine_settings and engine in ENGINES:
        raise UserError(f"rollout.engine_settings are for your own engine, and rollout.engine is {engine}; remove them")
    check_optimizer(config.trainer)
    sources = [*config.data.training_sources, *config.data.evaluation_sources.values()]
    for verifier in [*config.reward.verify, *(one for source in sources for one in source.verify or ())]:
        check_requirements(verifier.name, verifier.params, config.reward)
        resolve(verifier.name, verifier.params)
    for tracker in config.trackers:
        TRACKERS.check_settings(tracker.name, tracker.params)
        TRACKERS.check(tracker.name, settings=tracker.params)
        # A built-in tracker has the name of its package.
        if tracker.name in TRACKERS and importlib.util.find_spec(tracker.name) is None:
            raise UserError(f"trackers={tracker.name} is not installed; write pip install 'braidrl[{tracker.name}]'")


def check_divided_engines(config: Config, stages: Sequence[Stage]) -> None:
    """Raise UserError if engines of several processes are not supported with the stages of a run."""
    generating = {str(stage.role): stage for stage in stages if stage.kind is Kind.GENERATE}
    layout, rollout = generation_layout(config), config.rollout
    check_spanning_engines(config)
    if hosts_vllm(config):
        check_hosted_vllm(config, generating, any("environment" in stage.params for stage in stages))
        return
    if layout == GenerationLayout():
        return
    environments = any("environment" in stage.params for stage in stages)
    keys = {"tensor": layout.tensor, "pipeline": layout.pipeline, "grouping": layout.grouping}
    key = next(f"rollout.{name}={value}" for name, value in keys.items() if value not in (1, None))
    if rollout.engine in ("vllm", "http"):
        if rollout.grouping:
            raise UserError(
                f"rollout.grouping is for ranks that train and generate, and rollout.engine={rollout.engine} has its "
                "own processes; "
                "remove it, or write rollout.engines=0 for vLLM on these ranks"
            )
        check_attention_heads(config, key, generating)
        return
    if rollout.engine != "embedded":
        raise UserError(f"{key} shards the embedded engine, vLLM and servers, and rollout.engine is {rollout.engine}")
    if engine_processes(config) or config.runtime not in POOLED:
        raise UserError(
            f"{key} shards the embedded engine over ranks that train and generate; write runtime=distributed or "
            "hybrid without "
            "rollout.engines, or rollout.engine=vllm"
        )
    check_pooled_engines(config, key, generating, environments)
    for role in generating:
        settings = model_settings(settings_of(role, config).model)
        check_heads(settings, layout.tensor)
        check_plan(settings_of(role, config).model, ParallelLayout(tensor=layout.tensor, pipeline=layout.pipeline), key)
        if (layers := settings.get("num_hidden_layers", layout.pipeline)) % layout.pipeline:
            raise UserError(
                f"rollout.pipeline={layout.pipeline} does not divide the model's {layers} layers; write a divisor of "
                f"{layers}"
            )


def check_spanning_engines(config: Config) -> None:
    """Raise UserError if engines cannot span as many nodes as configured."""
    rollout, nodes, ranks = config.rollout, config.rollout.nodes or 1, generation_layout(config).ranks
    if nodes == 1:
        return
    if rollout.engine != "vllm" or config.runtime != "streaming":
        raise UserError(
            f"rollout.nodes={nodes} is for engines of vLLM under runtime=streaming, and this is "
            f"rollout.engine={rollout.engine} under "
            f"runtime={config.runtime}; remove it"
        )
    if ranks % nodes:
        raise UserError(f"rollout.nodes={nodes} does not divide an engine's {ranks} ranks; write a divisor of {ranks}")
    if rollout.weights == "file":
        raise UserError(f"rollout.weights=file stays on one machine, and rollout.nodes={nodes}; write collective")


def check_hosted_vllm(config: Config, generating: Iterable[str], environments: bool) -> None:
    """Raise UserError for what vLLM on the ranks that train does not support."""
    rollout = config.rollout
    if rollout.python is not None:
        raise UserError(
            "rollout.engines=0 runs vLLM in Braid's own interpreter, and rollout.python names another; start `braid` "
            "from the environment "
            "that has vLLM and remove rollout.python, or leave rollout.engines out"
        )
    if config.trainer.resident_gib is not None:
        raise UserError("trainer.resident_gib does not move vLLM on ranks that train (rollout.engines=0); remove it")
    if rollout.vllm.get("enable_sleep_mode") is False:
        raise UserError("rollout.vllm.enable_sleep_mode=false: vLLM on the ranks that train has to sleep; remove it")
    if rollout.pipeline > 1:
        raise UserError(
            f"rollout.pipeline={rollout.pipeline}: vLLM on the ranks that train supports tensor parallelism alone; "
            "write rollout.tensor"
        )
    if len(list(generating)) > 1:
        raise UserError("rollout.engines=0: vLLM on the ranks that train serves one role; leave rollout.engines out")
    key = f"rollout.engine=vllm on {'this process' if config.runtime == 'eager' else 'the ranks that train'}"
    if config.runtime != "eager" or rollout.tensor > 1:
        check_pooled_engines(
            config, key if rollout.tensor == 1 else f"rollout.tensor={rollout.tensor}", generating, environments
        )
    check_attention_heads(config, f"rollout.tensor={rollout.tensor}", generating)


def check_attention_heads(config: Config, key: str, generating: Iterable[str]) -> None:
    """Raise UserError if the ranks of vLLM or a server do not divide the model's heads."""
    rollout = config.rollout
    for role in generating:
        heads = model_settings(settings_of(role, config).model).get("num_attention_heads", rollout.tensor)
        if heads % rollout.tensor:
            raise UserError(f"{key} does not divide the model's {heads} attention heads; write a divisor of {heads}")


def check_weights(config: Config) -> None:
    """Raise UserError for a weight transfer to engine processes if none starts."""
    way, rollout = config.rollout.weights, config.rollout
    starts = rollout.engine != "http" and engine_processes(config)
    if way in (None, "file"):
        return
    TRANSPORTS.check(way)
    if not starts and config.runtime != "streaming":
        raise UserError(
            f"rollout.weights={way} is for engine processes, and none starts; write rollout.engines=1, or remove it"
        )


def check_pooled_engines(config: Config, key: str, generating: Iterable[str], environments: bool) -> None:
    """Raise UserError if training ranks cannot decode together."""
    if config.runtime not in POOLED:
        raise UserError(f"{key} needs engine processes, or runtime=distributed or hybrid; write rollout.engines=1")
    if environments:
        apart = "rollout.engines=1" if config.rollout.engine == "vllm" else "rollout.engine=vllm"
        raise UserError(f"{key}: ranks that decode together cannot run an environment; write {apart}")


def check_engine(config: Config) -> None:
    """Raise UserError for an unknown engine, and for servers or draws that contradict other settings."""
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
    """Return the sandboxes of user code: the section's name, the section itself, and a description of the code."""
    environment = config.rollout.environment
    verifiers = [one.name for one in config.reward.verify if one.name not in VERIFIERS]
    found: list[tuple[str, SandboxConfig, str]] = [("reward", config.reward, name) for name in verifiers[:1]]
    return [*found, *([("rollout.environment", environment, environment.name)] if environment.name else [])]


def without_effect(config: Config) -> list[str]:
    """Return a line for each setting that the run ignores, or that has no effect; the run continues."""
    runtime, trainer, launcher = config.runtime, config.trainer, config.cluster.launcher
    ignored = {
        f"workers={config.workers}": config.workers != 1 and runtime in ("eager", "streaming"),
        "streaming.*": config.streaming != StreamingConfig() and runtime != "streaming",
        "placement": config.placement != PlacementConfig() and runtime != "hybrid",
        "trainer.resident_gib": trainer.resident_gib is not None and runtime == "streaming",
        f"cluster.launcher={launcher}": launcher is not None and runtime in ("eager", "hybrid"),
    }
    lines = [f"{key} has no effect under runtime={runtime}" for key, is_ignored in ignored.items() if is_ignored]
    for key, sandbox, name in own_code(config):
        if sandbox.sandbox != "none" and (reason := walls_missing(sandbox.sandbox == "bubblewrap")):
            lines.append(
                f"{key}.sandbox={sandbox.sandbox} holds limits, environment and results of {name}, but there are no "
                f"walls here ({reason}): "
                "its code could signal or read this run's processes and write its files"
            )
    if trainer.max_staleness and runtime != "streaming" and trainer.surplus != "keep":
        lines.append(
            f"trainer.max_staleness={trainer.max_staleness} makes no row stale: only runtime=streaming and "
            "trainer.surplus=keep do; "
            "all that it changes here is that old log-probs are recomputed and corrected"
        )
    if config.flow == "distillation" and settings_of("reference", config).model == config.model:
        lines.append("the teacher is the model itself, from which it learns nothing; write roles.reference.model")
    return lines


def check_roles(config: Config, roles: Iterable[str], flow: str) -> None:
    """Raise UserError for settings of a role whose model no stage uses."""
    known = list(roles)
    for role in config.roles:
        if role not in known:
            raise UserError(f"roles.{role}: flow {flow} has no model of this role. {suggest(role, known)}")


def check_layouts(config: Config, flow: Flow, roles: Iterable[str], pool: Pool | None = None) -> None:
    """Raise UserError for a layout that the runtime, a role's model, or the ranks of its `pool` do not support."""
    infer = {stage.role for stage in flow.stages if stage.kind is Kind.INFER}
    for role, own in config.roles.items():
        if own.inference_layout and role not in flow.trained_roles:
            raise UserError(
                f"roles.{role}.inference_layout: {flow.name} does not train {role}; write roles.{role}.layout"
            )
        if own.inference_layout and role not in infer:
            raise UserError(f"roles.{role}.inference_layout: no stage of {flow.name} infers with {role}; remove it")
    if config.trainer.inference_layout and not infer & set(flow.trained_roles):
        raise UserError(f"trainer.inference_layout: no stage of {flow.name} infers with a trained role; remove it")
    inferring = inference_layouts(config, flow)
    pairs = [(own.role, own.layout, own.key("layout")) for own in (settings_of(role, config) for role in roles)]
    pairs += [(r, inferring[r], settings_of(r, config).key("inference_layout")) for r in roles if r in inferring]
    for role, layout, key in pairs:
        if layout != ParallelLayout() and config.runtime not in LAID_OUT:
            raise UserError(
                f"{key} is for runtime=distributed, hybrid or streaming; remove it, or write another runtime"
            )
        if layout.token_ranks > 1 and config.trainer.share_prompts:
            axis = "sequence" if layout.sequence > 1 else "context"
            raise UserError(f"{key}: {axis} divides rows apart; write {axis}=1, or trainer.share_prompts=false")
        if pool is not None:
            layout.resolve(pool.workers, key)
        resolved = settings_of(role, config)
        settings = model_settings(resolved.model)
        heads = settings.get("num_attention_heads", 1)
        layout.check_model(heads, settings.get("num_key_value_heads", heads), settings.get("num_hidden_layers", 1), key)
        if resolved.backend == "torch":
            check_plan(resolved.model, layout, key)
    if pool is not None and pools_ranks(config):
        for role in pool.generating:
            chosen = settings_of(role, config)
            layout = chosen.layout if role in pool.models else ParallelLayout()
            generation_layout(config).check(layout.resolve(pool.workers, chosen.key("layout")), pool.workers)


def check_pools(config: Config, flow: Flow, pools: Sequence[Pool]) -> None:
    """Raise UserError for pools of a hybrid run between which weights cannot go, or whose ranks do not fit a layout."""
    for stage in flow.stages:
        source = stage.params.get("source") if stage.kind is Kind.TRAIN else None
        if source is not None and any(stage.role in pool.roles and source not in pool.roles for pool in pools):
            raise UserError(
                f"{stage.name} copies weights within one process; put {stage.role} and {source} into one pool"
            )
    for role in (role for pool in pools for role in pool.generating if role not in pool.models):
        backend = settings_of(role, config).backend
        if "streaming" not in supported(backend):
            raise UserError(
                f"placement: {role} and {role}{GENERATE} are in different pools, and the backend {backend} cannot "
                "send weights to "
                f"another pool; remove {role}{GENERATE}, or write backend=torch"
            )
        if config.rollout.grouping:
            raise UserError(f"rollout.grouping is for ranks that train {role}, which generates elsewhere; remove it")
    for pool in pools:
        check_layouts(config, flow, pool.models, pool)


def check_plan(path: Path, layout: ParallelLayout, key: str) -> None:
    """Raise UserError for axes that cannot shard a model, and for a model whose checkpoints are not proven."""
    if not path.expanduser().is_dir():
        return
    config = read_model_config(path)
    plan = proven_plan(config, path)
    for name in FILES:
        check_accepted(config, plan, path, name, "model")
    axes = [axis for axis in ("tensor", "sequence", "context", "pipeline") if getattr(layout, axis) > 1]
    axes += ["shard"] * (layout.shard != "none")
    if axes and plan.by_rows:
        raise UserError(
            f"{key}: {axes[0]} is not supported for the model in {path}, whose attention mixes tokens in its own "
            "way; write data alone"
        )
    for axis, name in AXES.items():
        if getattr(layout, axis) > 1:
            check_accepted(config, plan, path, name, f"{key}: write {axis}=1")


def check_dtypes(config: Config, flow: Flow) -> None:
    """Raise UserError for a data type that the device, the model or a moving average of weights does not support."""
    for stage in flow.stages:
        decay = stage.params.get("decay", 0.0) if stage.kind is Kind.TRAIN else 0.0
        if not 0 <= decay < 1:
            raise UserError(f"{stage.name}: decay is a share of the old weights from 0 to below 1, got {decay:g}")
        if decay > 0.5 and settings_of(str(stage.role), config).dtype == torch.bfloat16:
            # A move of less than half the distance to the next number is rounded away, at every step anew.
            raise UserError(
                f"{stage.name}: decay={decay:g} moves weights by less than bfloat16 can represent; write "
                f"roles.{stage.role}.dtype=float32"
            )
    on_cuda = choose_device(config.device).type == "cuda"
    for role in flow.roles:
        own = settings_of(role, config)
        if on_cuda and own.dtype == torch.bfloat16 and not has_bfloat16():
            key = own.key("dtype")
            raise UserError(f"{key}=bfloat16: {torch.cuda.get_device_name()} does not have it; write {key}=float32")
        path, half = own.model, own.dtype == torch.bfloat16
        if half and own.backend == "torch" and path.expanduser().is_dir():
            found = read_model_config(path)
            check_accepted(found, proven_plan(found, path), path, HALF, "dtype: write float32")


def check_backends(config: Config, flow: Flow) -> None:
    """Raise UserError for an unknown training backend, and for features that it does not support."""
    for role in flow.roles:
        own = settings_of(role, config)
        BACKENDS.check(own.backend)
        known, layout = supported(own.backend), own.layout
        follows = [s.name for s in flow.stages if "source" in s.params and role in (s.role, s.params["source"])]
        copied, at = role in inference_layouts(config, flow), own.key("layout")
        wanted = [
            *(
                (axis, f"{at}.{axis}", getattr(layout, axis) > 1)
                for axis in ("tensor", "pipeline", "sequence", "context")
            ),
            ("shard", f"{at}.shard", layout.shard != "none"),
            ("copies", own.key("inference_layout"), copied),
            ("copies", f"stage {', '.join(follows)}", bool(follows)),
            ("lora", "trainer.lora", own.lora is not None),
            ("offload", "trainer.resident_gib", config.trainer.resident_gib is not None),
            ("checkpoint_async", "trainer.checkpoint_async", config.trainer.checkpoint_async),
            ("optimizers", "trainer.optimizer", config.trainer.optimizer != "adamw"),
            ("streaming", "runtime=streaming", config.runtime == "streaming"),
        ]
        if key := next((key for feature, key, asked in wanted if asked and feature not in known), None):
            raise UserError(
                f"{key} is not supported by the backend {own.backend} of {role}; remove it, or write "
                "trainer.backend=torch"
            )


def check_adapters(config: Config, flow: Flow) -> None:
    """Raise UserError for adapters of a role that is not trained, or whose model does not support them."""
    for role, own in config.roles.items():
        if own.lora and role not in flow.trained_roles:
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


def model_settings(model: Path) -> Mapping[str, Any]:
    """Return the settings of a model's text part, also by the names that transformers' models share; none without a
    directory.
    """
    path = model.expanduser() / "config.json"
    if not path.is_file():
        return {}
    settings = read_object(path)
    settings |= settings.get("text_config") or {}
    kind = settings.get("model_type")
    shared = CONFIG_MAPPING[kind].attribute_map if kind in CONFIG_MAPPING else {}
    return {**settings, **{name: settings[own] for name, own in shared.items() if own in settings}}
