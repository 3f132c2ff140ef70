"""Run folders: never two runs in one, and a name that no run has begun under stays free."""

from __future__ import annotations

from pathlib import Path

import pytest

from braidrl.config import Config
from braidrl.errors import UserError
from braidrl.runtimes.folders import latest_checkpoint, new_run_folder, run_config, whole_folder


def config(folder: Path, flow: str = "grpo", name: str | None = None) -> Config:
    return Config(flow=flow, model=Path("model"), output=folder, name=name)


def test_runs_of_one_second_get_folders_of_their_own_named_by_their_flow(tmp_path: Path) -> None:
    folders = [new_run_folder(config(tmp_path, flow)) for flow in ("grpo", "grpo", "own/median.py:median")]
    assert len(set(folders)) == 3 and [folder.name.split("-")[0] for folder in folders] == ["grpo", "grpo", "median"]
    assert run_config(folders[0]) == config(tmp_path)


def test_a_name_is_taken_once_a_run_has_begun(tmp_path: Path) -> None:
    folder = new_run_folder(config(tmp_path, name="mine"))
    assert new_run_folder(config(tmp_path, flow="dapo", name="mine")) == folder
    assert run_config(folder).flow == "dapo"
    (folder / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="mine exists; resume it with `--resume"):
        new_run_folder(config(tmp_path, name="mine"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file exists"):
        new_run_folder(config(tmp_path, name="file"))


def fail_half_way(path: Path) -> None:
    with whole_folder(path) as partial:
        (partial / "weights").write_text("half")
        raise RuntimeError("out of paper")


def test_a_folder_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    with whole_folder(tmp_path / "whole") as partial:
        (partial / "weights").write_text("all")
        assert not (tmp_path / "whole").exists()
    with pytest.raises(RuntimeError, match="out of paper"):
        fail_half_way(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert (tmp_path / "whole" / "weights").read_text() == "all" and latest_checkpoint(tmp_path) is None
