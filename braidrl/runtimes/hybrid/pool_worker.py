"""A process of a pool, whatever it computes: it joins the run, loads the models of its roles, and saves and loads their weights."""

import os
import secrets
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from braidrl.cluster.groups import connect_store, join_group, open_store
from braidrl.cluster.world import Notices
from braidrl.config import Config
from braidrl.data.rows import Rows
from braidrl.importing import import_function
from braidrl.models.parallel.replicated import DataParallel
from braidrl.observe.progress import Progress
from braidrl.observe.trace import TraceWriter
from braidrl.placement.pools import Pool
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.hybrid.handles import Part
from braidrl.runtimes.prepare.setup import Prepared, set_up_torch
from braidrl.runtimes.saving.background import BackgroundWriter
from braidrl.transfer.protocols import register


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's number among all workers, the names of these, its pool and rank there, the folder for its trace, limits of waiting."""

    number: int
    names: list[str]
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
        self.writing = BackgroundWriter()

    def configure(self, spec: WorkerSpec, *peers: Any) -> None:
        """Join a run, whose workers are `peers` by number."""
        self.spec, self.peers = spec, peers

    def close(self) -> None:
        """End the processes that check answers, and forget rows, files and ranks."""
        self.resources.close()
        self.trace = None
        self.kept = {}
        self.ranks, self.notices = DataParallel(), None

    @register(protocol="RANK_ZERO")
    def rendezvous(self) -> tuple[str, int, str]:
        """Open the store through which the ranks of the pool find each other; return its address, and what their keys begin with."""
        address, secret = ray.util.get_node_ip_address(), secrets.token_hex(16)
        self.meeting = open_store(address, self.spec.limit_s)
        return address, self.meeting.port, secret

    @register(protocol="ONE_TO_ALL")
    def join_process_group(self, meeting: tuple[str, int, str]) -> None:
        """Form a process group with the other ranks of the pool, by the address of their store."""
        host, port, secret = meeting
        if self.spec.rank > 0:
            self.meeting = connect_store(host, port, self.spec.limit_s)
        store, size, cuda = dist.PrefixStore(secret, self.meeting), self.spec.pool.workers, torch.cuda.is_available()
        self.ranks = DataParallel(join_group(store, self.spec.rank, size, self.spec.limit_s, cuda, host))
        self.resources.callback(dist.destroy_process_group)
        self.notices = Notices(dist.PrefixStore("notices", self.meeting))

    @register(protocol="ALL_TO_ALL")
    def load_models(self, prepared: Prepared, generating: Sequence[str], verifies: bool) -> int:
        """Load the pool's roles.

        Args:
            prepared: The run; only one worker gets its training data.
            generating: Roles that need an engine.
            verifies: Start the processes that check answers.

        Returns:
            This process's id.
        """
        set_up_torch(prepared.config)
        self.call.doing = (self.spec.pool.name, "loading its models", Part())
        self.flow, self.rows = prepared.flow, prepared.store()
        if self.spec.folder is not None:
            self.trace = TraceWriter(self.spec.folder, self.spec.name)
            self.resources.callback(self.trace.close)
        # The driver shows progress; a worker's own would go to a log file.
        silent = self.resources.enter_context(open(os.devnull, "w"))  # noqa: SIM115
        own = [role for role in generating if role in self.spec.pool.roles]
        self.executor = StageExecutor(
            prepared.config, prepared.flow, self.spec.pool.roles, prepared.tokenizer,
            prepared.rewards() if verifies else None, Progress(stream=silent), own, self.ranks,
        )  # fmt: skip
        self.resources.callback(self.executor.close)
        self.executor.generation.moves.trace = self.trace
        return os.getpid()

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
