"""A run never executes code from the files that it reads: a pickle in place of any of them has no effect."""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.cli.commands import app
from braidrl.runtimes.saving.checkpoints import write_manifest
from tests.tiny import Workshop, write_model


class Bomb:
    """An object that leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return Path.touch, (self.mark,)


def commands(run: Path, folder: Path) -> list[list[str]]:
    """Commands that read a run's files."""
    return [
        ["train", "--resume", str(run)],
        ["eval", str(run)],
        ["report", str(run)],
        ["timeline", str(run)],
        ["export", str(run), str(folder / "exported")],
        ["checkpoint", "check", str(run)],
        ["train", str(run / "config.yaml"), "name=again", "trainer.steps=1", "--replay", str(run)],
    ]


def obeyed(*arguments: str) -> None:
    """Run a command, which may fail."""
    with contextlib.suppress(BaseException):
        app(list(arguments), standalone_mode=False)


@pytest.mark.soak
@pytest.mark.parametrize(
    "forged", [pytest.param(False, id="checked"), pytest.param(True, id="manifest forged", marks=pytest.mark.soak)]
)
def test_pickles_in_every_file_of_a_run_do_nothing(workshop: Workshop, forged: bool, tmp_path: Path) -> None:
    run = workshop.run(trainer={"steps": 1, "surplus": "keep", "max_staleness": 1}, trackers=[])
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("  steps: 1\n", "  steps: 2\n", 1))
    mark, whole = tmp_path / "mark", tmp_path / "whole"
    shutil.copytree(run, whole)
    bomb = pickle.dumps(Bomb(mark))
    files = [path.relative_to(run) for path in run.rglob("*") if path.is_file()]
    assert len(files) >= 8, files
    for name in files:
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        (run / name).write_bytes(bomb)
        if forged and name.name != "manifest.json":
            write_manifest(run / "checkpoints" / "step-1")
        for command in commands(run, tmp_path):
            obeyed(*command)
            shutil.rmtree(tmp_path / "exported", ignore_errors=True)
            shutil.rmtree(run.parent / "again", ignore_errors=True)
        assert not mark.exists(), name


@pytest.mark.soak
def test_pickles_in_the_parts_that_ranks_write_do_nothing(workshop: Workshop, tmp_path: Path) -> None:
    divided = {"runtime": "distributed", "workers": 2, "trackers": []}
    trainer = {"steps": 1, "checkpoint_every": 1, "layout": {"shard": "full"}}
    obeyed("train", str(workshop.config_file(trainer=trainer, **divided)))
    run, mark, whole = workshop.folder / "run", tmp_path / "mark", tmp_path / "whole"
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("  steps: 1\n", "  steps: 2\n", 1))
    shutil.copytree(run, whole)
    parts = [path.relative_to(run) for path in (run / "checkpoints").rglob("*") if path.suffix != ".json"]
    parts = [path for path in parts if (run / path).is_file()]
    assert any(path.name == "optimizer.safetensors" for path in parts), parts
    for name in parts:
        shutil.rmtree(run)
        shutil.copytree(whole, run)
        (run / name).write_bytes(pickle.dumps(Bomb(mark)))
        # With a forged manifest, no check refuses the files before they are read.
        write_manifest(run / "checkpoints" / "step-1")
        obeyed("train", "--resume", str(run))
        assert not mark.exists(), name


def test_pickles_in_data_and_model_do_nothing(workshop: Workshop, tmp_path: Path) -> None:
    mark, model = tmp_path / "mark", write_model(tmp_path / "model")
    bomb = pickle.dumps(Bomb(mark))
    torch.save(Bomb(mark), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    obeyed("train", str(workshop.config_file("bin", model=str(model))))
    for name in sorted(os.listdir(write_model(tmp_path / "model"))):
        folder = write_model(tmp_path / "other" / name)
        (folder / name).write_bytes(bomb)
        obeyed("train", str(workshop.config_file(f"model-{name}", model=str(folder))))
    for name in ("train.jsonl", "train.parquet"):
        (tmp_path / name).write_bytes(bomb)
        obeyed("train", str(workshop.config_file(f"data-{name}", data={"train": str(tmp_path / name)})))
    assert not mark.exists()
