"""What ranks that divide a model do in tests: one case after the other on the same processes, each compared with a whole engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from braidrl.cluster.world import World
from braidrl.models.divided import Ranks, load_divided
from braidrl.models.loading import load_decoder
from braidrl.rollout.embedded import EmbeddedEngine
from braidrl.rollout.requests import Finished, Sampling
from tests.rollout.tiny import make_requests, make_tokenizer

REQUESTS = make_requests(groups=4, samples=3, sampling=Sampling(temperature=0.9, max_tokens=12), apart=7)


def generated(model: Any, compile: bool, **more: Any) -> list[Finished]:
    return EmbeddedEngine(model, make_tokenizer(), 16, 64, compile=compile, **more).generate(REQUESTS)


def compare(world: World, task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """By case: whether all ranks have the same bits, in how many rows tokens differ from a whole engine's, and log-probs at most."""
    torch.set_num_threads(1)
    found = {}
    assert world.group is not None
    for name, (path, dtype, compile) in task["cases"].items():
        world.at(name)
        number_type = getattr(torch, dtype)
        model, slices = load_divided(path, number_type, "cpu", Ranks(world.group))
        rows = generated(model, compile, slices=slices)
        bits = b"".join(r.tokens.numpy().tobytes() + r.log_probs.numpy().tobytes() for r in rows)
        equal = len({bytes(part) for part in world.gather("bits", bits)}) == 1
        differing: dict[str, Any] = {"equal": equal}
        if world.first:
            whole = generated(load_decoder(Path(path), number_type).eval(), compile)
            pairs = list(zip(rows, whole, strict=True))
            differing["rows"] = sum(a.tokens.tolist() != b.tokens.tolist() for a, b in pairs)
            differing["gap"] = max(
                float((a.log_probs - b.log_probs).abs().max()) for a, b in pairs if len(a.tokens) == len(b.tokens)
            )
        found[name] = json.loads(bytes(world.gather("found", json.dumps(differing).encode())[0]))
    return found
