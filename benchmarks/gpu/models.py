"""Models with random weights, rows and requests for `make gpu`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen3_5TextConfig

from braidrl.algorithms.ragged import Ragged
from braidrl.config import Config, parse_config
from braidrl.data.rows import Rows
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, SamplingParams
from braidrl.observe.metrics import Sums
from braidrl.training.backends import BackendSpec
from braidrl.training.objective import Objective, denominators
from braidrl.training.roles.worker import RoleWorker


@dataclass(frozen=True)
class Shape:
    """A Qwen2 with tied embeddings, two key/value heads and heads of `width` / `heads`."""

    name: str
    width: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int

    @property
    def products(self) -> int:
        """Parameters that each token is multiplied with, including the output layer's."""
        head = self.width // self.heads
        attention = self.width * head * (2 * self.heads + 4)
        return self.layers * (attention + 3 * self.width * self.intermediate) + self.width * self.vocabulary

    def training_operations(self, rows: int, tokens: int) -> float:
        """Return operations of forward and backward pass: 6 per parameter and token, plus attention to all earlier
        tokens.
        """
        return rows * (6.0 * self.products * tokens + 6.0 * self.layers * self.width * tokens * tokens)

    def step_bytes(self, rows: int, positions: float, size: int) -> float:
        """Return the bytes read in a decode step: all weights, and the keys and values of each row."""
        return size * (self.products + 2.0 * self.layers * 2 * self.width / self.heads * positions * rows)


SHAPES = {
    "tiny": (Shape("tiny", 64, 96, 2, 4, 256),),
    "full": (
        Shape("Qwen2.5-0.5B", 896, 4864, 24, 14, 151936),
        Shape("Qwen2.5-1.5B", 1536, 8960, 28, 12, 151936),
    ),
}


def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that knows only the end-of-sequence token; rows hold random numbers."""
    made = Tokenizer(models.WordLevel({"<end>": 0}, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")


def write(shape: Shape, folder: Path) -> Path:
    """Write the model's directory once."""
    place = folder / shape.name
    if not place.is_dir():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=shape.vocabulary,
            hidden_size=shape.width,
            intermediate_size=shape.intermediate,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=2,
            max_position_embeddings=32768,
            tie_word_embeddings=True,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=0,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    return place


def write_linear(size: str, folder: Path) -> Path:
    """Write a Qwen3.5 of 0.8B parameters, or a tiny one: three of four layers have linear attention."""
    place = folder / f"linear-{size}"
    if not place.is_dir():
        torch.manual_seed(0)
        small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "head_dim": 16, "vocab_size": 256}
        small |= {
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        }
        full = {
            "hidden_size": 1024,
            "intermediate_size": 3584,
            "num_hidden_layers": 24,
            "head_dim": 256,
            "vocab_size": 151936,
        }
        full |= {
            "linear_num_value_heads": 16,
            "linear_num_key_heads": 16,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        }
        config = Qwen3_5TextConfig(
            **(full if size == "full" else small),
            num_attention_heads=8,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            eos_token_id=0,
            bos_token_id=None,
            pad_token_id=0,
        )
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(place)
    return place


def settings(model: Path, device: str, dtype: str, **trainer: Any) -> Config:
    """Return the configuration of a role on a device."""
    trainer = {"learning_rate": 1e-3, "max_tokens_per_device": 16384, **trainer}
    return parse_config({"flow": "grpo", "model": str(model), "device": device, "dtype": dtype, "trainer": trainer})


def worker(model: Path, device: str, dtype: str, **trainer: Any) -> RoleWorker:
    return RoleWorker(BackendSpec("actor", settings(model, device, dtype, **trainer), train=True))


def engine(role: RoleWorker, rows: int, tokens: int, compile: bool = True) -> EmbeddedEngine:
    """Return an embedded engine on a role's own weights."""
    return EmbeddedEngine(role.model, tokenizer(), Decoding(rows, tokens, compile=compile))


def requests(rows: int, group: int, prompt: int, response: int, vocabulary: int) -> list[Request]:
    """Return groups of rows with one prompt each, whose responses all have the same length."""
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(1, vocabulary, (prompt,), generator=draw) for _ in range(-(-rows // group))]
    sampling = SamplingParams(max_tokens=response, ends=False)
    return [Request((0, n // group, n % group), prompts[n // group], sampling) for n in range(rows)]


def random_rows(count: int, tokens: int, vocabulary: int) -> Rows:
    """Return rows of equal length with random advantages; all but the first token are actions."""
    draw = torch.Generator().manual_seed(2)
    return as_rows(torch.randint(1, vocabulary, (count, tokens), generator=draw), torch.randn(count, generator=draw), 1)


def as_rows(tokens: Tensor, advantage: Tensor, prompt: int) -> Rows:
    """Return rows (B, T) of prompts and responses in the form that training takes."""
    return packed_rows(tokens.flatten(), torch.full((len(tokens),), tokens.shape[1]), advantage, prompt)


def packed_rows(tokens: Tensor, lengths: Tensor, advantage: Tensor, prompt: int) -> Rows:
    """Return rows from packed tokens and the rows' lengths (B,), in the form that training takes."""
    count = len(lengths)
    mask = torch.cat([torch.arange(int(length)) >= prompt for length in lengths])
    return Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64),
            "group": torch.arange(count),
            "sample": torch.zeros(count, dtype=torch.int64),
            "length": lengths,
            "action_tokens": lengths - prompt,
            "advantage": advantage.double(),
            "tokens": Ragged.from_lengths(tokens, lengths),
            "action_mask": Ragged.from_lengths(mask, lengths),
            "sequence_lengths": Ragged.from_lengths(lengths, torch.ones_like(lengths)),
        }
    )


def train(role: RoleWorker, rows: Rows, iteration: int = 1, loss: str = "sft") -> tuple[float, float]:
    """Take one optimizer step; return its loss and its gradient norm."""
    counts, objective = denominators(rows), Objective.of("actor", {"loss": loss, "aggregate": "token-mean"})
    sums = role.forward_backward(objective, rows, Sums())
    norm = role.optim_step(counts, iteration)
    return sums["tokens"] / counts["tokens"], float(norm or 0.0)
