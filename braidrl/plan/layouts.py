"""The layouts of a model on a number of devices, and the activation bytes of a micro-batch in each."""

import itertools
import math
from collections.abc import Iterator
from functools import cache

from braidrl.cluster.device_kinds import NodeGroup
from braidrl.config.layout import ParallelLayout
from braidrl.training.memory.footprint import Shape, saved_bytes

LONG = 8192
"""Tokens from which a row is worth sequence parallelism."""
AT_ONCE = 2048
"""Tokens at which activations are counted; other sizes are scaled linearly."""


def layouts(shape: Shape, devices: int, group: NodeGroup, trained: bool, longest: int) -> Iterator[ParallelLayout]:
    """Yield the layouts of a model on `devices` devices, with `data` filled in.

    Tensor and sequence parallelism stay within a node; sequence parallelism needs rows of at least LONG tokens.
    """
    config = shape.sizes
    heads = math.gcd(config.num_attention_heads, config.num_key_value_heads)
    within = math.gcd(devices, group.devices) if devices > group.devices else devices
    for tensor, sequence in itertools.product(divisors(math.gcd(heads, within)), repeat=2):
        if within % (tensor * sequence) or heads % (tensor * sequence) or (sequence > 1 and longest < LONG):
            continue
        for pipeline in divisors(math.gcd(config.num_hidden_layers, devices // (tensor * sequence))):
            data = devices // (tensor * sequence * pipeline)
            plain = ParallelLayout(pipeline=pipeline, tensor=tensor, data=data, sequence=sequence)
            yield plain
            if data * sequence > 1:
                yield plain.model_copy(update={"shard": "full"})
                nodes = devices // group.devices
                if nodes > 1 and data % nodes == 0:
                    yield plain.model_copy(update={"shard": "full", "nodes": nodes})
                if trained and pipeline == 1:
                    yield plain.model_copy(update={"shard": "optimizer"})


def divisors(number: int) -> list[int]:
    """Return the divisors of `number` in ascending order."""
    return [n for n in range(1, number + 1) if number % n == 0]


@cache
def _saved(shape: Shape, layers: int, tensor: int) -> float:
    return saved_bytes(shape, layers, AT_ONCE * tensor, tensor) / AT_ONCE


def activations(shape: Shape, tokens: int, checkpointing: bool, layout: ParallelLayout) -> int:
    """Return activation bytes as `footprint.activation_bytes`, measured once per (model, tensor) and scaled linearly in tokens."""
    share = -(-tokens // (layout.sequence * layout.tensor))
    one, two = (_saved(shape, layers, layout.tensor) * share for layers in (1, 2))
    layers = shape.sizes.num_hidden_layers
    if not checkpointing:
        return int(one + (layers - 1) * (two - one))
    return int(one + layers * share * shape.sizes.hidden_size * shape.element_bytes)
