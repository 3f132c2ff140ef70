"""Tokenizer and model of the examples: the tokens are whole words and phrases, the model is small and has random
weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

UNKNOWN, END = "<unknown>", "<end>"
WORD = r"\w+|[^\w\s]"


def make_tokenizer(
    phrases: Sequence[str], text: str = "", template: str | None = None, marks: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each phrase, and for each other word and sign of `text`; spaces between
    tokens have none.

    `marks` are the special tokens of the chat template.
    """
    words = sorted(set(re.findall(WORD, text)) - set(phrases))
    vocabulary = {token: number for number, token in enumerate([UNKNOWN, END, *marks, *phrases, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    longest_first = sorted(phrases, key=len, reverse=True)
    pieces = "|".join([*(re.escape(phrase).replace("\\ ", " ") for phrase in longest_first), WORD])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="removed", invert=True)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, unk_token=UNKNOWN, additional_special_tokens=list(marks)
    )
    made.chat_template = template
    return made


def write_model(folder: Path, tokenizer: PreTrainedTokenizerFast, seed: int, layers: int = 2, width: int = 64) -> None:
    """Write a small Qwen3 and its tokenizer as a Hugging Face directory."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_jsonl(path: Path, examples: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
