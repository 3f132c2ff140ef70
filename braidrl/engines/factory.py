"""Makes a role's engines and the publisher of its weights from the configuration, for any training layout.

engine of this process, or of a pool of ranks    in place: its own tensors, or slices copied in rounds, adapters merged
engine processes                                 file in shared memory; collective if they have separate CUDA devices
servers                                          file in a folder, or collective
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from transformers import PreTrainedTokenizerBase

from braidrl.cluster.devices import choose_device, device_count, visible_devices
from braidrl.cluster.process import LOOPBACK, default_threads
from braidrl.cluster.process_groups import address_towards, subgroup
from braidrl.cluster.world import Ranks
from braidrl.config import Config, LoraConfig
from braidrl.config.layout import ParallelLayout
from braidrl.data.chat import end_ids_of
from braidrl.engines.deployment import Deployment
from braidrl.engines.embedded.adapters import PolicyAdapters, share_weights
from braidrl.engines.embedded.embedded_engine import Decoding, DecodingRanks, EmbeddedEngine
from braidrl.engines.embedded.sharded_decoding import join_generation_groups, load_for_decoding
from braidrl.engines.engine import ENGINES, EngineSpec, ServedEngine
from braidrl.engines.engine_process import EngineProcess, engine_images
from braidrl.engines.http.dialects import DIALECTS, ServerNeeds, vllm_log_prob_modes
from braidrl.engines.requests import training_sampling
from braidrl.engines.routing.router import EngineService, RoleEngine
from braidrl.engines.spanning import OneOf
from braidrl.engines.stepping import SteppingEngine
from braidrl.errors import UserError
from braidrl.flow.signatures import columns_of
from braidrl.training.backends import ShardedBackend, TrainingBackend
from braidrl.training.compute.rope_lengths import most_positions
from braidrl.training.decoders.body import PACKED, plan_of_model
from braidrl.training.loading import load_decoder
from braidrl.training.lora import adapter_config, with_adapters
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.pretrained import read_model_config
from braidrl.training.processors import load_vision
from braidrl.training.role_settings import dtype_named, settings_of, slots_of
from braidrl.training.roles.copies import copy_within
from braidrl.training.roles.worker import RoleWorker, torch_worker
from braidrl.weights.collective import CollectivePublisher, WeightOffer
from braidrl.weights.file import FilePublisher, WeightWriter
from braidrl.weights.in_place import InPlacePublisher
from braidrl.weights.model_files import HubNames, model_in, shapes_in_folder
from braidrl.weights.publisher import ModelWeights, OnePolicy, Publisher
from braidrl.weights.shards import Parts, WeightPart
from braidrl.weights.transfer import LayoutCopy

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM can make room."""


def start_engine(
    role: str,
    ranks: DataParallel,
    worker: TrainingBackend | None,
    deployment: Deployment,
    tokenizer: PreTrainedTokenizerBase,
    started: Mapping[str, RoleEngine],
) -> RoleEngine:
    """Start the engine of a role that `worker` trains; None means that other processes train it. All `ranks` that
    generate for the role call this together.

    With engines `started` for other roles, engine processes share one event loop, and policies on a shared base share
    one engine. Raises UserError for a model that the engine cannot use.
    """
    config, engines, spec = deployment.config, deployment.engines, engine_spec(role, deployment)
    rollout, limit_s = config.rollout, config.cluster.wait_limit_s
    beside = next((engine for engine in started.values() if isinstance(engine, EngineService)), None)
    shared = deployment.shared_base if role in deployment.shared_base else ()
    if shared and worker is None and not deployment.mode.concurrent:
        raise UserError(f"rollout.shared_base: {role} generates in another pool than it trains in; remove it")
    if adapters_sent(worker, config):
        every = [lora.rank for policy in shared or (role,) if (lora := settings_of(policy, config).lora) is not None]
        room = min(rank for rank in LORA_RANKS if rank >= max(every))
        adapter_options = {"enable_lora": True, "max_loras": len(every), "max_lora_rank": room}
        spec = replace(spec, options={**adapter_options, **spec.options})
    if engines.home == "servers":
        return reach_servers(role, ranks, deployment, tokenizer, spec.max_sequence_tokens, beside)
    if engines.hosts_vllm or engines.pools_ranks:
        return spmd_engine(spec, role, ranks, worker, deployment, tokenizer)
    if engines.is_separate:
        if (running := next((started[policy] for policy in shared if policy in started), None)) is not None:
            return running
        return EngineService(engines_of(role, ranks, spec, deployment), limit_s, beside=beside)
    if rollout.engine != "embedded":
        # A user's engine in this process.
        users_engine: SteppingEngine | ServedEngine = ENGINES.make(spec.kind, spec)
        return (
            users_engine
            if isinstance(users_engine, SteppingEngine)
            else EngineService([users_engine], limit_s, beside=beside)
        )
    if shared:
        trainer = None if worker is None else torch_worker(worker)
        return shared_engine(role, trainer, deployment, spec, tokenizer, started)
    # Decode with the trainer's module if each rank has all weights, in this dtype and with adapters merged; otherwise
    # with a frozen copy, refreshed at each publication.
    model, dtype = worker.shared_model if worker else None, getattr(torch, spec.dtype)
    if model is None or (rollout.dtype and model.dtype != dtype):
        model = load_decoder(spec.model, dtype, spec.device).requires_grad_(False).eval()
    return EmbeddedEngine(
        model,
        tokenizer,
        Decoding(spec.slots, spec.max_sequence_tokens, config.seed, **spec.options),
        images=engine_images(model, spec),
    )


