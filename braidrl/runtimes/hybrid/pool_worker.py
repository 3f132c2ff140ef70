"""A process of a pool, whatever it computes: it joins the run, loads the models of its roles, and saves and loads their weights."""

import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from braidrl.cluster.groups import address_towards, connect_store, group_between, join_group, open_store
from braidrl.cluster.world import Notices
from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.flow import Stage
from braidrl.importing import import_function
from braidrl.models.parallel.replicated import DataParallel
from braidrl.observe.progress import Progress
from braidrl.observe.trace import TraceWriter
from braidrl.placement.pools import Pool
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.generating.receiving import check_devices_alike
from braidrl.runtimes.hybrid.handles import Part
from braidrl.runtimes.prepare.setup import Prepared, set_up_torch, with_data
from braidrl.runtimes.saving.background import BackgroundWriter
from braidrl.transfer.protocols import register

Meeting = tuple[str, int, str]
"""Host and port of a store, and what the keys of those begin with who meet there."""


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's number among all workers, its pool and rank there, the folder for its trace, limits of waiting."""

    number: int
    pool: Pool
    rank: int
    folder: Path | None
    limit_s: float

    @property
    def name(self) -> str:
        return f"{self.pool.name}-{self.rank}"


def method_class(config: Config, role: str) -> type | None:
    """Return the user's class of methods for a role, which `roles.ROLE.methods` names."""
    own = config.roles.get(role)
    return import_function(own.methods) if own and own.methods else None  # type: ignore[return-value]


class PoolWorker:
    """One rank of all roles of a pool."""

    def __init__(self) -> None:
        self.kept: dict[int, Rows] = {}
        self.ranks = DataParallel()
        self.notices: Notices | None = None
        # Of the call that a thread runs.
        self.call = threading.local()
        self.resources = ExitStack()
        self.trace: TraceWriter | None = None
        self.version = 0
        self.meeting: dist.TCPStore | None = None
        self.stages: tuple[Stage, ...] = ()
        self._everybody: Any = ([], [])
        self.writing = BackgroundWriter()

    def configure(self, spec: WorkerSpec, everybody: list[Any]) -> None:
        """Join a run; `everybody` refers to its workers by number, and their names."""
        self.spec, self._everybody = spec, everybody

    @property
    def everybody(self) -> tuple[list[Any], list[str]]:
        """Return the run's workers by number, and their names."""
        if isinstance(self._everybody, list):
            self._everybody = ray.get(self._everybody[0])
        found: tuple[list[Any], list[str]] = self._everybody
        return found

    def close(self) -> None:
        """End the processes that check answers, and forget rows, files and ranks."""
        self.resources.close()
        self.trace = None
        self.kept = {}
        self.ranks, self.notices, self.meeting = DataParallel(), None, None

    @register(protocol="RANK_ZERO")
    def rendezvous(self) -> Meeting:
        """Open the store through which the ranks of the pool find each other; return its address, and what their keys begin with."""
        address = ray.util.get_node_ip_address()
        self.meeting = self.meeting or open_store(address, self.spec.limit_s)
        return address, self.meeting.port, secrets.token_hex(16)

    @register(protocol="ONE_TO_ALL")
    def join_process_group(self, meeting: Meeting) -> None:
        """Form a process group with the other ranks of the pool, by the address of their store."""
        host, port, secret = meeting
        if self.spec.rank > 0:
            self.meeting = connect_store(host, port, self.spec.limit_s)
        assert self.meeting is not None
        store, size, cuda = dist.PrefixStore(secret, self.meeting), self.spec.pool.workers, torch.cuda.is_available()
        self.ranks = DataParallel(join_group(store, self.spec.rank, size, self.spec.limit_s, cuda, host))
        self.resources.callback(dist.destroy_process_group)
        self.notices = Notices(dist.PrefixStore("notices", self.meeting))

    @register(protocol="ONE_TO_ALL")
    def load_models(self, prepared: Prepared, kept: Mapping[str, Any] | None) -> int:
        """Load the pool's roles, with engines for those that generate in it.

        Args:
            prepared: The run without its data.
            kept: The examples that the driver has kept, where this worker reads data and checks answers.

        Returns:
            This process's id.
        """
        set_up_torch(prepared.config)
        if kept is not None:
            prepared = with_data(prepared, kept)
        self.call.doing = (self.spec.pool.name, "loading its models", Part())
        self.flow, self.rows, self.stages = prepared.flow, prepared.store(), prepared.stages
        if self.spec.folder is not None:
            self.trace = TraceWriter(self.spec.folder, self.spec.name)
            self.resources.callback(self.trace.close)
        # The driver shows progress; a worker's own would go to a log file.
        silent = self.resources.enter_context(open(os.devnull, "w"))  # noqa: SIM115
        self.executor = StageExecutor(
            prepared.config, prepared.flow, self.spec.pool.models, prepared.tokenizer,
            prepared.rewards() if kept is not None else None, Progress(stream=silent), self.spec.pool.generating, self.ranks,
        )  # fmt: skip
        self.resources.callback(self.executor.close)
        self.executor.generation.moves.trace = self.trace
        return os.getpid()

    @register(protocol="ONE_TO_ALL")
    def exchange_weights(self, role: str, meeting: Meeting, first: int, size: int) -> None:
        """Plan the way of a role's weights between the pool that trains it and the pool that generates for it.

        Args:
            role: The role.
            meeting: Where the ranks of both pools meet.
            first: This pool's first rank among them.
            size: How many they are.

        Raises:
            UserError: The two pools have devices of different kinds.
        """
        host, port, secret = meeting
        store: dist.Store = connect_store(host, port, self.spec.limit_s)
        store, rank, device = dist.PrefixStore(secret, store), first + self.spec.rank, self.executor.device.type
        check_devices_alike(role, store, rank, device)
        group = group_between(store, rank, size, self.spec.limit_s, device == "cuda", address_towards(host))
        self.executor.exchange_weights(role, DataParallel(group))

    @register(protocol="ONE_TO_ALL")
    def save(self, folder: Path) -> None:
        """Write checkpoints: rank 0 what is whole, and every rank its part of what they have divided."""
        self.executor.save(folder, self.spec.rank == 0)

    @register(protocol="ONE_TO_ALL")
    def copy_for_saving(self, folder: Path) -> None:
        """Begin to do as `save` does, from copies."""
        self.writing.begin(self.executor.copy_for_saving(folder, self.spec.rank == 0))

    @register(protocol="ONE_TO_ALL")
    def written(self) -> str:
        """Wait for what `copy_for_saving` began, and return why it could not be written, or nothing."""
        return self.writing.trouble()

    @register(protocol="ONE_TO_ALL")
    def load(self, folder: Path) -> None:
        self.executor.load(folder)
