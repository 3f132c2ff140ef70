"""Sixteen ranks on one machine with few open files: a run, a checkpoint, and a resume with half of them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from braidrl.observe.rollouts import recorded_steps, rollout_path
from tests.tiny import Workshop, braid, metrics_agree, sums, write_jsonl, write_model

FEW_FILES = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))"
TRAINER: dict[str, Any] = {"prompts_per_step": 8, "checkpoint_every": 1}


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_sixteen_ranks_train_save_and_resume_with_eight_within_256_open_files(tmp_path: Path) -> None:
    workshop = Workshop(tmp_path, write_model(tmp_path / "model", "qwen2"), write_jsonl(tmp_path / "t.jsonl", sums(32)))
    settings: dict[str, Any] = {"dtype": "float64", "trackers": []}
    quiet = workshop.run("quiet", **settings, trainer={**TRAINER, "steps": 4})
    ranks = {"runtime": "distributed", "workers": 16, "cluster": {"wait_limit_s": 300}}
    config = workshop.config_file("many", **settings, **ranks, trainer={**TRAINER, "steps": 2})
    folder = tmp_path / "many"
    for arguments in ([config], ["--resume", folder, "workers=8", "trainer.steps=4"]):
        start = time.monotonic()
        with braid("train", *arguments, folder=tmp_path, prefix=FEW_FILES) as process:
            _, output = process.communicate(timeout=900)
        print(f"{arguments[-1]}: {time.monotonic() - start:.0f} s")
        assert process.returncode == 0, output
    assert recorded_steps(folder) == [1, 2, 3, 4] and rollout_path(folder, 1).is_file(), "one file for each machine"
    assert metrics_agree(folder, quiet)
