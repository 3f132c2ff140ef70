"""Which part of each of a model's tensors a rank has, where ranks divide the matrices and the vocabulary: one rule for whoever loads
a model, updates it or moves it.

    q k v gate up, embedding, output layer    divided by rows of the weight: heads, inner width, vocabulary
    o down                                    divided by columns: each rank's product is a part of a sum
    norms, biases of o and down               whole on every rank
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from braidrl.models.parallel.boxes import Box

DIMENSIONS: dict[tuple[str, str], int] = {
    ("colwise", "weight"): 0,
    ("colwise", "bias"): 0,
    ("rowwise", "weight"): 1,
    ("embedding_rowwise", "weight"): 0,
}
"""The dimension that is divided, by the style of a module in the model's plan and the tensor's own name; nothing else is divided."""


def boxes_of(shapes: Mapping[str, Sequence[int]], plan: Mapping[str, str], rank: int, ranks: int) -> dict[str, Box]:
    """What rank `rank` of `ranks` has of tensors of these whole shapes.

    `plan` gives the style of modules by their whole names, in which `*` stands for a layer's number.
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
    """Where a rank's part of a dimension begins and how long it is, as torch divides: the last ones may be shorter, or empty."""
    each = -(-length // ranks)
    offset = min(rank * each, length)
    return offset, min(each, length - offset)


def pattern_of(module: str) -> str:
    """A module's name with `*` in place of numbers, as plans name it."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
