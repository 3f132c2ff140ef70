"""One trajectory while it grows: token ids that are only ever appended to, and what the engine said of those that it drew.

context ──▶ actions ──▶ observation ──▶ actions | context ──▶ actions          | a new sequence of the same row
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged
from braidrl.data.rows import Column, FinishReason
from braidrl.rollout.requests import Uid


@dataclass
class Trajectory:
    """`append` alone changes it."""

    uid: Uid
    tokens: list[int] = field(default_factory=list)
    """Of all sequences, joined."""
    actions: list[bool] = field(default_factory=list)
    """True for each token that was sampled."""
    sequence_lengths: list[int] = field(default_factory=list)
    log_probs: list[Tensor] = field(default_factory=list)
    """Of the sampled tokens, one tensor for each turn."""
    versions: list[Tensor] = field(default_factory=list)

    @property
    def sequence(self) -> list[int]:
        """The tokens of the sequence that is being extended: what the engine is given next."""
        return self.tokens[len(self.tokens) - self.sequence_lengths[-1] :]

    @property
    def action_tokens(self) -> int:
        """Tokens sampled so far; so many random numbers of the row are used up."""
        return sum(len(turn) for turn in self.log_probs)

    @property
    def last_turn(self) -> list[int]:
        """What was sampled last, while nothing has been appended to it."""
        return self.tokens[len(self.tokens) - len(self.log_probs[-1]) :]

    def append(
        self,
        tokens: Sequence[int],
        *,
        log_probs: Tensor | None = None,
        versions: Tensor | None = None,
        opens: bool = False,
    ) -> None:
        """Adds what was sampled, with log-probs (T,) and versions (T,), or without them what was not.

        `opens` begins a new sequence, with a context and never with an action. Raises ValueError, and changes nothing, for lengths
        that differ, for log-probs without versions or the reverse, and for actions where nothing predicts them.
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


def trajectory_columns(trajectories: Sequence[Trajectory], reasons: Sequence[FinishReason]) -> dict[str, Column]:
    """The columns `prompt` to `version` of a generate stage, in the order of `trajectories`.

    `prompt` is what precedes the first action of the first sequence; `version` the oldest among the row's tokens, 0 without any.
    """
    prompts = [first_context(trajectory) for trajectory in trajectories]
    tokens = Ragged.from_rows([t.tokens for t in trajectories], torch.int64)
    versions = [torch.cat([*t.versions, torch.empty(0, dtype=torch.int64)]) for t in trajectories]
    log_probs = [torch.cat([*t.log_probs, torch.empty(0, dtype=dtype_of(trajectories))]) for t in trajectories]
    return {
        "prompt": Ragged.from_rows(prompts, torch.int64),
        "prompt_length": torch.tensor([len(prompt) for prompt in prompts], dtype=torch.int64),
        "tokens": tokens,
        "action_mask": Ragged.from_rows([t.actions for t in trajectories], torch.bool),
        "sequence_lengths": Ragged.from_rows([t.sequence_lengths for t in trajectories], torch.int64),
        "rollout_log_probs": Ragged.from_rows(log_probs, dtype_of(trajectories)),
        "rollout_versions": Ragged.from_rows(versions, torch.int64),
        "length": tokens.lengths,
        "action_tokens": torch.tensor([t.action_tokens for t in trajectories], dtype=torch.int64),
        "finish_reason": torch.tensor([int(reason) for reason in reasons], dtype=torch.int64),
        "version": torch.tensor([int(v.min()) if len(v) else 0 for v in versions], dtype=torch.int64),
    }


def first_context(trajectory: Trajectory) -> list[int]:
    """What precedes the first action; all of the first sequence where there is none."""
    end = trajectory.sequence_lengths[0]
    acted = trajectory.actions[:end]
    return trajectory.tokens[: acted.index(True) if True in acted else end]


def dtype_of(trajectories: Sequence[Trajectory]) -> torch.dtype:
    """Of the log-probs: the engine's, which is the same for all."""
    return next((turn.dtype for t in trajectories for turn in t.log_probs), torch.float32)
