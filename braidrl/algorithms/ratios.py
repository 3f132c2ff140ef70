"""Importance ratios from log-probs, for a token or a whole row."""

from typing import Literal

import torch
from torch import Tensor

from braidrl.algorithms.ragged import Ragged

Level = Literal["token", "sequence", "geometric"]
# e^20 is beyond any ratio that is clipped or truncated, and far below overflow: an infinite ratio times a zero advantage is NaN.
LOG_RATIO_LIMIT = 20.0


def ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """π/π_old of each token, (N,); log-ratios beyond ±20 are held there."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def ratio_at(level: Level, log_probs: Tensor, old_log_probs: Tensor, offsets: Tensor) -> Tensor:
    """π/π_old (N,) of each token, or of its row: the product of the row's ratios, or their geometric mean.

    Raises ValueError for another level.
    """
    rows = Ragged(log_probs - old_log_probs, offsets)
    if level == "token":
        log_ratio = rows.values
    elif level == "sequence":
        log_ratio = rows.spread(rows.row_sums())
    elif level == "geometric":
        log_ratio = rows.spread(rows.row_means())
    else:
        raise ValueError(f"level must be token, sequence or geometric, got {level!r}")
    return torch.clamp(log_ratio, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
