"""Engines in separate processes, for tests: made once and used by many."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine, Sequence
from contextlib import closing
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from braidrl.cluster.world import Ranks
from braidrl.engines.engine import Engine, EngineSpec
from braidrl.engines.engine_contract import all_of
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.requests import Request
from braidrl.training.compute.attention import ATTENTION
from braidrl.weights.collective import WeightOffer
from braidrl.weights.publisher import ModelWeights
from braidrl.weights.shards import snapshot, weight_parts
from tests.engines.tiny import SIZES, make_tokenizer, training_log_probs
from tests.tiny import ROOT

T = TypeVar("T")
# The long rows must still be running when new weights arrive, even on a busy machine. vLLM, whose steps take
# milliseconds, runs as long with fewer tokens.
LIMIT, LONG, LONG_OF_SLOW = 650, 600, 200
# The narrowest heads that vLLM supports on a CPU. Tied, so that an update must also name the output layer.
CONFIG = Qwen3Config(**(SIZES | {"max_position_embeddings": 1024}), head_dim=32, tie_word_embeddings=True)


def served_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(CONFIG), dtype=torch.float32, attn_implementation=ATTENTION)


def write_served_model(folder: Path) -> Path:
    served_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def spec(
    kind: str, model: Path, tensor: int = 1, reproducible: bool = True, dtype: str = "float32", **options: Any
) -> EngineSpec:
    return EngineSpec(
        kind, str(model), 16, LIMIT, tensor=tensor, dtype=dtype, options=options, reproducible=reproducible
    )


def other_weights() -> ModelWeights:
    """Return weights that sample other tokens than those of `served_model`."""
    changed = served_model()
    with torch.no_grad():
        changed.model.embed_tokens.weight.mul_(-1)
    return ModelWeights(changed)


async def largest_gap(engine: Engine, wanted: Sequence[Request], updates: int = 6, offered: bool = False) -> float:
    """Return the largest gap of the engine's log-probs to training's, in nats, after each of several weight updates.

    With `offered` two of three versions are received in a process group; the second of these changes few values, which
    alone are sent.
    """
    trained, generator = served_model(), torch.Generator().manual_seed(3)
    drawn, largest, sent = set(), 0.0, list[int]()
    with closing(WeightOffer(Ranks(), "127.0.0.1", 60.0, torch.device("cpu"))) as offer:
        for version in range(1, updates + 1):
            with torch.no_grad():
                for parameter in trained.parameters():
                    changed = torch.rand(parameter.shape, generator=generator) < (0.05 if version % 3 == 2 else 1.0)
                    parameter.add_(0.01 * changed * torch.randn(parameter.shape, generator=generator))
            before = offer.sent_bytes
            if offered and version % 3:
                await engine.update_weights(version, offer.keep(version, snapshot(weight_parts(trained))))
                sent.append(offer.sent_bytes - before)
            else:
                await engine.update_weights(version, ModelWeights(trained))
            finished = await all_of(engine, wanted)
            for response, expected in zip(finished, training_log_probs(trained, list(wanted), finished), strict=True):
                largest = max(largest, float((response.log_probs - expected).abs().max()))
                assert set(response.versions.tolist()) == {version}
            drawn.add(tuple(finished[0].tokens.tolist()))
    print(f"largest gap: {largest:.1e} nats; bytes sent: {sent}")
    assert not offered or 5 * sent[1] < sent[0] == sent[2]
    assert len(drawn) > 1, "new weights sample other tokens"
    return largest


def vllm_python(target: str = "vllm") -> Path | None:
    """Return an interpreter that has vLLM: this one, or that of `make vllm` or `make vllm-images`. Skip the test if
    there is none.
    """
    module = importlib.util.find_spec("vllm")
    # A folder of this name, as of an earlier test's run, is a package without an origin.
    if module is not None and module.origin is not None:
        return None
    python = ROOT / "build" / f"{target}-venv" / "bin" / "python"
    if not (python.parent.parent / "installed").is_file():
        pytest.skip(f"vLLM is not installed; `make {target}` installs it")
    return python


class Served:
    """Processes of one kind of engine, and their event loop."""

    def __init__(self, kind: str, model: Path, count: int = 1, limit_s: float = 120.0, **options: Any) -> None:
        self.runner = asyncio.Runner()
        python = vllm_python() if kind == "vllm" else None
        made = spec(kind, model, **options)
        self.engines = [EngineProcess(made, f"engine {number}", python, limit_s) for number in range(count)]
        self.run(self._start())

    @property
    def engine(self) -> EngineProcess:
        return self.engines[0]

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def close(self) -> None:
        for engine in self.engines:
            self.run(engine.close())
        self.runner.close()

    async def _start(self) -> None:
        await asyncio.gather(*(engine.start() for engine in self.engines))
