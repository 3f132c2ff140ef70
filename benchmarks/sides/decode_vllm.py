"""vLLM on the CPU, its engine in this process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from benchmarks.turns import Turn


def prepare(case: Mapping[str, Any]) -> Turn:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(case["threads"])
    longest = len(case["prompts"][0]) + max(case["lengths"])
    engine = LLM(
        case["model"],
        dtype=case["dtype"],
        enforce_eager=True,
        max_num_seqs=len(case["lengths"]),
        max_model_len=longest + 1,
        enable_prefix_caching=True,
        disable_log_stats=True,
        skip_tokenizer_init=True,
        speculative_config=case.get("speculative_config"),
    )
    prompts = [{"prompt_token_ids": case["prompts"][i // case["group"]]} for i in range(len(case["lengths"]))]

    def generate(limit: int) -> int:
        settings = [
            SamplingParams(max_tokens=min(n, limit), ignore_eos=True, detokenize=False, temperature=1.0)
            for n in case["lengths"]
        ]
        made = engine.generate(prompts, settings, use_tqdm=False)
        return sum(len(row.outputs[0].token_ids) for row in made)

    def turn() -> dict[str, float]:
        return {"tokens": generate(longest)}

    generate(24)
    return turn
