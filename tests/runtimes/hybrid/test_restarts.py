"""A pool restarts after the loss of a worker, and the other pools continue."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import pytest

from braidrl.runtimes.hybrid.driver import HybridBackend
from braidrl.runtimes.run import TrainingRun
from tests.tiny import Workshop, metrics_agree

ALONE = [{"roles": ["actor"], "workers": 1}, {"roles": ["reference"], "workers": 1}]
APART = [{"roles": ["actor"], "workers": 2}, {"roles": ["reference"], "workers": 1}]
SAMPLING = [{"roles": ["actor", "reference"], "workers": 2}, {"roles": ["actor.generate"], "workers": 2}]


@pytest.mark.soak
@pytest.mark.parametrize(
    ("pools", "victim", "sent"),
    [
        (ALONE, "actor", signal.SIGKILL),
        pytest.param(APART, "actor", signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param(APART, "actor", signal.SIGSTOP, marks=pytest.mark.soak),
        pytest.param(APART, "reference", signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param(SAMPLING, "actor", signal.SIGKILL, marks=pytest.mark.soak),
        pytest.param(SAMPLING, "actor.generate", signal.SIGKILL, marks=pytest.mark.soak),
    ],
)
def test_only_the_pool_that_lost_a_worker_starts_again(
    workshop: Workshop,
    ray_cluster: None,
    pools: list[dict[str, Any]],
    victim: str,
    sent: signal.Signals,
) -> None:
    trainer = {"steps": 6, "checkpoint_every": 2, "deterministic": True}
    sections: dict[str, Any] = {"trackers": [], "dtype": "float64"}
    quiet = workshop.run("quiet-pools", **sections, trainer=trainer)
    sections |= {"runtime": "hybrid", "placement": {"pools": pools}, "cluster": {"silence_s": 10.0}}
    config = workshop.config("pools", **sections, trainer={**trainer, "max_restarts": 1})
    with TrainingRun(config) as run:
        assert isinstance(run.backend, HybridBackend)
        groups = run.backend.groups
        before = {role: list(group.processes) for role, group in groups.items()}

        def strike() -> None:
            while run.step < 3:
                time.sleep(0.01)
            process = groups[victim].processes[0]
            assert process is not None
            os.kill(process, sent)

        thread = threading.Thread(target=strike)
        thread.start()
        run.train()
        thread.join()
        assert not run.repairs.spend()
        again = {role for role, group in groups.items() if not set(before[role]) & set(group.processes)}
        assert again == {role for role in groups if groups[role] is groups[victim]}
        assert all(before[role] == group.processes for role, group in groups.items() if role not in again)
    assert metrics_agree(run.folder, quiet)
