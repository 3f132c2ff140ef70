"""Tiny models of the hub's newest families, and runs of each flow on them."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from braidrl.training.decoders.shrink import shrink_config, tiny_model
from tests.invariants.traces import EVERY_STEP, merged
from tests.tiny import TOKENIZER, sums, write_jsonl

FAMILIES = ("qwen3_5_text", "gpt_oss", "deepseek_v3", "gemma4_text")
FEW: dict[str, Any] = merged(
    EVERY_STEP,
    {"trainer": {"steps": 2, "prompts_per_step": 2, "rows_per_update": 4}, "rollout": {"samples_per_prompt": 2}},
)
FLOWS: dict[str, dict[str, Any]] = {
    "grpo": merged(FEW, {"flow": "grpo", "algorithm": {"kl_coef": 0.1}}),
    "dapo": merged(FEW, {"flow": "dapo", "algorithm": {"overlong_cache": 2}}),
    "dpo": {**merged(FEW, {"flow": "dpo"}), "rollout": {"samples_per_prompt": 2}},
    "sft": {**merged(FEW, {"flow": "sft", "trainer": {"rows_per_update": 2}}), "rollout": {"samples_per_prompt": 1}},
}


def family_config(name: str, **changes: Any) -> Any:
    """Return a tiny configuration of a family, with the vocabulary of the tests' tokenizer."""
    config = shrink_config(AutoConfig.for_model(name))
    for key, value in {
        "vocab_size": len(TOKENIZER),
        "eos_token_id": TOKENIZER.eos_token_id,
        "pad_token_id": TOKENIZER.pad_token_id,
        "bos_token_id": None,
        **changes,
    }.items():
        setattr(config, key, value)
    return config


def write_family(folder: Path, name: str, **changes: Any) -> Path:
    """Write a tiny random model of a family, with a tokenizer, as a Hugging Face directory."""
    tiny_model(deepcopy(family_config(name, **changes))).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


def write_pairs(path: Path) -> Path:
    """Write sums with a right and a wrong response, for every flow."""
    records = sums(40)
    wrong = [*records[1:], records[0]]
    return write_jsonl(
        path,
        [
            {**one, "chosen": one["response"], "rejected": other["response"]}
            for one, other in zip(records, wrong, strict=True)
        ],
    )
