"""The ranks of a distributed run on a Ray cluster: Ray chooses machines and devices, the ranks are processes as everywhere.

run_ranks ──▶ an actor on each reserved device ──start──▶ rank        the rank ends with its actor
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

import ray
import torch.distributed as dist
from ray.exceptions import RayActorError

from braidrl.cluster.rank_process import LOOPBACK, RankFailure, RankProcess, answer_of, environment_of, start, stop
from braidrl.cluster.ray_cluster import RayCluster
from braidrl.config import ClusterConfig
from braidrl.placement.pools import Pool

LOOK_EVERY_S = 0.2
"""How soon an interrupt is passed on."""


class RankKeeper:
    """An actor that starts one rank beside itself, waits for its last word, and ends it."""

    def __init__(self) -> None:
        self.rank: RankProcess | None = None

    def node(self) -> str:
        """The address of its machine."""
        return str(ray.util.get_node_ip_address())

    def keep(self, rank: int, meeting: Mapping[str, str], message: Mapping[str, Any]) -> Any:
        """The rank's result, or its RankFailure."""
        self.rank = start(rank, meeting, message)
        return answer_of(self.rank)

    def interrupt(self) -> None:
        if self.rank is not None:
            self.rank.signal(signal.SIGINT)

    def close(self) -> None:
        """Ends the rank if it still runs."""
        if self.rank is not None:
            stop([self.rank])


class RayRanks:
    """Ranks in reserved places of a cluster, each with a device of its own."""

    def __init__(self, config: ClusterConfig, device: str) -> None:
        self.config, self.device = config, device
        self.cluster: RayCluster | None = None
        self._store: dist.TCPStore | None = None
        self._keepers: list[Any] = []
        self._silent: dict[Any, int] = {}
        self._interrupts = self._passed_on = 0

    def start(self, message: Mapping[str, Any], workers: int) -> None:
        """Raises UserError where there is no cluster, or where it has too few devices."""
        self.cluster = RayCluster(self.config, self.device)
        (seats,) = self.cluster.seats([Pool(("rank",), workers)])
        self._keepers = [self.cluster.start(RankKeeper, seat) for seat in seats]
        here = str(ray.util.get_node_ip_address())
        nodes = ray.get([keeper.node.remote() for keeper in self._keepers], timeout=self.config.start_limit_s)
        address = LOOPBACK if set(nodes) == {here} else here
        self._store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        for rank, keeper in enumerate(self._keepers):
            # Ray shows each actor its own device alone.
            meeting = environment_of(rank, workers, address, self._store.port, device=0)
            self._silent[keeper.keep.remote(rank, meeting, message)] = rank

    def answers(self, seconds: float | None) -> dict[int, Any]:
        ready: list[Any] = []
        while not ready:
            self._pass_on()
            ready, _ = ray.wait(list(self._silent), timeout=LOOK_EVERY_S if seconds is None else seconds)
            if seconds is not None:
                break
        return dict(self._answer(ref, self._silent.pop(ref)) for ref in ready)

    def interrupt(self) -> None:
        # Noted here and passed on between two waits: a signal handler must not call into Ray, which may be at work.
        self._interrupts += 1

    def stop(self) -> None:
        if self.cluster is not None:
            self.cluster.close()
        # A traceback would keep the store, and with it its port.
        self._store = None

    def _pass_on(self) -> None:
        for _ in range(self._interrupts - self._passed_on):
            self._passed_on += 1
            for keeper in self._keepers:
                keeper.interrupt.options(concurrency_group="aside").remote()

    def _answer(self, ref: Any, rank: int) -> tuple[int, Any]:
        try:
            return rank, ray.get(ref)
        except RayActorError as error:
            return rank, RankFailure(
                rank, "died", f"rank {rank} is gone with its actor: {' '.join(str(error).split())}"
            )
