"""The arithmetic task: sums of two numbers, worked out column by column, with a teacher that makes mistakes.

prompt    47+85=
response  7+5=12 4+8+1=13 #### 132
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

SYMBOLS = [*"0123456789+= ", "####"]
END, PAD = "<end>", "<pad>"


def work_out(a: int, b: int, mistake: random.Random | None = None) -> str:
    """Work out the sum column by column; with `mistake` one column's result is off by one or two."""
    columns = max(len(str(a)), len(str(b)))
    wrong = mistake.randrange(columns) if mistake else -1
    steps, digits, carry = [], [], 0
    for column in range(columns):
        x, y = a // 10**column % 10, b // 10**column % 10
        total = x + y + carry
        if column == wrong and mistake:
            total = max(0, total + mistake.choice([-2, -1, 1, 2]))
        steps.append(f"{x}+{y}" + ("+1" if carry else "") + f"={total}")
        carry = total // 10
        digits.append(total if column == columns - 1 else total % 10)
    answer = int("".join(str(digit) for digit in reversed(digits)))
    return " ".join(steps) + f" #### {answer}"


def problems(count: int, digits: int, seed: int) -> list[tuple[int, int]]:
    """Return distinct pairs of numbers with up to `digits` digits."""
    source = random.Random(seed)
    pairs: dict[tuple[int, int], None] = {}
    while len(pairs) < count:
        pairs[source.randrange(1, 10**digits), source.randrange(1, 10**digits)] = None
    return list(pairs)


def demonstrations(
    pairs: Iterable[tuple[int, int]], mistakes: float, seed: int, rambling: float = 0.0
) -> Iterator[dict[str, str]]:
    """Return the teacher's answers: a share has a mistake, another share repeats its working several times."""
    source = random.Random(seed)
    for a, b in pairs:
        errs = source.random() < mistakes
        response = work_out(a, b, source if errs else None)
        if rambling and source.random() < rambling:
            working, _, answer = response.partition(" #### ")
            response = " ".join([working] * source.randint(2, 4)) + f" #### {answer}"
        yield {"prompt": f"{a}+{b}=", "response": response, "answer": str(a + b)}


def questions(pairs: Iterable[tuple[int, int]]) -> Iterator[dict[str, str]]:
    for a, b in pairs:
        yield {"prompt": f"{a}+{b}=", "answer": str(a + b)}


def write_jsonl(path: Path, examples: Iterable[dict[str, str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per character, one for the answer's mark, and one for the end."""
    vocabulary = {token: i for i, token in enumerate([PAD, END, *SYMBOLS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("####|."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)


LINEAR_ATTENTION = {
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
"""Further sizes of Qwen3.5: of four layers, three have linear attention."""
EXPERTS, ACTIVE = 8, 2
"""Experts of a mixture's layer, and of a token: their parameters in use are those of the dense model."""


def write_model(folder: Path, seed: int, layers: int = 3, width: int = 128, family: str = "qwen3") -> None:
    """Write a small model with random weights, of the family `qwen3`, `qwen3_5_text` or `qwen3_moe`, with its
    tokenizer, as a Hugging Face directory.
    """
    torch.manual_seed(seed)
    tokenizer = make_tokenizer()
    mixture = {
        "num_experts": EXPERTS,
        "num_experts_per_tok": ACTIVE,
        "moe_intermediate_size": 3 * width // ACTIVE,
        "norm_topk_prob": True,
    }
    more = {"qwen3": {}, "qwen3_5_text": LINEAR_ATTENTION, "qwen3_moe": mixture}[family]
    config = AutoConfig.for_model(
        family,
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers + (more is LINEAR_ATTENTION),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=width // 4,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **more,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
