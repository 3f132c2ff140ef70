"""Count the work of one role on one layout: three simulators (train, infer, generate), and the bytes of a change of layout.

rows' lengths, a model's shape, a layout ──▶ Work of the busiest device ──rates.price──▶ seconds

Operations of a forward pass over N tokens: 2·N·P of P parameters in matrices, 2·H·D·T² per layer in causal attention of a row of T tokens
with H heads of D numbers. A backward pass takes twice as many; recomputed activations one forward pass more. Tensor parallelism
gathers and scatters tokens twice per layer and pass (Korthikanti et al., arXiv 2205.05198); a pipeline of p ranks and n micro-batches
idles (p - 1) of n + p - 1 turns; a ring of g ranks carries (g - 1) / g of the bytes for each of gather and scatter.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from braidrl.models.memory.footprint import MASTER_BYTES, Shape, beside_layers, cache_bytes, head_width
from braidrl.models.parallel.layout import ParallelLayout
from braidrl.models.parallel.pipeline import RUN
from braidrl.placement.plan.rates import Phase, Work

OPTIMIZER_BYTES = 30
"""What an AdamW step reads and writes of each parameter: gradient, master weight and moments in float32, the weight itself."""
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Lengths:
    """Tokens of the rows of one batch: of prompts (R,) and responses (R,); `generated` times as many rows are sampled as are trained."""

    prompts: Numbers
    responses: Numbers
    generated: float = 1.0

    @cached_property
    def totals(self) -> Numbers:
        """Return the tokens of each row, (R,)."""
        return self.prompts + self.responses

    @cached_property
    def tokens(self) -> int:
        """Return the tokens of all rows."""
        return int(self.totals.sum())

    @cached_property
    def squares(self) -> float:
        """Return the sum of the squared lengths of rows, which attention grows with."""
        return float((self.totals.astype(np.float64) ** 2).sum())

    @cached_property
    def longest(self) -> int:
        """Return the tokens of the longest row."""
        return int(self.totals.max())

    @cached_property
    def ordered(self) -> Numbers:
        """Return responses from the shortest to the longest, (R,)."""
        return np.sort(self.responses)

    def __len__(self) -> int:
        return len(self.prompts)


class Share(NamedTuple):
    """What the busiest of some copies of a model computes of a batch: tokens, squared lengths, rows."""

    tokens: float
    squares: float
    rows: float


def share_of(lengths: Lengths, copies: int, updates: int = 1) -> Share:
    """Return one copy's share of one update; never less than whole rows, and never less than the longest."""
    rows = len(lengths) / updates
    own = math.ceil(rows / copies)
    mean = lengths.tokens / len(lengths)
    tokens = max(lengths.tokens / updates / copies, own * mean if own <= 2 else 0.0)
    if rows / copies < 8:
        # Of few rows one is the longest, now and then: the copy that has it is waited for.
        tokens = max(tokens, mean * (own - 1) + expected_longest(lengths, copies))
    return Share(tokens, lengths.squares / len(lengths) * (tokens / mean), own)


@cache
def expected_longest(lengths: Lengths, among: int) -> float:
    """Return the typical length of the longest of so many rows."""
    return float(np.quantile(lengths.totals, 1 - 1 / (among + 1)))


class Nodes(NamedTuple):
    """How many devices of a node neighbour each other."""

    devices: int

    def roads(self, inner: int, ranks: int) -> str:
        """Return what a group of `ranks` at intervals of `inner` devices talks over: a node's links, or the network."""
        return "link" if inner * ranks <= self.devices else "network"


def matrix_parameters(shape: Shape, scalar: bool) -> int:
    """Return the parameters that each token is multiplied with: all but an embedding that is only looked up."""
    embedding = shape.sizes.vocab_size * shape.sizes.hidden_size
    tied = shape.sizes.tie_word_embeddings
    return shape.parameters - (embedding if scalar or not tied else 0)


def forward_operations(shape: Shape, tokens: float, squares: float, scalar: bool) -> float:
    """Return the operations of a forward pass over rows of so many tokens and squared lengths together."""
    config = shape.sizes
    attention = 2.0 * config.num_hidden_layers * config.num_attention_heads * head_width(config) * squares
    return 2.0 * matrix_parameters(shape, scalar) * tokens + attention


