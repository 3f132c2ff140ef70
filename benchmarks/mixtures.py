"""Mixtures of experts: a whole step beside TRL, and one layer beside a dense one of equal operations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.case import Case
from benchmarks.comparison import Comparison
from benchmarks.duel import Side
from benchmarks.shapes import MODELS, equal_lengths, family_folder, long_tail, prompts, write_prompts
from benchmarks.speed import GROUP, PROMPT

LAYERS: dict[str, dict[str, int]] = {
    "8 experts, 2 active": {"width": 256, "inner": 384, "experts": 8, "active": 2, "tokens": 4096},
    "64 experts, 8 active": {"width": 512, "inner": 256, "experts": 64, "active": 8, "tokens": 4096},
}
"""Sizes of layers: that of the model in the step, and one with many small experts, as in Qwen3-30B-A3B."""


def moe() -> list[Case]:
    """Return the cases: GRPO steps of 64 rows, and forward and backward passes of one layer."""
    data = MODELS / "prompts-128.jsonl"
    write_prompts(data, prompts(64, PROMPT, 128))
    steps = {"128 tokens each": equal_lengths(64, 128), "up to 128 tokens": long_tail(64, 32, 4)}
    return [*(step_case(f"64 rows, {name}", data, steps[name]) for name in steps), *map(layer_case, LAYERS)]


def step_case(name: str, data: Path, lengths: list[int]) -> Comparison:
    """Return the case of a GRPO step with these lengths."""
    case = {
        "model": str(family_folder("qwen3_moe", 128)),
        "lengths": lengths,
        "group": GROUP,
        "data": str(data),
        "prompt_tokens": PROMPT,
        "dtype": "float32",
        "settings": {"trainer": {"share_prompts": True}},
    }
    sides = [Side(name, f"grpo_{name}", case) for name in ("braid", "trl")]
    title = f"GRPO step, mixture of 8 experts with 2 active, 4 layers x 256, prompts shared by Braid, {name}"
    return Comparison(title, sides, goals=[("braid", "trl", 2.0)])


def layer_case(name: str) -> Comparison:
    """Return the case of one layer beside a dense MLP with as many operations per token."""
    sizes: dict[str, Any] = LAYERS[name]
    sides = [Side(kind, "layer_braid", {**sizes, "kind": kind}) for kind in ("mixture", "dense")]
    title = f"one layer forward and backward, {name}, {sizes['tokens']} tokens of width {sizes['width']}"
    return Comparison(title, sides, rounds=5, goals=[("mixture", "dense", 0.6)])
