"""Aggregation of per-token losses into one number: a weight for each action token, and a denominator for the weighted
sum.

loss = Σ over all micro-batches of Σ_N weight·loss, divided once by a count over the whole optimizer step. The result is
therefore independent of micro-batches and devices.

An aggregation registers its denominator: `tokens` (action tokens), `rows` or `groups`, counted over the step after
masking. Weights are exact, in float64; cast them to the loss's dtype.
"""

from braidrl.algorithms.registry import Needs, aggregations
from braidrl.deferred import Tensor, torch

Metrics = dict[str, Tensor]
"""Metrics by name: a value per token or row, of which the mean is reported."""


def per_token(offsets: Tensor, per_row: Tensor) -> Tensor:
    """Repeat one weight per row (B,) at each of its tokens, (N,)."""
    return per_row.double().repeat_interleave(offsets.diff())


@aggregations.register("token-mean")
def token_mean(offsets: Tensor) -> Tensor:
    """Return 1 for every token; the denominator is all tokens, so long rows have more weight.

    DAPO, arXiv 2503.14476, equation 12.
    """
    return per_token(offsets, torch.ones_like(offsets[1:]))


@aggregations.register("seq-mean-token-mean", denominator="rows")
def seq_mean_token_mean(offsets: Tensor) -> Tensor:
    """Return 1/|o_i|; the denominator is rows: every row has the same weight. GRPO, arXiv 2402.03300, equation 3."""
    return per_token(offsets, 1 / offsets.diff().clamp(min=1).double())


@aggregations.register("seq-mean-token-sum", denominator="rows")
def seq_mean_token_sum(offsets: Tensor) -> Tensor:
    """Return 1 for every token; the denominator is rows: the mean of row sums."""
    return token_mean(offsets)


@aggregations.register("token-sum-norm", denominator="rows", needs=Needs({"max_tokens": (1, 1 << 40)}))
def token_sum_norm(offsets: Tensor, *, max_tokens: int) -> Tensor:
    """Return 1/`max_tokens`; the denominator is rows: the maximum length of a response replaces the lengths.

    Dr. GRPO, arXiv 2503.20783.
    """
    return token_mean(offsets) / max_tokens


@aggregations.register("prompt-mean", denominator="groups")
def prompt_mean(offsets: Tensor, group_tokens: Tensor) -> Tensor:
    """Return 1/(action tokens of the row's group); the denominator is groups: the mean over groups of each group's mean
    per token.

    ScaleRL, arXiv 2510.13786. `group_tokens` (B,) are counted over the optimizer step, after masking.
    """
    return per_token(offsets, 1 / group_tokens.clamp(min=1).double())
