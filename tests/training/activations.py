"""Measured bytes that autograd saves in a model's forward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._functional_collectives import AsyncCollectiveTensor

from braidrl.training.compute.attention import PackedSequences
from braidrl.weights.shards import local_shard


def kept_bytes(model: Any, tokens: int) -> int:
    """Return the bytes saved for one sequence's backward pass, with the output and without parameters."""
    own = {local_shard(p).untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        part = local_shard(tensor)
        # The result of a pending collective has no address.
        part = part.wait() if isinstance(part, AsyncCollectiveTensor) else part
        if part.untyped_storage().data_ptr() not in own:
            kept[part.untyped_storage().data_ptr()] = part
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden = model.base_model(
            input_ids=torch.zeros(1, tokens, dtype=torch.int64),
            position_ids=torch.arange(tokens)[None],
            use_cache=False,
            sequences=PackedSequences.of([tokens]),
        ).last_hidden_state
    keep(hidden.detach())
    return sum(part.untyped_storage().nbytes() for part in kept.values())
