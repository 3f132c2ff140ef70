"""The workers of a pool as the driver calls them, their start and restart, and the group and ranks that run a stage.

driver ──call("execute", table, ...)──▶ protocol ──▶ rank 0, rank 1, ... ──▶ Future each ──wait──▶ CallResult

driver ─configuration, number─▶ worker: derives its part ─▶ process groups ─▶ data, read by generating workers ─▶ models
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ray
import torch
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from braidrl.cluster.pools import Pool
from braidrl.cluster.ray_cluster import RayCluster, Reservation, room_for
from braidrl.cluster.watchdog import heartbeat_limit
from braidrl.config import Config
from braidrl.data.curricula import Units
from braidrl.data.packing import balanced_partition
from braidrl.data.rows import Rows, named_rows
from braidrl.errors import BadUpdate, LostProcess, UserError, WorkerError
from braidrl.flow import Stage
from braidrl.flow.signatures import registration_of
from braidrl.runtimes.hybrid.handles import CallResult, Future, Handle, Output, Part
from braidrl.runtimes.hybrid.hybrid_worker import HybridWorker, RunOrder, sign_of
from braidrl.runtimes.hybrid.protocols import Mesh, TransferProtocol
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.training.role_settings import inference_layouts, settings_of
from braidrl.training.row_costs import balance_of

DEATH_S = 2.0
"""Seconds until Ray reports a worker's end that others have noticed."""
Partition = Sequence[Sequence[int]]
"""The row positions of each rank, ascending."""


