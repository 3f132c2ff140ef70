"""Ragged tensors: rows of different lengths as flat values and offsets. Payload columns have this form in every
computation.

values_N   x0 x0 x0 | x1 | x2 x2          N = all entries, joined
offsets    0          3    4       6      B + 1 numbers; row b is values[offsets[b]:offsets[b + 1]]
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from braidrl.algorithms.registry import responses
from braidrl.deferred import Tensor, torch


@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows of different lengths: `values` (N, ...) holds the rows joined, `offsets` (B + 1, int64) the start of each
    and the last end.
    """

    values: Tensor
    offsets: Tensor

    def __post_init__(self) -> None:
        if self.offsets.dim() != 1 or self.offsets.dtype != torch.int64 or len(self.offsets) == 0:
            raise ValueError(f"offsets must be int64 of shape (B + 1,), got {self.offsets.dtype} {self.offsets.shape}")
        # On an accelerator this check would synchronise host and device at every construction.
        if self.offsets.device.type == "cpu" and int(self.offsets[-1]) != len(self.values):
            raise ValueError(f"offsets end at {int(self.offsets[-1])} but there are {len(self.values)} values")

    @staticmethod
    def from_lengths(values: Tensor, lengths: Tensor) -> "Ragged":
        """Make rows of these lengths (B,) int64 from consecutive values (N, ...)."""
        return Ragged(values, offsets_of(lengths))

    @staticmethod
    def from_rows(rows: Sequence[Tensor | Sequence[float]], dtype: "torch.dtype") -> "Ragged":
        """Make one row of each tensor (T, ...) or list; the values have this dtype also without rows."""
        tensors = [torch.as_tensor(row, dtype=dtype) for row in rows]
        lengths = torch.tensor([len(row) for row in tensors], dtype=torch.int64)
        # Rows without entries may not know the shape of one.
        filled = [row for row in tensors if len(row)] or tensors[:1]
        values = torch.cat(filled) if filled else torch.empty(0, dtype=dtype)
        return Ragged.from_lengths(values, lengths)

    def __len__(self) -> int:
        # `len` of a tensor is a call of Python code.
        return self.offsets.shape[0] - 1

    def __getitem__(self, row: int) -> Tensor:
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        row = row % len(self)
        return self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]

    def unbind(self) -> list[Tensor]:
        """Return all rows as views; much faster than one index per row."""
        return list(self.values.split(self.lengths.tolist()))

    @property
    def lengths(self) -> Tensor:
        """Return the length of each row, (B,) int64."""
        return self.offsets.diff()

    def row_ids(self) -> Tensor:
        """Return the row of each of the N values, (N,) int64."""
        rows = torch.arange(len(self), device=self.offsets.device)
        return rows.repeat_interleave(self.lengths, output_size=len(self.values))

    def spread(self, per_row: Tensor) -> Tensor:
        """Repeat one number per row (B, ...) over the row's entries, (N, ...)."""
        return per_row.repeat_interleave(self.lengths, dim=0, output_size=len(self.values))

    def row_sums(self) -> Tensor:
        """Return the sum of each row, (B, ...); an empty row gives 0."""
        sums = self.values.new_zeros((len(self), *self.values.shape[1:]))
        return sums.index_add(0, self.row_ids(), self.values)

    def row_means(self) -> Tensor:
        """Return the mean of each row, (B, ...); an empty row gives 0."""
        lengths = self.lengths.clamp(min=1).to(self.values.dtype)
        return self.row_sums() / lengths.reshape(-1, *[1] * (self.values.dim() - 1))

    def with_values(self, values: Tensor) -> "Ragged":
        """Return rows of the same lengths with other values."""
        return Ragged(values, self.offsets)

    def take(self, rows: Tensor) -> "Ragged":
        """Return the rows at these positions (K,) int64, in this order; positions may repeat. Consecutive rows are not
        copied.
        """
        if len(rows) and rows.device.type == "cpu" and bool((rows.diff() == 1).all()) and int(rows[0]) >= 0:
            first, end = int(rows[0]), int(rows[-1]) + 1
            begin = self.offsets[first]
            return Ragged(self.values[int(begin) : int(self.offsets[end])], self.offsets[first : end + 1] - begin)
        lengths = self.lengths[rows]
        offsets = offsets_of(lengths)
        shift = (self.offsets[:-1][rows] - offsets[:-1]).repeat_interleave(lengths)
        return Ragged(self.values[torch.arange(len(shift), device=shift.device) + shift], offsets)

    def where(self, kept: Tensor) -> "Ragged":
        """Return the rows with only those entries for which `kept` (N,) is true."""
        ends = torch.cat([kept.new_zeros(1, dtype=torch.int64), kept.cumsum(0)])
        return Ragged(self.values[kept], ends[self.offsets])

    def tolist(self) -> list[list[Any]]:
        values, ends = self.values.tolist(), self.offsets.tolist()
        return [values[start:end] for start, end in pairwise(ends)]

    @staticmethod
    def cat(parts: "Sequence[Ragged]") -> "Ragged":
        """Concatenate the rows of all parts."""
        return Ragged.from_lengths(torch.cat([p.values for p in parts]), torch.cat([p.lengths for p in parts]))


def observation_mask(action_mask: Ragged, sequence_lengths: Ragged) -> Tensor:
    """Return True at the observation tokens, (N,) bool: non-action tokens after the first action of their sequence.

    Tokens before the first action are a prompt, or a context whose actions are in an earlier sequence.
    """
    acted = action_mask.values.to(torch.int64).cumsum(0)
    starts = offsets_of(sequence_lengths.values)[:-1]
    before = torch.nn.functional.pad(acted, (1, 0))[starts].repeat_interleave(sequence_lengths.values)
    return ~action_mask.values & (acted > before)


def offsets_of(lengths: Tensor) -> Tensor:
    """Return the running sum of `lengths` (B,) with a leading 0, (B + 1,) int64."""
    return torch.nn.functional.pad(lengths.to(torch.int64).cumsum(0), (1, 0))


# For SFT, reward models and DPO, whose responses come from the data.
@responses.register(writes=["tokens", "action_mask", "sequence_lengths", "length", "action_tokens"])
def join_response(
    prompt: Ragged, response: Ragged, response_mask: Ragged | None = None
) -> tuple[Ragged, Ragged, Ragged, Tensor, Tensor]:
    """Join prompt and response ids as sequences, with masks and lengths; actions are all response tokens, or those of
    `response_mask`.
    """
    length, offsets = prompt.lengths + response.lengths, offsets_of(prompt.lengths + response.lengths)
    tokens = prompt.values.new_empty(len(prompt.values) + len(response.values))
    mask = torch.zeros_like(tokens, dtype=torch.bool)
    # Response tokens of row b start at offsets[b] plus the length of its prompt.
    starts = response.spread(offsets[:-1] + prompt.lengths - response.offsets[:-1])
    mask[torch.arange(len(response.values), device=starts.device) + starts] = True
    tokens[mask] = response.values
    tokens[~mask] = prompt.values
    sequences = Ragged(length, torch.arange(len(length) + 1, device=length.device))
    actions = response.lengths
    if response_mask is not None:
        mask[mask.clone()] = response_mask.values
        actions = response_mask.with_values(response_mask.values.to(torch.int64)).row_sums()
    return Ragged(tokens, offsets), Ragged(mask, offsets), sequences, length, actions
