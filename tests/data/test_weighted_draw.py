from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from braidrl.data.loader import permutation, weighted_draw

weights = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=5)


@given(weights, st.integers(0, 2**31), st.integers(1, 300))
def test_each_source_is_dealt_0_1_2(weights: list[float], seed: int, numbers: int) -> None:
    dealt = [0] * len(weights)
    for number in range(numbers):
        source, place = weighted_draw(number, weights, seed)
        assert place == dealt[source]
        dealt[source] += 1


@given(weights, st.integers(0, 2**31), st.integers(0, 10**9))
def test_sources_follow_the_weights_at_any_number(weights: list[float], seed: int, number: int) -> None:
    source, before = weighted_draw(number, weights, seed)
    # Each split is within one of its share, and shares are rounded to 2 ** -32.
    assert abs(before - number * weights[source] / sum(weights)) <= len(weights) + number * 1e-8


def test_the_seed_changes_the_deal() -> None:
    deals = {tuple(weighted_draw(number, [1.0, 2.0, 4.0], seed)[0] for number in range(50)) for seed in range(5)}
    assert len(deals) > 1


@given(st.integers(0, 2**40), st.integers(0, 3), st.integers(0, 100), st.integers(1, 200))
def test_an_epochs_order_holds_each_example_once(seed: int, source: int, epoch: int, size: int) -> None:
    assert sorted(permutation(seed, source, epoch, size).tolist()) == list(range(size))


def test_orders_differ_by_seed_source_and_epoch() -> None:
    orders = [permutation(*key, 100) for key in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert all(not np.array_equal(a, b) for i, a in enumerate(orders) for b in orders[:i])


def test_an_order_never_changes_between_releases() -> None:
    assert permutation(0, 0, 0, 10).tolist() == [0, 8, 9, 3, 5, 1, 7, 2, 6, 4]
