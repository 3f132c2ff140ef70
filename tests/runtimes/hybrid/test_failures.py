"""If a worker fails, dies or hangs, the run ends with one error that names the worker, the stage and the rows."""

from __future__ import annotations

import os
import re
import signal

import pytest

from braidrl.errors import LostProcess, UserError, WorkerError
from braidrl.flow import Flow, data
from braidrl.flow.roles import Role
from braidrl.observe.metrics import Sums
from braidrl.runtimes.hybrid.driver import HybridBackend
from tests.runtimes.hybrid.backends import hybrid_crew, rehearse, release, told
from tests.runtimes.hybrid.test_driver import all_stages, given
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop

CHAIN = Flow("chain", [data.join_response(), Role("first").log_probs(), Role("second").log_probs()])


def failure(backend: HybridBackend, **orders: tuple[str, float]) -> str:
    rehearse(backend, **orders)
    with pytest.raises(WorkerError) as caught:
        backend.index(all_stages(backend, CHAIN, 4))
    return str(caught.value)


def test_worker_error_names_role_rank_stage_rows_with_traceback(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    config = workshop.config(**given(workshop, 16), placement="standalone")
    with hybrid_crew(config, warm_cluster, CHAIN) as backend:
        text = failure(backend, second__log_probs=("raise", 0.0))
    first = text.splitlines()[0]
    assert re.match(r"second rank 0 .*second.log_probs \(iteration 1\) .*4 rows .*: \(0, 0, 0\)", first)
    assert "Traceback" in text and "ZeroDivisionError: as rehearsed" in text and "warm.py" in text


def test_a_worker_that_dies_is_named(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    config = workshop.config(**given(workshop, 16), placement="standalone")
    with hybrid_crew(config, warm_cluster, CHAIN) as backend:
        text = failure(backend, first__log_probs=("die", 0.0))
    assert re.match(r"first rank 0 died .*first.log_probs .*4 rows .*: \(0, 0, 0\)", text)


def test_lost_worker_is_detected_when_another_pool_needs_rows(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    config = workshop.config(**given(workshop, 16), placement="standalone")
    with hybrid_crew(config, warm_cluster, CHAIN) as backend:
        rows = all_stages(backend, Flow("first", CHAIN.stages[:-1]), 4)
        backend.index(rows)
        # It is idle when it ends.
        os.kill(told(backend, "process")[0][0], signal.SIGKILL)
        asked = backend.run(CHAIN.stages[-1], rows, 1, Sums())
        with pytest.raises(LostProcess, match="first rank 0 died; others"):
            backend.index(asked)


@pytest.mark.soak
def test_a_worker_that_is_silent_for_too_long_is_named(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    # Long enough for the other workers to answer on a busy machine.
    config = workshop.config(**given(workshop, 16), placement="standalone", cluster={"wait_limit_s": 4.0})
    with hybrid_crew(config, warm_cluster, CHAIN) as backend:
        text = failure(backend, second__log_probs=("linger", 60.0))
        release(backend)
    assert re.match(r"waited 4 s .*second rank 0 \(second.log_probs on 4 rows", text)
    assert "raise cluster.wait_limit_s" in text


def test_a_users_mistake_found_by_a_worker_stays_one_line(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    config = workshop.config(**given(workshop, 16), placement="standalone")
    with hybrid_crew(config, warm_cluster, CHAIN) as backend:
        rehearse(backend, first__log_probs=("refuse", 0.0))
        with pytest.raises(UserError) as caught:
            backend.index(all_stages(backend, CHAIN, 4))
    assert str(caught.value) == "a row is too long; write trainer.max_tokens_per_device=64"


def test_a_data_error_of_the_rank_that_reads_is_raised_in_one_line(
    workshop: Workshop, warm_cluster: WarmCluster
) -> None:
    bad = workshop.folder / "bad.jsonl"
    bad.write_text('{"question": "1+1="}\n')
    config = workshop.config(runtime="hybrid", workers=2, data={"train": str(bad)})
    with pytest.raises(UserError, match=r"bad\.jsonl, line 1") as caught, hybrid_crew(config, warm_cluster):
        pass
    assert "\n" not in str(caught.value)
