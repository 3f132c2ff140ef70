"""Code of ranks that move rows: functions of a world that return the outcome, run by `answers`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.world import World
from braidrl.data.codec import encode
from braidrl.data.messages import join, laid_out
from braidrl.data.rows import Objects, Rows
from braidrl.runtimes.interfaces import Interrupts
from braidrl.runtimes.spmd.shard import Shard, ShardExchange

RANKS = 3


@contextmanager
def received_by(world: World) -> Iterator[list[memoryview]]:
    """Collect the messages that a rank gets from others in exchanges."""
    received, exchange = list[memoryview](), world.exchange

    def collecting(
        purpose: str, messages: Mapping[int, bytes | bytearray], senders: Collection[int]
    ) -> dict[int, memoryview]:
        result = exchange(purpose, messages, senders)
        received.extend(result.values())
        return result

    world.exchange = collecting  # type: ignore[method-assign]
    yield received
    world.exchange = exchange  # type: ignore[method-assign]


def table(rows: int = 12, seed: int = 0) -> Rows:
    """Payload of every kind and dtype that a column may have; some rows are empty."""
    random = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 5, (rows,), generator=random)
    count = int(lengths.sum())
    numbers = torch.randn(count, generator=random)
    objects = [{"prompt": f"{seed}: {i}é", "answer": [i, None, {"deep": 0.1 * i}]} for i in range(rows)]
    return Rows(
        {
            "tokens": Ragged.from_lengths(torch.randint(0, 2**40, (count,), generator=random), lengths),
            "mask": Ragged.from_lengths(numbers > 0, lengths),
            "half": Ragged.from_lengths(numbers.bfloat16(), lengths),
            "single": Ragged.from_lengths(numbers, lengths),
            "double": Ragged.from_lengths(numbers.double(), lengths),
            "bytes": Ragged.from_lengths((numbers * 10).to(torch.uint8), lengths),
            "wide": Ragged.from_lengths(numbers[:, None].expand(-1, 3).contiguous(), lengths),
            "metadata": Objects(tuple(objects)),
        }
    )


def owners(kind: str, rows: int = 12) -> torch.Tensor:
    """Rank 2 has nothing, rank 0 gets nothing, and so on."""
    number = torch.arange(rows)
    return {"first two": number % 2, "last two": 1 + number % 2, "all": number % RANKS, "second": number * 0 + 1}[kind]


def held(rows: Rows, owner: torch.Tensor, rank: int) -> Rows:
    return rows.take(owner == rank)


def moved(world: World, rows: Rows, source: torch.Tensor, target: torch.Tensor) -> Rows:
    """Return this rank's rows after each row of a rank `source` has moved to the rank `target`."""
    exchange = ShardExchange(world, Interrupts(alone=False), None)
    return exchange.move("update", Shard(Rows({}), source, rows, world.rank), target).payload


def same(one: Rows, other: Rows) -> bool:
    return bytes(join(encode(one))) == bytes(join(encode(other)))


def columns_of_every_kind(world: World) -> dict[str, Any]:
    """Move all kinds of columns from all kinds of owners to all others."""
    rows, result = table(), {}
    for source in ("first two", "last two", "all", "second"):
        for target in ("first two", "last two", "all", "second"):
            edge, own = f"{source} to {target}", held(rows, owners(source), world.rank)
            received = moved(world, own if len(own) else Rows({}), owners(source), owners(target))
            expected = held(rows, owners(target), world.rank)
            result[edge] = same(received, expected) if len(expected) else len(received) == 0
    return result


def bytes_of_an_exchange(world: World) -> dict[str, Any]:
    """Return the bytes received, and the size of the rows that had to move."""
    rows, source, target = table(300), owners("first two", 300), owners("all", 300)
    with received_by(world) as received:
        moved(world, held(rows, source, world.rank), source, target)
    came = rows.take((target == world.rank) & (source != world.rank))
    return {"received": sum(map(len, received)), "needed": laid_out(encode(came))[0] if len(came) else 0}


def nothing_moves(world: World) -> dict[str, Any]:
    """Rows that stay where they are."""
    own = held(table(), owners("all"), world.rank)
    with received_by(world) as received:
        same = moved(world, own, owners("all"), owners("all"))
    return {"same object": same is own, "received": len(received)}


CHECKS = {f.__name__: f for f in (columns_of_every_kind, bytes_of_an_exchange, nothing_moves)}


def answers(world: World, task: dict[str, Any]) -> dict[str, list[Any]]:
    """Every check's answers, rank by rank."""
    result = {}
    for name, check in CHECKS.items():
        world.at(name)
        parts = world.gather("answers", json.dumps(check(world)).encode())
        result[name] = [json.loads(bytes(part)) for part in parts]
    return result
