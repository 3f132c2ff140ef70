"""Tasks of ranks in the test of HybridFlow's Table 2: train in one layout, enter generation in another, count, and go back."""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from braidrl.cluster.world import World
from braidrl.engines.embedded.sharded_decoding import join_generation_groups, load_for_decoding
from braidrl.training.parallel.replicated import DataParallel
from braidrl.training.roles.checkpoint import full_state_dict
from braidrl.training.roles.copies import local_weight_parts
from braidrl.training.roles.make import DecoderWorker
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.shard_index import weight_parts
from braidrl.weights.shards import local_shard
from tests.training.parallel.laid_out import config_of

LIMIT = 16384
LAYOUTS = {
    "1-4-2 to 1-2": ((1, 4, 2), (1, 2)),
    "1-8-1 to 1-4": ((1, 8, 1), (1, 4)),
    "2-2-2 to 1-2": ((2, 2, 2), (1, 2)),
    "2-4-1 to 1-2": ((2, 4, 1), (1, 2)),
    "2-2-2 to 2-1": ((2, 2, 2), (2, 1)),
}
"""Training (pipeline, tensor, data) and generation (pipeline, tensor) of the paper's Table 2."""
GROUPINGS = ("interval", "neighbour", "gather")


def measure(world: World, task: dict[str, Any]) -> dict[str, Any]:
    """Return, by case, the bytes that each rank received, held and held twice, per tensor if the formula is."""
    torch.set_num_threads(1)
    return {name: transition(world, task["model"], *case) for name, case in task["cases"].items()}


def transition(world: World, model: str, training: dict[str, Any], pipeline: int, tensor: int, grouping: str) -> Any:
    world.at(f"{training} {grouping}")
    worker = DecoderWorker("actor", config_of(model, training), True, DataParallel(world.group, world))
    layout = GenerationLayout(pipeline, tensor, grouping)  # type: ignore[arg-type]
    resolved = worker.config.trainer.layout.resolve(world.size)
    layout.check(resolved, world.size)
    ranks = join_generation_groups(layout.groups(resolved))
    generating, slices = load_for_decoding(worker.path, worker.dtype, "cpu", *ranks)
    weights = GenerationWeights(
        partial(local_weight_parts, worker),
        resolved,
        worker.ranks,
        partial(weight_parts, generating, slices),
        layout,
        LIMIT,
    )
    with torch.no_grad():
        for parameter in worker.model.parameters():
            local_shard(parameter).mul_(1.5)
    wanted = {name: tensor.clone() for name, tensor in full_state_dict(worker).items()}
    before = {name: part.local.clone() for name, part in local_weight_parts(worker).items()}
    volume = weights.enter()
    assert volume is not None and weights.enter() is None
    problems = [
        f"{name} differs"
        for name, part in weight_parts(generating, slices).items()
        if not torch.equal(part.local, part.box.of(wanted[name]))
    ]
    kept = [name for name, part in local_weight_parts(worker).items() if part.local.any()]
    if grouping == "interval" and kept:
        problems.append(f"training has {kept} beside generation")
    weights.leave()
    weights.leave()
    after = local_weight_parts(worker)
    problems += [
        f"{name} came back otherwise" for name, values in before.items() if not torch.equal(after[name].local, values)
    ]
    problems += [
        f"{n} stays"
        for n, part in weight_parts(generating, slices).items()
        if grouping == "interval" and part.local.any()
    ]
    again = weights.enter()
    assert again is not None
    if (again.received, again.rounds) != (volume.received, volume.rounds):
        problems.append("the second time is not as the first")
    weights.leave()
    said = {
        "received": volume.received, "peak": weights.peak_bytes, "redundant": weights.redundant_bytes,
        "rounds": volume.rounds, "problems": problems,
        "trained": {name: part.box.elements for name, part in local_weight_parts(worker).items()},
        "generated": {name: part.box.elements for name, part in weight_parts(generating, slices).items()},
    }  # fmt: skip
    return [json.loads(bytes(part)) for part in world.gather("measured", json.dumps(said).encode())]
