"""Code of ranks for the tests of start and end; each rank's task selects its behaviour."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from braidrl.cluster.process_groups import background_group, connect_store, join_group, mesh_of, subgroup
from braidrl.cluster.world import World
from braidrl.errors import LostPeers, UserError
from braidrl.observe.stalls import WORK


def words(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """Use every kind of collective with messages of different lengths."""
    gathered = [bytes(part).decode() for part in world.gather("words", b"x" * world.rank)]
    # Each rank writes to those before it.
    letters = {to: f"{world.rank}>{to}".encode() * 400 for to in range(world.rank)}
    received = world.exchange("letters", letters, range(world.rank + 1, world.size))
    exchanged = [bytes(part).decode()[:3] for _, part in sorted(received.items())]
    numbers = torch.arange(world.rank + 1, dtype=torch.int16)
    columns = {"number": numbers, "whole": numbers > 0, "pair": numbers.double()[:, None].expand(-1, 2)}
    counts = torch.arange(world.size) + 1
    rows = {name: column.tolist() for name, column in world.gather_columns("rows", columns, counts).items()}
    names = world.reduce("names", f"{world.rank} ", str.__add__, str)
    shared = world.share("a value", {"from": world.rank, "long": "x" * 5000 * world.rank})
    collected = world.reduce_to_first("letters", [world.rank * "x"], list.__add__, list[str])
    every = {"gathered": gathered, "exchanged": exchanged, "rows": rows, "names": names, "shared": shared}
    every["collected"] = collected
    return {"of all": world.gather("all", every), "task": task}


def renewed(world: World, task: dict[str, Any]) -> list[list[Any]]:
    """Count rounds over ranks of which the task's victims kill themselves; return each round's number and ranks."""
    elastic, rounds = world.elastic, list[list[Any]]()
    assert elastic is not None
    came_back = world.is_waiting
    if came_back:
        world.wait_until_member()
        world.regroup()
    while True:
        try:
            rounds = [list(each) for each in max(world.gather("rounds so far", rounds), key=len)]
            if len(rounds) >= task["rounds"] and world.size == task["size"]:
                return rounds
            came = world.share("processes that wait", elastic.waiting() if world.first else None)
            if came:
                if world.first:
                    elastic.add(came)
                world.regroup()
                continue
            if [elastic.member, len(rounds)] in task["dies"]:
                os.kill(os.getpid(), signal.SIGKILL)
            total = torch.ones(1)
            dist.all_reduce(total, group=world.group)
            rounds.append([len(rounds) + 1, int(total)])
            time.sleep(0.02)
        except RuntimeError as error:
            world.regroup(error)


def devices(world: World, task: dict[str, Any]) -> list[str]:
    """Return the devices of each rank as set before it imported torch."""
    return [bytes(seen).decode() for seen in world.gather("devices", os.environ["CUDA_VISIBLE_DEVICES"].encode())]


def limits(world: World, task: dict[str, Any]) -> list[float]:
    """Return the time limit of every kind of group, in seconds."""
    grid = mesh_of("cpu", (world.size, 1), ("data", "tensor"))
    groups = [world.group, subgroup(torch.arange(world.size)[None]), background_group(), *grid.get_all_groups()]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups if group]


def keys_of_strangers(world: World, task: dict[str, Any]) -> list[bool]:
    """Return True if ranks without a secret could meet under keys of the store."""
    store = connect_store(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 10.0)
    return [store.check([f"{prefix}came/{world.rank}"]) for prefix in ("", "/worker/attempt_0/")]


def lonely(arguments: dict[str, Any]) -> str:
    """Join a group that one of the other two ranks never joins."""
    store = dist.HashStore()
    store.set("came/2", "")
    try:
        join_group(store, 0, 3, 0.5, cuda=False)
    except LostPeers as error:
        return str(error).splitlines()[0]
    return "it was joined"


def echo(arguments: dict[str, Any]) -> Any:
    """End as the task says."""
    match arguments["how"]:
        case "refuse":
            raise UserError("write something else")
        case "raise":
            raise ZeroDivisionError("no such luck")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            own = subprocess.Popen(["sleep", "60"])
            Path(arguments["path"]).write_text(str(own.pid))
            time.sleep(60)
        case "stall":
            stall_in_work()
    # Named semaphores need another process to unlink them if their process is killed; a library's locks have no names.
    return {"told": arguments["how"], "lock": multiprocessing.RLock()._semlock.name}  # type: ignore[attr-defined]


def stall_in_work() -> None:
    """Do three pieces of work and hang in the fourth."""
    for seconds in (0.0, 0.0, 0.0, 60.0):
        with WORK.on("score"):
            time.sleep(seconds)


def left_alone(arguments: dict[str, Any]) -> None:
    """Record that the starter has ended."""
    Path(arguments["path"]).write_text("alone")


def device_of_a_worker(arguments: dict[str, Any]) -> str:
    """Return the devices that a worker sees."""
    return os.environ["CUDA_VISIBLE_DEVICES"]


def failing(world: World, task: dict[str, Any]) -> None:
    """End one rank as the task says, while the others wait for it."""
    world.at("step 3, reward.verify")
    Path(task["folder"], f"rank-{world.rank}").write_text(str(os.getpid()))
    world.gather("all ranks are here", b"")
    if world.rank == 1:
        world.rows = " on rows (0, 7, 1)"
        match task["how"]:
            case "raise":
                raise ValueError("no such luck")
            case "user":
                raise UserError("row (0, 7, 1) is too long; write a shorter one")
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(60)
            case "astray":
                world.gather("another thing", b"")
    world.at("step 3, actor.update")
    world.gather("index columns", b"")


def waiting(world: World, task: dict[str, Any]) -> None:
    """Wait until terminated, in a collective that the last rank never joins."""
    Path(task["folder"], f"rank-{world.rank}").write_text(str(os.getpid()))
    if world.rank:
        time.sleep(60)
    world.gather("nothing", b"")