def shared_engine(
    role: str,
    worker: RoleWorker | None,
    deployment: Deployment,
    spec: EngineSpec,
    tokenizer: PreTrainedTokenizerBase,
    started: Mapping[str, RoleEngine],
) -> EmbeddedEngine:
    """Return the engine of all policies on a shared base, with a further role's adapters added.

    With a `worker` these are the trained adapters, without one a copy of adapters that another process trains.

    The frozen weights of all these roles and of the engine are the same tensors. Raises UserError for a model that the
    engine cannot compute with several adapters.
    """
    engine = next((started[policy] for policy in deployment.shared_base if policy in started), None)
    dtype, seed = getattr(torch, spec.dtype), deployment.config.seed
    if worker is not None and worker.ranks.is_sharded:
        raise UserError(f"rollout.shared_base: ranks shard the weights of {role}; remove it, or write shard=none")
    trained = worker.model if worker is not None else load_decoder(spec.model, dtype, spec.device)
    if worker is None:
        lora = settings_of(role, deployment.config).lora
        assert lora is not None, "the deployment refuses roles without adapters"
        with_adapters(trained, lora, seed)
    if engine is None:
        model = load_decoder(spec.model, dtype, spec.device).requires_grad_(False).eval()
        if plan_of_model(model) != PACKED:
            raise UserError(f"rollout.shared_base: {spec.model} does not compute packed rows; remove it")
        share_weights(model, trained)
        size, adapters = spec.max_sequence_tokens, PolicyAdapters(model)
        engine = EmbeddedEngine(model, tokenizer, Decoding(spec.slots, size, seed, **spec.options), adapters=adapters)
    assert isinstance(engine, EmbeddedEngine) and engine.adapters is not None
    # Compiled decoding has concatenated some of the base's tensors.
    share_weights(trained, engine.model)
    engine.adapters.add(role, trained)
    return engine


def engines_of(role: str, ranks: DataParallel, spec: EngineSpec, deployment: Deployment) -> list[EngineProcess]:
    """Return the engine processes of a generating process, not started; on a node that does not lead, its parts of the
    engines.

    Each engine has separate CUDA devices. Raises UserError for too few devices.
    """
    config, count, available = deployment.config, deployment.engines.count, device_count(spec.device)
    specs = [spec] * count
    if available is not None:
        shares = visible_devices(available, count, deployment.engines.ranks_per_node).engines
        specs = [replace(spec, devices=devices) for devices in shares]
    spanning, python, limit_s = None, config.rollout.python, config.cluster.wait_limit_s
    engines = []
    for number, settings in enumerate(specs):
        if isinstance(ranks, OneOf) and ranks.spanning is not None:
            spanning = replace(ranks.spanning, store=dist.PrefixStore(f"engine/{number}", ranks.spanning.store))
        engines.append(EngineProcess(settings, f"{role}'s engine {number}", python, limit_s, spanning))
    return engines


async def follow_engines(role: str, ranks: DataParallel, deployment: Deployment) -> None:
    """Run this node's parts of engines that another node of the worker calls, until they are closed."""
    async with asyncio.TaskGroup() as group:
        for part in engines_of(role, ranks, engine_spec(role, deployment), deployment):
            group.create_task(part.follow())


