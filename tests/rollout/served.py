"""Engines in processes of their own, for tests: made once, used by many."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import Coroutine
from copy import deepcopy
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from braidrl.models.attention import ATTENTION
from braidrl.rollout.engine_spec import EngineSpec
from braidrl.rollout.process import EngineProcess
from tests.rollout.tiny import SIZES, make_tokenizer
from tests.tiny import ROOT

T = TypeVar("T")
LIMIT, LONG = 250, 200
# The narrowest heads that vLLM computes with on a CPU; tied, so that an update has to bring the output layer by its name too.
CONFIG = Qwen3Config(**SIZES, head_dim=32, tie_word_embeddings=True)


def served_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(deepcopy(CONFIG), dtype=torch.float32, attn_implementation=ATTENTION)


def write_served_model(folder: Path) -> Path:
    served_model().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def spec(kind: str, model: Path) -> EngineSpec:
    """`tensor-parallel` is the embedded engine divided between two processes."""
    divided = kind == "tensor-parallel"
    return EngineSpec(
        "embedded" if divided else kind, str(model), slots=16, max_sequence_tokens=LIMIT, tensor=1 + divided
    )


def vllm_python() -> Path | None:
    """The interpreter that has vLLM: this one, or that of `make vllm`. Skips the test where there is none."""
    if importlib.util.find_spec("vllm") is not None:
        return None
    python = ROOT / "build" / "vllm-venv" / "bin" / "python"
    if not (python.parent.parent / "installed").is_file():
        pytest.skip("vLLM is not installed; `make vllm` installs it")
    return python


class Served:
    """Processes of one kind of engine, and the loop that they belong to."""

    def __init__(self, kind: str, model: Path, count: int = 1, limit_s: float = 120.0) -> None:
        self.runner = asyncio.Runner()
        python = vllm_python() if kind == "vllm" else None
        made = spec(kind, model)
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
