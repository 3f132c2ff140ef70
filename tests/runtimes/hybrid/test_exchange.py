"""Workers send each other payload through Ray's object store, in chunks, in a pool as between pools."""

from __future__ import annotations

from braidrl.flow import Flow, data
from braidrl.flow.roles import Role
from braidrl.observe.metrics import Sums
from braidrl.runtimes.hybrid.hybrid_worker import FETCHED_ROWS
from braidrl.runtimes.row_store import Admission
from tests.runtimes.hybrid.backends import hybrid_crew, rehearse, told
from tests.runtimes.hybrid.test_driver import all_stages, given
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import Workshop

TWO = Flow("two", [data.join_response(), Role("first").log_probs(), Role("second").log_probs()])


def test_pool_ranks_fetch_only_the_rows_that_they_lack(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    config = workshop.config(**given(workshop, 16), placement="colocate", workers=2)
    with hybrid_crew(config, warm_cluster, TWO) as backend:
        table = backend.read(Admission(range(8)))
        # The ranks hold neighbouring rows; each gets rows of both.
        halves = table.cat([table.take(range(0, 8, 2)), table.take(range(1, 8, 2))])
        for stage in TWO.stages:
            halves = backend.run(stage, halves, 1, Sums())
        index = backend.index(halves)
        (given_out,) = told(backend, "given_out")
    assert all(counts and max(counts) <= 4 for counts in given_out)
    assert index["group"].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_rows_of_another_pool_come_in_chunks(workshop: Workshop, warm_cluster: WarmCluster) -> None:
    rows = 2 * FETCHED_ROWS + 10
    config = workshop.config(**given(workshop, 16, rows), placement="standalone")
    with hybrid_crew(config, warm_cluster, TWO) as backend:
        rehearse(backend, first__log_probs=("wait", 0.0), second__log_probs=("wait", 0.0))
        backend.index(all_stages(backend, TWO, rows))
        (first,), _ = told(backend, "given_out")
    assert sorted(first) == [10, FETCHED_ROWS, FETCHED_ROWS]
