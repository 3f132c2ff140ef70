"""Tasks of ranks in the test of HybridFlow's Table 2: train in one layout, enter generation in another, count, and go
back.
"""

from __future__ import annotations

import json
from functools import partial
from typing import Any

import torch

from braidrl.cluster.process_groups import subgroup
from braidrl.cluster.world import World
from braidrl.engines.embedded.sharded_decoding import join_generation_groups, load_for_decoding
from braidrl.engines.engine import EngineSpec
from braidrl.training.backends import BackendSpec
from braidrl.training.parallel.layouts import DataParallel
from braidrl.training.roles.worker import RoleWorker
from braidrl.weights.generation_layout import GenerationLayout
from braidrl.weights.in_place import GenerationWeights
from braidrl.weights.shards import Parts, local_shard, weight_parts
from tests.tiny import TOKENIZER
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


def transition(
    world: World, model: str, training: dict[str, Any], pipeline: int, tensor: int, grouping: str, vllm: bool = False
) -> Any:
    world.at(f"{training} {grouping}")
    config = config_of(model, training, "float32" if vllm else "float64")
    worker = RoleWorker(BackendSpec("actor", config, True, DataParallel(world.group, world)))
    layout = GenerationLayout(pipeline, tensor, grouping)  # type: ignore[arg-type]
    resolved = worker.config.trainer.layout.resolve(world.size)
    layout.check(resolved, world.size)
    groups, trained = layout.groups(resolved), worker.weights
    engine = None
    if vllm:
        # Imported here: only an interpreter that has vLLM measures it.
        from braidrl.engines.vllm.hosted import HostedVllmEngine

        spec = EngineSpec("vllm", model, 8, 64, tensor=tensor)
        engine = HostedVllmEngine(spec, TOKENIZER, groups, subgroup(groups.flatten(1)))
        generating: Parts = engine.parts
    else:
        generating = partial(
            weight_parts, *load_for_decoding(worker.path, worker.dtype, "cpu", *join_generation_groups(groups))
        )
    weights = GenerationWeights(trained, resolved, worker.ranks, generating, layout, LIMIT)
    with torch.no_grad():
        for parameter in worker.model.parameters():
            local_shard(parameter).mul_(1.5)
    expected = {name: tensor.clone() for name, tensor in worker.full_state_dict().items()}
    before = {name: part.local.clone() for name, part in worker.weights().items()}
    volume = weights.enter()
    assert volume is not None and weights.enter() is None
    problems = [
        f"{name} differs"
        for name, part in generating().items()
        if not torch.equal(part.local, part.box.of(expected[name]))
    ]
    kept = [name for name, part in worker.weights().items() if part.local.any()]
    if grouping == "interval" and kept:
        problems.append(f"training has {kept} beside generation")
    weights.leave()
    weights.leave()
    after = worker.weights()
    problems += [
        f"{name} came back otherwise" for name, values in before.items() if not torch.equal(after[name].local, values)
    ]
    problems += [f"{n} stays" for n, part in generating().items() if grouping == "interval" and part.local.any()]
    again = weights.enter()
    assert again is not None
    if (again.received, again.rounds) != (volume.received, volume.rounds):
        problems.append("the second time is not as the first")
    weights.leave()
    together: dict[int, list[str]] = {}
    for name, part in generating().items():
        together.setdefault(part.local.untyped_storage()._cdata, []).append(name)
    said = {
        "together": list(together.values()),
        "received": volume.received,
        "peak": weights.peak_bytes,
        "redundant": weights.redundant_bytes,
        "rounds": volume.rounds,
        "problems": problems,
        "trained": {name: part.box.elements for name, part in worker.weights().items()},
        "generated": {name: part.box.elements for name, part in generating().items()},
    }
    if engine is not None:
        engine.close()
    return [json.loads(bytes(part)) for part in world.gather("measured", json.dumps(said).encode())]
