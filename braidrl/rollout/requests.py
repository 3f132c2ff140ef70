"""What an engine is asked for, and what it gives back: plain values, the same for every engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from braidrl.algorithms.random import hashed
from braidrl.data.rows import FinishReason

Uid = tuple[int, int, int]


@dataclass(frozen=True)
class SamplingParams:
    """How one response is drawn. A temperature of 0, or `greedy`, takes the likeliest token."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    max_tokens: int = 512
    stop_token_ids: tuple[int, ...] = ()
    """Beside the model's own end of sequence."""
    stop: tuple[str, ...] = ()
    """The response ends with the token that completes one of these texts."""
    greedy: bool = False
    ends: bool = True
    """False draws on past the model's end of sequence."""

    def __post_init__(self) -> None:
        """Raises ValueError for settings that leave no token to draw."""
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0 or self.max_tokens < 1:
            raise ValueError(f"temperature >= 0, 0 < top_p <= 1, top_k >= 0 and max_tokens >= 1 are needed, got {self}")
        if "" in self.stop:
            raise ValueError("a stop text is empty")

    @property
    def takes_likeliest(self) -> bool:
        return self.greedy or self.temperature == 0

    @property
    def log_prob_temperature(self) -> float:
        """What logits are divided by before log-softmax; 1 where a temperature of 0 asks for the likeliest token."""
        return self.temperature or 1.0


@dataclass(frozen=True, eq=False)
class Request:
    """One response to `prompt`, (P,) int64 token ids with P >= 1."""

    uid: Uid
    prompt: Tensor
    sampling: SamplingParams
    purpose: str = "train"
    stage: str = "generate"
    first_draw: int = 0
    """Tokens that this row drew before, in earlier turns: their random numbers are not used again."""

    def __post_init__(self) -> None:
        """Raises ValueError for a prompt that is not a non-empty row of ids."""
        if self.prompt.dim() != 1 or not len(self.prompt) or self.prompt.dtype != torch.int64:
            raise ValueError(f"row {self.uid}: a prompt is one or more int64 ids, got {self.prompt.shape}")

    def key(self, seed: int) -> int:
        """The row's random key, from which number `first_draw` + tokens drawn since is taken."""
        return int(hashed(seed, self.purpose, self.stage, self.uid[1], self.uid[2]))


@dataclass(frozen=True, eq=False)
class Response:
    """A response of T tokens, on the CPU."""

    uid: Uid
    tokens: Tensor
    """(T,) int64, the stop token included."""
    log_probs: Tensor
    """(T,) log-softmax(logits / temperature) at each token, before any top-k or top-p cut."""
    finish_reason: FinishReason
    versions: Tensor
    """(T,) int64, the weights' version that drew each token."""
