"""The work of generation: a simulated engine with continuous batching, which refills slots as rows end.

rows' lengths ──slots──▶ steps until the last row ends ──▶ operations, bytes of weights, keys and values
"""

import math

import numpy as np

from braidrl.plan.rates import Work
from braidrl.plan.work import IntArray, Lengths, Nodes, forward_operations, matrix_sizes
from braidrl.training.memory.footprint import Shape
from braidrl.training.operations import decoding, decoding_bytes


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
    """Return the work of one rank in generation: (prefill, decode).

    Args:
        shape: The engine's model.
        tensor: Tensor-parallel ranks of an engine.
        replicas: The number of engines.
        lengths: The rows of the batch.
        slots: Rows that an engine decodes at once.
        samples: Rows per prompt, which share its prefill.
        nodes: Decides which links carry collectives.
        multiple: Rows are padded to a multiple of this in each decode step.
    """
    rows = max(1, math.ceil(len(lengths) * lengths.generated / replicas))
    config = shape.sizes
    own = responses_of_one(lengths, rows)
    prompt = lengths.prompts.mean()
    prompts = max(1.0, rows / samples)
    path = decoding(own, slots, multiple)
    computed = forward_operations(shape, prompts * prompt, prompts * float((lengths.prompts**2).mean()), True) / tensor
    context = float((own * prompt + own * own / 2.0).sum())
    sizes = matrix_sizes(shape, False)
    operations = (2.0 * (sizes.body + sizes.head) * path.slot_steps + 4.0 * sizes.queries * context) / tensor
    read = decoding_bytes(sizes, shape.element_bytes, path.steps, context) / tensor
    layers = config.num_hidden_layers
    width = config.hidden_size * shape.element_bytes
    summed = 2 * 2 * layers * width * (tensor - 1) / tensor
    prefill = Work(
        "prefill", computed, activations=layers * width * prompts * prompt / tensor, calls=layers, steps=1,
        collectives=2 * layers * (tensor > 1), **nodes.sent(1, tensor, summed * prompts * prompt)._asdict(),
    )  # fmt: skip
    decode = Work(
        "decode", operations, read, layers * width * path.slot_steps / tensor, path.slot_steps,
        layers * path.steps, 0.0, path.steps, collectives=2 * layers * path.steps * (tensor > 1),
        **nodes.sent(1, tensor, summed * float(own.sum()))._asdict(),
    )  # fmt: skip
    return prefill, decode


def responses_of_one(lengths: Lengths, rows: int) -> IntArray:
    """Return response lengths of the slowest engine: an even sample of all lengths with the longest, shuffled."""
    places = (
        np.linspace(0, len(lengths) - 1, rows).round().astype(np.int64) if rows > 1 else np.array([len(lengths) - 1])
    )
    return lengths.ordered[places][np.random.default_rng(0).permutation(rows)]
