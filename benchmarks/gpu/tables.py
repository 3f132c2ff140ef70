"""Speed on a device, and its share of what the device can do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu import models
from benchmarks.gpu.models import Shape

SIDE = {"cuda": 8192, "cpu": 512}
COPIED = {"cuda": 1 << 30, "cpu": 1 << 22}


@dataclass(frozen=True)
class Sizes:
    """Sizes of the measurements."""

    train: tuple[tuple[int, int], ...]
    """Rows and tokens per row of a training step."""
    decode: tuple[int, ...]
    """Rows at once."""
    prompt: int
    response: int
    group: int
    step: int
    """Rows of a GRPO step."""
    repeats: int


SIZES = {
    "tiny": Sizes(((4, 16), (2, 32)), (16, 32), 8, 8, 4, 16, 1),
    "full": Sizes(((16, 2048), (2, 16384)), (64, 256, 1024), 128, 256, 8, 256, 3),
}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def seconds(device: str, work: Callable[[], object], repeats: int) -> float:
    """Return the least of several times, after one uncounted run."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        start = time.perf_counter()
        work()
        synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def rates(device: str) -> dict[str, float]:
    """Return the device's rates: bfloat16 matrix operations per second, and bytes per second of a copy (reads plus
    writes).
    """
    a = torch.randn(SIDE[device], SIDE[device], device=device, dtype=torch.bfloat16)
    store = torch.ones(COPIED[device], dtype=torch.uint8, device=device)
    other = torch.empty_like(store)
    return {
        "operations_per_second": 2 * SIDE[device] ** 3 / seconds(device, lambda: a @ a, 5),
        "bytes_per_second": 2 * COPIED[device] / seconds(device, lambda: other.copy_(store), 5),
    }


def training(device: str, folder: Path, shape: Shape, sizes: Sizes, known: dict[str, float]) -> list[dict[str, Any]]:
    """Return tokens per second of a training step, and its share of the matrix rate."""
    role, found = models.worker(models.write(shape, folder), device, "bfloat16"), []
    for count, tokens in sizes.train:
        rows = models.random_rows(count, tokens, shape.vocabulary)
        took = seconds(device, lambda rows=rows: models.train(role, rows), sizes.repeats)  # type: ignore[misc]
        found.append(
            {
                "model": shape.name,
                "rows": count,
                "tokens_per_row": tokens,
                "tokens_per_second": count * tokens / took,
                "utilisation": shape.training_operations(count, tokens) / took / known["operations_per_second"],
            }
        )
    return found


def decoding(device: str, folder: Path, shape: Shape, sizes: Sizes, known: dict[str, float]) -> list[dict[str, Any]]:
    """Return tokens per second of decoding, and its share of the memory bandwidth, beside transformers' `generate`."""
    role, found = models.worker(models.write(shape, folder), device, "bfloat16"), []
    longest = sizes.prompt + sizes.response
    for rows in sizes.decode:
        engine = models.engine(role, rows, longest)
        asked = models.requests(rows, sizes.group, sizes.prompt, sizes.response, shape.vocabulary)
        took = seconds(device, partial(engine.generate, asked), sizes.repeats)
        read = sizes.response * shape.step_bytes(rows, sizes.prompt + sizes.response / 2, 2)
        engine.clear()
        found.append(
            {
                "model": shape.name,
                "rows": rows,
                "tokens_per_second": rows * sizes.response / took,
                "bandwidth": read / took / known["bytes_per_second"],
            }
        )
    return found


def grpo_step(device: str, folder: Path, shape: Shape, sizes: Sizes, known: dict[str, float]) -> list[dict[str, Any]]:
    """Return the seconds of a GRPO step (generation, scores, one optimizer step) beside `generate` and the same
    training.
    """
    place = models.write(shape, folder)
    role = models.worker(place, device, "bfloat16")
    engine = models.engine(role, sizes.step, sizes.prompt + sizes.response)
    asked = models.requests(sizes.step, sizes.group, sizes.prompt, sizes.response, shape.vocabulary)
    prompts = torch.stack([request.prompt for request in asked])

    def learn(responses: torch.Tensor) -> None:
        scores = (responses % 2).float().mean(-1).unflatten(0, (-1, sizes.group))
        advantage = (scores - scores.mean(-1, keepdim=True)).flatten()
        models.train(role, models.as_rows(torch.cat([prompts, responses], 1), advantage, sizes.prompt), loss="clip")

    ours = seconds(device, lambda: learn(torch.stack([a.tokens for a in engine.generate(asked)])), sizes.repeats)
    engine.clear()
    plain: Any = AutoModelForCausalLM.from_pretrained(place, dtype=torch.bfloat16).to(device).eval()
    plain.generation_config.eos_token_id = None

    def generate() -> torch.Tensor:
        given = prompts.to(device)
        mask = torch.ones_like(given)
        made = plain.generate(
            given, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=sizes.response, pad_token_id=0
        )
        return torch.as_tensor(made[:, sizes.prompt :]).cpu()

    theirs = seconds(device, lambda: learn(generate()), 1)
    tokens = sizes.step * (sizes.prompt + sizes.response)
    return [
        {
            "model": shape.name,
            "rows": sizes.step,
            "seconds": ours,
            "tokens_per_second": tokens / ours,
            "seconds_with_generate": theirs,
            "times": theirs / ours,
        }
    ]


def linear_attention(device: str, folder: Path, size: str, repeats: int) -> list[dict[str, Any]]:
    """Return tokens per second of training a model with linear attention on rows of different lengths."""
    role = models.worker(models.write_linear(size, folder), device, "bfloat16")
    draw = torch.Generator().manual_seed(3)
    lengths = torch.randint(*((256, 2048, (24,)) if size == "full" else (8, 24, (4,))), generator=draw)
    tokens = torch.randint(1, 256, (int(lengths.sum()),), generator=draw)
    rows = models.packed_rows(tokens, lengths, torch.randn(len(lengths), generator=draw), 1)
    took = seconds(device, lambda: models.train(role, rows), repeats)
    return [{"rows": len(lengths), "tokens_per_second": len(tokens) / took, "seconds": took}]


TABLES = {"training": training, "decoding": decoding, "GRPO step": grpo_step}
