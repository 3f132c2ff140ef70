"""`braid train --dry-run` ends with a verdict, and names all faults, not only the first."""

from __future__ import annotations

from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from braidrl.cli import commands as cli
from braidrl.cli.dry_run import dry_run
from braidrl.errors import Problems
from tests.cli.test_dry_run import write_qwen
from tests.tiny import Workshop


def verdict(workshop: Workshop, **sections: Any) -> list[str]:
    shown = StringIO()
    dry_run(workshop.config(**sections), Console(file=shown, width=400))
    return [line for line in shown.getvalue().splitlines() if line.startswith("verdict: ")]


def test_a_tiny_model_fits_on_this_machine(workshop: Workshop) -> None:
    (line,) = verdict(workshop)
    assert line.startswith("verdict: fits, ") and "of this machine; largest is actor: " in line


@pytest.mark.parametrize(
    ("gib", "sections", "says"),
    [
        (80, {"trainer": {"lora": {}, "activation_checkpointing": True}}, "verdict: fits, "),
        pytest.param(24, {"trainer": {"max_tokens_per_device": 4096}}, "AdamW moments", marks=pytest.mark.soak),
        (24, {"trainer": {"max_tokens_per_device": 4096}}, "trainer.layout={shard: full}"),
        (24, {"rollout": {"slots": 60_000}, "trainer": {"lora": {}}}, "lower rollout.slots"),
    ],
)
def test_a_part_that_does_not_fit_is_reported_with_a_remedy(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, gib: float, sections: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    about = SimpleNamespace(total_memory=int(gib * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: about)
    rollout = {"max_response_tokens": 1024, "samples_per_prompt": 4, "slots": 32, **sections.get("rollout", {})}
    model = write_qwen(workshop.folder, "7b")
    lines = verdict(workshop, model=str(model), device="cuda", dtype="bfloat16", **{**sections, "rollout": rollout})
    assert says in lines[0], lines
    assert says.startswith("verdict: fits") or lines[0].startswith("verdict: does not fit, ")


def test_without_a_device_the_verdict_says_not_on_this_machine(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    lines = verdict(workshop, device="cuda", dtype="float32")
    assert "and there is none here to compare with" in lines[0] and lines[-1].startswith("verdict: not on this machine")


def test_all_invalid_keys_are_reported_one_per_line(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = ["trainer.stepz=3", "dtype=float16", "rollout.temperature=-1"]
    monkeypatch.setattr("sys.argv", ["braid", "train", str(workshop.config_file()), *wrong, "--dry-run"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    lines = capsys.readouterr().err.splitlines()
    assert all(line.startswith("braid: ") for line in lines)
    assert {line.split(":")[1].split("'")[0].strip() for line in lines} == {
        "unknown key",
        "dtype",
        "rollout.temperature",
    }


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        (
            {
                "model": "/nowhere/model",
                "data": {"train": "none.jsonl"},
                "reward": {"verify": "gsm8"},
                "output": "/proc/version/x",
            },
            [
                "output: ",
                "there is no folder /nowhere/model",
                "no data file none.jsonl",
                "no verifier is called 'gsm8'",
            ],
        ),
        (
            {"trackers": "tensorbord", "data": {"max_prompt_tokens": 2}, "roles": {"critc": {"learning_rate": 1.0}}},
            ["no tracker is called 'tensorbord'", "all 40 prompts are longer", "roles.critc"],
        ),
        (
            {"rollout": {"engine": "turbo", "max_response_tokens": 300}, "trainer": {"optimizer": "adam"}},
            ["no rollout engine is called 'turbo'", "max_position_embeddings 256"],
        ),
    ],
    ids=["files", "data and names", "engine and lengths"],
)
def test_all_user_errors_are_reported(workshop: Workshop, sections: dict[str, Any], expected: list[str]) -> None:
    with pytest.raises(Problems) as error:
        dry_run(workshop.config(**sections), Console(file=StringIO()))
    lines = str(error.value).splitlines()
    assert all(any(part in line for line in lines) for part in expected), lines
    assert lines[-1] == f"verdict: {len(lines) - 1} things to change before this can run"
