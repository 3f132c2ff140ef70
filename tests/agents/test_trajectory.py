"""A trajectory contains only complete turns, and several sequences become one row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.agents.trajectory import Limits, Trajectory, trajectory_columns
from braidrl.algorithms.token_advantages import gae
from braidrl.data.rows import FinishReason, Rows
from braidrl.data.token_columns import LOG_PROBS, VERSIONS
from braidrl.flow.signatures import PLAYED
from braidrl.training.compute.packed import pack

UID = (0, 3, 1)
LIMITS = Limits(at_once=1, timeout_s=1.0, max_turns=1, max_sequence_tokens=100)


def turn(count: int, version: int = 0, versions: int | None = None) -> dict[str, Any]:
    of_versions = torch.full((count if versions is None else versions,), version)
    return {"per_token": {LOG_PROBS: -torch.ones(count), VERSIONS: of_versions}}


def two_sequences() -> Trajectory:
    trajectory = Trajectory(UID)
    trajectory.append([1, 2, 3], opens=True)
    trajectory.append([4, 5], **turn(2, 7))
    trajectory.append([6])
    trajectory.append([7], **turn(1, 8))
    trajectory.append([8, 9], opens=True)
    trajectory.append([10, 11], **turn(2, 8))
    return trajectory


def test_a_row_holds_every_sequence_and_marks_sampled_tokens() -> None:
    never = Trajectory((0, 4, 0), finish_reason=FinishReason.ERROR)
    never.append([1, 2], opens=True)
    columns = trajectory_columns([two_sequences(), never], LIMITS)
    assert set(columns) == set(PLAYED)
    rows = Rows(columns)
    assert rows["tokens"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [1, 2]]
    assert [[i for i, acted in enumerate(row) if acted] for row in rows["action_mask"].tolist()] == [
        [3, 4, 6, 9, 10],
        [],
    ]
    assert rows["sequence_lengths"].tolist() == [[7, 4], [2]]
    assert rows["prompt"].tolist() == [[1, 2, 3], [1, 2]] and rows["prompt_length"].tolist() == [3, 2]
    assert rows["rollout_versions"].tolist() == [[7, 7, 8, 8, 8], []]
    assert rows["length"].tolist() == [11, 2] and rows["action_tokens"].tolist() == [5, 0]
    assert rows["version"].tolist() == [7, 0] and rows["finish_reason"].tolist() == [0, 3]
    packed = pack(rows, torch.device("cpu"))
    assert packed.sequence_lengths == (7, 4, 2)
    assert packed.position_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 0, 1]
    assert packed.targets.tolist() == [4, 5, 7, 10, 11]


@pytest.mark.parametrize(
    ("tokens", "arguments", "message"),
    [
        ([4, 5], turn(1), r"1 .*rollout_log_probs for 2 tokens"),
        ([4], turn(1, versions=2), r"2 .*rollout_versions for 1 tokens"),
        ([4], {"per_token": {LOG_PROBS: -torch.ones(1)}}, "without values of rollout_versions"),
        ([4], {**turn(1), "opens": True}, "cannot begin with an action"),
        ([], {"opens": True}, r"begin .*at least one token"),
    ],
)
def test_what_is_not_whole_is_refused_and_changes_nothing(tokens: list[int], arguments: dict, message: str) -> None:
    trajectory = Trajectory(UID)
    trajectory.append([1, 2, 3], opens=True)
    with pytest.raises(ValueError, match=message):
        trajectory.append(tokens, **arguments)
    assert (trajectory.tokens, trajectory.sequence_lengths, trajectory.action_tokens) == ([1, 2, 3], [3], 0)


@pytest.mark.parametrize("arguments", [{}, turn(1)])
def test_the_first_tokens_of_a_sequence_are_not_actions(arguments: dict) -> None:
    with pytest.raises(ValueError, match=r"open a sequence|begin with an action"):
        Trajectory(UID).append([1], **arguments)


@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=6),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_gae_over_several_sequences_is_the_formula_on_the_joined_action_tokens(
    turns: list[tuple[int, int, bool]], gamma: float, lam: float
) -> None:
    trajectory = Trajectory(UID)
    trajectory.append([0], opens=True)
    for actions, observed, opens in turns:
        trajectory.append([1] * actions, **turn(actions))
        if observed:
            trajectory.append([2] * observed, opens=opens)
    rows = Rows(trajectory_columns([trajectory], LIMITS))
    values = rows["rollout_log_probs"].with_values(torch.linspace(-1, 1, trajectory.action_tokens, dtype=torch.float64))
    advantages, returns = gae(values, torch.tensor([0.7], dtype=torch.float64), gamma=gamma, lam=lam)
    v = values.values.tolist()
    following = 0.0
    for t in reversed(range(len(v))):
        delta = 0.7 - v[t] if t == len(v) - 1 else gamma * v[t + 1] - v[t]
        following = delta + gamma * lam * following
        assert advantages.values[t].item() == pytest.approx(following, abs=1e-12)
        assert returns.values[t].item() == pytest.approx(following + v[t], abs=1e-12)
