"""Advantages per turn of an episode: ragged by turn, and expanded over each turn's action tokens in the loss.

turn_lengths   2 3 | 4            action tokens of each turn
turn_rewards   r r | r            the environment's reward after each turn
turn_states    s s | s            equal where the model saw the same observation before the turn

Here i is a row of a group of N rows, k one of its K_i turns, r_{i,k} its reward, and R_i the row's reward.

A baseline of turn k must not depend on what the model does in turn k or later. How many turns a row has is such an act
where the policy may end the episode: a mean of r_{·,l} over the rows that reached turn l, subtracted from the rewards
of turns l ≥ k, pays −E[r_{·,l}] for each further turn. Therefore means are of returns from the turn itself on, or a
turn that a row did not reach counts with reward 0, in the mean and in the row (verl-project/verl#7244).
"""

from braidrl.algorithms.advantages import Groups, centered
from braidrl.algorithms.ragged import Ragged, offsets_of
from braidrl.algorithms.registry import Needs, advantages
from braidrl.algorithms.token_advantages import DISCOUNTS, at_row_end, is_row_end, sums_to_go
from braidrl.deferred import Tensor, torch

DISCOUNTED = Needs({"gamma": (-1, 1)}, group_size=2)


def with_rest(turn_rewards: Ragged, reward: Tensor) -> Ragged:
    """Return turn rewards that add up to `reward` (B,): the last turn gets the rewards of later stages."""
    rest = reward.to(turn_rewards.values.dtype) - turn_rewards.row_sums()
    return turn_rewards.with_values(turn_rewards.values + at_row_end(rest, turn_rewards).values)


def normalized(values: Tensor, groups: Groups, scale: bool, epsilon: float) -> Tensor:
    """Return (x − mean)/(s + epsilon) in each group, s the sample deviation, or without `scale` x − mean, (B,)."""
    difference = centered(values, groups)
    if not scale:
        return difference
    freedom = (groups.sums(groups.counted.double()) - 1).clamp(min=1)
    deviation = (groups.sums(difference**2) / freedom).sqrt()
    return difference / (deviation[groups.index] + epsilon)


@advantages.register(writes=["turn_advantages", "returns"], needs=DISCOUNTS)
def turn_gae(
    values: Ragged, turn_lengths: Ragged, turn_rewards: Ragged, reward: Tensor, *, gamma: float = 1.0, lam: float = 1.0
) -> tuple[Ragged, Ragged]:
    """Return GAE with turns as steps, A_k = Σ_l (γλ)^l·δ_{k+l}, and the returns A_k + V_k at each of a turn's tokens.

    δ_k = r_k + γ·V_{k+1} − V_k, where V_k is the value at the turn's first action token and V = 0 after the last turn.
    GAE, arXiv 1506.02438, equation 16.

    Args:
        gamma: Discount per turn.
        lam: λ: 0 looks one turn ahead, 1 looks to the end of the row.
    """
    rewards = with_rest(turn_rewards, reward)
    # A turn that was aborted before its first token, at the end, has no value.
    v = torch.nn.functional.pad(values.values, (0, 1))[offsets_of(turn_lengths.values)[:-1]]
    following = torch.cat([v[1:], v.new_zeros(min(len(v), 1))]) * ~is_row_end(rewards)
    delta = rewards.with_values(rewards.values.to(v.dtype) + gamma * following - v)
    result = sums_to_go(delta, gamma * lam)
    return result, values.with_values((result.values + v).repeat_interleave(turn_lengths.values))


@advantages.register(writes=["turn_advantages"], scope="group", needs=DISCOUNTED)
def turn_returns(
    turn_rewards: Ragged, reward: Tensor, group: Tensor, statistics_mask: Tensor | None = None, *, gamma: float = 1.0
) -> Ragged:
    """Return A_{i,k} = G_{i,k} − mean of G_{j,k} over the group's rows j that reached turn k, with the returns to go
    G_{i,k} = Σ_{l ≥ k} γ^(l − k)·r_{i,l}.

    REINFORCE with returns to go. This baseline depends on no act of turn k or later: all that reached turn k count,
    however they went on. A row that the statistics leave out has advantage 0. With γ = −1 a row is a game of two sides
    that move in turn, and a turn gains what the other side loses: self-play of one policy.
    """
    to_go = sums_to_go(with_rest(turn_rewards, reward), gamma)
    position = torch.arange(len(to_go.values)) - to_go.spread(to_go.offsets[:-1])
    peers = peers_of(to_go, group, position, statistics_mask)
    return to_go.with_values(centered(to_go.values, peers).to(to_go.values.dtype))


