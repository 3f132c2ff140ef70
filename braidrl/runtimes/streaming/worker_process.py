"""The process of a worker of a streaming run, from its start to the end of the run.

arguments of `Processes` ─▶ model, executor, connection to the queue ─▶ generate, compute or model loop, until the run
    ends
"""

import signal
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

from braidrl.cluster.child import TaskFailed
from braidrl.cluster.devices import choose_device
from braidrl.cluster.elastic import Meeting
from braidrl.cluster.event_loop import Runner
from braidrl.cluster.membership import Membership, member_name
from braidrl.cluster.process import LOOPBACK, Failure
from braidrl.cluster.process_groups import connect_store
from braidrl.cluster.world import World, elastic_world, world_at
from braidrl.config import parse_config
from braidrl.engines.engine import NodePart
from braidrl.engines.factory import follow_engines
from braidrl.engines.routing.router import run_together
from braidrl.engines.spanning import OneOf, SpanningEngine
from braidrl.observe.progress import Progress
from braidrl.observe.trace import WorkerTrace
from braidrl.queue.client import Client, DataPlane
from braidrl.queue.owner import remove_run
from braidrl.queue.storage import Place
from braidrl.rewards.verify import RuleRewards
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.prepare.run_data import Prepared
from braidrl.runtimes.prepare.run_flow import build_flow, evaluation_flow
from braidrl.runtimes.prepare.setup import set_up_torch
from braidrl.runtimes.replicas import are_copied, are_replicated
from braidrl.runtimes.streaming.consumers import Consumers
from braidrl.runtimes.streaming.generate import GenerateLoop
from braidrl.runtimes.streaming.groups import Group
from braidrl.runtimes.streaming.ranks import Rank
from braidrl.runtimes.streaming.weights import remove_weights
from braidrl.runtimes.streaming.worker import WorkerContext, serve_rows
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.pretrained import load_tokenizer

RANKS_LIMIT_S = 600.0
"""Seconds after which ranks give up waiting for another one."""
PREEMPTED = "preempted"
"""The kind of failure of a process that was asked to leave."""


def work(arguments: Mapping[str, Any]) -> None:
    """Run one process of a worker group: build its parts, then do the queue's work until the run ends.

    `arguments` are plain data from `Processes`.
    """
    group = Group(**arguments["group"])
    with leaving_on_signal() if group.kind == "generate" else nullcontext():
        work_in(group, arguments)


@contextmanager
def leaving_on_signal() -> Iterator[None]:
    """Let SIGTERM end the block, as for a process that leaves the run.

    A scheduler that reclaims a node sends this signal, and a kill some seconds later.
    """
    signals = list[int]()

    def leave(number: int, frame: FrameType | None) -> None:
        signals.append(number)
        # Event loops propagate this exception from any point.
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, leave)
    try:
        yield
    except KeyboardInterrupt:
        if signals:
            raise TaskFailed(Failure(PREEMPTED, "")) from None
        raise


def work_in(group: Group, arguments: Mapping[str, Any]) -> None:
    """Do the work of one process of a group."""
    config = parse_config(arguments["config"])
    set_up_torch(config)
    location, wait_limit_s = Place(*arguments["place"]), config.cluster.wait_limit_s
    data = DataPlane(location, arguments["holder"], wait_limit_s, arguments["secret"])
    if group.kind == "rows":
        with closing(Client(arguments["queue"], arguments["holder"], data)) as client:
            serve_rows(client, config, arguments["kept"], config.streaming.wait_s)
        return
    flow = build_flow(config)
    prepared = Prepared(config, flow, evaluation_flow(config, flow), load_tokenizer(config.model))
    generating = [str(group.role), *group.policies] if group.kind == "generate" else []
    ip, world = urlsplit(location.address).hostname or LOOPBACK, World()
    if generating:
        ranks: DataParallel = one_of(group, arguments, ip)
        if arguments["rank"] > 0:
            with Runner() as runner:
                runner.run(follow_engines(str(group.role), ranks, prepared.deployment))
            return
    else:
        world = join_ranks(group, arguments, choose_device(config.device).type == "cuda")
        ranks = DataParallel(supervisor=world)
    consumers = {**Consumers(flow).by_name, **Consumers(prepared.evaluation).by_name}
    checks = any(stage.type == "verify" for name in group.consumers for stage in consumers[name].stages)
    local_roles = [str(group.role)] if group.kind == "model" else []
    trace = WorkerTrace(Path(arguments["folder"]), arguments["name"], group.role or group.name)

    def context(rewards: RuleRewards | None = None) -> WorkerContext:
        parts = replace(prepared, running=rewards)
        executor = StageExecutor(parts, local_roles, Progress(bars=False), generating, ranks, group.trained, checks)
        leader = arguments["leader"], arguments["queue"]
        return WorkerContext(group, config.streaming, consumers, executor, data, trace, *leader, location.run, ip)

    with closing(data), closing(trace):
        if generating:
            worker = context()
            with closing(worker.executor), closing(Client(worker.queue, worker.leader, data, True)) as client:
                run_together(worker.executor.engines, GenerateLoop(worker, client).serve)
            return
        role = [str(group.role)]
        how = are_replicated(role, prepared.deployment), are_copied(role, prepared.deployment)
        with closing(Rank(world, context, *how)) as rank:
            rank.serve()
        world.close()


def meeting_of(secret: str, group: Group) -> str:
    """Return the prefix of the keys with which the ranks of a group that may change meet."""
    return f"{secret}/{group.name}"


def first_members(group: Group) -> Membership:
    """Return the initial ranks of a group."""
    return Membership(0, tuple(member_name(number, 0) for number in range(group.processes)))


def one_of(group: Group, arguments: Mapping[str, Any], ip: str) -> OneOf:
    """Return this generating process as a worker of its role, or as one node of a worker."""
    number, workers = arguments["number"] // group.nodes, group.processes // group.nodes
    if group.nodes == 1:
        return OneOf(rank=number, size=workers)
    started = f"{arguments['secret']}/{group.name}.{number}.{arguments['starts']}"
    host, port = arguments["meeting"]
    store = connect_store(host, port, RANKS_LIMIT_S, started)
    spanning = SpanningEngine(store, NodePart(arguments["rank"], group.nodes, ip))
    return OneOf(rank=number, size=workers, spanning=spanning)


def join_ranks(group: Group, arguments: Mapping[str, Any], cuda: bool) -> World:
    """Return the ranks of a worker, which meet at a store; a single process gets a world of one rank."""
    (host, port), rank = arguments["meeting"], arguments["rank"]
    if arguments["may_change"]:
        store = connect_store(host, port, RANKS_LIMIT_S, meeting_of(arguments["secret"], group))
        member = member_name(rank, arguments["starts"])
        return elastic_world(Meeting(store, RANKS_LIMIT_S, cuda, host), member, first_members(group), rank)
    if group.ranks == 1 and not group.divided:
        return World()
    started = f"{meeting_of(arguments['secret'], group)}.{arguments['starts']}"
    store = connect_store(host, port, RANKS_LIMIT_S, started)
    return world_at(store, rank, group.ranks, RANKS_LIMIT_S, cuda, host)


def orphaned(arguments: Mapping[str, Any]) -> None:
    """Remove the run's shared memory after its main process was killed; no other process does."""
    location = Place(*arguments["place"])
    remove_run(location.run, location.storage)
    remove_weights(location.run)
