"""A driver whose workers are objects of its own process and hold no models: what it sends and receives is what it would with real ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import ray
import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.pools import Pool
from braidrl.cluster.ray_cluster import RayCluster
from braidrl.config import ClusterConfig, parse_config
from braidrl.data.rows import Column, Rows
from braidrl.flow import Stage
from braidrl.observe.metrics import Sums
from braidrl.observe.rollouts import part_path, write_rollouts
from braidrl.runtimes.hybrid.handles import assemble
from braidrl.runtimes.hybrid.pool_worker import RunOrder, WorkerSpec, hybrid_pools, sign_of
from braidrl.runtimes.hybrid.protocols import register
from braidrl.runtimes.hybrid.worker import HybridWorker
from braidrl.runtimes.prepare.setup import Prepared, with_data, without_data

COUNTS = ("length", "action_tokens", "reflections")
FLAGS = ("finish_reason", "correct", "score", "reward")
METRICS = [f"actor/{name}" for name in (
    "entropy", "log_prob_mean", "kl_old", "clip_fraction", "clip_low_fraction", "clip_high_fraction", "ratio_mean", "ratio_max",
    "kl_reference", "rollout_log_prob_gap", "grad_norm",
)] + ["loss/actor", "tokens/trained", "train/rollout_log_prob_gap"]  # fmt: skip


class PlayedExecutor:
    """In an executor's place: makes columns up."""

    def __init__(self, seed: int) -> None:
        self.residency = self
        self.random = torch.Generator().manual_seed(seed)

    def before(self, stage: Stage) -> None: ...

    def is_collective(self, stage: Stage) -> bool:
        return False

    def run(self, stage: Stage, rows: Rows, sums: Sums, *more: Any) -> Mapping[str, Column]:
        sums.add("tokens/generated", 100.0 * len(rows))
        return {name: self.column(name, len(rows)) for name in stage.writes}

    def column(self, name: str, rows: int) -> Column:
        if name in COUNTS:
            return torch.randint(1, 2000, (rows,), generator=self.random)
        if name in FLAGS:
            return torch.randint(0, 2, (rows,), generator=self.random).double()
        if name in ("advantage", "version"):
            return torch.zeros(rows)
        return Ragged.from_lengths(torch.zeros(rows), torch.ones(rows, dtype=torch.int64))

    def train(self, stage: Stage, updates: Any, iteration: int, sums: Sums, *more: Any, **named: Any) -> None:
        for name in METRICS:
            sums.add(name, float(torch.rand((), generator=self.random)), 100)

    def publish(self, version: int) -> None: ...

    def close(self) -> None: ...


@cache
def read_once(settings: str) -> Prepared:
    """What every worker finds out for itself, which takes a thousand of them in one process too long."""
    config = parse_config(json.loads(settings))
    return with_data(without_data(config), True)


class PlayedWorker(HybridWorker):
    """A worker that reads index columns alone and computes nothing."""

    @register(protocol="ALL_TO_ALL")
    def join_run(self, number: int, order: RunOrder) -> int:
        self.prepared, self.trains = read_once(json.dumps(order.settings)), order.train
        limit_s = self.prepared.config.cluster.wait_limit_s
        self.spec = WorkerSpec.of(number, hybrid_pools(self.prepared, order.train), order, limit_s)
        self.stages = self.prepared.stages
        return sign_of(self.stages)

    @register(protocol="ONE_TO_ALL")
    def read_data(self) -> list[tuple[int, str]]:
        return [(len(source), source.report()) for source in self.prepared.sources] if self.spec.rank == 0 else []

    @register(protocol="ONE_TO_ALL")
    def load_models(self) -> tuple[int, str]:
        self.flow, self.rows = self.prepared.flow, self.prepared.store()
        self.executor: Any = PlayedExecutor(self.spec.number)
        return 0, ""

    @register(protocol="ONE_TO_ALL")
    def join_process_group(self, meeting: Any) -> None: ...

    @register(protocol="RANK_ZERO")
    def rendezvous(self) -> Any:
        return "", 0, ""

    @register(protocol="ALL_TO_ALL")
    def record(self, path: Any, part: Any, added: Any) -> None:
        write_rollouts(part_path(path, self.spec.rank), Rows({}), [], [])

    def _rows_of(self, part: Any, reads: frozenset[str] | None, beside: bool = False) -> Rows:
        return assemble(part, self.call.answers, frozenset(), None, lambda fetched: [])


class Method:
    """A method as Ray offers it: `method.remote(...)` returns a reference to the result."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def options(self, **named: Any) -> Method:
        return self

    def remote(self, *arguments: Any) -> Any:
        return ray.put(self.function(*(ray.get(a) if isinstance(a, ray.ObjectRef) else a for a in arguments)))


class PlayedActor:
    """A worker under the names by which the driver calls it."""

    def __init__(self, number: int) -> None:
        worker = PlayedWorker()
        self._actor_id = number.to_bytes(4, "little")
        self.perform, self.close = Method(worker.perform), Method(worker.close)


class PlayedCluster(RayCluster):
    """Gives out objects in the place of processes."""

    def __init__(self) -> None:
        super().__init__(ClusterConfig(start_limit_s=120, wait_limit_s=60), "cpu")
        self.numbers = 0

    def reserve(self, pools: Sequence[Pool]) -> list[list[Any]]:
        return [[None] * pool.workers for pool in pools]

    def start(self, worker: type, place: Any, *arguments: Any, name: str | None = None) -> Any:
        self.numbers += 1
        return PlayedActor(self.numbers)

    def close(self) -> None: ...
