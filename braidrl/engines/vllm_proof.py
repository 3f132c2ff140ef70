"""The vLLM proof: on a decoder's tiny twin, vLLM's log-probs must equal the trainer's, also after an update of its
weights.

`braid check MODEL --vllm PYTHON` runs it. vLLM runs in a separate process; this file does not import it.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from braidrl.config import ImagesConfig
from braidrl.data.vision import PROCESSOR_FILES, ImageSpan, Vision, has_image_processor
from braidrl.engines.engine import EngineSpec
from braidrl.engines.engine_process import EngineProcess
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.training.decoders.body import ForwardPlan
from braidrl.training.decoders.image_proof import packed_logits
from braidrl.training.decoders.images import ModelImages, images_of
from braidrl.training.decoders.proof import BOUND, Finding, Twin, distance, packed_log_probs
from braidrl.training.decoders.shrink import is_token
from braidrl.training.pretrained import load_tokenizer
from braidrl.training.processors import load_vision, no_vision_reason
from braidrl.weights.publisher import ModelWeights

WIDTH = 64
"""Width of the twin's heads: vLLM's kernels for CPUs need 32 or more, twice as many if some layers have wider ones."""
TOKENS = 16
SIZES = ((84, 56), (56, 112))
"""Widths and heights of images, in pixels."""
SEEN = ((0,), (), (1, 0))
"""The images of prompts, by number."""
WORD = 2
"""A token of text."""
VISUAL = ("image", "video", "vision")
"""Beginnings of the names of tokens that stand for images and around them."""
KEPT_MIB = 64
"""Memory for encoded images."""
LIMIT_S = 600.0


def vllm_finding(config: Any, plan: ForwardPlan, python: Path | None, model: Path) -> Finding:
    """Generate with vLLM, of the interpreter `python` or this one, from two versions of a twin's weights; compare
    log-probs with ours. If the folder `model` has an image processor, some prompts have images.
    """
    seen = model if has_image_processor(model) else None
    rows = " on rows with images" if seen is not None else ""
    return Finding.of(f"vLLM equals trainer{rows}, also after an update", greatest_gap, config, plan, python, seen)


def greatest_gap(config: Any, plan: ForwardPlan, python: Path | None, seen: Path | None) -> tuple[float, float]:
    """Return the greatest difference of log-probs, and its bound; `seen` is a folder with an image processor."""
    twins = [Twin(config, seed, head_width=WIDTH) for seed in (0, 1)]
    models, prompts = [twin.model(plan) for twin in twins], [row[: max(1, len(row) // 2)] for row in twins[0].rows]
    spans: list[list[ImageSpan]] = [[] for _ in prompts]
    vision, gaps = None, []
    with tempfile.TemporaryDirectory() as folder:
        models[0].save_pretrained(folder)
        write_tokenizer(Path(folder), twins[0].config, config, seen)
        images = ImagesConfig(folder=Path(folder) / "images")
        if seen is not None:
            for name in PROCESSOR_FILES:
                if (seen / name).is_file():
                    shutil.copy(seen / name, folder)
            if (vision := load_vision(Path(folder), images)) is None:
                raise ValueError(no_vision_reason(Path(folder), images))
            prompts, spans = with_images(prompts, vision, Path(folder))
        versions_drawn = asyncio.run(drawn(folder, models, prompts, spans, python, images if seen else None))
        for model, responses in zip(models, versions_drawn, strict=True):
            rows = [torch.cat([prompt, answer.tokens]) for prompt, answer in zip(prompts, responses, strict=True)]
            with torch.no_grad():
                if vision is None:
                    log_probs = packed_log_probs(model, rows)
                else:
                    log_probs = seen_log_probs(model, images_of(model, vision, KEPT_MIB, False), rows, spans)
            expected = [log_probs_of_row[-TOKENS:] for log_probs_of_row in log_probs]
            gaps.append(distance([response.log_probs for response in responses], expected))
    return max(gaps), BOUND


def write_tokenizer(folder: Path, twin: Any, config: Any, seen: Path | None) -> None:
    """Write a tokenizer of one word per id of the twin's vocabulary; image tokens have the texts of its tokenizer."""
    words = {str(number): number for number in range(twin.get_text_config().vocab_size)}
    if seen is not None:
        tokenizer_of_model = load_tokenizer(seen)
        for name in (key for key in twin.to_dict() if is_token(key)):
            small, large = getattr(twin, name), getattr(config, name)
            if isinstance(small, int) and isinstance(large, int) and name.startswith(VISUAL):
                words = {text: number for text, number in words.items() if number != small}
                words[tokenizer_of_model.convert_ids_to_tokens(large)] = small
    tokenizer = Tokenizer(WordLevel(words, unk_token="0"))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="1")
    fast.add_special_tokens({"additional_special_tokens": [text for text in words if not text.isdigit()]})
    fast.save_pretrained(folder)


def with_images(prompts: list[Tensor], vision: Vision, folder: Path) -> tuple[list[Tensor], list[list[ImageSpan]]]:
    """Return prompts of which some have images, of unequal sizes, and the images' spans."""
    from PIL import Image

    names, image_store = [], vision.store
    for number, (width, height) in enumerate(SIZES):
        generator = torch.Generator().manual_seed(number)
        pixels = torch.randint(0, 256, (height, width, 3), generator=generator, dtype=torch.uint8)
        names.append(image_store.add(Image.fromarray(pixels.numpy()), folder))
    expanded_prompts, spans = [], []
    for number, prompt in enumerate(prompts):
        images = [names[image] for image in SEEN[number % len(SEEN)]]
        text = [WORD if token == vision.placeholder_token else token for token in prompt.tolist()]
        expanded, placed = vision.expand([*text, *[vision.placeholder_token, WORD] * len(images)], images)
        expanded_prompts.append(torch.tensor(expanded))
        spans.append(placed)
    return expanded_prompts, spans


def seen_log_probs(
    model: Any, images: ModelImages, rows: Sequence[Tensor], spans: Sequence[Sequence[ImageSpan]]
) -> list[Tensor]:
    """Return the trainer's log-probs (T - 1,) of each row's tokens after the first."""
    logits = packed_logits(model, images, rows, spans)
    return [of_row[:-1].gather(-1, row[1:, None])[:, 0] for of_row, row in zip(logits, rows, strict=True)]


async def drawn(
    folder: str,
    versions: list[Any],
    prompts: list[Tensor],
    spans: list[list[ImageSpan]],
    python: Path | None,
    images: ImagesConfig | None,
) -> list[list[Response]]:
    """Generate the responses to the prompts with one vLLM, under each version of the weights."""
    longest = max(map(len, prompts)) + TOKENS
    settings = None if images is None else images.model_dump(mode="json")
    spec = EngineSpec("vllm", folder, len(prompts), longest, images=settings, train_vision=True)
    engine = EngineProcess(spec, "vLLM", python, LIMIT_S)
    sampling = SamplingParams(max_tokens=TOKENS, ends=False)
    requests = [
        Request((0, number, 0), prompt, sampling, images=tuple(of_prompt))
        for number, (prompt, of_prompt) in enumerate(zip(prompts, spans, strict=True))
    ]
    by_version = []
    try:
        await engine.start()
        for version, model in enumerate(versions):
            if version:
                await engine.update_weights(version, ModelWeights(model))
            by_version.append(await asyncio.gather(*map(engine.submit, requests)))
    finally:
        await engine.close()
    return by_version