def publisher_of(worker: TrainingBackend, engine: RoleEngine, deployment: Deployment) -> Publisher:
    """Return the publisher that brings the weights of `worker` to its engine; all ranks that generate call this."""
    shared = isinstance(engine, EmbeddedEngine) and (engine.model is worker.shared_model or engine.adapters is not None)
    if not isinstance(worker, ShardedBackend):
        # A user's backend without an index of its weights: every full tensor by its name.
        return InPlacePublisher(engine, source=None if shared else worker)
    config, engines, parts, ranks = deployment.config, deployment.engines, worker.weights, worker.ranks
    if lora := adapters_sent(worker, config):
        adapters, role = partial(torch_worker(worker).weights, adapters_alone=True), torch_worker(worker).role
        writer = WeightWriter(adapters(), ranks, adapter=adapter_config(lora))
        return FilePublisher(writer, adapters, OnePolicy(engine, role) if role in deployment.shared_base else engine)
    sharded = engines.hosts_vllm or engines.pools_ranks
    if isinstance(engine, SteppingEngine) and (sharded or config.rollout.engine == "embedded"):
        if shared or engine.phases:
            return InPlacePublisher(engine)
        copy = copy_within(worker, engine.parts, sharded)
        # The trainer may have rounded the directory's weights to another dtype.
        copy.refresh()
        return InPlacePublisher(engine, copy)
    if not isinstance(engine, EngineService) or not engines.is_separate:
        # A user's engine in this process.
        return InPlacePublisher(engine, source=worker)
    if (transport := deployment.transport) is not None:
        limit_s = config.cluster.wait_limit_s
        offer = WeightOffer(ranks, offering_address(config), limit_s, worker.device, transport)
        state = lambda: (worker.weight_updates, worker.offloadable["weights"].away_bytes)  # noqa: E731
        return CollectivePublisher(offer, parts, engine, state)
    return FilePublisher(file_writer(parts(), ranks, config), parts, engine)


def offering_address(config: Config) -> str:
    """Return this machine's address for the receivers of its weights: servers, other machines, or local engines."""
    peers = [*(urlsplit(url).hostname for url in config.rollout.servers.urls), os.environ.get("MASTER_ADDR")]
    addresses = [address_towards(peer) for peer in peers if peer]
    return next((address for address in addresses if address != LOOPBACK), LOOPBACK)


def adapters_sent(worker: TrainingBackend | None, config: Config) -> LoraConfig | None:
    """Return the adapters if only they are sent to vLLM, which reads the base weights from disk; None if merged."""
    lora = worker.lora if isinstance(worker, RoleWorker) else None
    if lora is None or config.rollout.engine != "vllm":
        return None
    # Under 4-bit weights the engine needs the values that training computes with. vLLM's kernels for CPUs apply no
    # adapters of experts.
    return None if lora.base_dtype is not None or lora.expert_targets else lora


def exchange_publisher(
    worker: ShardedBackend | None, engine: RoleEngine | None, deployment: Deployment, ranks: DataParallel
) -> Publisher:
    """Return the publisher between the pool that trains a role and the pool that generates for it; all `ranks` of both
    call this.

    `worker` is None if this process only generates, `engine` if it only trains.
    """
    parts: Parts = worker.weights if worker is not None else dict
    if deployment.engines.is_separate or deployment.engines.kind not in ("embedded", "vllm"):
        return FilePublisher(file_writer(parts(), ranks, deployment.config), parts, engine)
    assert engine is None or isinstance(engine, SteppingEngine)
    target: Parts = engine.parts if engine is not None else dict
    return InPlacePublisher(engine, LayoutCopy(parts, target, ranks))


def file_writer(parts: Mapping[str, WeightPart], ranks: Ranks, config: Config) -> WeightWriter:
    """Return the writer of weight versions: to a folder for servers, or shared memory; all ranks call this together."""
    servers = config.rollout.servers
    in_folder = config.rollout.engine == "http" and servers.weights == "folder"
    return WeightWriter(parts, ranks, repeat=in_folder, within=servers.folder)


def engine_spec(role: str, deployment: Deployment) -> EngineSpec:
    """Return the settings of a role's engine, as plain data for its process."""
    config, engines = deployment.config, deployment.engines
    rollout, settings, longest = config.rollout, settings_of(role, config), config.max_sequence_tokens
    path, dtype = settings.model.expanduser(), dtype_named(rollout.dtype) if rollout.dtype else settings.dtype
    longest = min(longest, most_positions(read_model_config(path).get_text_config().to_dict()) or longest)
    processes = max(1, engines.count) * engines.ranks_per_node
    embedded = {"compile": rollout.compile, "speculation": rollout.speculation}
    options = {"embedded": embedded, "vllm": rollout.vllm}
    if not rollout.is_reproducible and (modes := vllm_log_prob_modes(training_sampling(config))):
        options["vllm"] = {"logprobs_mode": modes[0], **rollout.vllm}
    return EngineSpec(
        rollout.engine,
        str(path),
        slots_of(config),
        longest,
        config.seed,
        str(dtype).removeprefix("torch."),
        choose_device(config.device).type,
        default_threads(processes),
        rollout.tensor,
        rollout.pipeline,
        options.get(rollout.engine, rollout.engine_settings),
        reproducible=rollout.is_reproducible,
        adapts_rows=rollout.slots == "auto",
        images=config.data.images.model_dump(mode="json") if load_vision(path, config.data.images) else None,
        train_vision=settings.trains_vision,
    )


