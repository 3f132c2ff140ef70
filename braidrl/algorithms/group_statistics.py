"""Statistics over the rows of one prompt. Rows are matched by group number, never by position.

group   7 3 7 3 3      rows of unfinished or mixed batches may come in any order
index   1 0 1 0 0      the same, counted from 0
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Groups:
    """The groups of some rows: `numbers` (K,) are the group numbers, ascending; `index` (B,) is each row's position among them."""

    numbers: Tensor
    index: Tensor

    @staticmethod
    def of(group: Tensor) -> "Groups":
        """Return the groups of rows with the group numbers `group` (B,) int64."""
        numbers, index = torch.unique(group, return_inverse=True)
        return Groups(numbers, index)

    def __len__(self) -> int:
        return len(self.numbers)

    def sums(self, per_row: Tensor) -> Tensor:
        """Return the sum of `per_row` (B,) in each group, (K,)."""
        return per_row.new_zeros(len(self)).index_add(0, self.index, per_row)

    def sizes(self) -> Tensor:
        """Return the number of rows in each group, (K,) int64."""
        return self.sums(torch.ones_like(self.index))

    def means(self, per_row: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean of `per_row` (B,) in each group, (K,), weighted by `weights` (B,); 0 where the weights add up to 0."""
        weights = torch.ones_like(per_row) if weights is None else weights.to(per_row.dtype)
        total = self.sums(weights)
        return self.sums(per_row * weights) / total.masked_fill(total == 0, 1)

    def varies(self, per_row: Tensor, counted: Tensor | None = None) -> Tensor:
        """Return True for each group in which `per_row` (B,) has different values among the rows `counted`, (K,) bool.

        The comparison is exact. The mean of equal numbers may differ from them by rounding, and a division by a tiny standard
        deviation would amplify that difference.
        """
        high = per_row if counted is None else per_row.masked_fill(~counted, -torch.inf)
        low = per_row if counted is None else per_row.masked_fill(~counted, torch.inf)
        start = per_row.new_zeros(len(self))
        highest = start.scatter_reduce(0, self.index, high, "amax", include_self=False)
        lowest = start.scatter_reduce(0, self.index, low, "amin", include_self=False)
        return highest > lowest

    def spread(self, per_group: Tensor) -> Tensor:
        """Repeat one number per group (K,) at each of its rows, (B,)."""
        return per_group[self.index]
