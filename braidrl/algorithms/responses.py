"""Rows with given responses in place of sampled ones: for SFT, reward models and DPO."""

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged, offsets_of
from braidrl.algorithms.registry import responses


@responses.register(writes=["tokens", "action_mask", "sequence_lengths", "length", "action_tokens"])
def join_response(
    prompt: Ragged, response: Ragged, response_mask: Ragged | None = None
) -> tuple[Ragged, Ragged, Ragged, Tensor, Tensor]:
    """Join prompt ids and response ids as one sequence per row. All response tokens are actions, or only those in `response_mask`.

    Returns:
        tokens (int64), action_mask (bool) and sequence_lengths (one per row), and per row the number of tokens and of action tokens,
        (B,) int64.
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
