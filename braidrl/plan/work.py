"""The work of a role in a layout: training, inference, generation, and the bytes of resharding.

rows' lengths, a model's shape, a layout ──▶ Work of the busiest device ──rates.price──▶ seconds

Operations of a forward pass over N tokens: 2·N·P for P matrix parameters, 2·H·D·T² per layer for causal attention over
a row of T tokens with H heads of size D; 2·P' per patch of an image for a vision tower of P' parameters, without the
attention within an image. A backward pass takes twice as many; recomputed activations add one forward pass. Tensor
parallelism gathers and scatters tokens twice per layer and pass (Korthikanti et al., arXiv 2205.05198); a pipeline of p
ranks and n micro-batches idles (p - 1) of n + p - 1 turns; a ring of g ranks carries (g - 1) / g of the bytes for each
of gather and scatter. An engine batches continuously: slots refill as rows end, and each step reads all weights, and
all keys and values of its rows.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from braidrl.config.layout import ParallelLayout
from braidrl.plan.rates import Phase, Work
from braidrl.training import operations
from braidrl.training.memory.footprint import (
    MASTER_BYTES,
    Shape,
    layer_experts,
    local_parameters,
    parameters_outside_layers,
)
from braidrl.training.parallel.pipeline import RUN
from braidrl.weights.generation_layout import GenerationLayout

OPTIMIZER_BYTES = 30
"""Bytes that an AdamW step reads and writes per parameter: float32 gradient, master weight and moments, and the weight.
"""
IntArray = npt.NDArray[np.int64]


@dataclass(eq=False)
class Lengths:
    """Prompt (R,) and response (R,) tokens of a batch's rows; `generated` is sampled rows per trained row, and `seen`
    the mean number of image tokens of a prompt.
    """

    prompts: IntArray
    responses: IntArray
    generated: float = 1.0
    seen: float = 0.0

    def __post_init__(self) -> None:
        self.totals: IntArray = self.prompts + self.responses
        """The tokens of each row, (R,)."""
        self.tokens, self.longest = int(self.totals.sum()), int(self.totals.max())
        """All tokens, and those of the longest row."""
        self.squares = float((self.totals.astype(np.float64) ** 2).sum())
        """The sum of squared row lengths (attention work)."""
        self.ordered: IntArray = np.sort(self.responses)
        """Response lengths in ascending order, (R,)."""

    def __len__(self) -> int:
        return len(self.prompts)


class Share(NamedTuple):
    """The share of a batch on the busiest model copy: tokens, squared lengths, rows."""

    tokens: float
    squares: float
    rows: float


def share_of(lengths: Lengths, copies: int, updates: int = 1) -> Share:
    """Return the busiest copy's share of one update, rounded up to complete rows."""
    rows = len(lengths) / updates
    local = math.ceil(rows / copies)
    mean = lengths.tokens / len(lengths)
    tokens = max(lengths.tokens / updates / copies, local * mean if local <= 2 else 0.0)
    if rows / copies < 8:
        # With few rows per copy, all copies wait for the one with the longest row.
        tokens = max(tokens, mean * (local - 1) + expected_longest(lengths, copies))
    return Share(tokens, lengths.squares / len(lengths) * (tokens / mean), local)


@cache
def expected_longest(lengths: Lengths, among: int) -> float:
    """Return the typical length of the longest of `among` rows."""
    return float(np.quantile(lengths.totals, 1 - 1 / (among + 1)))


