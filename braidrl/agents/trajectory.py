"""A growing trajectory: append-only token ids, with the engine's log-probs and versions of sampled tokens; and the columns of a generate
stage, here from single responses, in `player` from trajectories.

context ──▶ actions ──▶ observation ──▶ actions | context ──▶ actions          | a new sequence of the same row
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Column, FinishReason, Rows, Uid
from braidrl.engines.requests import Response


@dataclass
class Trajectory:
    """A growing trajectory; only `append` changes it."""

    uid: Uid
    tokens: list[int] = field(default_factory=list)
    """Token ids of all sequences, joined."""
    actions: list[bool] = field(default_factory=list)
    """True for each token that was sampled."""
    sequence_lengths: list[int] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    """Log-probs of the sampled tokens, one tensor for each turn."""
    versions: list[Tensor] = field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        """Return the tokens of the current sequence, the engine's next prompt."""
        return self.tokens[len(self.tokens) - self.sequence_lengths[-1] :]

    @property
    def action_tokens(self) -> int:
        """Return the number of tokens sampled so far, which equals the number of the row's random numbers used."""
        return sum(len(turn) for turn in self.log_probs)

    def append(
        self, tokens: Sequence[int], *, log_probs: Tensor | None = None, versions: Tensor | None = None,
        opens: bool = False,
    ) -> None:  # fmt: skip
        """Append sampled tokens, or tokens that were not sampled.

        Args:
            tokens: Token ids.
            log_probs: (T,) for sampled tokens, None for others.
            versions: (T,) int64 for sampled tokens, None for others.
            opens: Begin a new sequence, which cannot start with sampled tokens.

        Raises:
            ValueError: Lengths differ, only one of log-probs and versions is given, or a sequence starts with an action. The trajectory is
                unchanged.
        """
        if (log_probs is None) != (versions is None):
            raise ValueError(f"row {self.uid}: sampled tokens have log-probs and versions, others have neither")
        if log_probs is not None and versions is not None:
            if not len(tokens) == len(log_probs) == len(versions):
                raise ValueError(
                    f"row {self.uid}: {len(tokens)} tokens, {len(log_probs)} log-probs and {len(versions)} versions"
                )
            if opens or not self.sequence_lengths:
                raise ValueError(f"row {self.uid}: a sequence cannot begin with an action, since nothing predicts it")
        elif not opens and not self.sequence_lengths:
            raise ValueError(f"row {self.uid}: the first tokens must open a sequence")
        elif opens and not tokens:
            raise ValueError(f"row {self.uid}: a sequence must begin with at least one token")
        if opens:
            self.sequence_lengths.append(0)
        self.tokens.extend(tokens)
        self.actions.extend([log_probs is not None] * len(tokens))
        self.sequence_lengths[-1] += len(tokens)
        if log_probs is not None and versions is not None:
            self.log_probs.append(log_probs)
            self.versions.append(versions)


def response_columns(rows: Rows, finished: Sequence[Response]) -> dict[str, Column]:
    """Return the columns `tokens` to `version` of a generate stage with single responses, in the order of `rows`.

    Raises ValueError if `rows` and `finished` do not have the same uids.
    """
    by_uid = {response.uid: response for response in finished}
    uids = rows.uids()
    if len(by_uid) != len(finished) or set(by_uid) != set(uids) or len(uids) != len(finished):
        raise ValueError(f"{len(finished)} responses for {len(uids)} rows, which are not the same")
    ordered = [by_uid[uid] for uid in uids]
    prompts: Ragged = rows["prompt"]
    log_probs = [response.log_probs for response in ordered]
    drawn = torch.tensor([response.tokens.numel() for response in ordered], dtype=torch.int64)
    pieces = [ids for pair in zip(prompts.unbind(), (r.tokens for r in ordered), strict=True) for ids in pair]
    tokens = Ragged.from_lengths(torch.cat(pieces), prompts.lengths + drawn) if ordered else prompts
    stretches = torch.stack([prompts.lengths, drawn], dim=1).flatten()
    actions = torch.tensor([False, True]).repeat(len(ordered)).repeat_interleave(stretches)
    return generated_columns(
        tokens,
        tokens.with_values(actions),
        Ragged.from_lengths(tokens.lengths, torch.ones_like(tokens.lengths)),
        Ragged.from_rows(log_probs, log_probs[0].dtype if log_probs else torch.float32),
        [response.versions for response in ordered],
        [response.finish_reason for response in ordered],
    )


def generated_columns(
    tokens: Ragged, action_mask: Ragged, sequence_lengths: Ragged, log_probs: Ragged, versions: Sequence[Tensor],
    reasons: Sequence[FinishReason],
) -> dict[str, Column]:  # fmt: skip
    """Return the columns `tokens` to `version` of a generate stage; `version` is the oldest of the action tokens, 0 without any."""
    of_tokens = Ragged.from_rows(versions, torch.int64)
    never = torch.iinfo(torch.int64).max
    oldest = torch.full((len(of_tokens),), never).scatter_reduce(0, of_tokens.row_ids(), of_tokens.values, "amin")
    return {
        "tokens": tokens,
        "action_mask": action_mask,
        "sequence_lengths": sequence_lengths,
        "rollout_log_probs": log_probs,
        "rollout_versions": of_tokens,
        "length": tokens.lengths,
        "action_tokens": of_tokens.lengths,
        "finish_reason": torch.tensor([int(reason) for reason in reasons], dtype=torch.int64),
        "version": oldest.where(of_tokens.lengths > 0, 0),
    }
