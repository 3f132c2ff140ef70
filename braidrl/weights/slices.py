"""The slice of each tensor that a tensor-parallel rank holds: one rule for loading, updating and moving a model.

q k v gate up, embedding, output layer    divided by rows of the weight: heads, inner width, vocabulary
o down                                    divided by columns: each rank's product is a partial sum
norms, biases of o and down               replicated on every rank
"""

import re
from collections.abc import Mapping, Sequence

from braidrl.weights.boxes import Box

DIMENSIONS: dict[tuple[str, str], int] = {
    ("colwise", "weight"): 0,
    ("colwise", "bias"): 0,
    ("rowwise", "weight"): 1,
    ("embedding_rowwise", "weight"): 0,
}
"""The divided dimension, by a module's style in the model's plan and the tensor's own name; nothing else is divided."""


def boxes_of(shapes: Mapping[str, Sequence[int]], plan: Mapping[str, str], rank: int, ranks: int) -> dict[str, Box]:
    """Return the local block of each tensor of these global shapes.

    Args:
        shapes: Global shapes by tensor name.
        plan: Styles by module name, with `*` in place of a layer's number.
        rank: The tensor-parallel rank.
        ranks: The number of ranks.
    """
    found = {}
    for name, shape in shapes.items():
        module, _, own = name.rpartition(".")
        dimension = DIMENSIONS.get((plan.get(pattern_of(module), ""), own))
        box = Box.whole(shape)
        if dimension is not None:
            start, count = chunk(shape[dimension], rank, ranks)
            box = box.along(dimension, start, start + count)
        found[name] = box
    return found


def chunk(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return the offset and the length of a rank's chunk of a dimension, divided as torch does: the last ones may be shorter, or empty."""
    each = -(-length // ranks)
    offset = min(rank * each, length)
    return offset, min(each, length - offset)


def pattern_of(module: str) -> str:
    """Return a module's name with `*` in place of numbers, as plans have it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
