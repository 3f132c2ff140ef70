"""The metrics of a step, from the sums that its stages have counted."""

from __future__ import annotations

import pytest

from braidrl.data.rows import Rows
from braidrl.observe.metrics import Sums
from braidrl.runtimes.interfaces import IterationResult
from braidrl.runtimes.step_metrics import GAP, training_metrics


@pytest.mark.parametrize("roles", [("first", "second"), ("second", "first")])
def test_gap_is_that_of_the_trained_role_that_differs_most_from_its_engine(roles: tuple[str, str]) -> None:
    sums, of_role = Sums(), {"first": 0.3, "second": 0.001}
    for role in roles:
        sums.add(f"{role}/rollout_log_prob_gap", of_role[role])
    sums.add("third/rollout_log_prob_gap", 0.0, 0)
    assert training_metrics(IterationResult(Rows({}), Rows({}), None, None, sums)) == {GAP: 0.3}
