"""What a run's parts must have of each other, checked before any model loads."""

from __future__ import annotations

import importlib.util
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from braidrl.config import Config, SourceConfig
from braidrl.data.prompts import LoadedSource
from braidrl.data.sources import place
from braidrl.errors import UserError, suggest
from braidrl.flow import Flow, Kind, Stage
from braidrl.models.memory.footprint import model_shape
from braidrl.models.parallel.decoding import check_heads
from braidrl.models.parallel.layout import ParallelLayout
from braidrl.models.role_settings import (
    inference_layout_key,
    inference_layouts,
    layout_key,
    layout_of,
    lora_of,
    model_path,
)
from braidrl.placement.pools import NAMES as PLACEMENTS
from braidrl.rewards.verifier import Verifier, resolve
from braidrl.rollout.http.dialects import DIALECTS
from braidrl.runtimes.generating.engines import pools_ranks

ENGINES = ("embedded", "vllm", "http")
LAID_OUT = ("distributed", "hybrid")
"""Runtimes whose processes of a role can divide its model."""


def check_names(config: Config) -> None:
    """Raises UserError for a rollout engine or a placement that there is not, whatever the runtime."""
    engine, placement = config.rollout.engine, config.placement.name
    if engine not in ENGINES:
        raise UserError(f"rollout.engine: no engine is called {engine!r}. {suggest(engine, ENGINES)}")
    check_servers(config)
    if engine == "vllm" and config.rollout.engines == 0:
        raise UserError(f"rollout.engine={engine} generates in processes of its own; write rollout.engines=1")
    if placement not in PLACEMENTS:
        raise UserError(f"no placement is called {placement!r}. {suggest(placement, PLACEMENTS)}")


def check_divided_engines(config: Config, stages: Sequence[Stage]) -> None:
    """Raises UserError for engines of several processes that cannot be so, with the stages of a run."""
    generating = {str(stage.role): stage for stage in stages if stage.kind is Kind.GENERATE}
    ranks, rollout = config.rollout.tensor, config.rollout
    if ranks == 1:
        return
    if rollout.engine != "embedded":
        raise UserError(f"rollout.tensor={ranks} divides the embedded engine, and rollout.engine is {rollout.engine}")
    if not rollout.engines:
        environments = any("environment" in stage.params for stage in stages)
        check_pooled_engines(config, generating, environments)
    for role in generating:
        check_heads(model_settings(model_path(role, config)), ranks)


def check_pooled_engines(config: Config, generating: Iterable[str], environments: bool) -> None:
    """Raises UserError where ranks that train cannot decode together."""
    key = f"rollout.tensor={config.rollout.tensor}"
    if config.runtime not in LAID_OUT:
        raise UserError(
            f"{key} divides engines in processes of their own, or among the ranks of runtime=distributed or hybrid; "
            "write rollout.engines=1"
        )
    if environments:
        raise UserError(
            f"{key}: ranks that decode together take no turns in an environment, which answers when it likes; "
            "write rollout.engines=1"
        )
    for role in generating:
        own = config.roles.get(role)
        if own and own.generate_workers is not None:
            raise UserError(f"roles.{role}.generate_workers: with {key} all ranks decode together; remove it")


def check_generating_ranks(config: Config, devices: int) -> None:
    """Raises UserError where ranks that decode together do not divide those that generate."""
    if pools_ranks(config) and devices % config.rollout.tensor:
        raise UserError(
            f"rollout.tensor={config.rollout.tensor}: {devices} ranks generate, which it does not divide; "
            f"write a number that divides {devices}"
        )


def check_servers(config: Config) -> None:
    """Raises UserError for servers that are named and not asked, or the other way round."""
    engine, servers = config.rollout.engine, config.rollout.servers
    if servers.dialect not in DIALECTS:
        raise UserError(
            f"rollout.servers.dialect: there is none called {servers.dialect!r}. {suggest(servers.dialect, DIALECTS)}"
        )
    if engine != "http":
        if servers.urls:
            raise UserError(f"rollout.servers are asked with rollout.engine=http, and rollout.engine is {engine}")
        return
    if not servers.urls:
        raise UserError("rollout.engine=http asks servers; name them, as in rollout.servers=http://127.0.0.1:8000")
    if config.rollout.engines is not None:
        raise UserError(
            "rollout.engines are processes that Braid starts, and rollout.engine=http asks servers; remove it"
        )
    if servers.folder is not None and not servers.folder.is_dir():
        raise UserError(f"rollout.servers.folder: there is no folder {servers.folder}")
    if servers.weights == "network" and DIALECTS[servers.dialect].network is None:
        raise UserError(
            f"rollout.servers.weights=network: servers of {servers.dialect} read weights from a folder; remove it"
        )
    if importlib.util.find_spec("aiohttp") is None:
        raise UserError("rollout.engine=http needs aiohttp; install it with `pip install 'braidrl[endpoint]'`")


