"""Rows for which vLLM's cache is too small: `python -m tests.engines.vllm.preemptions MODEL FOUND.json [adapts]`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from vllm.v1.core.sched.scheduler import Scheduler

from braidrl.engines.engine import EngineSpec
from braidrl.engines.requests import Changes, Request, SamplingParams
from braidrl.engines.vllm.vllm_engine import VllmEngine
from tests.engines.tiny import make_tokenizer

ROWS, LIMIT, BLOCKS = 48, 380, 13
STOPS = (5, 12, 60, 91)


def main(model: Path, adapts: bool) -> dict[str, Any]:
    preempted: list[str] = []
    preempt = Scheduler._preempt_request

    def counting(self: Any, request: Any, *arguments: Any, **settings: Any) -> None:
        preempted.append(request.request_id)
        preempt(self, request, *arguments, **settings)

    Scheduler._preempt_request = counting
    generator = torch.Generator().manual_seed(7)
    sampling = SamplingParams(max_tokens=LIMIT, stop_token_ids=STOPS, ends=False)
    prompts = [torch.randint(0, 100, (3 + row % 5,), generator=generator) for row in range(ROWS)]
    submitted = [Request((0, row, 0), prompt, sampling) for row, prompt in enumerate(prompts)]
    options = {"num_gpu_blocks_override": BLOCKS}
    spec = EngineSpec("vllm", str(model), ROWS, LIMIT + 10, options=options, adapts_rows=adapts)
    engine = VllmEngine(spec, make_tokenizer())
    engine.generate([replace(request, purpose="warm") for request in submitted[:2]])
    at_once: list[int] = []

    def looked() -> Changes:
        at_once.append(engine.in_flight)
        return Changes()

    started = time.perf_counter()
    rows = engine.generate(submitted, changes=looked)
    seconds = time.perf_counter() - started
    return {
        "tokens": [row.tokens.tolist() for row in rows],
        "preempted": len(preempted),
        "seen": engine.preemptions,
        "steps": len(at_once),
        "most": max(at_once),
        "seconds": round(seconds, 1),
    }


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(main(Path(sys.argv[1]), "adapts" in sys.argv)))
