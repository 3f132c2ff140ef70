"""Metrics of a batch: pure functions of columns, or of means over all rows."""

import re
from collections.abc import Sequence

from braidrl.algorithms.advantages import Groups, subset_share
from braidrl.deferred import Tensor, torch


def explained_variance(error: Tensor, error_squared: Tensor, returns: Tensor, returns_squared: Tensor) -> Tensor:
    """Return 1 − Var(R − V)/Var(R) from the means over action tokens of R − V, R and their squares; 0 where R is
    constant.
    """
    variance = returns_squared - returns**2
    unexplained = error_squared - error**2
    # A smaller variance may be the rounding error of this difference.
    varies = variance > 1e-6 * returns_squared
    return torch.where(varies, 1 - unexplained / variance.masked_fill(~varies, 1), 0.0)


def effective_sample_share(mean: Tensor, mean_square: Tensor) -> Tensor:
    """Return (Σw)²/(N·Σw²), the effective sample size divided by N, from means over N weights and their squares; 0 if
    all are 0.
    """
    return torch.where(mean_square > 0, mean**2 / mean_square.masked_fill(mean_square <= 0, 1), 0.0)


def mean_where(indicated: Tensor, share: Tensor) -> Tensor:
    """Return the mean of a value over selected tokens, given the means over all of value·indicator and of the
    indicator; 0 if none is.

    `mean_where(clip_high_probability, clip_fraction_high)` is the mean probability of the tokens clipped from above.
    """
    return torch.where(share > 0, indicated / share.masked_fill(share <= 0, 1), 0.0)


def group_shares(correct: Tensor, reward: Tensor, group: Tensor) -> dict[str, Tensor]:
    """Return the shares of groups whose rewards are equal, and which therefore give no gradient: in total, all right,
    and all wrong.
    """
    groups = Groups(group)
    right, size, equal = groups.sums((correct > 0).long()), groups.sizes, ~groups.varies(reward)
    shares = {
        "all_correct_fraction": (right == size) & equal,
        "all_wrong_fraction": (right == 0) & equal,
        "no_signal_fraction": equal,
    }
    return {name: chosen.double().sum() / max(len(chosen), 1) for name, chosen in shares.items()}


def avg_at_k(correct: Tensor, group: Tensor) -> Tensor:
    """Return the mean over prompts of the share of right samples: avg@k for groups of k."""
    groups = Groups(group)
    return groups.means(correct.double()).sum() / max(len(groups.sizes), 1)


def pass_at_k(correct: Tensor, group: Tensor, k: int) -> Tensor:
    """Return the mean over prompts of 1 − C(wrong, k)/C(n, k), unbiased pass@k (arXiv 2107.03374, eq.

    1). Raises ValueError if n < k.
    """
    groups = Groups(group)
    sizes = groups.sizes
    if bool((sizes < k).any()):
        raise ValueError(f"pass@{k} needs at least {k} samples per prompt, a group has {int(sizes.min())}")
    wrong = sizes - groups.sums((correct > 0).long())
    return (1 - subset_share(wrong.double(), sizes.double(), k)).sum() / max(len(sizes), 1)


def reflection_counts(responses: Sequence[str], phrases: Sequence[str]) -> Tensor:
    """Return how often any of the phrases occurs in each of B responses, as whole words and in any case, (B,) int64."""
    if not phrases:
        return torch.zeros(len(responses), dtype=torch.int64)
    longest_first = sorted(phrases, key=len, reverse=True)
    pattern = re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, longest_first))})(?!\w)", re.IGNORECASE)
    return torch.tensor([len(pattern.findall(text)) for text in responses], dtype=torch.int64)


def repeats_itself(tokens: Tensor, window: int) -> bool:
    """Return True if the last `window` tokens of (T,) repeat one phrase at least four times (repeat detection of Kimi
    k1.5).
    """
    last = tokens[-window:]
    return len(last) == window and any(torch.equal(last[n:], last[:-n]) for n in range(1, window // 4 + 1))
