"""Rollout corrections match plain loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.algorithms import corrections
from braidrl.algorithms.policy_losses import decoupled
from braidrl.algorithms.ragged import Ragged
from braidrl.algorithms.registry import corrections as registered
from tests.algorithms.batches import ragged, ragged_rows

LEVELS = ["token", "sequence", "geometric"]


def ratios(old: list[list[float]], level: str) -> list[float]:
    """Return ρ of each token for engine log-probs of −0.2."""
    result = []
    for row in old:
        logs = [x + 0.2 for x in row]
        whole = sum(logs) if level == "sequence" else sum(logs) / max(len(logs), 1)
        result += [math.exp(x if level == "token" else whole) for x in logs]
    return result


def engine(old: Ragged) -> torch.Tensor:
    return torch.full_like(old.values, -0.2)


@pytest.mark.parametrize("level", LEVELS)
@given(rows=ragged_rows(st.floats(-1, 0.5)))
def test_truncated_weights_are_clamped_to_the_cap(level: str, rows: list[list[float]]) -> None:
    old = ragged(rows)
    weights, metrics = corrections.truncated(old.values, engine(old), old.offsets, level=level, cap=1.5)
    rho = ratios(rows, level)
    assert weights.tolist() == pytest.approx([min(r, 1.5) for r in rho])
    assert metrics["cut_fraction"].tolist() == [float(r > 1.5) for r in metrics["ratio"].tolist()]
    assert metrics["ratio"].tolist() == pytest.approx(rho)


@pytest.mark.parametrize("level", LEVELS)
@given(rows=ragged_rows(st.floats(-1, 0.5).map(lambda x: round(x, 3))))
def test_masked_weights_are_0_outside_the_band_and_rejection_weights_are_1_inside(
    level: str, rows: list[list[float]]
) -> None:
    old, rho = ragged(rows), ratios(rows, level)
    masked, _ = corrections.masked(old.values, engine(old), old.offsets, level=level, low=0.8123, high=1.3456)
    assert masked.tolist() == pytest.approx([r if 0.8123 <= r <= 1.3456 else 0.0 for r in rho])
    if level != "token":
        kept, _ = corrections.sequence_rejection(
            old.values, engine(old), old.offsets, level=level, low=0.8123, high=1.3456
        )
        assert kept.tolist() == [float(0.8123 <= r <= 1.3456) for r in rho]


def test_rejection_removes_all_tokens_of_a_sequence_and_of_no_other() -> None:
    old = ragged([[0.0, 2.0], [-0.2, -0.2]])
    weights, _ = corrections.sequence_rejection(old.values, engine(old), old.offsets)
    assert weights.tolist() == [0, 0, 1, 1]


def test_sequence_rejection_refuses_level_token() -> None:
    with pytest.raises(ValueError, match="level cannot be 'token'"):
        registered["sequence_rejection"].check({"level": "token"})


@pytest.mark.parametrize("name", list(registered))
def test_equal_log_probs_give_correction_weights_of_1(name: str) -> None:
    log_probs, offsets = -torch.rand(5), torch.tensor([0, 2, 5])
    weights, metrics = registered[name].function(log_probs, log_probs, offsets)
    assert weights.tolist() == [1.0] * 5 and metrics["cut_fraction"].sum() == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_row_of_two_versions_is_corrected_by_each_tokens_version(level: str) -> None:
    """The decoupled loss also uses each token's version: a plain loop looks up the version that drew the token."""
    drawn_by, offsets = [0, 0, 1, 1, 1, 1, 0], torch.tensor([0, 5, 7])
    told = torch.randn(3, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64).abs().neg()
    rollout = torch.tensor([float(told[version, t]) for t, version in enumerate(drawn_by)], dtype=torch.float64)
    logs = [float(told[2, t] - told[version, t]) for t, version in enumerate(drawn_by)]
    rows = [range(5), range(5, 7)]
    whole = [sum(logs[t] for t in row) / (len(row) if level == "geometric" else 1) for row in rows for _ in row]
    expected = [min(math.exp(x), 1.2) for x in (logs if level == "token" else whole)]
    weights, _ = corrections.truncated(told[2], rollout, offsets, level=level, cap=1.2)  # type: ignore[arg-type]
    assert weights.tolist() == pytest.approx(expected)
    if level == "token":
        assert any(x > math.log(1.2) for x in logs) and any(x < math.log(1.2) for x in logs)
        policy, advantages = told[2] + 0.1, torch.linspace(-1, 1, 7, dtype=torch.float64)
        loss, _ = decoupled(policy, told[2], rollout, advantages, cap=1.2)
        # u is the same for every token, and lies within the clip range.
        by_hand = [-w * math.exp(0.1) * float(a) for w, a in zip(expected, advantages, strict=True)]
        assert loss.tolist() == pytest.approx(by_hand)
