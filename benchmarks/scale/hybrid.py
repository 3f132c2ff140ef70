"""A hybrid run of many workers: the product's own driver and its first worker, and a model of Ray and of all others.

driver ──call──▶ PlayedActor 0       a real worker, with the messages of rank 0 of a played group
       ──call──▶ PlayedActor 1 ...   answers as the first one did, for as many rows as it was given

The driver's processor seconds are without those of the real worker, of the model and of Ray itself; its calls and the
bytes of their arguments and answers are counted. Each worker has as many rows: 2 prompts, 4 samples each.
"""

import pickle
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.scale.played import GROUPS, OF_A_MACHINE, SAMPLES, Counted, PlayedGroup, PlayedWorld, join_played
from benchmarks.scale.runs import CountedRun, settings, write_sums
from braidrl.cluster.pools import Pool
from braidrl.cluster.ray_cluster import Reservation
from braidrl.config.config import ClusterConfig
from braidrl.data import codec
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.observe.rollouts import part_path
from braidrl.runtimes.hybrid import driver, group, hybrid_worker
from braidrl.runtimes.hybrid.handles import CallResult, Part
from braidrl.runtimes.hybrid.hybrid_worker import HybridWorker
from braidrl.runtimes.row_store import RowText

STEPS, WARM = 6, 2
"""Steps of a run, and how many of them only warm caches."""
KEYS = ("algorithm.kl_coef=0", "runtime=hybrid")


@dataclass(frozen=True, eq=False)
class Answer:
    """Replaces a reference of Ray."""

    result: Any


@contextmanager
def payload_allowed() -> Iterator[None]:
    """Allow the first worker, which runs in the driver's process, to read payload."""
    forbidding = list(codec._forbidding)
    codec._forbidding.clear()
    yield
    codec._forbidding.extend(forbidding)


class PlayedActor:
    """A worker: the first is real, the others return an answer immediately."""

    def __init__(self, cluster: "PlayedCluster", rank: int) -> None:
        self.cluster, self.rank = cluster, rank
        self._actor_id = SimpleNamespace(hex=lambda: f"worker {rank}")
        self.worker = HybridWorker() if rank == 0 else None

    @property
    def perform(self) -> "PlayedActor":
        return self

    @property
    def fetch(self) -> "PlayedRows":
        return PlayedRows(self.cluster)

    def options(self, **_: Any) -> "PlayedActor":
        return self

    def remote(self, method: str, released: Sequence[int], count: int, *values: Any) -> Answer:
        """Count a call and return its answer."""
        counted = self.cluster.counted
        with counted.modelling(), payload_allowed():
            values = tuple(value.result if isinstance(value, Answer) else value for value in values)
            sent = len(pickle.dumps((method, released, count, values[:count])))
            if self.worker is not None:
                answer = self.cluster.latest[method] = self._own(method, released, count, *values)
            else:
                answer = self._of_other(method, values)
            counted.add("calls", sent + len(pickle.dumps(answer)), 2)
        return Answer(answer)

    def _own(self, method: str, released: Sequence[int], count: int, *values: Any) -> Any:
        assert self.worker is not None
        if method == "join_process_group":
            # Not before it has read the data, which is little, alone.
            return CallResult()
        if method == "load_models":
            self.worker.world = self.cluster.world(self.worker)
        return self.worker.perform(method, released, count, *values)

    def _of_other(self, method: str, values: Sequence[Any]) -> Any:
        """Return the first worker's answer to the same call, changed to this worker's rows."""
        answer, first = self.cluster.latest[method], self.cluster.actors[0].worker
        assert first is not None, "the first worker is real"
        if method == "make":
            origin, key = values
            rows = first.rows.make(origin, self.rank, len(self.cluster.actors))
            return CallResult(pack_rows(rows.index), tuple(rows.payload), self.rank, key)
        if method == "load_models":
            return replace(answer, result=(*answer.result[:1], f"node {self.rank // OF_A_MACHINE}", *answer.result[2:]))
        if method == "merge_recorded":
            return CallResult(result=first.merge_recorded(*values))
        if method == "record" and (mine := part_path(values[0], 0)).exists():
            part_path(values[0], self.rank).write_bytes(mine.read_bytes())
        size = next((len(value) for value in values if isinstance(value, Part)), 0)
        if method == "texts":
            return replace(answer, result=[RowText("", "")] * size)
        if not answer.index:
            return answer
        index = unpack_rows(answer.index)
        return replace(answer, index=pack_rows(index.take(torch.arange(size) % len(index))), worker=self.rank)