def spmd_engine(
    spec: EngineSpec,
    role: str,
    ranks: DataParallel,
    worker: TrainingBackend | None,
    deployment: Deployment,
    tokenizer: PreTrainedTokenizerBase,
) -> SteppingEngine:
    """Return the engine with which ranks decode together; all ranks call this at the same time.

    Raises UserError as `start_engine`.
    """
    config, layout = deployment.config, deployment.engines.layout
    rollout = config.rollout
    training = (settings_of(role, config).layout if worker else ParallelLayout()).resolve(ranks.size)
    groups = layout.groups(training)
    group = subgroup(groups.flatten(1)) if ranks.group is not None else None
    # With a memory budget the copy is kept, and is offloaded as the budget requires.
    takes_turns = (layout.grouping or layout.nests(training)) and config.trainer.resident_gib is None
    if rollout.engine == "vllm":
        # Read when vLLM is imported; it is optional and imported here. Its warnings are about settings that Braid sets.
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        try:
            from braidrl.engines.vllm.hosted import HostedVllmEngine
        except ImportError as error:
            raise UserError(
                f"rollout.engines=0: {sys.executable} cannot import vLLM ({error}); see docs/engines.md"
            ) from error
        engine: SteppingEngine = HostedVllmEngine(spec, tokenizer, groups if group is not None else None, group)
    else:
        assert group is not None
        tensor, pipeline = join_generation_groups(groups)
        model, slices = load_for_decoding(Path(spec.model), getattr(torch, spec.dtype), spec.device, tensor, pipeline)
        engine = EmbeddedEngine(
            model,
            tokenizer,
            Decoding(spec.slots, spec.max_sequence_tokens, config.seed, compile=rollout.compile),
            DecodingRanks(slices=slices, pipeline=pipeline, group=group),
        )
    if takes_turns and isinstance(worker, RoleWorker) and not adapters_sent(worker, config):
        engine.take_turns(worker.weights, training, worker.ranks, layout)
    return engine


def with_nodes(deployment: Deployment, devices_of_node: int | None) -> Config:
    """Return the configuration with vLLM's engines on the fewest nodes with enough devices, unless it sets their
    number.

    `devices_of_node` are the devices of the largest node; None without any. Engines that no number of nodes can hold
    stay on one.
    """
    config, ranks, engines = deployment.config, deployment.engines.layout.ranks, deployment.engines.started
    if config.rollout.nodes is not None or config.rollout.engine != "vllm" or devices_of_node is None:
        return config
    fitting = (n for n in range(1, ranks + 1) if ranks % n == 0 and engines * ranks // n <= devices_of_node)
    rollout = config.rollout.model_copy(update={"nodes": next(fitting, 1)})
    return config.model_copy(update={"rollout": rollout})


def reach_servers(
    role: str,
    ranks: DataParallel,
    deployment: Deployment,
    tokenizer: PreTrainedTokenizerBase,
    longest: int,
    beside: EngineService | None,
) -> EngineService:
    """Return this rank's servers; each generating rank has separate ones.

    Raises UserError for a server that cannot be used for training.
    """
    # Imported here: only servers need aiohttp, an optional dependency.
    from braidrl.engines.http.http_engine import HttpEngine, ServerSpec

    config = deployment.config
    rollout, limit_s = config.rollout, config.cluster.wait_limit_s
    urls = rollout.servers.urls[ranks.rank :: ranks.size]
    if not urls:
        raise UserError(
            f"rollout.servers: {len(rollout.servers.urls)} for {ranks.size} ranks that generate; name one for each, "
            "or more"
        )
    settings, sent = settings_of(role, config), rollout.servers.weights == "network"
    model = settings.model.expanduser()
    needs = ServerNeeds(
        longest,
        rollout.is_reproducible,
        training_sampling(config),
        rollout.tensor,
        rollout.pipeline,
        sent,
        tuple(dict.fromkeys(name for stage in deployment.flow.stages for name in columns_of(stage))),
    )
    names = None if sent else HubNames(model_in(model))
    spec = ServerSpec(
        DIALECTS[rollout.servers.dialect],
        tokenizer,
        end_ids_of(model, tokenizer),
        shapes_in_folder(model),
        slots_of(config),
        needs,
        config.seed,
        rollout.servers.folder,
        names if names and names.differ else None,
        choose_device(config.device),
        limit_s,
        load_vision(model, config.data.images),
    )
    service = EngineService([HttpEngine(url, spec) for url in urls], limit_s, spec.store, beside)
    # A server may still have the weights of an earlier run.
    service.publish(0, ModelWeights(load_decoder(model, settings.dtype, torch.device("cpu"))))
    if failures := list(service.router.failures.values()):
        service.close()
        raise UserError(f"rollout.servers: {failures[0]}")
    return service
