"""A vLLM logits processor that draws tokens as the embedded engine does: by each row's own random numbers.

logits ──sample, by (key, position)──▶ token ──▶ logits: -inf, and the token's log-prob in its place

vLLM then can draw no other token, and reports that number as the token's log-prob: log-softmax(logits / temperature) before any top-k or
top-p cut, which none of vLLM's own modes returns. Only vLLM's plug-in interface is used.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, process_dict_updates

from braidrl.algorithms.random import uniform
from braidrl.engines.requests import Draws, parse_draws
from braidrl.engines.sampling import batch_sampling, sample


@dataclass(frozen=True)
class Drawing:
    """One row's draws, and the list of its tokens, to which vLLM appends."""

    draws: Draws
    tokens: list[int]

    @property
    def position(self) -> int:
        """Return the index of the next draw."""
        return self.draws.first + len(self.tokens)


@dataclass(frozen=True)
class DrawBatch:
    """The rows of a step in vLLM's order, with their constant settings as tensors (B,)."""

    rows: Sequence[Drawing]
    key: Tensor
    temperature: Tensor
    greedy: Tensor
    top_k: Tensor
    top_p: Tensor

    @staticmethod
    def of(rows: Sequence[Drawing], device: torch.device) -> "DrawBatch":
        asked = [row.draws.sampling for row in rows]

        def facts(values: list[Any], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return DrawBatch(
            rows,
            facts([row.draws.key for row in rows], torch.int64),
            facts([s.log_prob_temperature for s in asked], torch.float64),
            facts([s.takes_likeliest for s in asked], torch.bool),
            facts([s.top_k for s in asked], torch.int64),
            facts([s.top_p for s in asked], torch.float64),
        )

    def draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Draw tokens (B,), and return them with their log-probs (B,); overwrites `logits` (B, V)."""
        positions = torch.tensor([row.position for row in self.rows], device=self.key.device)
        asked = [row.draws.sampling for row in self.rows]
        choice = batch_sampling(asked, self.temperature, self.greedy, self.top_k, self.top_p)
        return sample(logits, choice, uniform(self.key, positions))


class DrawByRow(LogitsProcessor):
    """The logits processor; vLLM makes one per engine, and passes it the rows' positions in the batch."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raise ValueError for a request that Braid did not make: a server answers it with an error and continues."""
        parse_draws(sampling_params.extra_args)

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self._device = device
        self._draws: dict[int, Drawing] = {}
        self._batch: DrawBatch | None = None

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is not None:
            process_dict_updates(
                self._draws, batch_update, lambda given, _, tokens: Drawing(parse_draws(given.extra_args), tokens)
            )
            self._batch = None

    def apply(self, logits: Tensor) -> Tensor:
        if self._batch is None:
            self._batch = DrawBatch.of([self._draws[place] for place in range(len(logits))], self._device)
        tokens, log_probs = self._batch.draw(logits)
        return logits.fill_(-torch.inf).scatter_(1, tokens[:, None], log_probs[:, None].to(logits.dtype))