def model_work(
    phase: Phase, shape: Shape, layout: ParallelLayout, share: Share, max_tokens: int, passes: float, scalar: bool,
    nodes: Nodes,
) -> Work:  # fmt: skip
    """Return the work of one rank while its copy of the model computes a share of rows.

    Args:
        layout: with `data` filled in.
        passes: forward passes' worth of operations: 1 to infer, 3 to train, 4 with recomputation, 2 with adapters.
    """
    t, s, p = layout.tensor, layout.sequence, layout.pipeline
    layers = shape.sizes.num_hidden_layers / p
    batches = max(1, math.ceil(share.tokens / max_tokens))
    run = min(batches, RUN * p)
    bubble = (run + p - 1) / run
    operations = passes * forward_operations(shape, share.tokens, share.squares, scalar) / (t * s * p) * bubble
    width = share.tokens * shape.sizes.hidden_size * shape.element_bytes / s
    times = layers * (1 if passes == 1 else passes - 1)
    roads = {"link": 0.0, "network": 0.0}
    collectives = 0.0
    if t > 1:
        roads[nodes.roads(1, t)] += 4 * times * width * (t - 1) / t * bubble
        collectives += 4 * times * batches
    if s > 1:
        roads[nodes.roads(t, s)] += 4 * times * width / t * (s - 1) / s * bubble
        collectives += 4 * times * batches
    if p > 1:
        both = 1 if passes == 1 else 2
        roads[nodes.roads(t * s * (layout.data or 1), p)] += both * width / t
        collectives += both * batches * bubble
    gathered = gather_work(shape, layout, batches, passes > 1, nodes)
    return Work(
        phase, operations, 0.0, layers * batches * passes * bubble, share.rows, 1, roads["link"], roads["network"],
        collectives + gathered.collectives, gathered.behind_link, gathered.behind_network,
    )  # fmt: skip


def gather_work(shape: Shape, layout: ParallelLayout, batches: int, trains: bool, nodes: Nodes) -> Work:
    """Return the bytes of weights that come together for a share of rows and, in training, of gradients that are summed."""
    inner, outer = layout.tensor, (layout.data or 1) * layout.sequence
    layers = shape.sizes.num_hidden_layers // layout.pipeline
    own = (layers * shape.layer_parameters + beside_layers(shape, layout)) / inner
    trained = own * shape.trained / shape.parameters
    roads = {"link": 0.0, "network": 0.0}
    collectives = 0.0
    if layout.shard != "none" and layout.shard_ranks > 1:
        g = layout.shard_ranks
        gathers = batches * (2 if trains else 1) if layout.shard == "full" else 1
        scatters = (batches if layout.shard == "full" else 1) if trains else 0
        moved = gathers * own * shape.element_bytes + scatters * trained * MASTER_BYTES
        roads[nodes.roads(inner, g)] += moved * (g - 1) / g
        collectives += (gathers + scatters) * (layers + 1)
    summed = outer if layout.shard == "none" else outer // layout.shard_ranks
    if trains and summed > 1:
        part = trained * MASTER_BYTES / layout.shard_ranks
        roads[nodes.roads(inner * layout.shard_ranks, summed)] += 2 * part * (summed - 1) / summed
        collectives += 1
    return Work("train", collectives=collectives, behind_link=roads["link"], behind_network=roads["network"])


def train_work(
    shape: Shape, layout: ParallelLayout, lengths: Lengths, max_tokens: int, checkpointing: bool, scalar: bool,
    nodes: Nodes, updates: int = 1, epochs: int = 1,
) -> Work:  # fmt: skip
    """Return the work of training one batch in `updates` optimizer steps in each of `epochs` passes."""
    share = share_of(lengths, layout.data or 1, updates)
    passes = (2.0 if shape.trained < shape.parameters else 3.0) + checkpointing
    one = model_work("train", shape, layout, share, max_tokens, passes, scalar, nodes)
    divisor = layout.tensor * layout.pipeline * layout.shard_ranks
    optimizer = shape.trained / divisor * OPTIMIZER_BYTES
    one = one._replace(memory=optimizer)
    return Work("train", *(number * updates * epochs for number in one[1:]))


