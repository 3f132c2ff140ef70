"""Models, prompts and lengths that all sides share, and the least operations and bytes that they need."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

MODELS = Path("build/bench-models")
END = 0


@dataclass(frozen=True)
class Shape:
    """A Qwen3 with tied embeddings."""

    vocabulary: int
    layers: int = 4
    width: int = 256
    intermediate: int = 768
    heads: int = 4
    key_heads: int = 2
    head_width: int = 64

    @property
    def body(self) -> int:
        """Return the number of parameters in the layers' matrix products."""
        attention = self.width * self.head_width * (2 * self.heads + 2 * self.key_heads)
        return self.layers * (attention + 3 * self.width * self.intermediate)

    @property
    def head(self) -> int:
        """Return the number of parameters in the output layer."""
        return self.width * self.vocabulary

    def attention(self, keys: int) -> int:
        """Return the operations of all layers for queries that attend to `keys` keys in total."""
        return 4 * self.layers * self.heads * self.head_width * keys

    def key_bytes(self, positions: int, size: int) -> int:
        """Return the bytes of the keys and values of some positions."""
        return 2 * self.layers * self.key_heads * self.head_width * positions * size


def model_folder(shape: Shape) -> Path:
    """Return the directory of a randomly initialised model with its tokenizer; it is made once."""
    folder = MODELS / "-".join(str(size) for size in asdict(shape).values())
    if (folder / "tokenizer.json").is_file():
        return folder
    config = Qwen3Config(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.key_heads,
        head_dim=shape.head_width,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=END,
        pad_token_id=END,
    )
    write_model(folder, config)
    return folder


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": {
        "intermediate_size": 768,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
    "gpt_oss": {"intermediate_size": 256, "num_key_value_heads": 2, "num_local_experts": 8, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "intermediate_size": 768,
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "num_key_value_heads": 4,
    },
    "gemma4_text": {
        "intermediate_size": 768,
        "num_key_value_heads": 2,
        "global_head_dim": 64,
        "hidden_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 128,
        "num_experts": None,
        "top_k_experts": None,
    },
}
"""The settings of the hub's newest families beside the widths that all share."""
MIXTURE: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "intermediate_size": 768,
        "moe_intermediate_size": 384,
        "num_key_value_heads": 2,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    }
}
"""A mixture whose active parameters are those of `Shape`."""


def family_folder(name: str, vocabulary: int) -> Path:
    """Return a randomly initialised model of a family, about as large as `Shape`, with its tokenizer; made once."""
    folder = MODELS / f"{name}-{vocabulary}"
    if not (folder / "tokenizer.json").is_file():
        head = {} if name == "deepseek_v3" else {"head_dim": 64}
        write_model(
            folder,
            AutoConfig.for_model(
                name,
                vocab_size=vocabulary,
                hidden_size=256,
                num_hidden_layers=4,
                num_attention_heads=4,
                bos_token_id=None,
                eos_token_id=END,
                pad_token_id=END,
                tie_word_embeddings=True,
                **head,
                **(FAMILIES | MIXTURE)[name],
            ),
        )
    return folder


SIDE, PATCH, MERGE = 224, 14, 2
"""Width and height of an image in pixels, of a patch, and the patches along each side of an image's token."""
IMAGE_TOKENS = (SIDE // PATCH // MERGE) ** 2


def vision_folder() -> Path:
    """Return a Qwen2.5-VL with random weights whose text part is as large as `Shape`, with tokenizer and image
    processor; made once.
    """
    folder = MODELS / "qwen2_5_vl"
    if (folder / "preprocessor_config.json").is_file():
        return folder
    drawing = drawings()
    drawing.write_model(folder, 0, layers=4, width=256, family="qwen2_5_vl", head=64)
    config = AutoConfig.from_pretrained(folder)
    config.vision_config.update(
        {"depth": 4, "hidden_size": 128, "num_heads": 4, "intermediate_size": 384, "fullatt_block_indexes": [1, 3]}
    )
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    size = {"shortest_edge": SIDE**2, "longest_edge": SIDE**2}
    drawing.Qwen2VLImageProcessorPil(size=size, patch_size=PATCH).save_pretrained(folder)
    return folder


def vision_data(count: int) -> Path:
    """Return questions of equal length, each about a drawing of its own; made once."""
    file = MODELS / "drawings" / f"{count}.jsonl"
    if not file.is_file():
        drawings().write_data(file.parent, count, 0, str(count), kinds=("count",))
    return file


def drawings() -> Any:
    """Import the example of drawings, whose task and tokenizer the benchmark of models that see takes."""
    spec = importlib.util.spec_from_file_location("drawings", "examples/vision/shapes.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write_model(folder: Path, config: Any) -> None:
    """Write a randomly initialised model, and a tokenizer with one word for each id."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    vocabulary = config.vocab_size
    tokenizer = Tokenizer(models.WordLevel({word(i): i for i in range(vocabulary)}, unk_token=word(END)))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=word(END), pad_token=word(END), padding_side="left"
    ).save_pretrained(folder)


def word(token: int) -> str:
    return f"w{token}"


def prompts(groups: int, tokens: int, vocabulary: int) -> list[list[int]]:
    """Return random ids, the same in every process, without the end-of-sequence token."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, vocabulary, (groups, tokens), generator=generator).tolist()


def write_prompts(path: Path, ids: Sequence[Sequence[int]]) -> None:
    """Write the prompts as text, one JSON object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"prompt": " ".join(word(i) for i in row), "answer": word(1)}) for row in ids]
    path.write_text("\n".join(lines) + "\n")


def equal_lengths(rows: int, tokens: int) -> list[int]:
    return [tokens] * rows


def long_tail(rows: int, median: int, times: int) -> list[int]:
    """Return log-normal lengths with this median, scaled in their logarithm so that the longest is `times` the
    median.
    """
    quantiles = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    normal = torch.special.ndtri(quantiles)
    spread = torch.log(torch.tensor(float(times))) / normal[-1]
    lengths = (median * torch.exp(spread * normal)).round().clamp(min=1, max=median * times).to(torch.int64)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(2))
    return lengths[order].tolist()
