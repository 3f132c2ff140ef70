"""Generation and training at the same time, with workers that wait a given time instead of computing, on the real
queue.

8 generating workers, one row at a time, and 4 training workers that share a lease; training as long as generation on
average, log-normal lengths with the longest ten times the median. What the clock says is what the simulator says
beforehand.
"""

from __future__ import annotations

import threading
import time

import pytest

from braidrl.data.packing import balanced_partition
from braidrl.data.rows import Uid
from braidrl.flow import Flow, Kind
from braidrl.flow.batches import Sizes
from braidrl.plan.simulation import Streaming, Workload
from braidrl.queue.calls import Stop
from braidrl.queue.client import Client, WorkItem
from braidrl.queue.transport import QueueServer
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.work import LeasedRows, Loaded, LoadWeights, Step, Stepped, TakeWork
from braidrl.weights.versions import LoadingSchedule
from tests.plan.durations import long_tailed
from tests.queue.made_up import GENERATE, SAMPLES, client, deliver, made_from, main_program, queue, stage

FLOW = Flow("overlap", [GENERATE, stage("update", Kind.TRAIN, ("tokens",))])
GENERATING, TRAINING, ROWS = 8, 4, 16


def workload(staleness: int, iterations: int, median_s: float) -> Workload:
    lengths = long_tailed(seed=3, median=median_s, longest=10 * median_s, among=ROWS)
    rows = [(0, group, sample) for group in range(400) for sample in range(SAMPLES)]
    # So many rows on so many workers, each as long as the others on average: training takes as long as generation.
    train = sum(map(lengths, rows)) / len(rows) * TRAINING / GENERATING

    def seconds(name: str, uid: Uid) -> float:
        return lengths(uid) if name == "generate" else train

    sizes = Sizes(iterations, ROWS // SAMPLES, SAMPLES, ROWS, max_staleness=staleness)
    return Workload(FLOW, sizes, seconds, {"generate": GENERATING, "update": TRAINING})


def generate(worker: Client, work: Workload) -> None:
    loaded = 0
    while (given := worker.take(TakeWork(["generate"], 1), 5.0)).kind is not Stop:
        if given.kind is LoadWeights:
            loaded = given.answer.version
            worker.ask(Loaded(loaded))
        elif given.kind is LeasedRows:
            rows = given.read()
            time.sleep(work.seconds("generate", rows.uids()[0]))
            deliver(worker, given, made_from("generate", rows, loaded))


def train(worker: Client, work: Workload) -> None:
    """The leader of a group: a lease takes as long as the largest share."""
    kept: list[WorkItem] = []
    while True:
        rows = sum(item.size for item in kept)
        ready = ["update"] if rows == ROWS else []
        given = worker.take(TakeWork(["train.actor"], work.dispatch_rows, role="actor", ready=ready), 5.0)
        if given.kind is Stop:
            return
        if given.kind is Step:
            worker.ask(Stepped("update", {}))
            worker.done("train.actor", [(item.lease, None) for item in kept])
            kept = []
        elif given.kind is LeasedRows:
            costs = [work.seconds("update", uid) for uid in given.read().uids()]
            time.sleep(max(sum(costs[i] for i in part) for part in balanced_partition(costs, TRAINING)))
            kept.append(given)


def measured(work: Workload) -> float:
    """Seconds of all iterations on the clock."""
    iterations = work.sizes.iterations
    loading = LoadingSchedule(work.loading, GENERATING // 2)
    with queue(FLOW, iterations, ROWS // SAMPLES, staleness=work.sizes.max_staleness, loading=loading) as (
        control,
        server,
        node,
    ):
        workers = [client(server, node, f"generate.{n}", generates=True) for n in range(GENERATING)]
        threads = [threading.Thread(target=generate, args=(worker, work)) for worker in workers]
        trainer = client(server, node, "update.0")
        threads.append(threading.Thread(target=train, args=(trainer, work)))
        for thread in threads:
            thread.start()
        try:
            start = time.monotonic()
            main_program(control, server, iterations, limit_s=300)
            return time.monotonic() - start
        finally:
            end(control, server)
            for thread in threads:
                thread.join()
            for worker in [*workers, trainer]:
                worker.close()


def end(control: ControlPlane, server: QueueServer) -> None:
    with control.changed:
        control.stopping = True
    server.changed()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("iterations", "median_s", "tolerance"),
    # On a machine that does other things as well, what the queue itself takes shows in short times.
    [(10, 0.06, 0.25), (20, 0.25, 0.1)],
)
def test_staleness_one_speedup_matches_simulator(iterations: int, median_s: float, tolerance: float) -> None:
    works = [workload(staleness, iterations, median_s) for staleness in (0, 1)]
    predicted = [Streaming(work).simulate().ends[-1] for work in works]
    seconds = [measured(work) for work in works]
    assert seconds == pytest.approx(predicted, rel=tolerance)
    assert seconds[0] > 1.5 * seconds[1]