@dataclass(eq=False)
class WorkerGroup:
    """The actors of a pool, in order of rank; `first` is rank 0's number among all workers of the run."""

    pool: Pool
    reservations: Sequence[Reservation]
    first: int
    cluster: RayCluster
    unread: deque[tuple[int, int]] = field(default_factory=deque)
    """The worker and key of rows without readers; they are forgotten when the next rows are read."""
    forgotten: dict[int, list[int]] = field(default_factory=dict)
    """Keys of such rows by rank: the worker frees them with its next call."""
    actors: list[Any] = field(default_factory=list)
    processes: Sequence[int | None] = ()
    """The process of each worker on the driver's machine, after it has loaded its models."""
    nodes: Sequence[str] = ()
    """The node of each worker, after it has loaded its models."""
    device: str = ""
    """The kind of device of its workers, after they have loaded their models."""

    def __post_init__(self) -> None:
        self.mesh = Mesh(self.pool.workers)
        self.numbers = range(self.first, self.first + self.mesh.size)

    def resize(self, reservations: Sequence[Reservation]) -> None:
        """Continue with a new number of workers at new locations, after `end`."""
        self.pool, self.reservations = replace(self.pool, workers=len(reservations)), reservations
        self.unread.clear()
        self.__post_init__()

    def start(self) -> None:
        """Start an actor for each rank under a name that other workers know, without data of the run."""
        self.actors, self.limit_s = [], self.cluster.config.start_limit_s
        self.forgotten.clear()
        for rank, bundle in enumerate(self.reservations):
            actor = self.cluster.start(HybridWorker, bundle, name=f"{self.cluster.family}-{self.first + rank}")
            self.cluster.names[actor._actor_id.hex()] = f"{self.pool.name} rank {rank}"
            self.actors.append(actor)

    def end(self) -> None:
        """Kill all actors, including stopped ones, and wait until their names are free."""
        names = [f"{self.cluster.family}-{number}" for number in self.numbers]
        self.cluster.end(self.actors, [process for process in self.processes if process is not None], names)

    def call(self, method: str, *arguments: Any, reads: frozenset[str] | None = None, aside: bool = False) -> Any:
        """Call a registered method of `HybridWorker` through its protocol; return the futures, collected by the
        protocol.

        `reads` are the columns of handles that workers need, by default all. `aside` runs the call concurrently with a
        worker's current call.
        """
        protocol: TransferProtocol = registration_of(HybridWorker, method).protocol
        calls = protocol.distribute(self.mesh, *arguments)
        sent = [self.send(rank, method, call, reads, aside) for rank, call in enumerate(calls) if call is not None]
        return protocol.collect(self.mesh, calls, sent)

    def send(
        self, rank: int, method: str, arguments: Sequence[Any], reads: frozenset[str] | None = None, aside: bool = False
    ) -> Future:
        """Call a method of one rank, with its part of a table in place of the handle; the rest is as for `call`."""
        awaited: list[Future] = []
        plain = [a.part(awaited, reads) if isinstance(a, Handle) else a for a in arguments]
        # An aside call may overtake others, which still need the rows to be freed.
        released = () if aside else self.forgotten.pop(rank, ())
        perform = self.actors[rank].perform
        if aside:
            perform = perform.options(concurrency_group="aside")
        ref = perform.remote(method, released, len(plain), *plain, *(future.ref for future in awaited))
        what = next((argument.name for argument in plain if isinstance(argument, Stage)), method)
        part = next((argument for argument in plain if isinstance(argument, Part)), Part())
        return Future(ref, self.first + rank, f"{self.pool.name} rank {rank}", what, part)

    def wait(self, futures: Sequence[Future], arrived: Callable[[Future], None] | None = None) -> list[CallResult]:
        """Return the answers of this group's calls, in the order of the futures.

        `arrived` is called with each completed future. Raises WorkerError if a worker failed or sent no answer for too
        long, and UserError if a worker raised it.
        """
        waiting = {future.ref: future for future in futures}
        answers: dict[Any, CallResult] = {}
        while waiting:
            ready = self.cluster.ready(list(waiting), self.limit_s)
            if not ready:
                late = "; ".join(f"{f.who} ({f.what}{named_rows(f.part.uids())})" for f in waiting.values())
                raise WorkerError(
                    f"waited {self.limit_s:g} s without an answer from {late}; "
                    "raise cluster.wait_limit_s if this may take longer"
                )
            for ref in ready:
                future = waiting.pop(ref)
                try:
                    answers[ref] = self._result(future)
                except WorkerError as failure:
                    self._raise_deaths(list(waiting.values()), failure)
                    raise
                if arrived:
                    arrived(future)
        return [answers[future.ref] for future in futures]

    def _result(self, future: Future) -> CallResult:
        try:
            result: CallResult = ray.get(future.ref)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, UserError):
                raise (BadUpdate if isinstance(cause, BadUpdate) else UserError)(str(cause)) from None
            story = str(cause) if isinstance(cause, WorkerError) else f"{future.who} failed in {future.what}:\n{error}"
            raise WorkerError(story) from None
        except (RayActorError, OutOfMemoryError) as error:
            who = self.cluster.names.get(str(getattr(error, "actor_id", "")), future.who)
            lost = LostProcess(
                f"{who} died in {future.what}{named_rows(future.part.uids())}: {' '.join(str(error).split())}"
            )
            lost.stage, lost.rows = future.what, future.part.uids()
            raise lost from None
        except RayError as error:
            raise WorkerError(f"{future.who} failed in {future.what}: {' '.join(str(error).split())}") from None
        return result

    def _raise_deaths(self, pending: Sequence[Future], failure: WorkerError) -> None:
        """Raise LostProcess for a dead worker, as the cause of the failures of workers that waited for it."""
        ready, _ = (
            ray.wait([f.ref for f in pending], num_returns=len(pending), timeout=DEATH_S) if pending else ([], [])
        )
        for future in pending:
            try:
                if future.ref in ready:
                    self._result(future)
            except LostProcess:
                raise
            except (WorkerError, UserError):
                continue
        # The cause may be a dead worker of any pool whose rows or weights these calls need.
        dead_actors = (
            [] if isinstance(failure, LostProcess) else self.cluster.dead_and_silent(self.cluster.actors, DEATH_S)[0]
        )
        if dead_actors:
            names = ", ".join(self.cluster.names.get(actor._actor_id.hex(), "an actor") for actor in dead_actors)
            raise LostProcess(f"{names} died; others were waiting for it") from failure


