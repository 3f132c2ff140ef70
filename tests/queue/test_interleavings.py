"""Whatever comes first, is repeated, dies or is killed: every task is done with each row once, and with all of them in the end."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from braidrl.queue.samplers import SAMPLERS
from tests.queue.network import TASKS, Network

ROWS = 24
STEPS = 20_000
HARMFUL_STEPS = 2_000


@pytest.mark.parametrize("sampler", list(SAMPLERS))
@settings(max_examples=10)
@given(seed=st.integers(0, 1 << 30), units=st.integers(1, 2))
# With shortest_first: rows left while the answer to their put was lost, the unit was killed again, and the put was repeated.
@example(seed=37658, units=1)
def test_any_kill_loses_and_repeats_nothing_and_work_continues(sampler: str, seed: int, units: int) -> None:
    play(sampler, seed, units, kills=True)


@settings(max_examples=15)
@given(seed=st.integers(0, 1 << 30), sampler=st.sampled_from(list(SAMPLERS)))
def test_whichever_client_dies_memory_of_rows_that_are_done_is_free(seed: int, sampler: str) -> None:
    network = play(sampler, seed, 1, kills=False)
    assert network.memory.names <= network.untold


@pytest.mark.soak
@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_ten_thousand_interleavings(sampler: str) -> None:
    for seed in range(2_000):
        play(sampler, seed, 1 + seed % 2, kills=True)


def play(sampler: str, seed: int, units: int, kills: bool) -> Network:
    network = Network(seed, dict.fromkeys(TASKS, sampler), units, ROWS)
    for step in range(STEPS):
        network.step(kills and step < HARMFUL_STEPS, step < HARMFUL_STEPS)
        if network.is_over():
            break
    else:
        raise AssertionError(f"it stands still: {network.done}, {network.uncertain}")
    for task, row in product(TASKS, range(ROWS)):
        expected = (0, 1) if (task, row) in network.uncertain else (1,)
        assert network.done[task, row] in expected, f"{task} is done {network.done[task, row]} times with row {row}"
    return network
