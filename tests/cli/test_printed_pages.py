"""Pages that show what a command prints show it as it is printed."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
import torch
import yaml
from rich.console import Console
from transformers import LlamaConfig

from braidrl.cli.doctor import examine
from braidrl.cli.dry_run import dry_run
from braidrl.cli.plan_command import PlanOptions, plan
from braidrl.config import load_config
from tests.cli.test_dry_run import write_qwen
from tests.tiny import ROOT, TOKENIZER, write_jsonl

WIDTH = 80


def block(page: str, after: str, kind: str = "") -> str:
    """Return the first block of a kind behind a text of a page."""
    text = (ROOT / "docs" / page).read_text().partition(after)[2]
    return re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0]


def lines_not_printed(shown: str, printed: str) -> list[str]:
    """Return the lines of a page that a command did not print; `...` stands for a part that the page leaves out."""
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    missing = []
    for line in shown.splitlines():
        pattern = ".*".join(re.escape(" ".join(part.split())) for part in line.split("..."))
        if not any(re.search(pattern, candidate) for candidate in lines):
            missing.append(line)
    return missing


def planned(folder: Path, *, lengths: str, max_staleness: int | None = None) -> str:
    """Return what `braid plan` prints for Qwen2.5-7B on eight H100."""
    config = load_config(ROOT / "examples" / "dapo_math" / "qwen2.5-7b.yaml", [f"model={write_qwen(folder, '7b')}"])
    output = StringIO()
    plan(
        config,
        PlanOptions("1x8xH100-80GB", lengths, max_staleness=max_staleness),
        folder / "overlay.yaml",
        None,
        Console(file=output, width=WIDTH),
    )
    return output.getvalue().replace(str(folder / "overlay.yaml"), "overlay.yaml")


def test_the_page_of_eight_devices_shows_the_plan_that_is_printed(tmp_path: Path) -> None:
    shown = block("eight-gpus.md", "--devices 1x8xH100-80GB --lengths 1500:8192")
    printed = planned(tmp_path, lengths="1500:8192")
    assert lines_not_printed(shown, printed) == [], printed


def test_the_page_of_planning_shows_the_plans_that_are_printed(tmp_path: Path) -> None:
    shown = block("plan.md", "a configuration that starts:")
    printed = planned(tmp_path, lengths="2000:8192", max_staleness=1)
    assert lines_not_printed(shown, printed) == [], printed


@pytest.mark.skipif(torch.cuda.is_available(), reason="the page is of a machine without a GPU")
def test_the_first_hour_shows_what_the_doctor_prints() -> None:
    lines: list[str] = []
    examine(lines.append)
    shown, printed = (
        re.sub(r"\d[\d.+a-z]*", "N", t) for t in (block("first-hour.md", "braid doctor"), "\n".join(lines))
    )
    assert lines_not_printed(shown, printed) == [], printed


def test_the_first_hour_shows_the_dry_run_that_is_printed(tmp_path: Path) -> None:
    model = tmp_path / "SmolLM2"
    LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(model)
    TOKENIZER.save_pretrained(model)
    config = yaml.safe_load(block("first-hour.md", "`first.yaml`:", "yaml"))
    data = write_jsonl(tmp_path / "sums.jsonl", [{"prompt": f"{a}+1=", "answer": str(a + 1)} for a in range(40)])
    config |= {"model": str(model), "data": {**config["data"], "train": str(data)}, "device": "cpu"}
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(config))
    output = StringIO()
    dry_run(load_config(tmp_path / "first.yaml"), Console(file=output, width=WIDTH))
    shown = block("first-hour.md", "braid train first.yaml --dry-run")
    assert lines_not_printed(shown, output.getvalue()) == [], output.getvalue()
