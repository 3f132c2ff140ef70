"""The configurations of `examples/moe` pass the dry run on their devices; the page has the figures of each layout."""

from __future__ import annotations

import re
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from transformers import AutoConfig

from braidrl.cli.dry_run import dry_run
from braidrl.config import load_config
from tests.tiny import ROOT, TOKENIZER, sums, write_jsonl

GIB = 1 << 30
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-30b-a3b": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "vocab_size": 151936,
        },
    ),
    "qwen3.5-35b-a3b": ("qwen3_5_moe", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24, "num_local_experts": 32}),
    "gpt-oss-120b": ("gpt_oss", {}),
    "deepseek-v3": ("deepseek_v3", {}),
}
"""The types of the models of the page, and settings in which they differ from transformers' defaults."""
STORED = ("weights", "gradients", "master weights", "AdamW moments")
PARTS = ("weights gathered", "rows of experts", "activations")


def rows_of_page() -> Iterator[tuple[str, int, dict[str, Any], list[float]]]:
    """Yield the model, the number of devices, the layout and the GiB of each row of the page's table."""
    model, text = "", (ROOT / "docs" / "moe.md").read_text().partition("\n## Which layout\n")[2]
    for name, devices, layout, figures in re.findall(r"^\| ([^|]*) ?\| (\d+) \| `([^`]+)` \|([\d. |]+)\|$", text, re.M):
        model = name.partition(":")[0].lower() or model
        yield model, int(devices), yaml.safe_load(f"{{{layout}}}"), [float(f.strip() or 0) for f in figures.split("|")]


def example_folder(folder: Path, model: str) -> list[str]:
    """Write the configuration of a model and data; return overrides that name them."""
    kind, changes = SHAPES[model]
    AutoConfig.for_model(kind, **changes).save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return [f"model={folder}", f"data.train={write_jsonl(folder / 'train.jsonl', sums(64))}", f"output={folder}/runs"]


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", SHAPES)
def test_examples_fit_and_the_page_has_the_memory_of_each_layout(model: str, tmp_path: Path) -> None:
    given = example_folder(tmp_path, model)
    for example in sorted((ROOT / "examples" / "moe").glob(f"{model}*.yaml")):
        (devices,) = re.findall(r"--devices (\S+)", example.read_text())
        printed = Console(file=StringIO(), width=200)
        dry_run(load_config(example, given), printed, devices)
        assert "verdict: fits" in printed.file.getvalue(), example.name  # type: ignore[attr-defined]
    rows = [row for row in rows_of_page() if row[0] == model]
    assert rows
    for _, devices, layout, figures in rows:
        # Without an engine, as the page has it.
        trainer = {"max_tokens_per_device": 8192, "activation_checkpointing": True, "layout": layout}
        settings = ["flow=sft", "runtime=distributed", "dtype=bfloat16", f"workers={devices}", f"trainer={trainer}"]
        config = load_config(None, [*given, *settings])
        ((_, (footprint,)),) = dry_run(config, Console(file=StringIO()), f"{devices // 8}x8xH100-80GB")
        sizes = {**footprint.resident, **footprint.working}
        stored = sum(sizes[part] for part in STORED)
        expected = [stored, *(sizes.get(part, 0) for part in PARTS), sum(sizes.values())]
        assert figures == pytest.approx([size / GIB for size in expected], abs=0.051), (model, devices, layout)
