"""From a configuration to what generates for a role, and how a version of its weights comes there, in whatever layout it is trained.

engine with the trainer's own weights    they are there
engine with a copy, whole or slices      box to box from the ranks that have divided them, adapters merged
engines in processes of their own        one file on each machine, which its ranks write side by side, or handles of the trainer's tensors
servers                                  the same in a folder, which they read, or sent to them from there
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from braidrl.cluster.devices import choose_device, device_count, own_devices
from braidrl.cluster.pools import Pool
from braidrl.cluster.process import default_threads
from braidrl.cluster.process_groups import subgroup
from braidrl.config import Config
from braidrl.config.layout import ParallelLayout
from braidrl.data.endings import end_ids_of
from braidrl.engines.divided.spmd import SpmdEngine
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.engines.embedded.sharded_decoding import Slices, join_generation_groups, load_for_decoding
from braidrl.engines.engine import ENGINES, ModelWeights, RoleEngine, ServedEngine
from braidrl.engines.http.dialects import DIALECTS
from braidrl.engines.process.process_engine import EngineProcess
from braidrl.engines.routing.service import EngineService
from braidrl.engines.stepping import SteppingEngine
from braidrl.engines.wire import EngineSpec
from braidrl.errors import UserError
from braidrl.training.loading import load_decoder, read_model_config
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.role_settings import DTYPES, dtype_of, layout_of, model_path, slots_of
from braidrl.training.roles.base import RoleWorker
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.handles import LiveWeights
from braidrl.weights.joint_file import WeightWriter
from braidrl.weights.local import shapes_of
from braidrl.weights.mirror import LayoutCopy, local_weight_parts
from braidrl.weights.phases import GenerationWeights
from braidrl.weights.shared_file import SharedWeights, WeightFolder
from braidrl.weights.transfer import TransferVolume
from braidrl.weights.weight_index import weight_parts

Publish = Callable[[int], TransferVolume | None]
"""Has an engine generate with the weights of now, under a version's number; all ranks that generate for the role call it together.
Returns what this rank sent and received for it, None where weights do not travel now."""


class Generated(Protocol):
    """What an engine needs to know of its role: which ranks call it together, and where its weights are."""

    role: str
    ranks: DataParallel

    @property
    def shared_model(self) -> Any:
        """Return the module that an engine of this process may decode with, or None where it needs a copy."""

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yield every full tensor of the model by its name."""


def from_source(worker: Generated, engine: RoleEngine) -> Publish:
    """Return how an engine takes every full tensor by its name: one of a user's own, or from a backend of a user's own."""

    def publish(version: int) -> None:
        engine.publish(version, worker)

    return publish


def into_copy(worker: Generated, engine: EmbeddedEngine, slices: Slices | None = None) -> Publish:
    """Return how the engine's own weights, or this rank's slices of them, take the worker's, a bounded number of bytes at a time."""
    if not isinstance(worker, RoleWorker):
        return from_source(worker, engine)
    copy = LayoutCopy.of(worker, lambda: weight_parts(engine.model, slices), divided=slices is not None)

    def publish(version: int) -> TransferVolume:
        moved = copy.refresh()
        engine.publish(version)
        return moved

    return publish


def through_file(worker: Generated, engine: EngineService, config: Config) -> Publish:
    """Return how processes of engines, and servers, read what the ranks of their machine have written."""
    if not isinstance(worker, RoleWorker):
        return from_source(worker, engine)
    own = config.roles.get(worker.role)
    # Of ranks that each have everything some may generate alone: those do not wait for the others.
    together = worker.ranks.is_sharded or own is None or own.generate_workers is None
    ranks, rollout = worker.ranks if together else DataParallel(), config.rollout
    if takes_handles(worker, config):
        return by_handles(worker, engine)
    asks = rollout.engine == "http"
    in_folder = asks and rollout.servers.weights == "folder"
    # What servers are sent is checked on its way.
    writer = WeightWriter(local_weight_parts(worker), ranks, rollout.check_weights and not asks, repeat=in_folder)

    def publish(version: int) -> TransferVolume:
        parts = local_weight_parts(worker)
        folder = rollout.servers.folder
        engine.publish(version, writer.in_folder(parts, folder) if in_folder else writer.in_memory(parts))
        return writer.traffic

    return publish


def by_handles(worker: RoleWorker, engine: EngineService) -> Publish:
    """Return how processes of engines map the tensors of a worker that has the whole model."""

    def publish(version: int) -> None:
        updates = worker.weight_updates
        weights = worker.offloadable["weights"]
        tensors = worker.model.state_dict()
        engine.publish(
            version, LiveWeights(tensors, lambda: worker.weight_updates == updates and not weights.away_bytes)
        )

    return publish


