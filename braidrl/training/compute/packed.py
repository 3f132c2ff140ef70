"""Rows packed end to end for one forward pass, without padding; attention stays within each sequence.

tokens      p p p a a | p p a a a | p a          concatenated rows, or sequences of a row
actions           ^ ^       ^ ^ ^     ^          sampled tokens; each is predicted from the position before it
"""

from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from braidrl.algorithms.ragged import offsets_of
from braidrl.data.rows import Rows
from braidrl.training.compute.attention import AttentionContext, PackedSequences

FILLER = 64
"""Length of padding sequences; attention over many short sequences costs less than over a long one."""


@dataclass(frozen=True)
class Packed:
    """N tokens of B rows with A action tokens, packed without padding.

    input_ids, position_ids (N,)
    sequence_lengths: of all sequences
    predictors (A,): positions whose hidden states predict the actions
    targets (A,): the actions
    offsets (B + 1,), on the CPU: each row's slice of the A actions
    row_ends (B,): position of each row's last token
    hidden (1, N, D): the previous pipeline rank's output; None on the first
    """

    input_ids: Tensor
    position_ids: Tensor
    sequence_lengths: tuple[int, ...]
    predictors: Tensor
    targets: Tensor
    offsets: Tensor
    row_ends: Tensor
    hidden: Tensor | None = field(default=None, kw_only=True)

    def attention(self) -> AttentionContext:
        """Return the attention context of these tokens."""
        return PackedSequences.of(self.sequence_lengths, self.input_ids.device, keep_scores=True)

    def padded(self, tokens: int) -> Self:
        """Return the same rows padded to `tokens` tokens by filler sequences."""
        missing = tokens - len(self.input_ids)
        if not missing:
            return self
        positions = torch.arange(missing, device=self.input_ids.device) % FILLER
        lengths = tuple(min(FILLER, missing - start) for start in range(0, missing, FILLER))
        return replace(
            self,
            input_ids=torch.cat([self.input_ids, torch.zeros_like(positions)]),
            position_ids=torch.cat([self.position_ids, positions]),
            **self._followed_by(lengths),
        )

    def _followed_by(self, lengths: tuple[int, ...]) -> dict[str, Any]:
        """Return the fields of the attention context with filler sequences of these lengths appended."""
        return {"sequence_lengths": (*self.sequence_lengths, *lengths)}


def pack(rows: Rows, device: torch.device) -> Packed:
    """Pack rows for one forward pass. Raises ValueError if a sequence starts with an action, which nothing can predict."""
    tokens, lengths = rows["tokens"], rows["sequence_lengths"].values
    actions = rows["action_mask"].values.nonzero().flatten()
    starts = offsets_of(lengths)
    positions = torch.arange(len(tokens.values)) - starts[:-1].repeat_interleave(lengths)
    if len(actions) and int(positions[actions].min()) == 0:
        raise ValueError("an action token begins a sequence; a prompt must hold at least one token")
    per_row = rows["action_mask"].with_values(rows["action_mask"].values.to(torch.int64)).row_sums()
    return Packed(
        tokens.values.to(device), positions.to(device), tuple(lengths.tolist()), (actions - 1).to(device),
        tokens.values[actions].to(device), offsets_of(per_row), (tokens.offsets[1:] - 1).to(device),
    )  # fmt: skip
