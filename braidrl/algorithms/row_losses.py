"""Sequence-level losses: policy losses with a ratio per row (GSPO, GMPO), and preference losses on pairs of rows.

In each preference group sample 0 is the chosen response and sample 1 the rejected one. A pair's loss is repeated at
both rows, so that the mean over rows is the mean over pairs. Both rows must be in one micro-batch, because the loss
compares them; any other group raises ValueError. Metrics are averaged over rows, like the loss, and not over tokens.
"""

from dataclasses import replace

from braidrl.algorithms.advantages import Groups
from braidrl.algorithms.kl import LOG_RATIO_LIMIT
from braidrl.algorithms.policy_losses import Metrics, clip_metrics, clipped_surrogate
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Needs, losses
from braidrl.deferred import Tensor, torch

# The ratio is already a mean over the row; another aggregation would weight the row by its length again.
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
    """Return −min(s·A, clip(s, 1 − low, 1 + high)·A) with s = exp(mean over the row of log r), in token form.

    GSPO-token, arXiv 2507.18071, section 4.3: s_t = sg(s)·π/sg(π), whose value is s and whose gradient each token's
    own.
    """
    rows = Ragged((log_probs - old_log_probs).detach(), offsets)
    mean = rows.spread(rows.row_means())
    s = (mean + log_probs - log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    return clipped_surrogate(s, advantages, low, high, log_probs, old_log_probs)


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
    """Return −A·(Π of the row's clipped ratios)^(1/|o|), the same number at each of the row's tokens.

    GMPO, arXiv 2507.20673. A row's A is the mean over its tokens; log-ratios are at most `high` where A > 0, at least
    −`low` elsewhere.
    """
    rows = Ragged(log_probs - old_log_probs, offsets)
    advantage = rows.with_values(advantages).row_means()
    positive = rows.spread(advantage) > 0
    above, below = positive & (rows.values > high), ~positive & (rows.values < -low)
    clipped = torch.where(positive, rows.values.clamp(max=high), rows.values.clamp(min=-low))
    mean = rows.with_values(clipped).row_means().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    metrics = clip_metrics(above, below, log_probs, old_log_probs)
    return -rows.spread(advantage * mean.exp()), metrics


PAIRS = Needs(group_size=2, whole_groups=True, aggregations=("seq-mean-token-mean",))


def pair_loss(scores: Tensor, group: Tensor, sample: Tensor) -> tuple[Tensor, Metrics]:
    """Return −log σ(score of the chosen − score of the rejected) at each row, (B,), and metrics, (B,) each."""
    groups = Groups(group)
    chosen = sample == 0
    if bool((groups.sums(chosen.long()) != 1).any() | (groups.sums((sample == 1).long()) != 1).any()):
        raise ValueError(
            "a preference pair has sample 0, the chosen response, and sample 1, the rejected one, in one micro-batch"
        )
    if len(group) != 2 * len(groups.numbers):
        raise ValueError("a preference pair has two samples, there are groups with more")
    margin = groups.sums(torch.where(chosen, scores, -scores))[groups.index]
    shown = scores.detach()
    return -torch.nn.functional.logsigmoid(margin), {
        "accuracy": (margin.detach() > 0).to(shown.dtype),
        "margin": margin.detach(),
        # The mean over rows halves this: a pair has two rows, and one of them has 0 here.
        "chosen": torch.where(chosen, 2 * shown, 0),
        "rejected": torch.where(chosen, 0, 2 * shown),
    }


@losses.register(needs=PAIRS)
def bradley_terry(scores: Tensor, group: Tensor, sample: Tensor) -> tuple[Tensor, Metrics]:
    """Return −log σ(s_chosen − s_rejected), (B,): one score and one loss per row, not per token.

    Bradley and Terry 1952, as in InstructGPT, arXiv 2203.02155, equation 1. Aggregated with one token per row (offsets
    0..B).
    """
    return pair_loss(scores, group, sample)


@losses.register(needs=replace(PAIRS, limits={"beta": (1e-6, 1e6)}))
def dpo(
    log_probs: Tensor, ref_log_probs: Tensor, offsets: Tensor, group: Tensor, sample: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, Metrics]:
    """Return −log σ(β·(Σ log π/π_ref chosen − Σ log π/π_ref rejected)) at each token of both rows.

    DPO, arXiv 2305.18290, equation 7.
    """
    rows = Ragged(log_probs - ref_log_probs, offsets)
    loss, metrics = pair_loss(beta * rows.row_sums(), group, sample)
    return rows.spread(loss), {name: rows.spread(value) for name, value in metrics.items()}