def takes_handles(worker: RoleWorker, config: Config) -> bool:
    """Return True where engine processes map the worker's own tensors, as asked or because they are on its CUDA device.

    Raises UserError where they are asked to and are on another one.
    """
    rollout, available = config.rollout, device_count(config.device)
    if rollout.weights == "file" or rollout.engine == "http" or rollout.check_weights or not worker.has_full_weights:
        return False
    if not available:
        return rollout.weights == "handles"
    devices = own_devices(available, engine_processes(config), rollout.tensor)
    beside = all(own == devices.every[:1] for own in devices.engines)
    if rollout.weights == "handles" and not beside:
        raise UserError(
            "rollout.weights=handles: the engines have CUDA devices of their own, and handles are for one that they share with the "
            "trainer; remove it"
        )
    return beside


def start_engine(worker: Generated, config: Config, tokenizer: PreTrainedTokenizerBase) -> tuple[RoleEngine, Publish]:
    """Return what generates with the weights of `worker`, and how these reach it.

    All ranks that generate for the role call both at the same time. Raises UserError for a model that the engine cannot use.
    """
    rollout, spec = config.rollout, engine_spec(worker.role, config)
    if rollout.engine == "http":
        servers = reach_servers(worker, config, tokenizer, spec.max_sequence_tokens)
        return servers, through_file(worker, servers, config)
    if pools_ranks(config):
        return spmd_engine(worker, config, tokenizer, spec)
    if count := engine_processes(config):
        service = start_processes(worker.role, config, on_devices(spec, count))
        return service, through_file(worker, service, config)
    if rollout.engine != "embedded":
        own = own_engine(config, spec)
        return own, from_source(worker, own)
    # Decoding needs all weights on each rank, adapters merged: else a frozen copy, brought up to date at each publication.
    dtype = DTYPES[rollout.dtype] if rollout.dtype else None
    own_dtype = dtype or dtype_of(worker.role, config)
    model = worker.shared_model or load_decoder(spec.model, own_dtype, spec.device).requires_grad_(False).eval()
    engine = EmbeddedEngine(
        model, tokenizer, spec.slots, spec.max_sequence_tokens, config.seed, dtype=dtype, compile=rollout.compile
    )
    return engine, engine.publish if worker.shared_model else into_copy(worker, engine)


def engine_spec(role: str, config: Config) -> EngineSpec:
    """Return what an engine of a role is made from, as plain data that travels to its process."""
    rollout, path = config.rollout, model_path(role, config).expanduser()
    longest, dtype = config.max_sequence_tokens, DTYPES[rollout.dtype] if rollout.dtype else dtype_of(role, config)
    longest = min(longest, getattr(read_model_config(path), "max_position_embeddings", None) or longest)
    processes = max(1, engine_processes(config)) * rollout.tensor
    options = {"embedded": {"compile": rollout.compile}, "vllm": rollout.vllm}
    return EngineSpec(
        rollout.engine, str(path), slots_of(config), longest, config.seed, str(dtype).removeprefix("torch."),
        choose_device(config.device).type, default_threads(processes), rollout.tensor, config.cluster.wait_limit_s,
        options.get(rollout.engine, rollout.engine_settings),
    )  # fmt: skip


def start_processes(role: str, config: Config, specs: Sequence[EngineSpec]) -> EngineService:
    """Return engines in processes of their own. Raises UserError for a model that they cannot use."""
    limit_s, rollout = config.cluster.wait_limit_s, config.rollout
    engines = [EngineProcess(own, f"{role}'s engine {n}", rollout.python, limit_s) for n, own in enumerate(specs)]
    return EngineService(engines, limit_s, partial(SharedWeights, check=rollout.check_weights))


def own_engine(config: Config, spec: EngineSpec) -> RoleEngine:
    """Return a user's engine in this process."""
    made: SteppingEngine | ServedEngine = ENGINES.find(spec.kind)(spec)
    if isinstance(made, SteppingEngine):
        return made
    return EngineService([made], config.cluster.wait_limit_s)


