"""A float64 model of two layers, a tokenizer of 16 tokens and sums as data: what the tests of runtimes run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from braidrl.config import Config, parse_config

SYMBOLS = [*"0123456789+= #"]


def make_tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", pad_token="<pad>")


def write_model(folder: Path, seed: int = 0) -> Path:
    """Random weights, the same for the same seed, and large enough that answers differ."""
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True, initializer_range=0.2,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.float64).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_questions(path: Path, count: int = 24) -> Path:
    lines = [{"prompt": f"{a}+{a * 7 % 10}=" + "0" * (a % 3), "answer": str(a % 10)} for a in range(count)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def tiny_config(folder: Path, **changes: Any) -> Config:
    """Four prompts of four samples a step, three steps; `folder` gets model and data where it has none."""
    if not (folder / "model").is_dir():
        write_model(folder / "model")
        write_questions(folder / "train.jsonl")
        write_questions(folder / "held_out.jsonl", 5)
    tree: dict[str, Any] = {
        "flow": "grpo",
        "model": str(folder / "model"),
        "data": {"train": str(folder / "train.jsonl")},
        "reward": {"verify": "tests.runtimes.own_verifiers:even_length"},
        "rollout": {"samples_per_prompt": 4, "max_response_tokens": 10, "slots": 16},
        "trainer": {"steps": 3, "prompts_per_step": 4, "learning_rate": 3e-3, "deterministic": True},
        "evaluation": {"every": 0},
        "dtype": "float64",
        "device": "cpu",
        "threads": 1,
        "output": str(folder / "runs"),
    }
    return parse_config(merged(tree, changes))


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """The tree with nested changes laid over it."""
    result = dict(tree)
    for name, value in changes.items():
        known = result.get(name)
        result[name] = merged(known, value) if isinstance(known, dict) and isinstance(value, dict) else value
    return result
