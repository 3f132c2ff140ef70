"""An engine whose processes each have their slices of the model: how leader and followers begin."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from braidrl.cluster.devices import see_only
from braidrl.cluster.groups import LOOPBACK, connect_store, join_group, open_store
from braidrl.models.cpu.malloc import keep_freed_memory
from braidrl.models.loading import load_tokenizer
from braidrl.models.parallel.decoding import TensorRanks, load_divided
from braidrl.rollout.divided.followers import ForkedFollowers
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
    store = open_store(LOOPBACK, wait_s(spec))
    followers.meet(store.port)
    engine = LeadingEngine(**_parts(spec, 0, store), followers=followers)
    engine.await_followers()
    return engine


def _follower(spec: EngineSpec, rank: int, port: int) -> EmbeddedEngine:
    torch.set_num_threads(spec.threads)
    keep_freed_memory()
    return EmbeddedEngine(**_parts(spec, rank, connect_store(LOOPBACK, port, wait_s(spec))))


def _parts(spec: EngineSpec, rank: int, store: dist.Store) -> dict[str, Any]:
    """What every rank's engine is made of, once the ranks have met."""
    device = torch.device(spec.device)
    if device.type == "cuda":
        see_only(rank)
    group = join_group(store, rank, spec.tensor, wait_s(spec), device.type == "cuda", LOOPBACK)
    model, slices = load_divided(spec.model, getattr(torch, spec.dtype), device, TensorRanks(group))
    return {
        "model": model, "tokenizer": load_tokenizer(spec.model), "slots": spec.slots,
        "max_sequence_tokens": spec.max_sequence_tokens, "seed": spec.seed, "slices": slices, **spec.options,
    }  # fmt: skip


def wait_s(spec: EngineSpec) -> float:
    """How long the processes wait for one another: whoever waits for their leader is still to hear for whom it waited."""
    return spec.limit_s / 2
