"""Workers of two engines on one node, and trainer ranks on another, as processes over gloo; each node is a name."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from braidrl.cluster.world import Ranks, World
from braidrl.weights import collective
from braidrl.weights.boxes import Box
from braidrl.weights.collective import Incoming, OfferedWeights, TransferNotice, WeightOffer
from braidrl.weights.shards import WeightPart, full_parts

TRAINERS, ENGINES, TENSOR, LIMIT_S = 2, 2, 2, 60.0
SHAPES = {"embedding": (64, 48), "norm": (48,), **{f"layers.{n}.up": (32, 48) for n in range(4)}}


def tensors(version: int) -> dict[str, Tensor]:
    """Return a version; a few values differ from the version before."""
    generator = torch.Generator().manual_seed(0)
    result = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    for tensor in result.values():
        tensor.view(-1)[:: 40 // version] += version - 1
    return result


def part_of(name: str, tensor: Tensor, axis: int, rank: int, ranks: int, dtype: torch.dtype) -> WeightPart:
    """Return a rank's slice; vectors are whole on every rank."""
    box = Box.whole(tensor.shape)
    if tensor.dim() > 1:
        size = tensor.shape[axis] // ranks
        box = box.along(axis, rank * size, (rank + 1) * size)
    return WeightPart([name], box.of(tensor).to(dtype).clone(), (tensor.shape, box))


def take_part(world: World, task: dict[str, Any]) -> list[dict[str, Any]]:
    """Send with each of the divisions into nodes, over the same ranks."""
    torch.set_num_threads(1)
    trainers = dist.new_group(list(range(TRAINERS)))
    return [send_two_versions(world, trainers, nodes) for nodes in task["nodes"]]


def send_two_versions(world: World, trainers: dist.ProcessGroup, nodes: str) -> dict[str, Any]:
    """Send two versions from the trainer ranks to the workers; return the bytes of each version and the tensors that
    differ.

    `nodes` has a letter for each rank.
    """
    collective.machine = lambda: nodes[world.rank]
    engine, worker = divmod(world.rank - TRAINERS, TENSOR)
    offer, held, result = None, None, {"sent": [], "received": [], "differs": []}
    if world.rank < TRAINERS:
        offer = WeightOffer(Ranks(trainers), "127.0.0.1", LIMIT_S, torch.device("cpu"))
    dtype = (torch.bfloat16, torch.float32)[engine]
    own = {n: part_of(n, torch.zeros_like(t), 1, worker, TENSOR, dtype) for n, t in tensors(1).items()}
    for version in (1, 2):
        notices, asked = None, ExitStack()
        if offer is not None:
            parts = {n: part_of(n, t, 0, world.rank, TRAINERS, t.dtype) for n, t in tensors(version).items()}
            source = offer.keep(version, parts)
            before = offer.sent_bytes
            if world.first:
                notices = [asdict(asked.enter_context(source.request(TENSOR, held))) for _ in range(ENGINES)]
                held = source
        notices = world.share("notices", notices)
        if offer is None:
            received = Incoming(TransferNotice(**notices[engine]), worker, torch.device("cpu")).put_into(own).received
            expected = {n: part_of(n, t, 1, worker, TENSOR, dtype) for n, t in tensors(version).items()}
            result["differs"] += [n for n, part in expected.items() if not torch.equal(own[n].local, part.local)]
            result["received"].append(received)
        world.gather("workers have the version", b"")
        asked.close()
        if offer is not None:
            result["sent"].append(offer.sent_bytes - before)
            result["counted"] = source.received
    if offer is not None:
        offer.close()
    every = [json.loads(bytes(one)) for one in world.gather("results", json.dumps(result).encode())]
    return {
        "sent": [sum(one["sent"][n] for one in every[:TRAINERS]) for n in (0, 1)],
        "received": [sum(one["received"][n] for one in every[TRAINERS:]) for n in (0, 1)],
        "counted": every[0]["counted"],
        "differs": [name for one in every for name in one["differs"]],
    }


def put_into_slices(world: World, task: dict[str, Any]) -> list[str]:
    """Put a version that the first rank offers into the slices of all ranks; return the tensors that differ."""
    torch.set_num_threads(1)
    offer = WeightOffer(Ranks(), "127.0.0.1", LIMIT_S, torch.device("cpu")) if world.first else None
    offered = asdict(offer.keep(1, full_parts(tensors(1).items()))) if offer is not None else None
    source = OfferedWeights(**world.share("the offer", offered))
    own, expected = (
        {n: part_of(n, t * share, 1, world.rank, world.size, t.dtype) for n, t in tensors(1).items()}
        for share in (0, 1)
    )
    source.put_into(own, Ranks(world.group, world))
    differs = [n for n, part in expected.items() if not torch.equal(own[n].local, part.local)]
    every = world.gather("results", json.dumps(differs).encode())
    if offer is not None:
        offer.close()
    return [name for one in every for name in json.loads(bytes(one))]
