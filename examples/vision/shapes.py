"""The shapes task: questions about a drawing of a few colored shapes on a grid of 3 x 3 cells, and a tiny model that
sees.

image     a PNG of 84 x 84 pixels
prompt    <image>how many shapes ?          answer   2
prompt    <image>what color is the shape ?  answer   red
prompt    <image>where is the shape ?       answer   top-left
"""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

COLORS = ("red", "green", "blue", "yellow")
PLACES = tuple(f"{row}-{column}" for row in ("top", "middle", "bottom") for column in ("left", "center", "right"))
COUNTS = ("1", "2", "3", "4")
QUESTIONS = {
    "count": "how many shapes ?",
    "color": "what color is the shape ?",
    "place": "where is the shape ?",
}
CELL = 28
START, END, PAD = "<|im_start|>", "<|im_end|>", "<|pad|>"
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
VIDEO = "<|video_pad|>"
"""A token that the processors of Qwen-VL look up, as vLLM makes them; the task has no videos."""
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role + ' ' }}\
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}\
{% endfor %}{% endif %}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"""


def draw(cells: dict[int, tuple[str, str]]) -> bytes:
    """Return a PNG with a shape, `circle` or `square`, and its color in some cells of the grid."""
    image = Image.new("RGB", (3 * CELL, 3 * CELL), "black")
    pen = ImageDraw.Draw(image)
    for cell, (shape, color) in cells.items():
        top, left = (CELL * part + 4 for part in divmod(cell, 3))
        box = (left, top, left + CELL - 9, top + CELL - 9)
        (pen.ellipse if shape == "circle" else pen.rectangle)(box, fill=color)
    content = io.BytesIO()
    image.save(content, "PNG")
    return content.getvalue()


def examples(count: int, seed: int, kinds: tuple[str, ...] = tuple(QUESTIONS)) -> Iterator[tuple[bytes, str, str]]:
    """Yield drawings with a question and its answer."""
    source = random.Random(seed)
    for number in range(count):
        kind = kinds[number % len(kinds)]
        shapes = source.randint(1, 4) if kind == "count" else 1
        cells = {
            cell: (source.choice(("circle", "square")), source.choice(COLORS))
            for cell in source.sample(range(9), shapes)
        }
        ((cell, (_, color)), *_) = cells.items()
        yield draw(cells), QUESTIONS[kind], {"count": str(shapes), "color": color, "place": PLACES[cell]}[kind]


def write_data(folder: Path, count: int, seed: int, name: str, kinds: tuple[str, ...] = tuple(QUESTIONS)) -> Path:
    """Write drawings as files, and a JSON line for each question; return the file of questions."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    lines = []
    for number, (image, question, answer) in enumerate(examples(count, seed, kinds)):
        path = folder / "images" / f"{name}-{number}.png"
        path.write_bytes(image)
        record = {"prompt": f"<image>{question}", "images": [f"images/{path.name}"], "answer": answer}
        lines.append(json.dumps({**record, "response": answer}) + "\n")
    file = folder / f"{name}.jsonl"
    file.write_text("".join(lines))
    return file


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each word of the task."""
    said = {word for question in QUESTIONS.values() for word in question.split()}
    words = [PAD, START, END, *VISION, "user", "assistant", "system", *sorted(said), *COLORS, *PLACES, *COUNTS, VIDEO]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    fast.add_special_tokens({"additional_special_tokens": [START, *VISION, VIDEO]})
    fast.chat_template = TEMPLATE
    return fast


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 64, "mlp_ratio": 2},
    "qwen2_5_vl": {"intermediate_size": 128, "fullatt_block_indexes": [1], "window_size": 56},
    "qwen3_vl": {"intermediate_size": 128, "deepstack_visual_indexes": [0], "num_position_embeddings": 64},
    "qwen3_5": {"intermediate_size": 128, "num_position_embeddings": 64},
}
"""Further sizes of the vision tower, by family."""
TEXT: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
        "partial_rotary_factor": 1.0,
    }
}
"""Further sizes of the text part, by family."""


def write_model(
    folder: Path, seed: int, layers: int = 2, width: int = 64, family: str = "qwen3_vl", head: int = 16
) -> Path:
    """Write a small model with random weights, with tokenizer and image processor, as a Hugging Face directory.

    `head` is the width of its heads.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in (END, PAD, *VISION, VIDEO)}
    patch = 14
    sections = [head // 8, 3 * head // 16, 3 * head // 16]
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections}
    if family.startswith("qwen3"):
        rope["mrope_interleaved"] = True
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // head,
        "num_key_value_heads": max(1, width // head // 2),
        "head_dim": head,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
        "bos_token_id": None,
        "tie_word_embeddings": True,
        "initializer_range": 0.1,
        **TEXT.get(family, {}),
    }
    vision = {
        "depth": 2,
        "hidden_size": width if family == "qwen2_vl" else 64,
        "out_hidden_size": width,
        "num_heads": 64 // head,
        "patch_size": patch,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "initializer_range": 0.1,
        **FAMILIES[family],
    }
    start, image, end = VISION
    config = AutoConfig.for_model(
        family,
        text_config=text,
        vision_config=vision,
        image_token_id=ids[image],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[start],
        vision_end_token_id=ids[end],
        tie_word_embeddings=True,
    )
    AutoModelForImageTextToText.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    size = {"shortest_edge": (2 * patch) ** 2, "longest_edge": (8 * patch) ** 2}
    Qwen2VLImageProcessorPil(size=size, patch_size=patch).save_pretrained(folder)
    return folder


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Write drawings, questions and an untrained model.")
    parser.add_argument("--folder", type=Path, default=Path("build/vision"))
    parser.add_argument("--train", type=int, default=3000)
    parser.add_argument("--held-out", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_model(given.folder / "untrained", given.seed)
    write_data(given.folder, given.train, given.seed + 1, "train")
    write_data(given.folder, given.held_out, given.seed + 2, "held_out")
