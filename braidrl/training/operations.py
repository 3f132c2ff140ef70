"""The minimal operations and bytes of a decoder, from its sizes and its rows' lengths, and the peak rates of this
process's device.

A forward pass takes 2 operations per token and matrix parameter, and 4·H·D per layer for each pair of a query and a
visible key, with H heads of size D (Chowdhery et al., PaLM, arXiv 2204.02311, appendix B; PaLM counts T² pairs for a
row of T tokens, this module the causal T·(T + 1)/2). Only predicted tokens go through the output layer. A backward pass
takes as many operations for gradients of activations, and as many again for gradients of weights. Recomputation does
not count.

Each decode step reads all matrices once, and all earlier keys and values of each row (Pope et al., arXiv 2211.05102,
section 2).

A vision tower of P parameters takes 2·P operations for each patch of an image.
"""

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from braidrl.cluster.device_kinds import known_kinds
from braidrl.data.rows import Rows
from braidrl.training.compute.packed import families_of
from braidrl.training.memory.footprint import ModelSizes, Shape


class MatrixSizes(NamedTuple):
    """The matrix sizes that determine operations and bytes."""

    body: int
    """Matrix parameters in the layers."""
    head: int
    """Parameters of the output layer, which only predicting tokens use; 0 for a scalar head."""
    queries: int
    """Elements of a token's queries, summed over layers."""
    cached: int
    """Elements of a token's keys and values, summed over layers."""
    idle: int = 0
    """Parameters in the layers that a token does not use: those of the experts that are not chosen for it."""

    @staticmethod
    def of(sizes: ModelSizes, parameters: int, scalar: bool, idle: int = 0) -> "MatrixSizes":
        """Return the sizes of a model with `parameters` parameters, tied ones counted once; `scalar` for a critic or a
        reward model.
        """
        embedding, layers = sizes.vocab_size * sizes.hidden_size, sizes.num_hidden_layers
        head = 0 if scalar else embedding
        looked_up = 0 if sizes.tie_word_embeddings and not scalar else embedding
        return MatrixSizes(
            parameters - looked_up - head,
            head,
            layers * sizes.num_attention_heads * sizes.head_dim,
            2 * layers * sizes.num_key_value_heads * sizes.head_dim,
            idle,
        )


class TokenCounts(NamedTuple):
    """The counts of one pass: tokens, predicted tokens, and (query, visible key) pairs."""

    tokens: float
    predicted: float
    pairs: float

    @staticmethod
    def of(rows: Rows, shared_prompts: bool = False) -> "TokenCounts":
        """Count rows; with `shared_prompts`, a shared prompt counts once for all of its rows."""
        lengths = rows["sequence_lengths"].values.tolist()
        tokens, pairs = sum(lengths), sum(length * (length + 1) // 2 for length in lengths)
        for family in (families_of(rows) or []) if shared_prompts else []:
            again = len(family.rows) - 1
            tokens -= again * family.prompt
            pairs -= again * (family.prompt * (family.prompt + 1) // 2)
        return TokenCounts(tokens, int(rows["action_mask"].values.sum()), pairs)


def forward_operations(sizes: MatrixSizes, counts: TokenCounts) -> float:
    """Return the operations of a forward pass; a backward pass takes twice as many, or as many if frozen."""
    products = 2.0 * ((sizes.body - sizes.idle) * counts.tokens + sizes.head * counts.predicted)
    return products + 4.0 * sizes.queries * counts.pairs


def tower_operations(shape: Shape, image_tokens: float) -> float:
    """Return the operations of a vision tower's forward pass over images that stand for so many tokens, without the
    attention within an image.
    """
    merge = getattr(getattr(shape.config, "vision_config", None), "spatial_merge_size", None) or 1
    return 2.0 * shape.tower * image_tokens * merge**2


def decoding_bytes(sizes: MatrixSizes, element_bytes: int, steps: float, attended: float) -> float:
    """Return the bytes that decoding reads, with `element_bytes` per element of weights, keys and values.

    Each of the `steps` reads all weights once, with all experts, which many rows choose together. Keys and values are
    read of `attended` tokens, summed over rows and steps.
    """
    return element_bytes * (steps * (sizes.body + sizes.head) + attended * sizes.cached)


class DecodedSteps(NamedTuple):
    """An engine's decoding of its rows: steps until the last row ends, and computed slots summed over steps."""

    steps: int
    slot_steps: int


def decoding(responses: npt.NDArray[np.int64], slots: int, multiple: int = 1) -> DecodedSteps:
    """Simulate continuous batching in `slots` slots, refilled in order of lengths (R,); a step computes a multiple of
    `multiple` rows.
    """
    busy: list[int] = []
    ends: list[int] = []
    for tokens in responses.tolist():
        start = heapq.heappop(busy) if len(busy) >= slots else 0
        heapq.heappush(busy, start + tokens)
        ends.append(start + tokens)
    last = np.sort(np.array(ends, dtype=np.int64))
    # Slots are full until the last row starts; then they empty in the order in which rows end.
    tail = last[-min(slots, len(last)) :]
    counts = np.arange(len(tail), 0, -1)
    spans = np.diff(tail, prepend=0)
    return DecodedSteps(int(last[-1]), int((spans * (-(-counts // multiple) * multiple)).sum()))


@dataclass(frozen=True)
class DeviceRates:
    """The peak rates of one process."""

    operations: Mapping[str, float]
    """Operations per second of matrix products, by dtype."""
    bandwidth: float
    """Bytes per second read from memory."""


def device_rates(device: torch.device, threads: int) -> DeviceRates | None:
    """Return the peak rates of this process, which uses `threads` cores on a CPU, from `kinds.yaml`; None for an
    unknown CUDA device.
    """
    if device.type != "cuda":
        core = known_kinds()["cpu"]
        return DeviceRates({name: rate * threads for name, rate in core.peak.items()}, core.bandwidth * threads)
    name = torch.cuda.get_device_name()
    kind = next((kind for kind in known_kinds().values() if name in kind.names), None)
    return None if kind is None else DeviceRates(kind.peak, kind.bandwidth)
