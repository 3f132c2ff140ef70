"""Work of ranks with a sharded model: one case after the other on the same processes, each compared with a full
engine.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from braidrl.cluster.world import World
from braidrl.data.rows import FinishReason, Uid
from braidrl.engines.embedded.embedded_engine import ALONE, Decoding, DecodingRanks, EmbeddedEngine
from braidrl.engines.embedded.sharded_decoding import TensorRanks, load_for_decoding
from braidrl.engines.requests import Changes, Response, SamplingParams
from braidrl.training.loading import load_decoder
from tests.engines.tiny import make_requests, make_tokenizer

REQUESTS = make_requests(groups=4, samples=3, sampling=SamplingParams(temperature=0.9, max_tokens=12), apart=7)


def generated(model: Any, compile: bool, ranks: DecodingRanks = ALONE) -> list[Response]:
    return EmbeddedEngine(model, make_tokenizer(), Decoding(16, 64, compile=compile), ranks).generate(REQUESTS)


def together(world: World, task: Mapping[str, Any]) -> list[str]:
    """Return the faults of a shared engine when each rank brings rows and one rank ends a row early."""
    torch.set_num_threads(1)
    assert world.group is not None
    model, slices = load_for_decoding(task["path"], torch.float64, "cpu", TensorRanks(world.group))
    engine = EmbeddedEngine(
        model, make_tokenizer(), Decoding(16, 64, compile=False), DecodingRanks(slices=slices, group=world.group)
    )
    whole = {row.uid: row for row in generated(load_decoder(Path(task["path"]), torch.float64).eval(), False)}
    own, heard, wrong = REQUESTS[world.rank :: world.size], list[Uid](), list[str]()
    for row in engine.generate(own, lambda row: heard.append(row.uid)):
        wrong += [f"{row.uid} differs"] if row.tokens.tolist() != whole[row.uid].tokens.tolist() else []
    if sorted(heard) != sorted(request.uid for request in own):
        wrong.append(f"rank {world.rank} heard of {heard}")
    # The other rank has no rows, so it has nothing to end.
    first = world.rank == 0
    result = engine.generate(own if first else [], None, (lambda: Changes([own[0].uid])) if first else None)
    ended = [row.uid for row in result if row.finish_reason is FinishReason.ABORT]
    if ended != ([own[0].uid] if first else []) or len(result) != (len(own) if first else 0):
        wrong.append(f"rank {world.rank} ended {ended} of {len(result)}")
    return [word for part in world.gather("wrong", json.dumps(wrong).encode()) for word in json.loads(bytes(part))]


def compare(world: World, task: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return, by case: whether all ranks have the same bits, the rows with other tokens than a full engine's, and the
    largest gap.
    """
    torch.set_num_threads(1)
    result = {}
    assert world.group is not None
    for name, (path, dtype, compile) in task["cases"].items():
        world.at(name)
        number_type = getattr(torch, dtype)
        model, slices = load_for_decoding(path, number_type, "cpu", TensorRanks(world.group))
        rows = generated(model, compile, DecodingRanks(slices))
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
        result[name] = json.loads(bytes(world.gather("found", json.dumps(differing).encode())[0]))
    return result
