"""Dynamic sampling: selection of a batch's groups. Each function returns the groups to drop, with the reason."""

from torch import Tensor

from braidrl.algorithms.group_statistics import Groups
from braidrl.algorithms.registry import Needs, selections


@selections.register(scope="group", needs=Needs(group_size=2))
def informative_groups(correct: Tensor, group: Tensor) -> dict[int, str]:
    """Drop groups whose samples are all right or all wrong: they keep 0 < #correct < G.

    Dynamic sampling, DAPO, arXiv 2503.14476, equation 11. `correct` (B,) is 1 for a right sample and 0 for a wrong one.
    """
    groups = Groups.of(group)
    right = groups.sums((correct > 0).long())
    dropped = dict.fromkeys(groups.numbers[right == 0].tolist(), "all wrong")
    return dropped | dict.fromkeys(groups.numbers[right == groups.sizes()].tolist(), "all correct")


@selections.register(scope="group", needs=Needs(group_size=2))
def informative_rewards(reward: Tensor, group: Tensor) -> dict[int, str]:
    """Drop groups whose rewards (B,) are all equal, for graded rewards without right and wrong."""
    groups = Groups.of(group)
    return dict.fromkeys(groups.numbers[~groups.varies(reward)].tolist(), "all rewards equal")
