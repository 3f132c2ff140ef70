"""Generation, training and memory against TRL, transformers and vLLM, beside the least seconds that the machine's rates
allow.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.case import Case, Rates
from benchmarks.comparison import Comparison
from benchmarks.duel import Side
from benchmarks.shapes import (
    FAMILIES,
    IMAGE_TOKENS,
    MODELS,
    Shape,
    equal_lengths,
    family_folder,
    long_tail,
    model_folder,
    prompts,
    vision_data,
    vision_folder,
    write_prompts,
)

GROUP = 8
PROMPT = 16
VISION_PROMPT = IMAGE_TOKENS + 11
"""Tokens of a question about a drawing, with the marks of its message."""

VLLM_DRAFTS = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
"""vLLM's own speculation: tokens that followed the same words of the row before."""


def decode() -> list[Case]:
    """Return the generation cases: every row has a prompt of 16 tokens, in groups of 8."""
    return decode_cases(128)


def decode_vocabulary() -> list[Case]:
    """Return generation cases with a long vocabulary, where sampling costs as much as the layers."""
    return decode_cases(32768)


def decode_cases(vocabulary: int) -> list[Case]:
    settings = [(64, False, 1.3), (256, False, 1.5), (64, True, 2.5), (256, True, 2.5)]
    return [decode_case(vocabulary, *setting) for setting in settings]


