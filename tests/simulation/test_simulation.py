"""Messages are lost, late and doubled, workers die, freeze, join and leave, stores are full: no row is lost or trained
twice, none is too stale, every engine has one whole version, and the run ends with the batches of an undisturbed one.
"""

from __future__ import annotations

import pytest

from braidrl.queue.calls import Hello
from tests.simulation.__main__ import FAULT_SEEDS, run_seeds
from tests.simulation.faults import FAULTS, Fault, planted
from tests.simulation.run import Scenario, SimulatedRun, drawn, failure, outcome, shrunk

SEEDS = 100
MORE_SEEDS = 10_000
PROCESSES = 2


def test_a_hundred_disturbed_runs_keep_every_invariant() -> None:
    broken = {seed: result for seed in range(SEEDS) if (result := failure(drawn(seed)))}
    assert not broken, broken


@pytest.mark.soak
def test_ten_thousand_disturbed_runs_keep_every_invariant() -> None:
    assert run_seeds(range(MORE_SEEDS), PROCESSES) == 0


def test_a_late_registration_does_not_bring_a_dead_worker_back() -> None:
    run = SimulatedRun(Scenario())
    while not run.control.loading.engines:
        run.clock.step()
    (name, *_) = run.control.loading.engines
    run.control.fail(name)
    run.control.handle(Hello(holder=name, address="", generates=True), ())
    assert name not in run.control.holders and name not in run.control.loading.engines


@pytest.mark.parametrize("seed", [3, 17])
def test_a_seed_gives_the_same_run_twice(seed: int) -> None:
    assert drawn(seed) == drawn(seed) and outcome(drawn(seed)) == outcome(drawn(seed))


@pytest.mark.soak
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_planted_fault_is_found_and_shrunk(fault: Fault) -> None:
    with planted(fault):
        seed = next(seed for seed in range(FAULT_SEEDS) if failure(drawn(seed)))
        short = shrunk(drawn(seed))
        result = failure(short)
        assert result and failure(short) == result and len(short.events) <= 20
    assert not failure(short), "without the fault the same events do no harm"
    print(f"{fault.__name__}: seed {seed}, {len(drawn(seed).events)} events, shrunk to {short.events}: {result}")
