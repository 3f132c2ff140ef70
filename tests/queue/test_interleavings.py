"""Whatever comes first, is lost, repeated or dies: every task is done with each row once, and with all of them in the
end.
"""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from braidrl.queue.samplers import SAMPLERS
from tests.queue.network import TASKS, Network

ROWS = 24
STEPS = 20_000
HARMFUL_STEPS = 2_000


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@settings(max_examples=20)
@given(seed=st.integers(0, 1 << 30))
def test_lost_messages_and_dead_clients_lose_and_repeat_no_row(sampler: str, seed: int) -> None:
    assert_each_row_is_done_once(sampler, seed)


@pytest.mark.soak
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_ten_thousand_interleavings(sampler: str) -> None:
    for seed in range(2_000):
        assert_each_row_is_done_once(sampler, seed)


def assert_each_row_is_done_once(sampler: str, seed: int) -> None:
    network = Network(seed, sampler, ROWS)
    for step in range(STEPS):
        network.step(step < HARMFUL_STEPS)
        if network.is_over():
            break
    else:
        raise AssertionError(f"it stands still: {network.done}, {network.uncertain}")
    for task, row in product(TASKS, range(ROWS)):
        expected = (0, 1) if (task, row) in network.uncertain else (1,)
        assert network.done[task, row] in expected, f"{task} is done {network.done[task, row]} times with row {row}"
    assert network.memory.names <= network.untold, "memory of rows that all tasks are done with is free"
