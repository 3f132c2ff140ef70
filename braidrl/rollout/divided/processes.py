"""An engine whose processes each have their slices of the model: how leader and followers begin."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from braidrl.models.cpu.malloc import keep_freed_memory
from braidrl.models.loading import load_tokenizer
from braidrl.models.parallel.decoding import TensorRanks, load_divided
from braidrl.rollout.divided.followers import LOOPBACK, ForkedFollowers, join, open_port
from braidrl.rollout.divided.leader import LeadingEngine
from braidrl.rollout.embedded.engine import EmbeddedEngine
from braidrl.rollout.process.spec import EngineSpec


def fork_followers(spec: EngineSpec, inherited: int) -> ForkedFollowers:
    """Starts the other processes of an engine; for `inherited` see there."""
    return ForkedFollowers(spec.tensor - 1, partial(_follower, spec), inherited, wait_s(spec))


def lead(spec: EngineSpec, followers: ForkedFollowers) -> LeadingEngine:
    """The engine, once every process has loaded its slices.

    Raises UserError for a model that cannot be used, and EngineError for a follower that fails.
    """
    store = open_port(spec.tensor, wait_s(spec))
    followers.meet(store.port)
    ranks = join(store, 0, spec.tensor, wait_s(spec), device_of(spec, 0))
    engine = LeadingEngine(**_parts(spec, ranks), followers=followers)
    engine.await_followers()
    return engine


def _follower(spec: EngineSpec, rank: int, port: int) -> EmbeddedEngine:
    torch.set_num_threads(spec.threads)
    keep_freed_memory()
    limit = timedelta(seconds=wait_s(spec))
    store = dist.TCPStore(LOOPBACK, port, spec.tensor, is_master=False, timeout=limit)
    return EmbeddedEngine(**_parts(spec, join(store, rank, spec.tensor, wait_s(spec), device_of(spec, rank))))


def _parts(spec: EngineSpec, ranks: TensorRanks) -> dict[str, Any]:
    """What every rank's engine is made of."""
    model, slices = load_divided(spec.model, getattr(torch, spec.dtype), device_of(spec, ranks.rank), ranks)
    return {
        "model": model, "tokenizer": load_tokenizer(spec.model), "slots": spec.slots,
        "max_sequence_tokens": spec.max_sequence_tokens, "seed": spec.seed, "slices": slices, **spec.options,
    }  # fmt: skip


def device_of(spec: EngineSpec, rank: int) -> torch.device:
    """Of a rank: the leader's, or one as many further."""
    device = torch.device(spec.device)
    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)


def wait_s(spec: EngineSpec) -> float:
    """How long the processes wait for one another: whoever waits for their leader is still to hear for whom it waited."""
    return spec.limit_s / 2
