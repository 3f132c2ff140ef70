"""The states of a stream's stages. A stage works on one batch after the other, so that each state has one value at a time.

lease ──acknowledged──▶ add its totals ──the batch's last──▶ advance ──▶ the values for the next batch
"""

from __future__ import annotations

from collections.abc import Mapping

from braidrl.flow import Flow
from braidrl.flow.compute import State, initial_states, next_state


class StageStates:
    """For each stage with a state the values for the batch that it is at, and the sums over those of its rows that are done."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.values = initial_states(flow)
        self.totals: dict[str, dict[str, float]] = {name: {} for name in self.values}

    def add(self, name: str, totals: Mapping[str, float]) -> None:
        """Counts some rows."""
        known = self.totals[name]
        self.totals[name] = known | {sum_: known.get(sum_, 0.0) + total for sum_, total in totals.items()}

    def advance(self, name: str) -> State:
        """All rows of the batch are counted; the values that it was done with, which give way to the next batch's."""
        before, totals = self.values[name], self.totals[name]
        self.values[name], self.totals[name] = next_state(self.flow[name], before, totals), {}
        return before
