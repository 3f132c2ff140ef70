"""Sampling: draws a token per row from logits and one uniform number, and returns its log-prob, without sorting the
vocabulary.

Shapes: B rows, V vocabulary.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from braidrl.engines.requests import SamplingParams

BLOCK = 128
"""Tokens per block when the vocabulary is long: a block is found first, then the token in it."""
NUCLEUS = 256
"""Number of likeliest tokens that are searched for a top-p set before the whole vocabulary is sorted."""


@dataclass(frozen=True)
class BatchSampling:
    """The sampling settings of B rows as tensors (B,); None where no row has the setting."""

    temperature: Tensor | None = None
    greedy: Tensor | None = None
    """True for a row that takes its likeliest token."""
    top_k: Tensor | None = None
    """0 means no cut."""
    top_p: Tensor | None = None
    """1 means no cut."""
    most: int = 0
    """The largest top-k, known on the host without a device synchronization."""

    def of(self, rows: Tensor) -> "BatchSampling":
        """Return the settings for tokens of these rows, (N,)."""
        settings = (self.temperature, self.greedy, self.top_k, self.top_p)
        temperature, greedy, top_k, top_p = (None if setting is None else setting[rows] for setting in settings)
        return BatchSampling(temperature, greedy, top_k, top_p, self.most)


def batch_sampling(rows: Sequence[SamplingParams], device: torch.device | str) -> BatchSampling:
    """Return the settings of B rows as tensors on the device; a setting that no row uses is None."""

    def tensor(values: Iterable[Any], used: bool, dtype: torch.dtype) -> Tensor | None:
        return torch.tensor(list(values), dtype=dtype, device=device) if used else None

    return BatchSampling(
        tensor((s.log_prob_temperature for s in rows), any(s.log_prob_temperature != 1 for s in rows), torch.float64),
        tensor((s.takes_likeliest for s in rows), any(s.takes_likeliest for s in rows), torch.bool),
        tensor((s.top_k for s in rows), any(s.top_k for s in rows), torch.int64),
        tensor((s.top_p for s in rows), any(s.top_p < 1 for s in rows), torch.float64),
        max((s.top_k for s in rows), default=0),
    )


def sample(logits: Tensor, sampling: BatchSampling, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token (B,) int64 for each of B rows; return it with its log-prob (B,) in nats at the row's temperature,
    before any cut.

    `logits` (B, V) are overwritten where they are float32 or float64; `uniforms` (B,) float64 in [0, 1) are one random
    number per row.
    """
    logits = scaled(logits, sampling)
    largest, likeliest = logits.max(-1, keepdim=True)
    weights = (logits - largest).exp_()
    total = weights.sum(-1, keepdim=True)
    if sampling.top_k is not None:
        ranks = sampling.top_k.clamp(max=weights.shape[-1])
        values = weights.topk(min(sampling.most, weights.shape[-1]), dim=-1).values
        least = values.gather(-1, (ranks - 1).clamp(min=0)[:, None])
        weights = weights.masked_fill((weights < least) & (ranks > 0)[:, None], 0.0)
    if sampling.top_p is not None:
        # Keep the smallest set of likeliest tokens with the share `top_p` of the weight left by top-k.
        everything = (sampling.top_p >= 1)[:, None]
        least_weight = sampling.top_p.double()[:, None] * weights.sum(-1, keepdim=True, dtype=torch.float64)
        for width in (NUCLEUS, weights.shape[-1]):
            values = weights.topk(min(width, weights.shape[-1]), dim=-1).values
            short = values.cumsum(-1, dtype=torch.float64) < least_weight
            if not bool((short[:, -1:] & ~everything).any()):
                break
        last = short.sum(-1, keepdim=True).clamp(max=values.shape[-1] - 1)
        weights = weights.masked_fill(weights < values.gather(-1, last).masked_fill(everything, 0.0), 0.0)
    tokens = inverse_cdf(weights, uniforms)[:, None]
    if sampling.greedy is not None:
        tokens = torch.where(sampling.greedy[:, None], likeliest, tokens)
    log_probs = logits.gather(-1, tokens) - largest - total.log()
    return tokens[:, 0], log_probs[:, 0]


def scaled(logits: Tensor, sampling: BatchSampling) -> Tensor:
    """Divide logits (B, V) by the rows' temperatures, in at least float32; float32 and float64 are overwritten."""
    logits_of_rows = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    if sampling.temperature is not None:
        logits_of_rows = logits_of_rows.div_(sampling.temperature.to(logits_of_rows.dtype)[:, None])
    return logits_of_rows


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Return the token (B,) at which the running sum of `weights` (B, V) passes `uniforms` (B,) of the total."""
    if weights.shape[-1] <= 8 * BLOCK:
        return _passing(weights.cumsum(-1, dtype=torch.float64), uniforms)[0]
    blocks = pad(weights, (0, -weights.shape[-1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    block, rest = _passing(blocks.sum(-1).cumsum(-1, dtype=torch.float64), uniforms)
    within = blocks[torch.arange(len(block), device=block.device), block]
    return block * BLOCK + _passing(within.cumsum(-1, dtype=torch.float64), rest)[0]


def _passing(cumulative: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the entry at which the running sums (B, C) pass this share of the total, (B,), and the offset in it, (B,)
    in [0, 1].
    """
    total = cumulative[:, -1:]
    # Below the total even if the product rounds up to it, so that the entry found has a weight.
    target = torch.minimum(uniforms[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    entry = torch.searchsorted(cumulative, target, right=True)
    upper = cumulative.gather(-1, entry)
    lower = cumulative.gather(-1, (entry - 1).clamp(min=0)).masked_fill(entry == 0, 0.0)
    return entry[:, 0], ((target - lower) / (upper - lower))[:, 0]