@dataclass(frozen=True)
class PlayedRows:
    """The rows of a simulated worker, with the values of the first worker's rows."""

    cluster: "PlayedCluster"

    def options(self, **_: Any) -> "PlayedRows":
        return self

    def remote(self, requests: Sequence[tuple[int, Any, tuple[str, ...]]]) -> Answer:
        first = self.cluster.actors[0].worker
        assert first is not None, "the first worker is real"
        return Answer(first.fetch([(key, rows % len(first.rows_by_key[key]), names) for key, rows, names in requests]))


class PlayedCluster:
    """Replaces a cluster of Ray."""

    latest_cluster: "PlayedCluster"

    def __init__(self, config: ClusterConfig, device: str) -> None:
        self.config, self.family, self.own_node = config, "played", "node 0"
        self.counted, self.actors = Counted(), list[PlayedActor]()
        self.latest: dict[str, Any] = {}
        """The first worker's latest answer to each method."""
        self.names: dict[str, str] = {}
        PlayedCluster.latest_cluster = self

    def world(self, worker: HybridWorker) -> PlayedWorld:
        """Return the process group of the first worker."""
        played: PlayedGroup = join_played(0, worker.pool.workers)
        return PlayedWorld(played, [])

    def reserve(self, pools: Sequence[Pool]) -> list[list[Reservation]]:
        return [[Reservation("here", None, 1)] * pool.workers for pool in pools]

    def start(self, worker: type, reservation: Reservation, *_: Any, name: str = "") -> PlayedActor:
        self.actors.append(PlayedActor(self, len(self.actors)))
        return self.actors[-1]

    def ready(self, references: Sequence[Answer], limit_s: float) -> list[Answer]:
        return list(references)

    def close(self) -> None:
        pass


def counters() -> dict[str, float]:
    """Return the driver's seconds, and its messages and their bytes."""
    counted = PlayedCluster.latest_cluster.counted
    seconds = time.process_time() - counted.modelled_s
    return {"seconds": seconds, "messages": counted.messages["calls"], "bytes": counted.sent["calls"]}


def play(folder: Path, workers: int) -> dict[str, Any]:
    """Simulate a run of this many workers; return the median step of its driver."""
    ray = SimpleNamespace(
        put=lambda value: value,
        get=lambda asked, **_: [one.result for one in asked] if isinstance(asked, list) else asked.result,
        get_actor=lambda name: PlayedCluster.latest_cluster.actors[int(name.rpartition("-")[2])],
        wait=lambda references, **_: (references, []),
        util=SimpleNamespace(get_node_ip_address=lambda: "127.0.0.1"),
        get_runtime_context=lambda: SimpleNamespace(get_node_id=lambda: "node 0"),
    )
    for module in (driver, group, hybrid_worker):
        module.ray = ray  # type: ignore[attr-defined]
    driver.RayCluster = PlayedCluster  # type: ignore[misc,assignment]
    write_sums(folder / "lines.jsonl", 4 * workers)
    start = time.process_time()
    keys = *KEYS, f"workers={workers}"
    run = CountedRun(settings(folder, workers, STEPS, *keys), counters)
    with run:
        started = time.process_time() - start - PlayedCluster.latest_cluster.counted.modelled_s
        run.train()
    parts, before = {f"driver, {part}": counts for part, counts in run.parts(WARM).items()}, time.process_time()
    dist.destroy_process_group()
    with CountedRun(settings(folder, workers, STEPS + 1, *keys), counters, resume=run.folder):
        counted = PlayedCluster.latest_cluster.counted
        seconds = time.process_time() - before - counted.modelled_s
    sent = {"messages": float(counted.messages["calls"]), "bytes": float(counted.sent["calls"])}
    parts["driver, resume"] = {"seconds": seconds, **sent}
    return {"devices": workers, "rows": GROUPS * SAMPLES * workers, "start_s": started, "parts": parts}
