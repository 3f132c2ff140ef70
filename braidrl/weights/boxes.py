"""Blocks of global tensors: the arithmetic behind shards, transfers and tensor-parallel slices.

q k v gate up, embedding, output layer    sharded by rows of the weight: heads, inner width, vocabulary
o down                                    sharded by columns: each rank's product is a partial sum
norms, biases of o and down               replicated on every rank
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class Box:
    """A block: its offset and its size along each dimension of the global tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "Box":
        """Return the box of the full tensor."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def elements(self) -> int:
        """The number of elements in the block; a scalar has one."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def of(self, tensor: Tensor, held: "Box | None" = None) -> Tensor:
        """Return this block as a view of the global tensor, or of a tensor with only the block `held` around it."""
        if held is None:
            return tensor[self.slices]
        inside = tuple(at - start for at, start in zip(self.offsets, held.offsets, strict=True))
        return tensor[Box(inside, self.sizes).slices]

    def along(self, axis: int, start: int, end: int) -> "Box":
        """Return this block narrowed to `start:end` along one dimension."""
        offsets = (*self.offsets[:axis], start, *self.offsets[axis + 1 :])
        return replace(self, offsets=offsets, sizes=(*self.sizes[:axis], end - start, *self.sizes[axis + 1 :]))

    def contains(self, other: "Box") -> bool:
        """Return True if this block contains the other one."""
        edges = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        return all(at <= start and start + size <= at + length for at, length, start, size in edges)

    def nested(self, inner: "Box") -> "Box":
        """Return the block `inner` of this one's tensor, which may lack leading dimensions, in the global tensor."""
        lacking = len(self.sizes) - len(inner.sizes)
        starts = (start + at for start, at in zip(self.offsets[lacking:], inner.offsets, strict=True))
        return Box((*self.offsets[:lacking], *starts), (*self.sizes[:lacking], *inner.sizes))

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection, or None if it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def span(self, start: int, end: int, axis: int = 0) -> "list[Box]":
        """Return blocks that cover elements `start:end` of this one in memory order; axes before `axis` have size 1."""
        if start >= end:
            return []
        if end - start == self.elements:
            return [self]
        row, at = self.elements // self.sizes[axis], self.offsets[axis]
        first, last = -(-start // row), end // row
        if first > last:
            return self.along(axis, at + last, at + last + 1).span(start - last * row, end - last * row, axis + 1)
        head = self.along(axis, at + first - 1, at + first) if start < first * row else None
        tail = self.along(axis, at + last, at + last + 1) if end > last * row else None
        return [
            *(head.span(start - (first - 1) * row, row, axis + 1) if head else ()),
            *([self.along(axis, at + first, at + last)] if first < last else ()),
            *(tail.span(0, end - last * row, axis + 1) if tail else ()),
        ]

    def divided(self, parts: int) -> "list[Box]":
        """Split this block into at most `parts` disjoint blocks of about equal size."""
        if not self.sizes:
            return [self]
        axis = max(range(len(self.sizes)), key=lambda dimension: self.sizes[dimension])
        at, size = self.offsets[axis], self.sizes[axis]
        edges = [at + size * part // parts for part in range(parts + 1)]
        return [self.along(axis, a, b) for a, b in pairwise(edges) if a < b]


@dataclass(frozen=True)
class Slices:
    """The global shape and the local block of each of a model's tensors, under all of its names."""

    shapes: Mapping[str, torch.Size]
    boxes: Mapping[str, Box]


DIMENSIONS: dict[tuple[str, str], int] = {
    ("colwise", "weight"): 0,
    ("colwise", "bias"): 0,
    ("rowwise", "weight"): 1,
    ("embedding_rowwise", "weight"): 0,
}
"""The sharded dimension by (the module's style in the model's plan, the tensor's own name).

All other tensors are replicated.
"""


def boxes_of(shapes: Mapping[str, Sequence[int]], plan: Mapping[str, str], rank: int, ranks: int) -> dict[str, Box]:
    """Return a tensor-parallel rank's block of each tensor; `plan` has styles by module name, `*` for layer numbers."""
    boxes = {}
    for name, shape in shapes.items():
        module, _, leaf = name.rpartition(".")
        dimension = DIMENSIONS.get((plan.get(pattern_of(module), ""), leaf))
        box = Box.whole(shape)
        if dimension is not None:
            start, count = chunk(shape[dimension], rank, ranks)
            box = box.along(dimension, start, start + count)
        boxes[name] = box
    return boxes


def chunk(length: int, rank: int, ranks: int) -> tuple[int, int]:
    """Return (offset, length) of a rank's chunk of a dimension, split as `torch.chunk` does: the last ones may be
    shorter, or empty.
    """
    size = -(-length // ranks)
    offset = min(rank * size, length)
    return offset, min(size, length - offset)


def pattern_of(module: str) -> str:
    """Return a module's name with `*` in place of numbers, as in tensor-parallel plans."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", module)