@dataclass(frozen=True)
class RunWorkers:
    """The worker groups of a run, from actors to loaded models; also restarts lost groups."""

    groups: Sequence[WorkerGroup]
    home: WorkerGroup
    """The group that reads the data."""
    prepared: Prepared
    order: RunOrder

    def begin(self, fresh: Sequence[WorkerGroup]) -> list[tuple[int, str, Units]]:
        """Start the actors of `fresh` groups; let them join the run, form process groups, read the data and load their
        models.

        Returns the number of prompts, a message and a curriculum's units per source if `home` is among them, and reads
        data. Raises UserError if a worker refuses the configuration or the data, and WorkerError if one fails or sends
        no answer in time.
        """
        config = self.prepared.config
        order = ray.put(replace(self.order, sizes={group.pool.name: group.pool.workers for group in self.groups}))
        for group in fresh:
            group.start()
        joined = wait_all((group, group.call("join_run", group.numbers, [order] * group.mesh.size)) for group in fresh)
        if any(answer.result != sign_of(self.prepared) for answers in joined for answer in answers):
            raise UserError(
                "workers make other stages than the driver, whose device is of another kind; write dtype=float32 or "
                "dtype=bfloat16, not auto"
            )
        self._form_process_groups(fresh)
        reads = self.home in fresh and (self.prepared.train or config.data.evaluation_sources)
        counts = self.home.wait(self.home.call("read_data"))[0].result if reads else []
        loaded = wait_all((group, group.call("load_models")) for group in fresh)
        for group, answers in zip(fresh, loaded, strict=True):
            results = [answer.result for answer in answers]
            group.processes = [process if node == group.cluster.own_node else None for process, node, _ in results]
            group.nodes, group.device = [node for _, node, _ in results], results[0][2]
        self._plan_transfers(fresh)
        for group in fresh:
            group.limit_s = config.cluster.wait_limit_s
        return counts

    def _form_process_groups(self, fresh: Sequence[WorkerGroup]) -> None:
        """Let the ranks of each pool form a process group if there are several or a model is sharded."""
        config, started = self.prepared.config, list[tuple[WorkerGroup, Sequence[Future]]]()
        inferring = inference_layouts(config, self.prepared.flow)
        for group in fresh:
            layouts = [settings_of(role, config).layout for role in group.pool.models]
            layouts += [inferring[role] for role in group.pool.models if role in inferring]
            if group.mesh.size > 1 or any(layout.shard != "none" for layout in layouts):
                (answer,) = group.wait([group.call("rendezvous")])
                started.append((group, group.call("join_process_group", answer.result)))
        wait_all(started)

    def _plan_transfers(self, fresh: Sequence[WorkerGroup]) -> None:
        """Plan the transfer of weights from a pool that trains a role to one that generates for it, if one is new."""
        for role in self.prepared.deployment.generating:
            trains = next((group for group in self.groups if role in group.pool.models), None)
            generates = next(group for group in self.groups if role in group.pool.generating)
            if trains is None or trains is generates or not (trains in fresh or generates in fresh):
                continue
            check_devices_alike(role, trains.device, generates.device)
            (answer,) = trains.wait([trains.call("rendezvous")])
            sides, size = ((trains, 0), (generates, trains.mesh.size)), trains.mesh.size + generates.mesh.size
            wait_all((group, group.call("exchange_weights", role, answer.result, n, size)) for group, n in sides)

    def size_for(self, group: WorkerGroup, nodes: Mapping[str, Mapping[str, float]]) -> int:
        """Return the number of workers, at most the configured one, with which a group fits on these nodes; 0 for none.

        Pools whose nodes or devices are configured keep their size.
        """
        deployment = self.prepared.deployment
        configured = next(pool for pool in deployment.pools if pool.name == group.pool.name)
        if configured.nodes is not None or configured.kind is not None:
            return configured.workers
        reserved = [
            taken_slot for neighbour in self.groups if neighbour is not group for taken_slot in neighbour.reservations
        ]
        room = room_for(nodes, reserved, group.reservations[0].cpus, group.reservations[0].gpus)
        sizes = range(min(configured.workers, room), 0, -1)
        return next((size for size in sizes if deployment.fits(replace(configured, workers=size))), 0)

    def can_grow(self) -> bool:
        """Return True if a group that lost workers with a node can grow again."""
        configured = {pool.name: pool.workers for pool in self.prepared.deployment.pools}
        if all(group.pool.workers == configured[group.pool.name] for group in self.groups):
            return False
        nodes = self.home.cluster.living_nodes()
        return any(self.size_for(group, nodes) > group.pool.workers for group in self.groups)

    def replace_lost(self) -> list[str]:
        """Restart groups that lost a worker, that do not finish within `cluster.silence_s`, or that can grow again.

        A rank of a group that does not finish may wait for a lost one. Returns a log line for each group whose size
        changes. All other groups forget their rows. Raises WorkerError if the restart failed.
        """
        cluster = self.home.cluster
        cluster.look()
        actors, limit_s = [a for group in self.groups for a in group.actors], heartbeat_limit(cluster.config.silence_s)
        mute = [actor for actor in actors if cluster.silence(actor) > limit_s]
        dead, silent = cluster.dead_and_silent([actor for actor in actors if actor not in mute], limit_s)
        lost, nodes = set(map(id, [*mute, *dead, *silent])), cluster.living_nodes()
        fresh = [
            group
            for group in self.groups
            if lost & set(map(id, group.actors)) or self.size_for(group, nodes) > group.pool.workers
        ]
        for group in fresh:
            group.end()
        continuing = [group for group in self.groups if group not in fresh]
        for group, futures in [(group, group.call("forget_rows")) for group in continuing]:
            group.limit_s = cluster.config.silence_s
            try:
                group.wait(futures)
            except WorkerError:
                group.end()
                fresh.append(group)
            group.limit_s = cluster.config.wait_limit_s
        lines = list(filter(None, (self._find_places(group) for group in fresh)))
        self.begin(fresh)
        return lines

    def _find_places(self, group: WorkerGroup) -> str:
        """Place a group on living nodes, unless all of its nodes live; return a log line if its size changes.

        Raises WorkerError if it does not fit on the nodes.
        """
        nodes, before = group.cluster.living_nodes(), group.pool.workers
        size = self.size_for(group, nodes)
        if size == 0:
            raise WorkerError(f"no living node has resources for {group.pool.name}")
        if size == before and all(slot.node in nodes for slot in group.reservations):
            return ""
        group.cluster.release(group.reservations)
        (reservations,) = group.cluster.reserve([replace(group.pool, workers=size)])
        group.resize(reservations)
        configured = next(pool.workers for pool in self.prepared.deployment.pools if pool.name == group.pool.name)
        return f"{group.pool.name} continues with {size} of {configured} workers" if size != before else ""