def sent(node: int, inner: int, ranks: int, moved: float) -> npt.NDArray[np.float64]:
    """Return the bytes (2,) within a node of `node` devices, and between nodes, that each of `ranks` ranks, `inner`
    devices apart, sends.

    A group with several devices per node spreads its bytes over all of their network adapters.
    """
    if inner * ranks <= node:
        return np.array([moved, 0.0])
    return np.array([0.0, moved / max(1, node // inner)])


def forward_operations(shape: Shape, tokens: float, squares: float, scalar: bool) -> float:
    """Return the operations of a forward pass over `tokens` tokens, all predicted, with this sum of squared lengths."""
    counts = operations.TokenCounts(tokens, tokens, squares / 2)
    sizes = operations.MatrixSizes.of(shape.sizes, shape.parameters - shape.tower, scalar, shape.idle)
    return operations.forward_operations(sizes, counts)


def model_work(
    phase: Phase,
    shape: Shape,
    layout: ParallelLayout,
    share: Share,
    max_tokens: int,
    passes: float,
    scalar: bool,
    node: int,
) -> Work:
    """Return the work of one rank for its model copy's share of rows, in micro-batches of `max_tokens`.

    `passes` are operations in units of forward passes: 1 to infer, 3 to train, 4 with recomputation, 2 with adapters. A
    node has `node` devices.
    """
    t, s, c, p = layout.tensor, layout.sequence, layout.context, layout.pipeline
    layers = shape.sizes.num_hidden_layers / p
    batches = max(1, math.ceil(share.tokens / max_tokens))
    run = min(batches, RUN * p)
    bubble = (run + p - 1) / run
    computed = passes * forward_operations(shape, share.tokens, share.squares, scalar) / (t * s * c * p) * bubble
    width = share.tokens * shape.sizes.hidden_size * shape.element_bytes / (s * c)
    times = layers * (1 if passes == 1 else passes - 1)
    waited, collectives = np.zeros(2), 0.0
    if t > 1:
        waited += sent(node, 1, t, 4 * times * width * (t - 1) / t * bubble)
        collectives += 4 * times * batches
    if s > 1:
        waited += sent(node, t, s, 4 * times * width / t * (s - 1) / s * bubble)
        collectives += 4 * times * batches
    if (e := layout.expert) > 1:
        # The all-to-all of rows to experts and back, and in training of their gradients.
        rows = times * width / t * shape.chosen_experts
        waited += sent(node, 1, e, 2 * rows * (e - 1) / e * bubble)
        collectives += 3 * times * batches
    if c > 1:
        # Keys and values are gathered, and in training their gradients reduced.
        states = 2 * share.tokens * shape.sizes.num_key_value_heads * shape.sizes.head_dim * shape.element_bytes
        waited += sent(node, t * s, c, times * states / (t * s) * (c - 1) / c * bubble)
        collectives += 2 * times * batches
    if p > 1:
        both = 1 if passes == 1 else 2
        waited += sent(node, t * s * c * (layout.data or 1), p, both * width / t)
        collectives += both * batches * bubble
    shared = sharing_work(shape, layout, batches, passes > 1, node)
    link, network = waited.tolist()
    return shared._replace(
        phase=phase,
        operations=computed,
        activations=passes * layers * width / t * bubble,
        tokens=share.tokens / (s * c),
        calls=layers * batches * passes * bubble,
        rows=share.rows,
        steps=1,
        link=shared.link + link,
        network=shared.network + network,
        collectives=shared.collectives + collectives,
    )


def sharing_work(shape: Shape, layout: ParallelLayout, batches: int, trains: bool, node: int) -> Work:
    """Return the data-parallel communication of `batches` micro-batches.

    FSDP2 gathers and reduce-scatters layer by layer, overlapped with compute; replicas all-reduce before the step,
    exposed.
    """
    layers = shape.sizes.num_hidden_layers // layout.pipeline
    experts = layers * layer_experts(shape) if layout.expert > 1 else 0
    dense = layers * shape.layer_parameters + parameters_outside_layers(shape, layout) - experts
    behind, waited, collectives = np.zeros(2), np.zeros(2), 0.0
    # Parameters, the ranks that shard them, and all ranks.
    for parameters, inner in ((dense, layout.tensor), (experts, layout.expert)):
        if not parameters:
            continue
        ranks = (layout.data or 1) * layout.token_ranks * layout.tensor
        outer, g = ranks // inner, max(1, layout.shard_ranks * layout.tensor // inner)
        g = 1 if layout.shard == "none" else g
        local = parameters / inner
        trained = local * shape.trained / shape.parameters
        if layout.shard != "none" and g > 1:
            gathers = batches * (2 if trains else 1) if layout.shard == "full" else 1
            scatters = batches if trains else 0
            moved = gathers * local * shape.element_bytes + scatters * trained * MASTER_BYTES
            behind += sent(node, inner, g, moved * (g - 1) / g)
            collectives += (gathers + scatters) * (layers + 1)
        summed = outer // g
        if trains and summed > 1:
            sums = sent(node, inner * g, summed, 2 * trained * MASTER_BYTES / g * (summed - 1) / summed)
            waited, behind = (waited + sums, behind) if layout.shard == "none" else (waited, behind + sums)
            collectives += 1
    (link, network), (behind_link, behind_network) = waited.tolist(), behind.tolist()
    return Work(
        "train",
        link=link,
        network=network,
        collectives=collectives,
        behind_link=behind_link,
        behind_network=behind_network,
    )


def train_work(
    shape: Shape,
    layout: ParallelLayout,
    lengths: Lengths,
    max_tokens: int,
    checkpointing: bool,
    scalar: bool,
    node: int,
    updates: int = 1,
    epochs: int = 1,
    trains_tower: bool = False,
) -> Work:
    """Return the work of training one batch for `epochs` passes of `updates` optimizer steps. The images of a frozen
    vision tower are kept from generation or inference.
    """
    share = share_of(lengths, layout.data or 1, updates)
    passes = (2.0 if shape.trained < shape.parameters else 3.0) + checkpointing
    work = model_work("train", shape, layout, share, max_tokens, passes, scalar, node)
    if trains_tower:
        work = work._replace(
            operations=work.operations + passes * operations.tower_operations(shape, share.rows * lengths.seen)
        )
    parameters = local_parameters(shape, layout) * shape.trained / shape.parameters
    work = work._replace(memory=parameters * OPTIMIZER_BYTES)
    return Work("train", *(number * updates * epochs for number in work[1:]))


def infer_work(
    shape: Shape, layout: ParallelLayout, lengths: Lengths, max_tokens: int, scalar: bool, node: int, samples: int = 1
) -> Work:
    """Return the work of one forward pass over a batch; the `samples` rows of a prompt share its encoded images."""
    share = share_of(lengths, layout.data or 1)
    work = model_work("infer", shape, layout, share, max_tokens, 1.0, scalar, node)
    encoded = operations.tower_operations(shape, max(1.0, share.rows / samples) * lengths.seen)
    return work._replace(operations=work.operations + encoded)


def generate_work(
    shape: Shape, tensor: int, replicas: int, lengths: Lengths, slots: int, samples: int, node: int, multiple: int = 1
) -> tuple[Work, Work]:
    """Return the work of one rank in generation: (prefill, decode).

    Each of `replicas` engines has `tensor` ranks and decodes `slots` concurrent rows, padded to a `multiple`; the
    `samples` rows of a prompt share its prefill.
    """
    # The slowest engine: an even sample of all response lengths with the longest, shuffled.
    rows = max(1, math.ceil(len(lengths) * lengths.generated / replicas))
    config = shape.sizes
    sample = (
        np.linspace(0, len(lengths) - 1, rows).round().astype(np.int64) if rows > 1 else np.array([len(lengths) - 1])
    )
    drawn = lengths.ordered[sample][np.random.default_rng(0).permutation(rows)]
    prompt = lengths.prompts.mean()
    prompts = max(1.0, rows / samples)
    path = operations.decoding(drawn, slots, multiple)
    computed = forward_operations(shape, prompts * prompt, prompts * float((lengths.prompts**2).mean()), True) / tensor
    context = float((drawn * prompt + drawn * drawn / 2.0).sum())
    computed += operations.tower_operations(shape, prompts * lengths.seen)
    sizes = operations.MatrixSizes.of(config, shape.parameters - shape.tower, False, shape.idle)
    decoded = (2.0 * (sizes.body - sizes.idle + sizes.head) * path.slot_steps + 4.0 * sizes.queries * context) / tensor
    read = operations.decoding_bytes(sizes, shape.element_bytes, path.steps, context) / tensor
    layers = config.num_hidden_layers
    width = config.hidden_size * shape.element_bytes
    summed = 2 * 2 * layers * width * (tensor - 1) / tensor
    links = [sent(node, 1, tensor, summed * tokens).tolist() for tokens in (prompts * prompt, float(drawn.sum()))]
    prefill = Work(
        "prefill",
        computed,
        activations=layers * width * prompts * prompt / tensor,
        calls=layers,
        steps=1,
        collectives=2 * layers * (tensor > 1),
        link=links[0][0],
        network=links[0][1],
    )
    decode = Work(
        "decode",
        decoded,
        read,
        layers * width * path.slot_steps / tensor,
        path.slot_steps,
        layers * path.steps,
        0.0,
        path.steps,
        collectives=2 * layers * path.steps * (tensor > 1),
        link=links[1][0],
        network=links[1][1],
    )
    return prefill, decode


@cache
def share_received(layout: ParallelLayout, target: GenerationLayout) -> float:
    """Return the maximum share of the model that a rank receives when training ranks reshard weights for generation.

    This is HybridFlow's table 2 (arXiv 2409.19256). `neighbour` and `gather` collect full tensors; otherwise slices
    that a rank already holds are not sent.
    """
    pipeline, tensor = layout.pipeline, layout.tensor
    if target.grouping in ("neighbour", "gather"):
        ranks = pipeline * tensor * (1 if target.grouping == "neighbour" else layout.data or 1)
        return (ranks - 1) / ranks
    groups = target.groups(layout).numpy()
    shared_part = np.ones(groups.shape)
    # The parts of the stages and of each tensor that a rank already holds, and those with which it generates, as parts
    # of [0, 1].
    for trains, parts, targets, generated in (
        (groups // (groups.size // pipeline), pipeline, np.arange(target.pipeline)[:, None], target.pipeline),
        (groups % tensor, tensor, np.arange(target.tensor)[None, :], target.tensor),
    ):
        ends = np.minimum((trains + 1) / parts, (targets + 1) / generated)
        shared_part *= np.maximum(0.0, ends - np.maximum(trains / parts, targets / generated))
    return float(1 / target.ranks - shared_part.min() / layout.shard_ranks)
