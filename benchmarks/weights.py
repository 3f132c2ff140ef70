"""Measure the seconds and bytes of a version of 1 GB to two vLLM engines of two tensor ranks, beside a copy in memory
and a gloo broadcast.

python -m benchmarks.weights              # measures; with --keep it writes benchmarks/results/weights.json; needs `make
                                          vllm`

The trainer is one process. `sent` are the bytes that it sends for a version, `written` those of its file in shared
memory. From another node, which here is another name of this one, the engines share one stream.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, Qwen3Config

from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import Ranks, World
from braidrl.engines.engine import EngineSpec
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.routing.router import EngineService
from braidrl.weights import collective as weights_collective
from braidrl.weights.collective import CollectivePublisher, WeightOffer
from braidrl.weights.file import FilePublisher, WeightWriter, stored_weights
from braidrl.weights.publisher import TransferVolume
from braidrl.weights.shards import snapshot, weight_parts
from braidrl.weights.transfer import WeightTransfer
from tests.tiny import ROOT, TOKENIZER

RESULT = Path("benchmarks/results/weights.json")
PYTHON = ROOT / "build" / "vllm-venv" / "bin" / "python"
ENGINES, TENSOR, TURNS, LIMIT_S, CHUNK = 2, 2, 5, 600.0, 64 << 20
CHANGED = 0.006
"""Share of values that differ from the version before: of bfloat16 weights after a step of GRPO at 1e-6."""
PAUSE_S = 1.5
"""Seconds between two versions, as a training step takes: for a second after a call vLLM's idle processes poll without
pause.
"""
SENT = TransferVolume()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(Path(folder))
        parts = lambda: weight_parts(model)  # noqa: E731
        size = sum(part.local.nbytes for part in parts().values())
        floors = run_ranks("benchmarks.weights:floors", {"bytes": size}, 1 + ENGINES * TENSOR, LIMIT_S)
        count_sent()
        spec = EngineSpec("vllm", folder, 8, 64, tensor=TENSOR)
        processes = [EngineProcess(spec, f"engine {n}", PYTHON, LIMIT_S) for n in range(ENGINES)]
        engine = EngineService(processes, LIMIT_S, stored_weights)
        try:
            offer = WeightOffer(Ranks(), "127.0.0.1", LIMIT_S, torch.device("cpu"))
            collective = CollectivePublisher(offer, parts, engine, lambda: 0)
            file = FilePublisher(WeightWriter(parts(), Ranks()), parts, engine)
            ways = {"collective": timed(collective.publish)}
            with patch.object(weights_collective, "machine", lambda: "another node"):
                ways["collective from another node"] = timed(collective.publish)
            ways["file"] = timed(file.publish) | {"written": size}
            offered = []

            def change(version: int) -> None:
                """Offer a version in which some values differ, as copies of the trainer's tensors, which streaming
                makes anyway.
                """
                with torch.no_grad():
                    for part in parts().values():
                        part.local.view(-1)[:: round(1 / CHANGED)] += 1
                offered.append(offer.keep(version, snapshot(parts())))
                offer.forget(version - 2)

            ways["changed values"] = timed(lambda version: engine.publish(version, offered[-1]), change)
            collective.close()
            file.close()
        finally:
            engine.close()
    head = {"benchmark": "weights", "date": datetime.date.today().isoformat(), "bytes": size, "turns": TURNS}
    result = head | floors | ways
    print(json.dumps(result, indent=1))
    if "--keep" in sys.argv:
        kept = json.loads(RESULT.read_text()) | {"one stream to each node": result}
        RESULT.write_text(json.dumps(kept, indent=1) + "\n")


def write_model(folder: Path) -> Any:
    """Write and return a model of 1 GB in float32 that two ranks divide."""
    config = Qwen3Config(
        vocab_size=32768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=14,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=False,
        max_position_embeddings=256,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return model


def timed(publish: Callable[[int], object], prepare: Callable[[int], object] = lambda version: None) -> dict[str, Any]:
    """Return the median, least and most seconds of a publication, after a first one, and the bytes that were sent for
    one.
    """
    prepare(1)
    publish(1)
    before, seconds = SENT.sent, []
    for version in range(2, 2 + TURNS):
        prepare(version)
        time.sleep(PAUSE_S)
        start = time.perf_counter()
        publish(version)
        seconds.append(time.perf_counter() - start)
    return {
        "seconds": median(seconds),
        "least": min(seconds),
        "most": max(seconds),
        "sent": (SENT.sent - before) // TURNS,
    }


def count_sent() -> None:
    """Add up what all transfers of this process send."""
    run: Any = WeightTransfer.run

    def counted(*arguments: Any) -> Any:
        moved = run(*arguments)
        SENT.sent += moved.sent
        return moved

    setattr(WeightTransfer, "run", counted)  # noqa: B010


def floors(world: World, task: dict[str, Any]) -> dict[str, float]:
    """Return the seconds of a copy in memory, and of a broadcast to all other ranks."""
    torch.set_num_threads(1)
    values = (
        torch.ones(task["bytes"], dtype=torch.uint8) if world.first else torch.empty(task["bytes"], dtype=torch.uint8)
    )
    found: dict[str, list[float]] = {"copy": [], "broadcast": []}
    for _ in range(1 + TURNS):
        start = time.perf_counter()
        if world.first:
            values.clone()
        found["copy"].append(time.perf_counter() - start)
        dist.barrier()
        start = time.perf_counter()
        for chunk in values.split(CHUNK):
            dist.broadcast(chunk, 0)
        dist.barrier()
        found["broadcast"].append(time.perf_counter() - start)
    return {name: median(seconds[1:]) for name, seconds in found.items()}


if __name__ == "__main__":
    main()
