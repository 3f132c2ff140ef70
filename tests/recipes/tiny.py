"""A tiny model, its data and configurations, for running recipes end to end in a second."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from braidrl.config import Config, parse_config

SYMBOLS = ["<pad>", "<end>", *"0123456789+= "]


@cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character."""
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(SYMBOLS)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def write_decoder(folder: Path, width: int = 32, seed: int = 0, layers: int = 2) -> Path:
    """Write a random Qwen3 of two layers (or `layers`) with its tokenizer."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(SYMBOLS),
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.2,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_scorer(folder: Path, width: int = 48, seed: int = 1, layers: int = 2) -> Path:
    """Write a random reward model, larger than the decoder, as a Hugging Face sequence-classification directory."""
    decoder = write_decoder(folder.with_name(f"{folder.name}-decoder"), width, seed, layers)
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_pretrained(decoder, num_labels=1)
    torch.nn.init.normal_(model.score.weight, std=0.5)
    model.save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


def write_data(folder: Path, examples: int = 16) -> Path:
    """Write sums of digits with every field that a recipe may need."""
    lines = []
    for i in range(examples):
        a, b = i % 5, (3 * i + 1) % 4
        right, wrong = str(a + b), str(a + b + 1)
        fields = {"answer": right, "response": right, "chosen": right, "rejected": wrong}
        lines.append(json.dumps({"prompt": f"{a}+{b}=", **fields}))
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_texts(folder: Path) -> Path:
    """Write plain text for ptx."""
    path = folder / "texts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}+{i}={2 * i}"}) + "\n" for i in range(5)))
    return path


def make_config(folder: Path, flow: str, **changes: Any) -> Config:
    """Return the configuration of two short steps; `changes` have dotted keys, with two underscores for a dot."""
    tree: dict[str, Any] = {
        "flow": flow,
        "model": str(folder / "model"),
        "data": {"train": str(folder / "data.jsonl")},
        "reward": {"verify": f"{Path(__file__).parent}/even.py:even"},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 6, "slots": 16},
        "trainer": {"steps": 2, "prompts_per_step": 4, "learning_rate": 1e-3, "checkpoint_every": 0},
        "evaluation": {"every": 0},
        "output": str(folder / "runs"),
        "threads": 1,
        "device": "cpu",
    }
    for key, value in changes.items():
        *parents, last = key.split("__")
        section = tree
        for parent in parents:
            section = section.setdefault(parent, {})
        section[last] = value
    return parse_config(tree)


def write_everything(folder: Path, layers: int = 2) -> Path:
    """Write the models, data and texts of every recipe."""
    write_decoder(folder / "model", layers=layers)
    write_decoder(folder / "teacher", width=48, seed=3, layers=layers)
    write_scorer(folder / "scorer", layers=layers)
    write_data(folder)
    write_texts(folder)
    return folder