def peers_of(turns: Ragged, group: Tensor, key: Tensor, statistics_mask: Tensor | None) -> Groups:
    """Return the turns of a group that have the same key, (by turn), as groups."""
    both = torch.stack([turns.spread(group), key], dim=1)
    _, peers = torch.unique(both, dim=0, return_inverse=True)
    return Groups(peers, None if statistics_mask is None else turns.spread(statistics_mask))


@advantages.register(
    writes=["turn_advantages"], scope="group", needs=Needs({"weight": (0, 1e6), "epsilon": (0, 1)}, group_size=2)
)
def mt_grpo(
    turn_rewards: Ragged,
    reward: Tensor,
    group: Tensor,
    statistics_mask: Tensor | None = None,
    *,
    weight: float = 1.0,
    scale: bool = True,
    epsilon: float = 1e-6,
) -> Ragged:
    """Return A_{i,k} = Â_i + w·Σ_{l ≥ k} Â_{i,l}: the outcome's advantage, and those of the turns' own rewards.

    Multi-turn GRPO, arXiv 2505.11821: Â_{i,l} normalises the rewards of turn l in the group, and Â_i the outcomes,
    which are the rows' rewards without those of turns before the last. The sum over l runs to the longest row's end,
    since turns that a row did not reach count with reward 0.

    Args:
        weight: w, the weight of the turns' own rewards.
        scale: Divide by the group's deviation; without it rewards are only centred.
        epsilon: Added to the deviation.
    """
    groups = Groups(group, statistics_mask)
    before_last = turn_rewards.values * ~is_row_end(turn_rewards)
    own_rewards = turn_rewards.with_values(before_last)
    outcome = reward.double() - own_rewards.row_sums().double()
    of_row = normalized(outcome, groups, scale, epsilon)
    longest = int(own_rewards.lengths.max()) if len(own_rewards) else 0
    rewards_BK = before_last.new_zeros((len(own_rewards), longest), dtype=torch.float64)
    position = torch.arange(len(own_rewards.values)) - own_rewards.spread(own_rewards.offsets[:-1])
    rewards_BK[own_rewards.row_ids(), position] = before_last.double()
    of_turn = [normalized(rewards_BK[:, turn], groups, scale, epsilon) for turn in range(longest)]
    to_go_BK = torch.stack(of_turn, dim=1).flip(1).cumsum(1).flip(1) if of_turn else rewards_BK
    total = own_rewards.spread(of_row) + weight * to_go_BK[own_rewards.row_ids(), position]
    return own_rewards.with_values(total.to(turn_rewards.values.dtype))


@advantages.register(
    writes=["turn_advantages"],
    scope="group",
    needs=Needs({"weight": (0, 1e6), "gamma": (0, 1), "epsilon": (0, 1)}, group_size=2),
)
def gigpo(
    turn_rewards: Ragged,
    turn_states: Ragged,
    reward: Tensor,
    group: Tensor,
    statistics_mask: Tensor | None = None,
    *,
    weight: float = 1.0,
    gamma: float = 1.0,
    scale: bool = True,
    epsilon: float = 1e-6,
) -> Ragged:
    """Return A_{i,k} = A^E_i + w·A^S_{i,k}: advantages of whole episodes and of turns from one state, (by turn).

    A^E normalises the rewards R of a group's rows, equation 3. A^S normalises the returns to go
    Σ_{l ≥ k} γ^(l − k)·r_{i,l} of all turns of a group that begin in one state, equations 6 and 7; a state that occurs
    once gives 0. GiGPO, arXiv 2505.10978. A state is what the model saw before the turn, so that its baseline depends
    on no later act.

    Args:
        weight: w, the weight of the turns' advantages.
        gamma: Discount per turn in the returns to go.
        scale: Divide by the deviation; without it rewards are only centred.
        epsilon: Added to the deviation.
    """
    groups = Groups(group, statistics_mask)
    of_row = normalized(reward, groups, scale, epsilon)
    to_go = sums_to_go(with_rest(turn_rewards, reward), gamma)
    anchors = peers_of(to_go, group, turn_states.values, statistics_mask)
    total = to_go.spread(of_row) + weight * normalized(to_go.values, anchors, scale, epsilon)
    return to_go.with_values(total.to(to_go.values.dtype))