def without_effect(config: Config) -> list[str]:
    """A line for each setting of processes that this runtime does not look at; a run goes on without it."""
    lines = []
    if config.workers != 1 and config.runtime == "eager":
        lines.append(f"workers={config.workers} has no effect: runtime=eager is this one process")
    if config.workers != 1 and config.runtime == "streaming":
        lines.append(
            f"workers={config.workers} has no effect: the processes of runtime=streaming are streaming.workers"
        )
    if config.trainer.resident_gib is not None and config.runtime == "streaming":
        lines.append("trainer.resident_gib has no effect: each role has processes of its own under runtime=streaming")
    if config.cluster.launcher is not None and config.runtime in ("eager", "hybrid"):
        lines.append(
            f"cluster.launcher={config.cluster.launcher} has no effect: only runtime=distributed has ranks to start, "
            "and runtime=streaming workers"
        )
    trainer = config.trainer
    if trainer.max_staleness and not rows_may_be_stale(config):
        lines.append(
            f"trainer.max_staleness={trainer.max_staleness} makes no row stale: only runtime=streaming and trainer.surplus=keep do; "
            "all that it changes here is that old log-probs are recomputed and corrected"
        )
    return lines


def rows_may_be_stale(config: Config) -> bool:
    """Return True where rows may be trained by later weights than those that generated them."""
    return config.trainer.max_staleness > 0 and (config.runtime == "streaming" or config.trainer.surplus == "keep")


def check_roles(config: Config, roles: Iterable[str], flow: str) -> None:
    """Raises UserError for settings of a role that no stage uses a model of."""
    known = list(roles)
    for role in config.roles:
        if role not in known:
            raise UserError(f"roles.{role}: flow {flow} has no model of this role. {suggest(role, known)}")
        if config.roles[role].generate_workers is not None and config.runtime != "distributed":
            raise UserError(
                f"roles.{role}.generate_workers is for runtime=distributed; remove it, or place roles by `placement`"
            )


def check_layouts(config: Config, flow: Flow, roles: Iterable[str], devices: int | None = None) -> None:
    """Raises UserError for a layout that the runtime or the number of devices does not allow, or that does not divide a role's model."""
    check_inference_layouts(config, flow)
    inferring = inference_layouts(config, flow)
    pairs = [(role, layout_of(role, config), layout_key(role, config)) for role in roles]
    pairs += [(r, inferring[r], inference_layout_key(r, config)) for r in roles if r in inferring]
    for role, layout, key in pairs:
        if layout != ParallelLayout() and config.runtime not in LAID_OUT:
            raise UserError(
                f"{key} is for runtime=distributed or hybrid; remove it, or write runtime=distributed and workers=..."
            )
        if layout.sequence > 1 and config.trainer.share_prompts:
            raise UserError(f"{key}: sequence divides rows apart; write sequence=1, or trainer.share_prompts=false")
        if devices is not None:
            layout.over(devices, key)
        settings = model_settings(model_path(role, config))
        heads = settings.get("num_attention_heads", 1)
        layout.check_model(heads, settings.get("num_key_value_heads", heads), settings.get("num_hidden_layers", 1), key)


def check_inference_layouts(config: Config, flow: Flow) -> None:
    """Raises UserError for a layout to infer in that no role would use."""
    infer = {stage.role for stage in flow.stages if stage.kind is Kind.INFER}
    for role, own in config.roles.items():
        if own.inference_layout and role not in flow.trained_roles:
            raise UserError(
                f"roles.{role}.inference_layout: flow {flow.name} does not train {role}; write roles.{role}.layout"
            )
        if own.inference_layout and role not in infer:
            raise UserError(f"roles.{role}.inference_layout: no stage of {flow.name} infers with {role}; remove it")
    if config.trainer.inference_layout and not infer & set(flow.trained_roles):
        raise UserError(
            f"trainer.inference_layout: no stage of {flow.name} infers with a role that it trains; remove it"
        )


