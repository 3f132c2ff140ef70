"""Workers that are reused from test to test, because a process that imports torch takes seconds to start."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from threading import Event
from typing import Any

import ray
import torch
from torch.distributed.tensor._redistribute import _gen_transform_infos, clear_redistribute_planner_cache
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.pools import Pool
from braidrl.cluster.ray_cluster import BEATS, RayCluster
from braidrl.config import ClusterConfig
from braidrl.data.rows import Column, Rows
from braidrl.errors import UserError
from braidrl.flow import Stage
from braidrl.observe.metrics import Sums
from braidrl.runtimes.hybrid.handles import CallResult, Numbers, Part
from braidrl.runtimes.hybrid.hybrid_worker import HybridWorker
from braidrl.runtimes.hybrid.protocols import register
from tests.runtimes.patience import patient

gc.freeze()  # Workers collect garbage whenever a backend ends: not in what they have imported.


class RehearsingWorker(HybridWorker):
    """A worker that, on request, waits, blocks until released, raises, refuses or dies at a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.orders: dict[str, tuple[str, float]] = {}
        self.rows_given: list[int] = []
        self.released = Event()

    def release(self) -> None:
        """Release a blocked call from another thread."""
        self.released.set()

    def rehearse(self, orders: Mapping[str, tuple[str, float]]) -> None:
        self.orders = dict(orders)

    @register(protocol="DP")
    def execute(self, part: Part, stage: Stage, iteration: int, key: int, *more: Any) -> CallResult:
        order, seconds = self.orders.get(stage.name, ("", 0.0))
        if order == "wait":
            return self._write(part, stage, iteration, key, lambda rows, sums: waited(stage, rows, sums, seconds))
        if order == "linger":
            self.released.wait(seconds)
        if order == "raise":

            def fails(rows: Rows, sums: Sums) -> None:
                raise ZeroDivisionError("as rehearsed")

            self._compute(part, stage, iteration, fails)
        if order == "refuse":
            raise UserError("a row is too long; write trainer.max_tokens_per_device=64")
        if order == "die":
            os._exit(3)
        with patient() if len(more) > 1 else nullcontext():
            return super().execute(part, stage, iteration, key, *more)

    def fetch(self, wanted: Sequence[tuple[int, Numbers, tuple[str, ...]]]) -> list[list[Numbers]]:
        result = super().fetch(wanted)  # Fails for a call of an earlier test that outlives its backend.
        self.rows_given.append(max(len(rows) for _, rows, _ in wanted))
        return result

    def close(self) -> None:
        super().close()
        # DTensor's caches hold the process groups, which end with the backend.
        _clear_sharding_prop_cache()
        clear_redistribute_planner_cache()
        _gen_transform_infos.cache_clear()
        # Models hold them too: each group that stays alive polls a hundred times a second.
        vars(self).clear()
        gc.collect()
        self.__init__()  # type: ignore[misc]

    def held(self) -> int:
        """Return the number of calls whose rows are kept here."""
        return len(self.rows_by_key)

    def given_out(self) -> list[int]:
        """Return the number of rows of each answered fetch."""
        return self.rows_given

    def process(self) -> int:
        return os.getpid()


def waited(stage: Stage, rows: Rows, sums: Sums, seconds: float) -> dict[str, Column]:
    """Return zeros instead of the log-probs of a stage."""
    time.sleep(seconds)
    counts = rows["action_mask"].with_values(rows["action_mask"].values.long()).row_sums()
    return {stage.writes[0]: Ragged.from_lengths(torch.zeros(int(counts.sum())), counts)}


class WarmCluster(RayCluster):
    """Hands out workers that earlier backends have returned; it makes no placement groups, which have their own
    test.
    """

    def __init__(self) -> None:
        super().__init__(ClusterConfig(start_limit_s=120, wait_limit_s=60), "cpu")
        self.spare: dict[str, Any] = {}
        self.called: dict[Any, str] = {}

    def reserve(self, pools: Sequence[Pool]) -> list[list[Any]]:
        return [[None] * pool.workers for pool in pools]

    def start(self, worker: type, seat: Any, *arguments: Any, name: str | None = None) -> Any:
        assert name is not None
        actor = self.spare.pop(name) if name in self.spare else self.new(name)
        self.actors.append(actor)
        self.called[actor] = name
        return actor

    def new(self, name: str) -> Any:
        groups = {"rows": 2, "aside": 1, BEATS: 1}
        made = ray.remote(num_cpus=1, concurrency_groups=groups)(RehearsingWorker)
        while True:
            try:
                return made.options(name=name).remote()
            except ValueError:  # Ray is still ending the previous actor of this name.
                time.sleep(0.05)

    def close(self) -> None:
        """Take back the workers that still answer."""
        given, self.actors = self.actors, []
        for actor in given:
            name = self.called.pop(actor)
            try:
                ray.get(actor.close.remote(), timeout=60)
                self.spare[name] = actor
            except ray.exceptions.RayError:
                ray.kill(actor)
