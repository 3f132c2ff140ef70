"""From finished responses to the columns that a generate stage writes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Column, Rows
from braidrl.rollout.requests import Response


def to_rows(rows: Rows, finished: Sequence[Response]) -> dict[str, Column]:
    """The columns `tokens` to `version` of a generate stage, in the order of `rows` and not of `finished`.

    `version` is the oldest among the row's tokens; a row that was ended before its first token has version 0.
    Raises ValueError when rows and responses are not the same.
    """
    by_uid = {response.uid: response for response in finished}
    uids = rows.uids()
    if len(by_uid) != len(finished) or set(by_uid) != set(uids) or len(uids) != len(finished):
        raise ValueError(f"{len(finished)} responses for {len(uids)} rows, which are not the same")
    ordered = [by_uid[uid] for uid in uids]
    prompts: Ragged = rows["prompt"]
    sequences = [torch.cat([prompts[i], response.tokens]) for i, response in enumerate(ordered)]
    actions = torch.tensor([len(response.tokens) for response in ordered], dtype=torch.int64)
    lengths = prompts.lengths + actions
    tokens = Ragged.from_rows(sequences, torch.int64)
    return {
        "tokens": tokens,
        "action_mask": tokens.with_values(_actions(prompts.lengths, actions)),
        "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
        "rollout_log_probs": Ragged.from_rows([r.log_probs for r in ordered], _dtype(ordered)),
        "rollout_versions": Ragged.from_rows([r.versions for r in ordered], torch.int64),
        "length": lengths,
        "action_tokens": actions,
        "finish_reason": torch.tensor([int(r.finish_reason) for r in ordered], dtype=torch.int64),
        "version": torch.tensor([int(r.versions.min()) if len(r.versions) else 0 for r in ordered], dtype=torch.int64),
    }


def _actions(prompts: Tensor, actions: Tensor) -> Tensor:
    """False over each prompt and True over each response, for lengths (B,) of both, (N,) bool."""
    stretches = torch.stack([prompts, actions], dim=1).flatten()
    return torch.tensor([False, True]).repeat(len(prompts)).repeat_interleave(stretches)


def _dtype(ordered: Sequence[Response]) -> torch.dtype:
    return ordered[0].log_probs.dtype if ordered else torch.float32
