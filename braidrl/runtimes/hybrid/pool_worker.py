"""The model part of a pool's process: joins the run, loads the models of its roles, and saves and loads their weights."""

import gc
import os
import secrets
import threading
import zlib
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from braidrl.cluster.pools import GENERATE, Pool, place
from braidrl.cluster.process_groups import address_towards, connect_store, group_between, join_group, open_store
from braidrl.cluster.world import Notices, World
from braidrl.config import parse_config
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.prompts import Readers
from braidrl.data.rows import Rows
from braidrl.engines.factory import with_engines
from braidrl.errors import UserError
from braidrl.importing import OBJECTS_BETWEEN_COLLECTIONS
from braidrl.observe.progress import Progress
from braidrl.observe.trace import TraceWriter
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.hybrid.handles import Part
from braidrl.runtimes.hybrid.protocols import register
from braidrl.runtimes.prepare.setup import Prepared, rule_rewards, set_up_torch, with_data, without_data
from braidrl.runtimes.saving.checkpoints import BackgroundWriter
from braidrl.training.parallel.layouts import DataParallel

Meeting = tuple[str, int, str]
"""Host and port of a store, and the key prefix of the ranks that use it."""


@dataclass(frozen=True)
class RunOrder:
    """The description of a run for all workers: from it and its number each worker derives its own work."""

    settings: dict[str, Any]
    """The configuration's values that are not defaults."""
    train: bool
    """False to evaluate alone."""
    folder: Path | None
    """The run's folder, for files of workers."""
    family: str
    """Prefix of the names of the run's actors; their numbers follow it."""


@dataclass(frozen=True)
class WorkerSpec:
    """A worker's number among all workers, its pool and rank, the folder for its trace, time limits, and its peers."""

    number: int
    pool: Pool
    rank: int
    folder: Path | None = None
    limit_s: float = 0.0
    peers: tuple[str, ...] = ()
    """Name in messages of each worker of the run, by number."""
    family: str = ""


UNJOINED = WorkerSpec(-1, Pool(("worker",), 1), 0)
"""The state of a worker before it has joined a run."""


def hybrid_pools(prepared: Prepared, train: bool) -> tuple[Pool, ...]:
    """Return the pools of a run, or of its evaluation alone, with the engine processes that they start."""
    config = prepared.config
    pools = with_engines(place(config.placement, prepared.roles(), prepared.generating, config.workers), config)
    if train:
        return pools
    roles = prepared.roles(train=False)
    kept = [replace(pool, roles=tuple(r for r in pool.roles if r.removesuffix(GENERATE) in roles)) for pool in pools]
    return tuple(pool for pool in kept if pool.roles)


def sign_of(prepared: Prepared) -> int:
    """Return a hash of the stages; workers and driver must derive the same stages from a configuration."""
    return zlib.crc32(repr((*prepared.flow.stages, *prepared.evaluation.stages)).encode())


def check_devices_alike(role: str, store: dist.Store, rank: int, device: str) -> None:
    """Raise UserError if this rank's kind of device differs from rank 0's, which trains; all ranks call this."""
    store.set(f"device/{rank}", device)
    if (trains := store.get("device/0").decode()) != device:
        raise UserError(
            f"placement: {role} trains on {trains} and generates on {device}, and its weights cannot go from one to the other; "
            "write device=cpu, or give both pools devices of one kind"
        )


