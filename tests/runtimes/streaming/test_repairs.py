"""Lost workers are replaced within a budget of repairs per hour."""

from braidrl.runtimes.streaming.processes import HOUR_S, RepairBudget


def test_repairs_beyond_the_budget_of_an_hour_are_refused() -> None:
    budget = RepairBudget(2)
    assert [budget.spend(now) for now in (0.0, 10.0, 20.0)] == [True, True, False]
    assert budget.spend(HOUR_S + 1.0), "the first repair is more than an hour ago"
    assert [budget.spend(HOUR_S + 2.0), budget.spend(HOUR_S + 11.0)] == [False, True]
    assert not RepairBudget(0).spend(0.0)
