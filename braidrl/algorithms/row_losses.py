"""Policy losses whose ratio belongs to the whole row: GSPO and GMPO."""

import torch
from torch import Tensor

from braidrl.algorithms.policy_losses import Metrics, clip_metrics, clipped_surrogate, stopped
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.ratios import LOG_RATIO_LIMIT
from braidrl.algorithms.registry import Needs, losses

# Each row is one decision here: weighing it by its length again would undo the mean inside the ratio.
ROWS = ("seq-mean-token-mean",)


@losses.register(needs=Needs({"low": (0, 1), "high": (0, 1e6)}, aggregations=ROWS))
def gspo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    offsets: Tensor,
    *,
    low: float = 3e-4,
    high: float = 4e-4,
) -> tuple[Tensor, Metrics]:
    """−min(s·A, clip(s, 1 − low, 1 + high)·A) with s = exp(mean over the row of log r), in token form.

    GSPO-token, arXiv 2507.18071, section 4.3: s_t = sg(s)·π/sg(π), whose value is s and whose gradient each token's own.
    """
    rows = Ragged((log_probs - old_log_probs).detach(), offsets)
    mean = rows.spread(rows.row_means())
    s = (mean + log_probs - log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    metrics = clip_metrics(*stopped(s, advantages, low, high), log_probs, old_log_probs)
    return clipped_surrogate(s, advantages, low, high), metrics


@losses.register(needs=Needs({"low": (0, 100), "high": (0, 100)}, aggregations=ROWS))
def gmpo(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    offsets: Tensor,
    *,
    low: float = 0.4,
    high: float = 0.4,
) -> tuple[Tensor, Metrics]:
    """−A·(Π of the row's clipped ratios)^(1/|o|), the same number at each of the row's tokens.

    GMPO, arXiv 2507.20673. A ratio is clipped to at most e^high where A > 0, to at least e^(−low) where A < 0; a row's A is
    the mean over its tokens.
    """
    rows = Ragged(log_probs - old_log_probs, offsets)
    advantage = rows.with_values(advantages).row_means()
    positive = rows.spread(advantage) > 0
    above, below = positive & (rows.values > high), ~positive & (rows.values < -low)
    clipped = torch.where(positive, rows.values.clamp(max=high), rows.values.clamp(min=-low))
    mean = rows.with_values(clipped).row_means().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = clip_metrics(above, below, log_probs, old_log_probs)
    return -rows.spread(advantage * mean.exp()), metrics