class PoolWorker:
    """One rank of all roles of a pool."""

    def __init__(self) -> None:
        gc.freeze()  # Imported objects are not garbage.
        gc.set_threshold(OBJECTS_BETWEEN_COLLECTIONS)
        self.spec = UNJOINED
        self.kept: dict[int, Rows] = {}
        self.world = World()
        self.notices: Notices | None = None
        # State of the call that a thread runs.
        self.call = threading.local()
        self.resources = ExitStack()
        self.trace: TraceWriter | None = None
        self.version = 0
        self.meeting: dist.TCPStore | None = None
        self.store: dist.Store | None = None
        self.beside: World | None = None
        """The ranks of the pool for calls beside others: a separate group, formed on first use."""
        self.peers: dict[int, Any] = {}
        """Other workers of the run, found by name on first use."""
        self.exchanges: dict[str, dist.ProcessGroup] = {}
        """Process groups between the pools that train a role and generate for it, by role."""
        self.writing = BackgroundWriter()

    def close(self) -> None:
        """End the reward processes, and forget rows, files and ranks."""
        self.resources.close()
        self.trace = None
        self.kept, self.peers, self.exchanges = {}, {}, {}
        self.world, self.notices, self.meeting, self.spec = World(), None, None, UNJOINED
        self.store = self.beside = None

    @register(protocol="ONE_TO_ALL")
    def forget_rows(self) -> None:
        """Wait for the running checkpoint; forget rows, unfinished checks, the state of user methods, and references to workers."""
        self.kept, self.peers = {}, {}
        self.executor.generation.checks.pending.clear()
        self.executor.methods.clear()
        self.writing.trouble()

    @register(protocol="ALL_TO_ALL")
    def join_run(self, number: int, order: RunOrder) -> int:
        """Derive this worker's part from the run's configuration; return the hash of its stages.

        Raises UserError for a configuration that cannot run.
        """
        config = parse_config(order.settings)
        self.prepared, self.trains = without_data(config, order.train), order.train
        # Numbers run from pool to pool.
        places = [(own, n) for own in hybrid_pools(self.prepared, order.train) for n in range(own.workers)]
        (pool, rank), peers = places[number], tuple(f"{own.name} rank {n}" for own, n in places)
        self.spec = WorkerSpec(number, pool, rank, order.folder, config.cluster.wait_limit_s, peers, order.family)
        set_up_torch(config)
        return sign_of(self.prepared)

    @register(protocol="RANK_ZERO")
    def rendezvous(self) -> Meeting:
        """Open the store for the ranks of the pool; return its address and their key prefix."""
        address = ray.util.get_node_ip_address()
        self.meeting = self.meeting or open_store(address, self.spec.limit_s)
        return address, self.meeting.port, secrets.token_hex(16)

    @register(protocol="ONE_TO_ALL")
    def join_process_group(self, meeting: Meeting) -> None:
        """Form a process group with the other ranks of the pool, given the address of their store."""
        host, port, secret = meeting
        if self.spec.rank > 0:
            self.meeting = connect_store(host, port, self.spec.limit_s)
        assert self.meeting is not None
        size, cuda = self.spec.pool.workers, torch.cuda.is_available()
        self.store = dist.PrefixStore(secret, self.meeting)
        group = join_group(self.store, self.spec.rank, size, self.spec.limit_s, cuda, host)
        self.world = World(self.spec.rank, size, group, dist.PrefixStore("places", self.store))
        self.resources.callback(self.world.close)
        self.notices = Notices(dist.PrefixStore("notices", self.meeting))

    @register(protocol="ONE_TO_ALL")
    def read_data(self) -> list[tuple[int, str]]:
        """Read the run's data with the other ranks of the pool; return the number of prompts and a message per source.

        The first rank writes tables, and the others map them. Raises UserError if the run cannot use the data.
        """
        readers = Readers(
            self.world.rank, self.world.size,
            lambda said: [unpack_message(words) for words in self.world.gather("data", pack_message(said))],
        )  # fmt: skip
        self.prepared = with_data(self.prepared, self.trains, readers=readers)
        return [(len(source), source.report()) for source in self.prepared.sources] if self.spec.rank == 0 else []

    @register(protocol="ONE_TO_ALL")
    def load_models(self) -> tuple[int, str]:
        """Load the pool's roles, with engines for generating ones; return this process's id, and Ray's node id."""
        prepared, pool = self.prepared, self.spec.pool
        flow = prepared.flow if self.trains else prepared.evaluation
        self.call.doing = (pool.name, "loading its models", Part())
        self.flow, self.rows = flow, prepared.store()
        if self.spec.folder is not None:
            self.trace = TraceWriter(self.spec.folder, f"{pool.name}-{self.spec.rank}")
            self.resources.callback(self.trace.close)
        # The driver shows progress; a worker's own would go to a log file.
        silent = self.resources.enter_context(open(os.devnull, "w"))  # noqa: SIM115
        self.executor = StageExecutor(
            prepared.config, flow, pool.models, prepared.tokenizer,
            rule_rewards(prepared.config, prepared.stages, prepared.tokenizer), Progress(stream=silent), pool.generating,
            DataParallel(self.world.group),
        )  # fmt: skip
        self.resources.callback(self.executor.close)
        self.executor.generation.moves.trace = self.trace
        return os.getpid(), ray.get_runtime_context().get_node_id()

    @register(protocol="ONE_TO_ALL")
    def exchange_weights(self, role: str, meeting: Meeting, first: int, size: int) -> None:
        """Plan the transfer of a role's weights between its training pool and its generating pool, `size` ranks together.

        `first` is this pool's first rank among them. Raises UserError if the two pools have devices of different kinds.
        """
        host, port, secret = meeting
        store: dist.Store = connect_store(host, port, self.spec.limit_s)
        store, rank = dist.PrefixStore(secret, store), first + self.spec.rank
        device = self.executor.usage.device.type
        check_devices_alike(role, store, rank, device)
        if role in self.exchanges:
            # Some of its ranks have ended: waiting for them would time out.
            self.exchanges.pop(role).abort()
        group = group_between(store, rank, size, self.spec.limit_s, device == "cuda", address_towards(host))
        self.exchanges[role] = group
        self.executor.generation.exchange_weights(role, self.executor.workers.get(role), DataParallel(group))

    @register(protocol="ONE_TO_ALL")
    def save(self, folder: Path, copy: bool) -> None:
        """Write checkpoints, or with `copy` start to, from copies: rank 0 the replicated parts, and every rank its shards."""
        calls = self.executor.save(folder, self.spec.rank == 0, copy)
        if copy:
            self.writing.begin(calls)

    @register(protocol="ONE_TO_ALL")
    def written(self) -> str:
        """Wait for the write that `save` started, and return its error, or an empty string."""
        return self.writing.trouble()

    @register(protocol="ONE_TO_ALL")
    def load(self, folder: Path) -> None:
        self.executor.load(folder)