def check_adapters(config: Config, flow: Flow) -> None:
    """Raises UserError for adapters of a role that is not trained, or that its model does not allow."""
    for role, own in config.roles.items():
        if own.lora and role not in flow.trained_roles:
            raise UserError(f"roles.{role}.lora: flow {flow.name} does not train {role}; remove it")
    for role in flow.trained_roles:
        if lora := lora_of(role, config):
            model_shape(model_path(role, config), torch.float32, role in flow.scalar_roles, lora)


def check_answers(config: Config, sources: Sequence[LoadedSource], settings: Sequence[SourceConfig]) -> None:
    """Raises UserError, with its line, for the first example without the answer that a verifier compares with."""
    for source, own in zip(sources, settings, strict=True):
        verifiers = [resolve(v.name, v.params) for v in (config.reward.verify if own.verify is None else own.verify)]
        needy = next((verifier for verifier in verifiers if needs_answer(verifier)), None)
        missing = next((example for example in source.examples if example.answer is None), None)
        if needy is not None and missing is not None:
            hint = suggest(own.answer_field, missing.metadata) if missing.metadata else "There is no other field."
            raise UserError(
                f"{place(source.path, missing.line)}: no field {own.answer_field!r} for the answer, which the verifier "
                f"{needy.label!r} compares with. {hint} Set answer_field of this source."
            )


def needs_answer(verifier: Verifier) -> bool:
    """True where the verifier asks for the answer and has no default for it."""
    if "answer" not in verifier.reads:
        return False
    return inspect.signature(verifier.function).parameters["answer"].default is inspect.Parameter.empty


def check_lengths(config: Config, flow: Flow, train: Sequence[LoadedSource], held_out: Sequence[LoadedSource]) -> None:
    """Raises UserError for prompts that leave no room for a response in a micro-batch, or in the model."""
    generates = any(stage.kind is Kind.GENERATE for stage in flow.stages)
    responses = config.rollout.max_response_tokens
    trained = longest(train, responses if generates else 0)
    if any("environment" in stage.params for stage in flow.stages):
        # where none is set, generation ends a sequence at the model's own limit
        trained = max(trained, config.rollout.max_sequence_tokens or 0)
    limits = {"trainer": config.trainer.max_tokens_per_device}
    limits |= {f"roles.{r}": own.max_tokens_per_device or trained for r, own in config.roles.items()}
    for section, limit in limits.items():
        if trained > limit:
            key = f"{section}.max_tokens_per_device"
            raise UserError(
                f"rows of data.train may have {trained} tokens, prompt and response together, and {key}={limit} is the most that one "
                f"micro-batch holds; write {key}={trained}, or lower data.max_prompt_tokens or rollout.max_response_tokens"
            )
    positions = max_positions(config.model)
    needed = max(trained, longest(held_out, responses))
    if positions is not None and needed > positions:
        raise UserError(
            f"rows may have {needed} tokens, prompt and response together, and {config.model} has max_position_embeddings "
            f"{positions}; lower data.max_prompt_tokens or rollout.max_response_tokens"
        )


def longest(sources: Sequence[LoadedSource], added: int) -> int:
    """Tokens of the longest row of prompt and given response, or where none is given of prompt and `added` sampled tokens."""
    found = 0
    for source in sources:
        # A rank that leaves the filter to another has not tokenised its prompts.
        if source.prompts is not None:
            lengths = source.prompts.lengths
            given = [known.lengths for known in (source.responses, source.rejected) if known is not None]
            found = max(found, *(int((lengths + response).max()) for response in given or [torch.tensor(added)]))
    return found


def max_positions(model: Path) -> int | None:
    """How long a sequence the model was made for, where its configuration says so."""
    found: int | None = model_settings(model).get("max_position_embeddings")
    return found


def model_settings(model: Path) -> Mapping[str, Any]:
    """What a model's directory says of its sizes."""
    path = model.expanduser() / "config.json"
    found: Mapping[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found
