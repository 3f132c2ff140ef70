"""Selection of groups, and advantages with one number per row, from the scores of a prompt's samples.

R̄ and s are a group's mean and deviation. Rows are matched by group number, never by position:

group   7 3 7 3 3      rows of unfinished or mixed batches may come in any order
index   1 0 1 0 0      the same, counted from 0

An earlier stage may write `statistics_mask` (B,): rows with 0 are excluded from their group's statistics and get the
advantage 0, such as trajectories whose environment failed.
"""

from braidrl.algorithms.registry import Needs, advantages, selections
from braidrl.deferred import Tensor, torch


class Groups:
    """The groups of some rows: their numbers (K,), ascending, and sizes (K,); `index` (B,) is each row's position among
    them.

    `counted` (B,) bool masks the rows that count in their group's statistics.
    """

    def __init__(self, group: Tensor, statistics_mask: Tensor | None = None) -> None:
        """Find the groups of rows with the group numbers `group` (B,) int64."""
        self.numbers, self.index, self.sizes = torch.unique(group, return_inverse=True, return_counts=True)
        self.counted = torch.ones_like(group, dtype=torch.bool) if statistics_mask is None else statistics_mask > 0

    def sums(self, per_row: Tensor) -> Tensor:
        """Return the sum of `per_row` (B,) in each group, (K,)."""
        return per_row.new_zeros(len(self.numbers)).index_add(0, self.index, per_row)

    def means(self, per_row: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the mean of the counted `per_row` (B,) in each group, (K,), weighted by `weights` (B,); 0 where these
        add up to 0.
        """
        weights = (self.counted if weights is None else weights * self.counted).to(per_row.dtype)
        total = self.sums(weights)
        return self.sums(per_row * weights) / total.masked_fill(total == 0, 1)

    def varies(self, per_row: Tensor) -> Tensor:
        """Return True for each group in which `per_row` (B,) has different values among the counted rows, (K,) bool.

        The comparison is exact. The mean of equal numbers may differ from them by rounding, and a division by a tiny
        standard deviation would amplify that difference.
        """
        start = per_row.new_zeros(len(self.numbers))
        high, low = (per_row.masked_fill(~self.counted, end) for end in (-torch.inf, torch.inf))
        highest = start.scatter_reduce(0, self.index, high, "amax", include_self=False)
        lowest = start.scatter_reduce(0, self.index, low, "amin", include_self=False)
        return highest > lowest


# A single sample has no group to be compared with.
PAIR = Needs(group_size=2)


def centered(reward: Tensor, groups: Groups, weights: Tensor | None = None) -> Tensor:
    """Return R − R̄ (B,) in float64, exactly 0 in a group of equal scores and for rows that do not count; `weights` are
    those of R̄.
    """
    scores = reward.double()
    difference = scores - groups.means(scores, weights)[groups.index]
    return difference * groups.varies(scores)[groups.index] * groups.counted


@advantages.register(writes=["advantage"], scope="group", needs=PAIR)
def group_normalized(
    reward: Tensor, group: Tensor, statistics_mask: Tensor | None = None, *, epsilon: float = 1e-6
) -> Tensor:
    """Return (R − R̄)/(s + epsilon), s the sample deviation, (B,); 0 for equal scores. GRPO, arXiv 2402.03300; DAPO,
    arXiv 2503.14476.
    """
    groups = Groups(group, statistics_mask)
    difference = centered(reward, groups)
    freedom = (groups.sums(groups.counted.double()) - 1).clamp(min=1)
    deviation = (groups.sums(difference**2) / freedom).sqrt()
    return (difference / (deviation[groups.index] + epsilon)).to(reward.dtype)


@advantages.register(writes=["advantage"], scope="group", needs=PAIR)
def group_centered(reward: Tensor, group: Tensor, statistics_mask: Tensor | None = None) -> Tensor:
    """Return R − R̄, (B,). Dr. GRPO, arXiv 2503.20783."""
    return centered(reward, Groups(group, statistics_mask)).to(reward.dtype)


@advantages.register(writes=["advantage"], scope="group", needs=PAIR)
def leave_one_out(reward: Tensor, group: Tensor, statistics_mask: Tensor | None = None) -> Tensor:
    """Return G/(G − 1)·(R − R̄), (B,): each reward minus the mean of the group's other samples; 0 in a group of one
    sample. RLOO, arXiv 2402.14740.
    """
    groups = Groups(group, statistics_mask)
    size = groups.sums(groups.counted.double())
    return (centered(reward, groups) * (size / (size - 1).clamp(min=1))[groups.index]).to(reward.dtype)


@advantages.register(writes=["advantage"], scope="group", needs=PAIR)
def optimal_baseline(
    reward: Tensor, action_tokens: Tensor, group: Tensor, statistics_mask: Tensor | None = None
) -> Tensor:
    """Return R − Σ l_j R_j / Σ l_j with the lengths l in action tokens as weights, (B,). OPO, arXiv 2505.23585."""
    return centered(reward, Groups(group, statistics_mask), action_tokens).to(reward.dtype)


@advantages.register(writes=["advantage"], columns={"greedy_reward": "greedy.reward"})
def remax(reward: Tensor, greedy_reward: Tensor) -> Tensor:
    """Return R minus the reward of the same prompt's greedy response, (B,). ReMax, arXiv 2310.10505."""
    return reward - greedy_reward


@advantages.register(writes=["advantage"], scope="group", needs=PAIR)
def maxrl(correct: Tensor, group: Tensor, statistics_mask: Tensor | None = None) -> Tensor:
    """Return (R − R̄)/R̄ on the successes R ∈ {0, 1}, (B,); 0 in a group without a success. MaxRL, arXiv 2602.02710."""
    groups = Groups(group, statistics_mask)
    mean = groups.means(correct.double())[groups.index]
    dtype = correct.dtype if correct.is_floating_point() else torch.float32
    return (centered(correct, groups) / mean.masked_fill(mean == 0, 1)).to(dtype)


@advantages.register(
    writes=["advantage"],
    scope="group",
    needs=Needs(limits={"k": (1, 1 << 20)}, group_size=lambda settings: settings["k"] + 1),
)
def pass_at_k(correct: Tensor, group: Tensor, statistics_mask: Tensor | None = None, *, k: int = 4) -> Tensor:
    """Return each sample's mean normalised advantage over the k-subsets of its group that contain it, (B,), in closed
    form.

    A subset scores 1 if any of its k samples is right. With n samples of which w are wrong, R̄ = 1 − C(w, k)/C(n, k)
    and σ² = R̄(1 − R̄): a right sample gets (1 − R̄)/σ, a wrong one (1 − R̄ − C(w − 1, k − 1)/C(n − 1, k − 1))/σ, and
    every sample gets 0 where σ = 0. Pass@k training, arXiv 2508.10751, its analytical form. Raises ValueError if a
    group has fewer than k samples. With fewer that count in its statistics, its samples get 0.
    """
    groups = Groups(group, statistics_mask)
    if bool((groups.sizes < k).any()):
        fewest = int(groups.sizes.min())
        raise ValueError(f"pass_at_k with k={k} needs at least {k} samples per prompt, a group has {fewest}")
    n = groups.sums(groups.counted.double())
    wrong = groups.sums((groups.counted & (correct <= 0)).double())
    of_right = subset_share(wrong, n, k)
    of_wrong = of_right - subset_share(wrong - 1, n - 1, k - 1)
    deviation = (of_right * (1 - of_right)).sqrt()
    scale = torch.where(deviation > 0, 1 / deviation.masked_fill(deviation == 0, 1), 0.0)
    of_row = torch.where(correct > 0, (of_right * scale)[groups.index], (of_wrong * scale)[groups.index])
    return (of_row * groups.counted).to(correct.dtype if correct.is_floating_point() else torch.float32)


def subset_share(part: Tensor, total: Tensor, size: int) -> Tensor:
    """Return C(part, size)/C(total, size), (K,) float64: the share of the subsets of `size` that are contained in
    `part`.
    """
    share = torch.ones_like(total)
    for taken in range(size):
        share = share * (part - taken).clamp(min=0) / (total - taken).clamp(min=1)
    return share


@selections.register(scope="group", needs=PAIR)
def informative_groups(correct: Tensor, group: Tensor, statistics_mask: Tensor | None = None) -> dict[int, str]:
    """Drop groups that are all right or all wrong: they keep 0 < #correct < G.

    Dynamic sampling, DAPO, arXiv 2503.14476, equation 11.
    """
    groups = Groups(group, statistics_mask)
    right, wrong = (groups.sums((groups.counted & rows).long()) for rows in (correct > 0, correct <= 0))
    dropped = dict.fromkeys(groups.numbers[wrong == 0].tolist(), "all correct")
    return dropped | dict.fromkeys(groups.numbers[right == 0].tolist(), "all wrong")


@selections.register(scope="group", needs=PAIR)
def informative_rewards(reward: Tensor, group: Tensor, statistics_mask: Tensor | None = None) -> dict[int, str]:
    """Drop groups whose rewards (B,) are all equal, for graded rewards without right and wrong."""
    groups = Groups(group, statistics_mask)
    return dict.fromkeys(groups.numbers[~groups.varies(reward)].tolist(), "all rewards equal")
