"""Losses on preferences: in each group sample 0 is the chosen response and sample 1 the rejected one.

A pair's loss stands at both of its rows, so that a mean over rows is the mean over pairs. Both rows must be in one micro-batch:
the loss is not a sum over rows, and half a pair says nothing. ValueError tells of a group that is not such a pair. Metrics are averaged
over rows, as the loss is, and not over tokens.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from braidrl.algorithms.groups import Groups
from braidrl.algorithms.policy_losses import Metrics
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import Needs, losses

PAIRS = Needs(group_size=2, whole_groups=True, aggregations=("seq-mean-token-mean",))


def pair_loss(scores: Tensor, group: Tensor, sample: Tensor) -> tuple[Tensor, Metrics]:
    """−log σ(score of the chosen − score of the rejected) at each row, (B,), and what to report, (B,) each."""
    groups = Groups.of(group)
    chosen = sample == 0
    if bool((groups.sums(chosen.long()) != 1).any() | (groups.sums((sample == 1).long()) != 1).any()):
        raise ValueError(
            "a preference pair has sample 0, the chosen response, and sample 1, the rejected one, in one micro-batch"
        )
    if len(group) != 2 * len(groups):
        raise ValueError("a preference pair has two samples, there are groups with more")
    margin = groups.spread(groups.sums(torch.where(chosen, scores, -scores)))
    shown = scores.detach()
    return -logsigmoid(margin), {
        "accuracy": (margin.detach() > 0).to(shown.dtype),
        "margin": margin.detach(),
        # A pair is two rows: twice the one row's score is the pair's, once averaged over rows.
        "chosen": torch.where(chosen, 2 * shown, 0),
        "rejected": torch.where(chosen, 0, 2 * shown),
    }


@losses.register(needs=PAIRS)
def bradley_terry(scores: Tensor, group: Tensor, sample: Tensor) -> tuple[Tensor, Metrics]:
    """−log σ(s_chosen − s_rejected), (B,): one score and one loss per row, not per token.

    Bradley and Terry 1952, as in InstructGPT, arXiv 2203.02155, equation 1. Aggregated with one token per row (offsets 0..B).
    """
    return pair_loss(scores, group, sample)


@losses.register(needs=replace(PAIRS, limits={"beta": (1e-6, 1e6)}))
def dpo(
    log_probs: Tensor, ref_log_probs: Tensor, offsets: Tensor, group: Tensor, sample: Tensor, *, beta: float = 0.1
) -> tuple[Tensor, Metrics]:
    """−log σ(β·(Σ log π/π_ref of the chosen − Σ log π/π_ref of the rejected)), the row's at each of its tokens.

    DPO, arXiv 2305.18290, equation 7.
    """
    rows = Ragged(log_probs - ref_log_probs, offsets)
    loss, metrics = pair_loss(beta * rows.row_sums(), group, sample)
    return rows.spread(loss), {name: rows.spread(value) for name, value in metrics.items()}
