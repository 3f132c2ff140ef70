"""Lost workers are replaced within a budget of repairs per hour, and a row that ends its engines is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from braidrl.observe.metrics import read_metrics
from tests.tiny import Workshop, braid, metrics_agree, recorded, sums, write_jsonl, write_model

DEADLY = """
import os, signal


def deadly(response: str, prompt: str) -> bool:
    if prompt.startswith({prompt!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    return response[:1] in set("02468")
"""


@pytest.mark.soak
def test_a_prompt_whose_verifier_kills_its_engine_is_left_out_also_after_a_resume(tmp_path: Path) -> None:
    examples = sums(8)
    shop = Workshop(tmp_path, write_model(tmp_path / "model", "qwen2"), write_jsonl(tmp_path / "train.jsonl", examples))
    (tmp_path / "deadly.py").write_text(DEADLY.format(prompt=examples[3]["prompt"]))
    sections = {
        "runtime": "streaming",
        "trackers": [],
        "dtype": "float64",
        "reward": {"verify": f"{tmp_path}/deadly.py:deadly", "processes": 0},
        "rollout": {"samples_per_prompt": 2},
        "data": {"shuffle": False},
    }

    def run(name: str, steps: int, *resumed: object) -> str:
        config = shop.config_file(name, **sections, trainer={"steps": steps, "prompts_per_step": 2})
        with braid("train", *(resumed or (config,)), folder=tmp_path) as process:
            _, said = process.communicate(timeout=200)
        assert process.returncode == 0, said
        return said

    said = run("whole", 3)
    left_out = {tuple(map(int, row.split(", "))) for row in re.findall(r"row \((\d+, \d+, \d+)\) .*is left out", said)}
    assert len(left_out) == 2 and len({group for _, group, _ in left_out}) == 1, said
    lines = read_metrics(tmp_path / "whole")
    assert sum(line["streaming/rows_left_out"] for line in lines) == 2
    rows = recorded(tmp_path / "whole", 2)
    assert {
        uid for uid, tokens in zip(rows.uids(), rows["action_tokens"].tolist(), strict=True) if not tokens
    } == left_out
    run("halves", 1)
    assert run("halves", 3, "--resume", tmp_path / "halves", "trainer.steps=3").count("is left out: 3 engines") == 2
    assert metrics_agree(tmp_path / "whole", tmp_path / "halves")