def infer_work(
    shape: Shape, layout: ParallelLayout, lengths: Lengths, max_tokens: int, scalar: bool, nodes: Nodes
) -> Work:
    """Return the work of one forward pass over a batch."""
    return model_work(
        "infer", shape, layout, share_of(lengths, layout.data or 1), max_tokens, 1.0, scalar, nodes
    )  # fmt: skip


class Decoding(NamedTuple):
    """One engine's way through its rows: steps until the last ends, and slots that take part in them, summed over steps."""

    steps: int
    slot_steps: int


def decoding(responses: Numbers, slots: int, multiple: int = 1) -> Decoding:
    """Return how an engine decodes responses of so many tokens in `slots` slots that it fills again as they become free.

    Args:
        responses: tokens by row, in the order in which they begin, (R,).
        multiple: a step computes a multiple of so many rows.
    """
    busy: list[int] = []
    ends: list[int] = []
    for tokens in responses.tolist():
        start = heapq.heappop(busy) if len(busy) >= slots else 0
        heapq.heappush(busy, start + tokens)
        ends.append(start + tokens)
    last = np.sort(np.array(ends, dtype=np.int64))
    # Slots are full until the last row has begun; from then on they empty in the order of their ends.
    tail = last[-min(slots, len(last)) :]
    counts = np.arange(len(tail), 0, -1)
    spans = np.diff(tail, prepend=0)
    return Decoding(int(last[-1]), int((spans * (-(-counts // multiple) * multiple)).sum()))


def generate_work(
    shape: Shape,
    tensor: int,
    replicas: int,
    lengths: Lengths,
    slots: int,
    samples: int,
    nodes: Nodes,
    multiple: int = 1,
) -> tuple[Work, Work]:
    """Return the work of one rank in generation: prompts, and decoding.

    Args:
        tensor: ranks of an engine. replicas: engines. slots: rows that each decodes at once.
        samples: rows of a prompt, which is computed once for all of them.
    """
    rows = max(1, math.ceil(len(lengths) * lengths.generated / replicas))
    config = shape.sizes
    own = responses_of_one(lengths, rows)
    prompt = lengths.prompts.mean()
    prompts = max(1.0, rows / samples)
    path = decoding(own, slots, multiple)
    computed = forward_operations(shape, prompts * prompt, prompts * float((lengths.prompts**2).mean()), True) / tensor
    per_token = cache_bytes(config, shape.element_bytes, 1, 1) / tensor
    context = float((own * prompt + own * own / 2.0).sum())
    attention = 4.0 * config.num_hidden_layers * config.num_attention_heads * head_width(config) * context
    operations = (2.0 * matrix_parameters(shape, False) * path.slot_steps + attention) / tensor
    weights = path.steps * matrix_parameters(shape, False) * shape.element_bytes / tensor
    layers = config.num_hidden_layers
    width = config.hidden_size * shape.element_bytes
    summed = 2 * 2 * layers * width * (tensor - 1) / tensor
    road = nodes.roads(1, tensor)
    prefill = Work(
        "prefill", computed, 0.0, layers, rows, 1, **{road: summed * prompts * prompt},
        collectives=2 * layers * (tensor > 1),
    )  # fmt: skip
    decode = Work(
        "decode", operations, weights + per_token * context, layers * path.steps, rows, path.steps,
        **{road: summed * float(own.sum())}, collectives=2 * layers * path.steps * (tensor > 1),
    )  # fmt: skip
    return prefill, decode


def responses_of_one(lengths: Lengths, rows: int) -> Numbers:
    """Return the responses of the engine that ends last: spread evenly over all lengths, with the longest, in mixed order."""
    places = (
        np.linspace(0, len(lengths) - 1, rows).round().astype(np.int64) if rows > 1 else np.array([len(lengths) - 1])
    )
    return lengths.ordered[places][np.random.default_rng(0).permutation(rows)]


def reshard_bytes(shape: Shape, layout: ParallelLayout, target: int, shared: bool, element_bytes: int) -> float:
    """Return the bytes that a rank receives when trained weights go to a layout that divides them by `target`.

    What a rank holds already is not sent: HybridFlow's zero-redundancy transition, arXiv 2409.19256, table 2.

    Args:
        shared: true where trainer and target are the same ranks.
    """
    whole = shape.parameters * element_bytes
    held = whole / (layout.tensor * layout.pipeline * layout.shard_ranks) if shared else 0.0
    return max(0.0, whole / target - held)
