"""The vLLM proof: on a decoder's tiny twin, vLLM's log-probs must equal the trainer's, also after an update of its
weights.

`braid check MODEL --vllm PYTHON` runs it. vLLM runs in a process of its own; this file does not import it.
"""

import asyncio
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from braidrl.engines.engine import EngineSpec
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.training.decoders.body import ForwardPlan
from braidrl.training.decoders.proof import BOUND, Finding, Twin, distance, packed_log_probs
from braidrl.weights.publisher import ModelWeights

WIDTH = 64
"""Width of the twin's heads: vLLM's kernels for CPUs need 32 or more, and twice as many where some layers have wider
ones.
"""
TOKENS = 16
LIMIT_S = 600.0


def vllm_finding(config: Any, plan: ForwardPlan, python: Path | None) -> Finding:
    """Generate with vLLM, of the interpreter `python` or this one, from two versions of a twin's weights; compare
    log-probs with ours.
    """

    def greatest_gap() -> tuple[float, float]:
        twins = [Twin(config, seed, head_width=WIDTH) for seed in (0, 1)]
        prompts = [row[: max(1, len(row) // 2)] for row in twins[0].rows]
        models = [twin.model(plan) for twin in twins]
        with tempfile.TemporaryDirectory() as folder:
            # A Hugging Face directory, with a tokenizer of one word per id.
            models[0].save_pretrained(folder)
            words = {str(n): n for n in range(twins[0].config.get_text_config().vocab_size)}
            tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
            PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1").save_pretrained(folder)
            versions_drawn = asyncio.run(drawn(folder, models, prompts, python))
        gaps = []
        for model, responses in zip(models, versions_drawn, strict=True):
            rows = [torch.cat([prompt, answer.tokens]) for prompt, answer in zip(prompts, responses, strict=True)]
            with torch.no_grad():
                expected = [log_probs_of_row[-TOKENS:] for log_probs_of_row in packed_log_probs(model, rows)]
            gaps.append(distance([response.log_probs for response in responses], expected))
        return max(gaps), BOUND

    return Finding.of("vLLM equals trainer, also after an update", greatest_gap)


async def drawn(folder: str, versions: list[Any], prompts: list[Tensor], python: Path | None) -> list[list[Response]]:
    """Return the responses of one vLLM to the prompts under each version of the weights."""
    longest = max(map(len, prompts)) + TOKENS
    engine = EngineProcess(EngineSpec("vllm", folder, len(prompts), longest), "vLLM", python, LIMIT_S)
    sampling = SamplingParams(max_tokens=TOKENS, ends=False)
    to_draw = [Request((0, number, 0), prompt, sampling) for number, prompt in enumerate(prompts)]
    by_version = []
    try:
        await engine.start()
        for version, model in enumerate(versions):
            if version:
                await engine.update_weights(version, ModelWeights(model))
            by_version.append(await asyncio.gather(*map(engine.submit, to_draw)))
    finally:
        await engine.close()
    return by_version
