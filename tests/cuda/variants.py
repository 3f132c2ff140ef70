"""Settings with which a run trains on CUDA, or on shadows of its tensors."""

from __future__ import annotations

from typing import Any

VARIANTS: dict[str, dict[str, Any]] = {
    "recorded steps": {"rollout__compile": True, "trainer__steps": 2},
    "adapters": {"trainer__lora": {"rank": 4}, "algorithm": {"old": "recompute"}},
    "shared prompts": {"trainer__share_prompts": True, "algorithm": {"old": "recompute"}},
    "activation checkpointing": {"trainer__activation_checkpointing": True},
    "top-k and top-p": {"rollout__top_k": 5, "rollout__top_p": 0.9},
    "an engine of another type": {"dtype": "float32", "rollout__dtype": "bfloat16", "trainer__steps": 2},
    "moments of 8 bits": {"trainer__optimizer": "adamw8bit", "trainer__optimizer_settings": {"min_8bit_size": 256}},
    "weights of 4 bits": {"trainer__lora": {"rank": 4, "base_dtype": "nf4"}},
}