def check_devices_alike(role: str, trains: str, generates: str) -> None:
    """Raise UserError if a role's training and generation devices differ in kind."""
    if trains != generates:
        raise UserError(
            f"placement: {role} trains on {trains} and generates on {generates}; give both pools devices of one "
            "kind, or write device=cpu"
        )


def wait_all(started: Iterable[tuple[WorkerGroup, Sequence[Future]]]) -> list[list[CallResult]]:
    """Start calls of several groups, then wait for all; return the answers of each group."""
    return [group.wait(futures) for group, futures in list(started)]


def where_computed(table: Handle, outputs: Sequence[Output]) -> tuple[WorkerGroup, Partition]:
    """Return the group that computes the first of these outputs, and each rank's rows, by the first output that has
    them.

    Rank 0 also gets the rows that are on no worker of the group.
    """
    group: WorkerGroup = outputs[0].group
    workers = torch.full((len(table),), -1)
    for output in outputs:
        rows = table.rows[table.outputs.index(output)]
        positions = ((rows >= 0) & (workers < 0)).nonzero().flatten()
        workers[positions] = output.worker[rows[positions]]
    ranks = [worker - group.first if worker in group.numbers else 0 for worker in workers.tolist()]
    return group, rows_of_ranks(ranks, group.mesh.size)


def by_cost(
    index: Rows, ranks: int, config: Config, role: str | None = None, trains: bool = False, whole_groups: bool = False
) -> Partition:
    """Partition rows by equal work of a role, by default by tokens; `whole_groups` stay on one rank."""
    costs, groups = balance_of(index, role, config, trains, ranks, whole_groups)
    return balanced_partition(costs.tolist(), ranks, groups=None if groups is None else groups.tolist())


def rows_of_ranks(rank_of: Iterable[int], ranks: int) -> Partition:
    """Return the rows of each rank, from the rank of each row."""
    parts: list[list[int]] = [[] for _ in range(ranks)]
    for row, rank in enumerate(rank_of):
        parts[rank].append(row)
    return parts