def decode_case(vocabulary: int, rows: int, tail: bool, goal: float) -> Comparison:
    shape = Shape(vocabulary)
    lengths = long_tail(rows, 32, 10) if tail else equal_lengths(rows, 128)
    case = {
        "model": str(model_folder(shape)),
        "lengths": lengths,
        "group": GROUP,
        "prompts": prompts(rows // GROUP, PROMPT, vocabulary),
    }
    sides, goals = [], []
    for dtype in ("float32", "bfloat16"):
        for name in ("braid", "transformers", "vllm"):
            sides.append(Side(f"{name} {dtype}", f"decode_{name}", {**case, "dtype": dtype}))
        if tail:
            guessing = {**case, "dtype": dtype, "speculative_config": VLLM_DRAFTS}
            sides.append(Side(f"vllm with drafts {dtype}", "decode_vllm", guessing))
        goals += [(f"braid {dtype}", f"transformers {dtype}", goal), (f"braid {dtype}", f"vllm {dtype}", 1.0)]
    if rows == 256:
        goals.append(("braid bfloat16", "transformers float32", 2.5))

    def floor(dtype: str, rates: Rates) -> float:
        return decode_floor(shape, lengths, dtype, rates)

    name = f"decode, {rows} rows, {'long tail' if tail else '128 tokens each'}, vocabulary {vocabulary}"
    return Comparison(name, sides, goals=goals, floor=floor)


def decode_floor(shape: Shape, lengths: list[int], dtype: str, rates: Rates) -> float:
    """Return the operations of products and attention, and the bytes of keys and values read once per token."""
    size = 4 if dtype == "float32" else 2
    seen = sum(n * PROMPT + n * (n + 1) // 2 for n in lengths)
    operations = 2 * (shape.body + shape.head) * sum(lengths)
    return (
        operations / rates[f"{dtype}_operations_per_second"]
        + shape.attention(seen) / rates["float32_operations_per_second"]
        + shape.key_bytes(seen, size) / rates["bytes_per_second"]
    )


def grpo() -> list[Case]:
    """Return the cases of a whole step: 64 rows generated, scored and trained on in one optimizer step."""
    short, up_to = equal_lengths(64, 128), [min(128, n) for n in long_tail(64, 64, 4)]
    return [grpo_case(Shape(128), short), grpo_case(Shape(128), up_to), grpo_case(Shape(32768), up_to)]


def grpo_smollm2() -> list[Case]:
    """Return the same at the size of a real model, SmolLM2-135M: 64 rows of 100 tokens. The sides run one by one, about
    10 GiB each.
    """
    return [grpo_case(Shape(49152, 30, 576, 1536, 9, 3, 64), equal_lengths(64, 100), at_once=False)]


def grpo_case(shape: Shape, lengths: list[int], at_once: bool = True) -> Comparison:
    data = MODELS / f"prompts-{shape.vocabulary}.jsonl"
    write_prompts(data, prompts(64, PROMPT, shape.vocabulary))
    case = {
        "model": str(model_folder(shape)),
        "lengths": lengths,
        "group": GROUP,
        "data": str(data),
        "prompt_tokens": PROMPT,
    }
    sides = [
        Side(f"{name} {dtype}", f"grpo_{name}", {**case, "dtype": dtype})
        for dtype in ("float32", "bfloat16")
        for name in ("braid", "trl")
    ]
    goals = [
        ("braid float32", "trl float32", 2.5),
        ("braid bfloat16", "trl bfloat16", 3.0),
        ("braid bfloat16", "trl float32", 3.0),
    ]

    def floor(dtype: str, rates: Rates) -> float:
        # Forward and backward: three products per weight. The output layer's count only where a token is predicted.
        tokens = sum(lengths) + PROMPT * len(lengths)
        training = 6 * (shape.body * tokens + shape.head * sum(lengths))
        return decode_floor(shape, lengths, dtype, rates) + training / rates[f"{dtype}_operations_per_second"]

    tokens = f"{max(lengths)} tokens each" if min(lengths) == max(lengths) else f"up to {max(lengths)} tokens"
    name = f"GRPO step, 64 rows, {tokens}, {shape.layers} layers x {shape.width}, vocabulary {shape.vocabulary}"
    return Comparison(name, sides, at_once=at_once, goals=goals, floor=floor)


def models() -> list[Case]:
    """The hub's newest families: decoding beside transformers' generate, and a GRPO step beside TRL; a long tail of
    lengths.
    """
    lengths = long_tail(64, 32, 4)
    found: list[Case] = []
    for name in FAMILIES:
        data = MODELS / "prompts-128.jsonl"
        write_prompts(data, prompts(64, PROMPT, 128))
        case = {
            "model": str(family_folder(name, 128)),
            "lengths": lengths,
            "group": GROUP,
            "data": str(data),
            "prompts": prompts(64 // GROUP, PROMPT, 128),
            "prompt_tokens": PROMPT,
            "dtype": "float32",
        }
        for what, peer, goal in (("decode", "transformers", 1.5), ("grpo", "trl", 2.0)):
            sides = [Side(side, f"{what}_{side}", case) for side in ("braid", peer)]
            title = f"{'decoding' if what == 'decode' else 'GRPO step'}, {name}, 64 rows of up to {max(lengths)} tokens"
            found.append(Comparison(title, sides, goals=[("braid", peer, goal)]))
    return found


def vision() -> list[Case]:
    """Return a GRPO step of a small Qwen2.5-VL beside TRL's, with the vision tower trained and frozen: 64 rows in
    groups of 8, each group about an image of its own.
    """
    cases: list[Case] = []
    for trained in (True, False):
        case = {
            "model": str(vision_folder()),
            "lengths": equal_lengths(64, 64),
            "group": GROUP,
            "data": str(vision_data(512)),
            "prompt_tokens": VISION_PROMPT,
            "images": 64,
            "dtype": "float32",
            "train_vision": trained,
            "settings": {
                "trainer": {"train_vision": trained},
                "data": {"images": {"folder": str(MODELS / "drawings" / "store")}},
            },
        }
        sides = [Side(name, f"grpo_{name}", case) for name in ("braid", "trl")]
        tower = "trained" if trained else "frozen"
        name = f"GRPO step, Qwen2.5-VL, 64 rows with images of {IMAGE_TOKENS} tokens, tower {tower}"
        cases.append(Comparison(name, sides, goals=[("braid", "trl", 2.0)]))
    return cases


def shared_prompt() -> list[Case]:
    """Return the case of training on 64 rows in groups of 16 (prompts of 1,024 tokens, responses of 32) with and
    without shared prompts.
    """
    shape = Shape(128)
    sides = [
        Side(
            f"{'shared' if shared else 'apart'} {dtype}",
            "shared_prompt_braid",
            {
                "model": str(model_folder(shape)),
                "groups": 4,
                "samples": 16,
                "prompt": 1024,
                "response": 32,
                "vocabulary": 128,
                "dtype": dtype,
                "shared": shared,
            },
        )
        for dtype in ("float32", "bfloat16")
        for shared in (True, False)
    ]
    goals = [(f"shared {dtype}", f"apart {dtype}", 3.0) for dtype in ("float32", "bfloat16")]
    return [Comparison("training, prompts of 1024 tokens, 16 responses of 32 each", sides, goals=goals)]


def memory() -> list[Case]:
    """Return the cases of a training step's peak memory at a vocabulary of 151,936; fewer than 8,192 tokens where
    memory is short.
    """
    shape = Shape(151_936)
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    logits = 4 * shape.vocabulary
    tokens = next((n for n in (8192, 4096, 2048) if 3.4 * n * logits < available), 1024)
    return [memory_case(shape, tokens)]


def memory_case(shape: Shape, tokens: int) -> Comparison:
    case: dict[str, Any] = {
        "model": str(model_folder(shape)),
        "rows": tokens // 128,
        "tokens": 128,
        "vocabulary": shape.vocabulary,
        "dtype": "float32",
    }
    sides = [
        Side("braid", "memory_braid", {**case, "way": "braid"}),
        Side("plain", "memory_braid", {**case, "way": "plain"}),
        Side("trl", "memory_trl", case),
    ]
    goals = [("braid", "trl", 1.0), ("braid", "plain", 1.0)]
    name = f"peak memory of a training step, vocabulary {shape.vocabulary}, {tokens} tokens"
    return Comparison(name, sides, rounds=1, at_once=False, goals=goals, measure="peak_mebibytes")
