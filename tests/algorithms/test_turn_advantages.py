"""Credit by turn: each formula against a plain loop, and no hidden reward for further turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms.ragged import Ragged, observation_mask
from braidrl.algorithms.registry import advantages

Rewards = list[list[float]]
EPSILON = 1e-6
number = st.floats(-3, 3, width=32).map(lambda value: round(value, 2))


@st.composite
def episodes(draw: st.DrawFn) -> tuple[Rewards, list[int], list[list[int]], list[float]]:
    """Return the turns' rewards, groups, states of turns, and what later stages added to the reward of some rows."""
    rows = draw(st.integers(2, 7))
    rewards = [draw(st.lists(number, min_size=1, max_size=4)) for _ in range(rows)]
    groups = [draw(st.integers(3, 4)) for _ in range(rows)]
    states = [[draw(st.integers(0, 2)) for _ in turns] for turns in rewards]
    return rewards, groups, states, [draw(st.sampled_from([0.0, -0.5])) for _ in range(rows)]


def run(name: str, rewards: Rewards, groups: Sequence[int], added: Sequence[float], **settings: object) -> Rewards:
    """Return the turn advantages that a registered function gives."""
    states = settings.pop("states", None)
    row = torch.tensor([sum(turns) + more for turns, more in zip(rewards, added, strict=True)], dtype=torch.float64)
    columns = {
        "turn_rewards": Ragged.from_rows(rewards, torch.float64),
        "turn_states": None if states is None else Ragged.from_rows(states, torch.int64),  # type: ignore[arg-type]
        "reward": row,
        "group": torch.tensor(groups),
    }
    entry = advantages[name]
    result: Ragged = entry.function(*(columns[column] for column in entry.reads), **settings)
    return result.tolist()


def to_go(rewards: Sequence[float], gamma: float) -> list[float]:
    return [sum(gamma ** (n - k) * rewards[n] for n in range(k, len(rewards))) for k in range(len(rewards))]


def normal(value: float, all_values: Sequence[float], scale: bool = True) -> float:
    if len(set(all_values)) < 2:
        return 0.0
    deviation = statistics.stdev(all_values) + EPSILON if scale else 1.0
    return (value - statistics.fmean(all_values)) / deviation


def assert_close_rows(found: Rewards, wanted: Rewards) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def completed(rewards: Rewards, added: Sequence[float]) -> Rewards:
    return [[*turns[:-1], turns[-1] + more] for turns, more in zip(rewards, added, strict=True)]


@given(episodes(), st.sampled_from([1.0, 0.7, -1.0]))
def test_turn_returns_are_the_plain_loops(case: tuple[Rewards, list[int], list[list[int]], list[float]], gamma: float):  # type: ignore[no-untyped-def]
    rewards, groups, _, added = case
    sums = [to_go(turns, gamma) for turns in completed(rewards, added)]
    expected = []
    for row, turns in enumerate(sums):
        peers = [other for other, number in zip(sums, groups, strict=True) if number == groups[row]]
        means = [statistics.fmean(other[k] for other in peers if len(other) > k) for k in range(len(turns))]
        expected.append([value - mean for value, mean in zip(turns, means, strict=True)])
    assert_close_rows(run("turn_returns", rewards, groups, added, gamma=gamma), expected)


@given(episodes(), st.booleans())
def test_mt_grpo_is_the_plain_loop_with_absent_turns_as_zero(  # type: ignore[no-untyped-def]
    case: tuple[Rewards, list[int], list[list[int]], list[float]], scale: bool
):
    rewards, groups, _, added = case
    longest = max(map(len, rewards))
    own = [[*turns[:-1], *[0.0] * (longest - len(turns) + 1)] for turns in rewards]
    outcome = [turns[-1] + more for turns, more in zip(rewards, added, strict=True)]
    expected = []
    for row, turns in enumerate(rewards):
        peers = [j for j in range(len(rewards)) if groups[j] == groups[row]]
        of_row = normal(round(outcome[row], 9), [round(outcome[j], 9) for j in peers], scale)
        of_turn = [normal(own[row][k], [own[j][k] for j in peers], scale) for k in range(longest)]
        expected.append([of_row + 0.5 * sum(of_turn[k:]) for k in range(len(turns))])
    result = run("mt_grpo", rewards, groups, added, weight=0.5, scale=scale)
    for one, other in zip(result, expected, strict=True):
        assert one == pytest.approx(other, abs=1e-4)


def test_mt_grpo_of_two_turns_is_the_papers_formula() -> None:
    rewards, groups = [[0.2, 1.0], [0.0, 1.0], [0.4, 0.0], [0.2, 1.0]], [0, 0, 0, 0]
    turn, outcome = [r[0] for r in rewards], [r[1] for r in rewards]
    expected = [[normal(o, outcome) + normal(t, turn), normal(o, outcome)] for t, o in zip(turn, outcome, strict=True)]
    assert_close_rows(run("mt_grpo", rewards, groups, [0.0] * 4), expected)


