"""From a configuration to what generates for a role: the trainer's own weights, engines in processes of their own, or servers."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import torch
from transformers import PreTrainedTokenizerBase

from braidrl.config import Config
from braidrl.errors import UserError
from braidrl.models.loading import load_decoder
from braidrl.models.parallel.decoding import TensorRanks, load_divided
from braidrl.models.parallel.sharded import subgroup
from braidrl.models.role_settings import DTYPES
from braidrl.models.roles.base import RoleWorker
from braidrl.rollout.divided.pooled import PooledEngine
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.engine import ModelWeights
from braidrl.rollout.http.dialects import DIALECTS
from braidrl.rollout.process.client import EngineProcess
from braidrl.rollout.process.spec import EngineSpec
from braidrl.rollout.routing.service import EngineService
from braidrl.rollout.stopping import end_ids_of
from braidrl.rollout.weights.local import shapes_of
from braidrl.rollout.weights.shared_file import SharedWeights, WeightFolder


def start_engine(
    worker: RoleWorker, config: Config, tokenizer: PreTrainedTokenizerBase
) -> EmbeddedEngine | EngineService:
    """What generates with the weights of `worker`. Raises UserError for a model that the engine cannot use."""
    rollout, longest = config.rollout, config.max_sequence_tokens
    longest = min(longest, getattr(worker.model.config, "max_position_embeddings", None) or longest)
    model, dtype = worker.model, DTYPES[rollout.dtype] if rollout.dtype else None
    if rollout.engine == "http":
        return reach_servers(worker, config, tokenizer, longest)
    count = engine_processes(config)
    if pools_ranks(config):
        return pooled_engine(worker, config, tokenizer, longest)
    if not count:
        if not worker.holds_its_weights:
            # Decoding needs all weights on each rank, adapters merged: a frozen copy, brought up to date at each publication.
            model = load_decoder(worker.path, dtype or worker.dtype, worker.device).requires_grad_(False).eval()
        return EmbeddedEngine(
            model, tokenizer, rollout.slots, longest, seed=config.seed, dtype=dtype, compile=rollout.compile
        )
    threads = config.threads or max(1, (os.cpu_count() or 1) // (count * rollout.tensor))
    limit_s = config.cluster.wait_limit_s
    spec = EngineSpec(
        rollout.engine, str(worker.path.expanduser()), rollout.slots, longest, config.seed,
        str(dtype or worker.dtype).removeprefix("torch."), worker.device.type, threads, rollout.tensor, limit_s,
        rollout.vllm if rollout.engine == "vllm" else {"compile": rollout.compile},
    )  # fmt: skip
    engines = [
        EngineProcess(own, f"{worker.role}'s engine {n}", rollout.python, limit_s)
        for n, own in enumerate(on_devices(spec, count))
    ]
    return EngineService(engines, limit_s, partial(SharedWeights, check=rollout.check_weights))


def pooled_engine(worker: RoleWorker, config: Config, tokenizer: PreTrainedTokenizerBase, longest: int) -> PooledEngine:
    """What neighbouring ranks decode with together; all ranks call this at the same time. Raises UserError as `start_engine`."""
    rollout = config.rollout
    group = subgroup(torch.arange(worker.ranks.size).view(-1, rollout.tensor))
    assert group is not None
    dtype = DTYPES[rollout.dtype] if rollout.dtype else worker.dtype
    model, slices = load_divided(worker.path, dtype, worker.device, TensorRanks(group))
    return PooledEngine(model, tokenizer, rollout.slots, longest, config.seed, slices, group, compile=rollout.compile)


def on_devices(spec: EngineSpec, count: int) -> list[EngineSpec]:
    """So many engines, each on CUDA devices of its own where several processes divide it. Raises UserError for too few devices."""
    if spec.tensor == 1 or spec.device != "cuda":
        return [spec] * count
    needed, found = count * spec.tensor, torch.cuda.device_count()
    if needed > found:
        raise UserError(
            f"rollout.engines={count} of rollout.tensor={spec.tensor} devices need {needed}, and there are {found}; "
            "write numbers whose product is at most that"
        )
    return [replace(spec, device=f"cuda:{number * spec.tensor}") for number in range(count)]


def reach_servers(
    worker: RoleWorker, config: Config, tokenizer: PreTrainedTokenizerBase, longest: int
) -> EngineService:
    """The servers of this rank; of ranks that generate each has its own. Raises UserError for those that cannot be trained with."""
    # Imported here: only servers need aiohttp, which need not be installed.
    from braidrl.rollout.http.engine import HttpEngine, ServerSpec
    from braidrl.rollout.http.servers import GenerationServer, Sending

    rollout, ranks = config.rollout, worker.ranks
    urls = rollout.servers.urls[ranks.rank :: ranks.size]
    if not urls:
        raise UserError(
            f"rollout.servers: {len(rollout.servers.urls)} for {ranks.size} ranks that generate; name one for each, or more"
        )
    model = worker.path.expanduser()
    sent = rollout.servers.weights == "network"
    store = SharedWeights if sent else partial(WeightFolder, within=rollout.servers.folder)
    sending = Sending(worker.device, rollout.check_weights) if sent else None
    spec = ServerSpec(
        tokenizer, end_ids_of(model, tokenizer), shapes_of(model), rollout.slots, longest, config.seed, store,
    )  # fmt: skip
    limit_s, dialect = config.cluster.wait_limit_s, DIALECTS[rollout.servers.dialect]
    engines = [HttpEngine(GenerationServer(url, dialect, limit_s, sending), spec) for url in urls]
    service = EngineService(engines, limit_s, store)
    # A server may still have the weights of the last run that asked it.
    service.publish(0, ModelWeights(load_decoder(worker.path, worker.dtype, torch.device("cpu"))))
    if failures := service.router.failures:
        service.close()
        raise UserError(f"rollout.servers: {failures[0]}")
    return service


def pools_ranks(config: Config) -> bool:
    """True where ranks decode together, of which each has slices of the model."""
    return config.rollout.tensor > 1 and not engine_processes(config)


def engine_processes(config: Config) -> int:
    """Processes of their own, or servers, that generate for whoever would generate itself; 0 where it does."""
    asked = len(config.rollout.servers.urls) if config.rollout.engine == "http" else config.rollout.engines
    return int(config.rollout.engine != "embedded") if asked is None else asked