def spmd_engine(
    worker: Generated, config: Config, tokenizer: PreTrainedTokenizerBase, spec: EngineSpec
) -> tuple[RoleEngine, Publish]:
    """Return what ranks decode with together; all ranks call this at the same time. Raises UserError as `start_engine`."""
    layout, trains = generation_layout(config), isinstance(worker, RoleWorker)
    training = (layout_of(worker.role, config) if trains else ParallelLayout()).resolve(worker.ranks.size)
    groups = layout.groups(training)
    group = subgroup(groups.flatten(1))
    assert group is not None
    tensor, pipeline = join_generation_groups(groups)
    model, slices = load_for_decoding(Path(spec.model), getattr(torch, spec.dtype), spec.device, tensor, pipeline)
    engine = SpmdEngine(
        model, tokenizer, spec.slots, spec.max_sequence_tokens, config.seed, slices, group,
        compile=config.rollout.compile, pipeline=pipeline,
    )  # fmt: skip
    # With a budget a copy stays, and comes and goes as the budget says.
    takes_turns = (layout.grouping or layout.nests(training)) and config.trainer.resident_gib is None
    if not takes_turns or not isinstance(worker, RoleWorker):
        return engine, into_copy(worker, engine, slices)
    engine.phases = GenerationWeights(worker, model, slices, layout)
    return engine, engine.publish


def generation_layout(config: Config) -> GenerationLayout:
    """Return the layout in which ranks that train generate."""
    return GenerationLayout(config.rollout.pipeline, config.rollout.tensor, config.rollout.grouping)


def on_devices(spec: EngineSpec, count: int) -> list[EngineSpec]:
    """Return so many engines, each with CUDA devices of its own. Raises UserError for too few devices."""
    available = device_count(spec.device)
    if available is None:
        return [spec] * count
    return [replace(spec, devices=devices) for devices in own_devices(available, count, spec.tensor).engines]


def with_engines(pools: Sequence[Pool], config: Config) -> tuple[Pool, ...]:
    """Return the pools with the engine processes that those of them start which generate."""
    engines, each = own_engines(config), config.rollout.tensor
    return tuple(replace(pool, engines=engines, engine_devices=each) if pool.generating else pool for pool in pools)


def own_engines(config: Config) -> int:
    """Return how many engine processes whoever generates starts beside itself; servers were started by somebody else."""
    return 0 if config.rollout.engine == "http" else engine_processes(config)


def reach_servers(worker: Generated, config: Config, tokenizer: PreTrainedTokenizerBase, longest: int) -> EngineService:
    """Return the servers of this rank; of ranks that generate each has its own. Raises UserError for those that cannot be trained with."""
    # Imported here: only servers need aiohttp, which need not be installed.
    from braidrl.engines.http.http_engine import HttpEngine, ServerSpec
    from braidrl.engines.http.servers import BroadcastSettings, GenerationServer

    rollout, ranks = config.rollout, worker.ranks
    urls = rollout.servers.urls[ranks.rank :: ranks.size]
    if not urls:
        raise UserError(
            f"rollout.servers: {len(rollout.servers.urls)} for {ranks.size} ranks that generate; name one for each, or more"
        )
    model, device = model_path(worker.role, config).expanduser(), choose_device(config.device)
    sent = rollout.servers.weights == "network"
    store = SharedWeights if sent else partial(WeightFolder, within=rollout.servers.folder)
    sending = BroadcastSettings(device, rollout.check_weights) if sent else None
    spec = ServerSpec(
        tokenizer, end_ids_of(model, tokenizer), shapes_of(model), slots_of(config), longest, config.seed, store,
    )  # fmt: skip
    limit_s, dialect = config.cluster.wait_limit_s, DIALECTS[rollout.servers.dialect]
    engines = [HttpEngine(GenerationServer(url, dialect, limit_s, sending), spec) for url in urls]
    service = EngineService(engines, limit_s, store)
    # A server may still have the weights of the last run that asked it.
    service.publish(0, ModelWeights(load_decoder(model, dtype_of(worker.role, config), torch.device("cpu"))))
    if failures := service.router.failures:
        service.close()
        raise UserError(f"rollout.servers: {failures[0]}")
    return service


def pools_ranks(config: Config) -> bool:
    """Return True where ranks decode together, of which each has slices of the model."""
    layout = generation_layout(config)
    return (layout.ranks > 1 or layout.grouping is not None) and not engine_processes(config)


def engine_processes(config: Config) -> int:
    """Return how many processes or servers generate in place of this process; 0 where it generates itself."""
    rollout = config.rollout
    asked = len(rollout.servers.urls) if rollout.engine == "http" else rollout.engines
    # Under streaming who generates has no ranks beside it that could hold a slice.
    divided = config.runtime == "streaming" and rollout.tensor > 1
    return int(rollout.engine == "vllm" or divided) if asked is None else asked
