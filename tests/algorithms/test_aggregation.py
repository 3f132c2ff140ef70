"""Aggregation: the loss of a batch does not depend on how the batch is split."""

from __future__ import annotations

import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from braidrl.algorithms.advantages import Groups
from braidrl.algorithms.ragged import offsets_of
from braidrl.algorithms.registry import aggregations, losses
from tests.algorithms.batches import built_in, floats, loss_columns, ragged, ragged_rows, take_rows

MAX_TOKENS = 8
Columns = dict[str, Any]


def group_tokens(offsets: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    groups = Groups(group)
    return groups.sums(offsets.diff())[groups.index]


def weights_of(name: str, offsets: torch.Tensor, of_group: torch.Tensor) -> torch.Tensor:
    if name == "prompt-mean":
        return aggregations[name].function(offsets, of_group)
    if name == "token-sum-norm":
        return aggregations[name].function(offsets, max_tokens=MAX_TOKENS)
    return aggregations[name].function(offsets)


def count(name: str, offsets: torch.Tensor, group: torch.Tensor) -> int:
    return {"tokens": int(offsets[-1]), "rows": len(group), "groups": len(group.unique())}[
        aggregations[name].denominator
    ]


def loop(name: str, rows: list[list[float]], group: list[int]) -> float:
    """Aggregate as the papers define it."""
    if name == "token-mean":
        return statistics.fmean(x for row in rows for x in row)
    if name == "seq-mean-token-mean":
        return statistics.fmean(statistics.fmean(row) for row in rows)
    if name == "seq-mean-token-sum":
        return statistics.fmean(sum(row) for row in rows)
    if name == "token-sum-norm":
        return sum(sum(row) for row in rows) / (len(rows) * MAX_TOKENS)
    joined = [[x for row, g in zip(rows, group, strict=True) if g == number for x in row] for number in set(group)]
    return statistics.fmean(statistics.fmean(tokens) for tokens in joined)


@pytest.mark.parametrize("name", list(built_in(aggregations)))
@given(rows=ragged_rows(min_len=1), data=st.data())
def test_an_aggregation_computes_the_mean_in_its_name(name: str, rows: list[list[float]], data: st.DataObject) -> None:
    group = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    loss, numbers = ragged(rows), torch.tensor(group)
    weights = weights_of(name, loss.offsets, group_tokens(loss.offsets, numbers))
    result = (loss.values * weights).sum() / count(name, loss.offsets, numbers)
    assert result.item() == pytest.approx(loop(name, rows, group), abs=1e-9)


def test_a_users_aggregation_registers_its_denominator() -> None:
    with pytest.raises(ValueError, match=r"denominator .*tokens, rows, groups, not 'words'"):
        aggregations.register("mine", denominator="words")


def test_a_long_row_weighs_by_its_tokens_only_in_token_mean() -> None:
    loss = ragged([[1.0], [0.0] * 9])
    shares = {name: loop(name, loss.tolist(), [0, 1]) for name in ("token-mean", "seq-mean-token-mean")}
    assert shares == {"token-mean": 0.1, "seq-mean-token-mean": 0.5}


def sums_in_parts(name: str, aggregation: str, columns: Columns, parts: list[list[int]]) -> tuple[float, torch.Tensor]:
    """Return Σ weight·loss and its gradient with respect to the trained column, accumulated over micro-batches."""
    entry = losses[name]
    trained = {"value": "values", "bradley_terry": "scores"}.get(name, "log_probs")
    leaf = columns[trained].clone().requires_grad_()
    of_group = group_tokens(columns["offsets"], columns["group"])
    total = 0.0
    for part in parts:
        taken = take_rows(columns | {trained: leaf}, part)
        loss, _ = entry.function(*(taken[c] for c in entry.reads))
        offsets = offsets_of(torch.ones(len(part))) if name == "bradley_terry" else taken["offsets"]
        share = (loss * weights_of(aggregation, offsets, of_group[torch.tensor(part, dtype=torch.int64)])).sum()
        share.backward()
        total += share.item()
    assert leaf.grad is not None
    return total, leaf.grad


@st.composite
def partitions(draw: st.DrawFn, units: int) -> list[list[int]]:
    """Split `units` things, in any order, into micro-batches of which some are empty."""
    order = draw(st.permutations(range(units)))
    owner = [draw(st.integers(0, 3)) for _ in range(units)]
    return [[unit for unit in order if owner[unit] == part] for part in range(4)]


@pytest.mark.parametrize("aggregation", list(built_in(aggregations)))
@pytest.mark.parametrize("name", list(built_in(losses)))
@settings(max_examples=3)
@given(data=st.data())
def test_loss_and_gradient_are_the_same_for_any_packing_and_any_micro_batches(
    name: str, aggregation: str, data: st.DataObject
) -> None:
    columns = loss_columns(data.draw(st.integers(0, 99)))
    if losses[name].needs.whole_groups:
        parts = [[row for pair in part for row in (2 * pair, 2 * pair + 1)] for part in data.draw(partitions(3))]
    else:
        parts = data.draw(partitions(6))
    whole, gradient = sums_in_parts(name, aggregation, columns, [list(range(6))])
    cut, cut_gradient = sums_in_parts(name, aggregation, columns, parts)
    assert cut == pytest.approx(whole, abs=1e-12)
    torch.testing.assert_close(cut_gradient, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aggregation", list(built_in(aggregations)))
def test_reinforce_with_every_advantage_1_is_sft_under_any_aggregation(aggregation: str) -> None:
    columns = loss_columns(1)
    columns["advantages"] = torch.ones_like(columns["advantages"])
    reinforce, sft = (sums_in_parts(name, aggregation, columns, [list(range(6))]) for name in ("reinforce", "sft"))
    assert reinforce[0] == sft[0] and torch.equal(reinforce[1], sft[1])


def test_token_mean_divides_by_the_tokens_of_the_whole_batch() -> None:
    loss = ragged([[1.0], [0.0, 0.0, 0.0]])
    halves = [ragged([[1.0]]), ragged([[0.0, 0.0, 0.0]])]
    total = sum((h.values * weights_of("token-mean", h.offsets, floats([]))).sum().item() for h in halves)
    assert total / int(loss.offsets[-1]) == 0.25
    assert statistics.fmean(h.values.mean().item() for h in halves) == 0.5


def test_rows_without_action_tokens_have_zero_weight() -> None:
    offsets = torch.tensor([0, 0, 2, 2])
    for name in built_in(aggregations):
        weights = weights_of(name, offsets, torch.tensor([0, 2, 2]))
        assert weights.shape == (2,) and torch.isfinite(weights).all()
