"""Admission bounds staleness, and a batch that breaks the bound is named."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.flow.batches import TooStale, admissible, check_staleness, trained_on


@given(st.integers(1, 100), st.integers(0, 100), st.integers(0, 5))
def test_a_row_is_within_the_staleness_bound_iff_admissible(iteration: int, version: int, bound: int) -> None:
    # Admitted so early that the version is too old by the time of training.
    iteration += version
    if admissible(iteration, version, bound):
        assert check_staleness(iteration, [version], bound, "a") <= bound
    else:
        with pytest.raises(TooStale):
            check_staleness(iteration, [version], bound, "a")


def test_on_policy_admits_the_next_batch_only_after_its_version() -> None:
    assert admissible(1, 0, 0) and not admissible(2, 0, 0) and admissible(2, 1, 0)
    assert admissible(2, 0, 1) and not admissible(3, 0, 1)


def test_a_batch_reports_its_oldest_row() -> None:
    assert check_staleness(5, [4, 3, 4], 1, "abc") == 1
    assert check_staleness(1, [trained_on(1)], 0, "a") == 0


def test_a_row_too_old_or_from_the_future_is_named() -> None:
    with pytest.raises(TooStale, match=r"row \(0, 7, 1\).*version 2,.*version 4"):
        check_staleness(5, [4, 2], 1, [(0, 7, 0), (0, 7, 1)])
    with pytest.raises(TooStale, match=r"row b .*tokens of version 5"):
        check_staleness(5, [4, 5], 1, "ab")
