"""Blocks of a tensor: what a rank holds of it, and what one rank sends to another."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

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
        """Elements in the block; a scalar has one."""
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        return tuple(slice(at, at + size) for at, size in zip(self.offsets, self.sizes, strict=True))

    def of(self, whole: Tensor) -> Tensor:
        """Return the block as a view of the global tensor."""
        return whole[self.slices]

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Return the block as an index of a tensor that holds only the block `outer`, which contains it."""
        inside = tuple(at - start for at, start in zip(self.offsets, outer.offsets, strict=True))
        return Box(inside, self.sizes).slices

    def along(self, axis: int, start: int, end: int) -> "Box":
        """Return the same block, narrowed to `start` to `end` along one dimension."""
        offsets = (*self.offsets[:axis], start, *self.offsets[axis + 1 :])
        return replace(self, offsets=offsets, sizes=(*self.sizes[:axis], end - start, *self.sizes[axis + 1 :]))

    def overlap(self, other: "Box") -> "Box | None":
        """Return the intersection, or None where it is empty."""
        starts = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None

    def without(self, other: "Box") -> "list[Box]":
        """Return disjoint blocks that together are this one less its overlap with `other`."""
        inner = self.overlap(other)
        if inner is None:
            return [self]
        found, rest = [], self
        for axis, (at, size) in enumerate(zip(inner.offsets, inner.sizes, strict=True)):
            start, end = rest.offsets[axis], rest.offsets[axis] + rest.sizes[axis]
            found += [rest.along(axis, a, b) for a, b in ((start, at), (at + size, end)) if a < b]
            rest = rest.along(axis, at, at + size)
        return found

    def span(self, start: int, end: int, axis: int = 0) -> "list[Box]":
        """Return blocks that together are the elements `start` to `end` of this one, in memory order; axes before `axis` are one long."""
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
        """Return at most so many disjoint blocks, about equal, that together are this one."""
        if not self.sizes:
            return [self]
        axis = max(range(len(self.sizes)), key=lambda one: self.sizes[one])
        at, size = self.offsets[axis], self.sizes[axis]
        edges = [at + size * part // parts for part in range(parts + 1)]
        return [self.along(axis, a, b) for a, b in pairwise(edges) if a < b]
