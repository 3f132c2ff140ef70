"""A worker process of the streaming runtime: builds what its group needs, then does what the queue has for it until the run ends."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from braidrl.cluster.rank_process import LOOPBACK
from braidrl.cluster.world import World
from braidrl.config import parse_config
from braidrl.models.loading import load_tokenizer
from braidrl.observe.trace import TraceWriter
from braidrl.runtimes.evaluation import evaluation_flow
from braidrl.runtimes.executor import StageExecutor
from braidrl.runtimes.prepare.flow import build_flow
from braidrl.runtimes.prepare.setup import rule_rewards, set_up_torch
from braidrl.runtimes.streaming.context import LeaseProgress, WorkerContext
from braidrl.runtimes.streaming.groups import Group
from braidrl.runtimes.streaming.loops.compute import compute
from braidrl.runtimes.streaming.loops.generate import GenerateLoop
from braidrl.runtimes.streaming.loops.model import ModelLoop
from braidrl.transfer.queue.client import Client
from braidrl.transfer.queue.data_plane import DataPlane, Place
from braidrl.transfer.queue.segments import remove_run, shared_folder

CONNECT_LIMIT_S = 60.0
RANKS_LIMIT_S = 600.0
"""A rank that the others have waited for so long is given up."""


def work(arguments: Mapping[str, Any]) -> None:
    """Runs one process of a worker group; `arguments` are plain data, as `Processes` makes them."""
    config, group = parse_config(arguments["config"]), Group(**arguments["group"])
    set_up_torch(config)
    flow = build_flow(config)
    evaluation = evaluation_flow(config, flow)
    tokenizer, progress = load_tokenizer(config.model), LeaseProgress()
    world = join_ranks(group, arguments["rank"], arguments["meeting"])
    data = DataPlane.at(Place(*arguments["place"]), arguments["holder"])
    executor = StageExecutor(
        config, flow, (group.role,) if group.role else (), tokenizer,
        rule_rewards(config, [*flow.stages, *evaluation.stages], tokenizer) if group.kind == "compute" else None,
        progress, (group.role,) if group.role and group.kind == "generate" else (), world.data_parallel, group.trained,
    )  # fmt: skip
    trace = TraceWriter(Path(arguments["folder"]), arguments["name"])
    place = WorkerContext(arguments["name"], group, config.streaming, flow, evaluation, executor, data, progress, trace)
    try:
        run_loop(place, world, arguments)
        world.close()
    finally:
        trace.close()
        executor.close()


def join_ranks(group: Group, rank: int, meeting: tuple[str, int]) -> World:
    """The processes of a trained role, which meet at a store; a world of its own for one that shares its role with nobody."""
    if group.ranks == 1:
        return World()
    host, port = meeting
    if host == LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = timedelta(seconds=RANKS_LIMIT_S)
    store = dist.PrefixStore(group.name, dist.TCPStore(host, port, is_master=False, timeout=limit))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=group.ranks, timeout=limit)
    return World(rank, group.ranks, dist.group.WORLD, dist.PrefixStore("places", store))


def run_loop(context: WorkerContext, world: World, arguments: Mapping[str, Any]) -> None:
    """The loop of the worker's group; ranks that do not lead have no connection of their own to the queue."""
    if not world.first:
        ModelLoop(context, world, None).follow()
        return
    generates = context.group.kind == "generate"
    client = Client(arguments["queue"], arguments["holder"], context.data, CONNECT_LIMIT_S, generates)
    try:
        if generates:
            GenerateLoop(context, client).run()
        elif context.group.kind == "compute":
            compute(context, client)
        else:
            ModelLoop(context, world, client).lead()
    finally:
        client.close()


def orphaned(arguments: Mapping[str, Any]) -> None:
    """The main program was killed: nobody else removes what the run has in shared memory."""
    remove_run(shared_folder(), Place(*arguments["place"]).run)
