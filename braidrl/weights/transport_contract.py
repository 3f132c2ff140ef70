"""The contract of weight transports: checks for ours and for those that users write in `rollout.weights`.

    for check in CHECKS:
        check("transport.py:MappedFiles")

Four processes run each check on the CPU. A failed check raises AssertionError.
"""

import time
from collections.abc import Callable
from contextlib import closing
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import Ranks, World
from braidrl.weights.boxes import Box
from braidrl.weights.names import TRANSPORTS
from braidrl.weights.reshard_plan import gather_shard_index
from braidrl.weights.shards import WeightPart
from braidrl.weights.transfer import WeightTransfer

PROCESSES, ROUNDS, LIMIT_S = 4, 4, 3.0
CPU = torch.device("cpu")


def every_byte_arrives_where_it_belongs(name: str) -> None:
    assert run_ranks(f"{__name__}:exchange_bytes", {"name": name}, PROCESSES, 60.0) == ""


def ranks_get_their_slices_of_each_version(name: str) -> None:
    assert run_ranks(f"{__name__}:reshard", {"name": name}, PROCESSES, 60.0) == ""


def a_process_that_is_gone_is_an_error_and_no_endless_wait(name: str) -> None:
    assert run_ranks(f"{__name__}:lose_one", {"name": name}, PROCESSES, 60.0) == ""


CHECKS: tuple[Callable[[str], None], ...] = (
    every_byte_arrives_where_it_belongs,
    ranks_get_their_slices_of_each_version,
    a_process_that_is_gone_is_an_error_and_no_endless_wait,
)


def exchange_bytes(world: World, task: dict[str, Any]) -> str:
    """Exchange several rounds of bytes, with empty messages between some processes; return the errors found."""

    def bytes_of(number: int, sender: int, receiver: int) -> torch.Tensor:
        size = 0 if (sender + receiver + number) % 3 == 0 else 1000 * number + 7 * sender + receiver
        return torch.arange(size).add(31 * sender + 5 * receiver + number).to(torch.uint8)

    problem = ""
    with closing(TRANSPORTS.make(task["name"], Ranks(dist.group.WORLD), CPU)) as transport:
        for number in range(ROUNDS):
            outgoing = [bytes_of(number, world.rank, peer) for peer in range(PROCESSES)]
            expected = [bytes_of(number, peer, world.rank) for peer in range(PROCESSES)]
            sent, received = torch.cat(outgoing), torch.empty(sum(map(len, expected)), dtype=torch.uint8)
            transport.exchange(received, sent, [*map(len, expected)], [*map(len, outgoing)])
            sent.zero_()
            if not torch.equal(received, torch.cat(expected)):
                problem = f"process {world.rank} receives other bytes than those sent to it in round {number}"
    return _any_problem(world, problem)


def reshard(world: World, task: dict[str, Any]) -> str:
    """Move two versions from rows on two ranks to columns on two other ranks, the second as changed values alone."""
    ranks, full = Ranks(dist.group.WORLD), torch.randn(64, 48, generator=torch.Generator().manual_seed(0))
    shape, half = full.shape, world.rank % 2
    rows, columns = Box((half * 32, 0), (32, 48)), Box((0, half * 24), (64, 24))

    def part(box: Box, values: torch.Tensor) -> dict[str, WeightPart]:
        return {"weight": WeightPart(["weight"], box.of(values).clone(), (shape, box))}

    is_sender, problem, before = world.rank < 2, "", None
    local_parts = {} if is_sender else part(columns, torch.zeros(shape))
    with closing(TRANSPORTS.make(task["name"], ranks, CPU)) as transport:
        for version in (1, 2):
            full[version, version::7] = version
            parts = part(rows, full) if is_sender else {}
            index = gather_shard_index(parts, ranks)
            groups = index.groups(gather_shard_index(local_parts, ranks))
            transfer = WeightTransfer(index, groups, ranks, limit_bytes=1 << 11, device=CPU, transport=transport)
            transfer.before = before
            transfer.run(parts, local_parts)
            before = parts
            if not is_sender and not torch.equal(local_parts["weight"].local, columns.of(full)):
                problem = f"process {world.rank} has other values than version {version}"
    return _any_problem(world, problem)


def lose_one(world: World, task: dict[str, Any]) -> str:
    """Let one process leave; every other process must detect it within the group's limit."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LIMIT_S))
    assert isinstance(group, dist.ProcessGroup)
    transport, problem = TRANSPORTS.make(task["name"], Ranks(group), CPU), ""
    if world.rank < PROCESSES - 1:
        started, sizes = time.monotonic(), [8] * PROCESSES
        empty = torch.zeros(sum(sizes), dtype=torch.uint8)
        try:
            transport.exchange(empty.clone(), empty, sizes, sizes)
            problem = f"process {world.rank} does not notice that another did not take part"
        except RuntimeError:
            pass
        if time.monotonic() - started > 10 * LIMIT_S:
            problem = f"process {world.rank} waits longer than the group's limit"
    problem = _any_problem(world, problem)
    transport.close()
    return problem


def _any_problem(world: World, problem: str) -> str:
    return next(filter(None, Ranks(supervisor=world).all_gather("problems", problem, str)), "")