@given(episodes(), st.sampled_from([1.0, 0.7]))
def test_gigpo_is_the_plain_loop_over_groups_and_anchors(  # type: ignore[no-untyped-def]
    case: tuple[Rewards, list[int], list[list[int]], list[float]], gamma: float
):
    rewards, groups, states, _ = case
    added = [0.0] * len(rewards)
    # Sums in another order may differ in the last bit, which decides whether equal numbers count as equal.
    exact = [[round(8 * value) / 8 for value in turns] for turns in rewards]
    sums = [to_go(turns, gamma) for turns in exact]
    expected = []
    for row, turns in enumerate(exact):
        peers = [j for j in range(len(exact)) if groups[j] == groups[row]]
        of_row = normal(sum(turns), [sum(exact[j]) for j in peers])
        line = []
        for k, value in enumerate(sums[row]):
            anchor = [sums[j][n] for j in peers for n in range(len(exact[j])) if states[j][n] == states[row][k]]
            spread = max(anchor) - min(anchor)
            line.append(of_row + 0.8 * (normal(value, anchor) if spread > 1e-9 else 0.0))
        expected.append(line)
    result = run("gigpo", exact, groups, added, states=states, weight=0.8, gamma=gamma)
    for one, other, turns in zip(result, expected, exact, strict=True):
        assert len(one) == len(turns)
        if gamma == 1.0:
            assert one == pytest.approx(other, abs=2e-4)


@given(episodes(), st.sampled_from([1.0, 0.7]), st.sampled_from([1.0, 0.4]), st.data())
def test_gae_over_turns_is_the_plain_recursion(  # type: ignore[no-untyped-def]
    case: tuple[Rewards, list[int], list[list[int]], list[float]], gamma: float, lam: float, data: st.DataObject
):
    rewards, _, _, added = case
    lengths = [[data.draw(st.integers(1, 3)) for _ in turns] for turns in rewards]
    values = [[data.draw(number) for _ in range(sum(row))] for row in lengths]
    row = torch.tensor([sum(turns) + more for turns, more in zip(rewards, added, strict=True)], dtype=torch.float64)
    ragged = [Ragged.from_rows(each, torch.float64) for each in (values, rewards)]
    of_turn, returns = advantages["turn_gae"].function(
        ragged[0], Ragged.from_rows(lengths, torch.int64), ragged[1], row, gamma=gamma, lam=lam
    )
    for i, turns in enumerate(completed(rewards, added)):
        starts = [sum(lengths[i][:k]) for k in range(len(turns))]
        v = [*(values[i][start] for start in starts), 0.0]
        later, expected = 0.0, list[float]()
        for k in reversed(range(len(turns))):
            later = turns[k] + gamma * v[k + 1] - v[k] + gamma * lam * later
            expected.insert(0, later)
        assert of_turn[i].tolist() == pytest.approx(expected, abs=1e-6)
        spread = [expected[k] + v[k] for k in range(len(turns)) for _ in range(lengths[i][k])]
        assert returns[i].tolist() == pytest.approx(spread, abs=1e-6)


@pytest.mark.parametrize("name", ["turn_returns", "mt_grpo", "gigpo"])
def test_a_further_turn_that_costs_a_reward_is_not_paid_for(name: str) -> None:
    """verl-project/verl#7244: each row solves its task, and rows that take a second turn lose 0.5 by it."""
    rewards, groups = [[1.0], [-0.5, 1.0], [1.0], [-0.5, 1.0]], [0, 0, 0, 0]

    def by_index(scores: Rewards) -> list[float]:
        """Return the first turns' advantages with a mean over the rows that reached a turn: the biased form."""
        inner = [turns[:-1] for turns in scores]
        means = [statistics.fmean(t[k] for t in inner if len(t) > k) for k in range(max(map(len, inner)))]
        outcome = statistics.fmean(turns[-1] for turns in scores)
        return [
            turns[-1] - outcome + sum(own[k] - means[k] for k in range(len(own)))
            for turns, own in zip(scores, inner, strict=True)
        ]

    assert by_index(rewards) == [0, 0, 0, 0], "the biased form does not see the cost of the further turn"
    states = [[7], [7, 8], [7], [7, 8]] if name == "gigpo" else None
    settings = {} if states is None else {"states": states}
    first = [turns[0] for turns in run(name, rewards, groups, [0.0] * 4, **settings)]  # type: ignore[arg-type]
    assert first[0] == first[2] > 0 > first[1] == first[3]
    if name == "turn_returns":
        assert first[0] - first[1] == pytest.approx(0.5), "the difference is what the turn costs"


def test_rows_whose_environment_failed_count_in_no_mean_and_have_no_advantage() -> None:
    columns = {
        "turn_rewards": Ragged.from_rows([[1.0], [0.0, 0.0], [9.0, 9.0]], torch.float64),
        "turn_states": Ragged.from_rows([[1], [1, 2], [1, 2]], torch.int64),
        "reward": torch.tensor([1.0, 0.0, 18.0], dtype=torch.float64),
        "group": torch.zeros(3, dtype=torch.int64),
    }
    for name in ("turn_returns", "mt_grpo", "gigpo"):
        entry = advantages[name]
        given = [columns[column] for column in entry.reads]
        result = entry.function(*given, torch.tensor([1.0, 1, 0])).tolist()
        alone = [c.take(torch.arange(2)) if isinstance(c, Ragged) else c[:2] for c in given]
        assert result[2] == [0, 0] and result[:2] == entry.function(*alone).tolist(), name


def test_observations_are_what_follows_an_action_of_the_same_sequence() -> None:
    actions = [[0, 0, 1, 1, 0, 0, 1], [0, 0, 0, 1, 0, 0, 1, 0]]
    lengths = [[7], [5, 3]]
    mask = Ragged.from_rows(actions, torch.bool)
    result = mask.with_values(observation_mask(mask, Ragged.from_rows(lengths, torch.int64)))
    assert [[int(one) for one in row] for row in result.tolist()] == [[0, 0, 0, 0, 1, 1, 0], [0, 0, 0, 0, 1, 0, 0, 1]]
