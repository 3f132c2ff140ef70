"""Two runs never share a folder, and a name stays free until a run has started under it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from braidrl.config import Config, parse_config
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.parsing import parse_yaml
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.folders import (
    absolute,
    latest_checkpoint,
    named_output,
    new_run_folder,
    run_config,
    with_changes,
    written_whole,
)
from tests.tiny import ROOT, Workshop


def config(folder: Path, flow: str = "grpo", name: str | None = None) -> Config:
    return Config(flow=flow, model=Path("model"), output=folder, name=name)


def test_runs_of_one_second_get_separate_folders(tmp_path: Path) -> None:
    folders = [new_run_folder(config(tmp_path, flow)) for flow in ("grpo", "grpo", "own/median.py:median")]
    assert len(set(folders)) == 3 and [folder.name.split("-")[0] for folder in folders] == ["grpo", "grpo", "median"]
    asked = config(tmp_path)
    images = asked.data.images.model_copy(update={"folder": asked.data.images.folder.expanduser()})
    data = asked.data.model_copy(update={"cache": asked.data.cache.expanduser(), "images": images})
    assert run_config(folders[0]) == asked.model_copy(update={"model": Path("model").absolute(), "data": data})


def test_a_name_is_taken_once_a_run_has_started(tmp_path: Path) -> None:
    folder = new_run_folder(config(tmp_path, name="mine"))
    assert new_run_folder(config(tmp_path, flow="dapo", name="mine")) == folder
    assert run_config(folder).flow == "dapo"
    (folder / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(UserError, match="mine exists; resume it with `--resume"):
        new_run_folder(config(tmp_path, name="mine"))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file exists"):
        new_run_folder(config(tmp_path, name="file"))


def test_an_output_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    unusable = config(tmp_path / "file" / "runs")
    named = unusable.model_copy(update={"name": "mine"})
    restarting = unusable.model_copy(update={"trainer": unusable.trainer.model_copy(update={"max_restarts": 2})})
    for make, given in ((new_run_folder, unusable), (new_run_folder, named), (train, restarting)):
        with pytest.raises(UserError, match=r"^output: .*runs.*\(.*\); set another `output`$"):
            make(given)


def test_an_existing_folder_is_no_output_error_and_a_full_disk_is_one(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), named_output(tmp_path):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    for number in (errno.ENOSPC, errno.EDQUOT):
        with (
            pytest.raises(UserError, match=rf"^output: .* cannot be written \({os.strerror(number)}\)"),
            named_output(tmp_path),
        ):
            raise OSError(number, os.strerror(number))


def test_run_with_relative_paths_resumes_from_any_folder(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, source in (("model", workshop.model), ("train.jsonl", workshop.data)):
        (workshop.folder / name).symlink_to(source)
    (workshop.folder / "flow.yaml").write_text((ROOT / "tests" / "runtimes" / "diamond.yaml").read_text())
    tree = workshop.tree(
        model="model",
        output="runs",
        flow="flow.yaml",
        data={"train": "train.jsonl", "eval": {"sums": "train.jsonl"}},
        reward={"verify": "verifiers.py:starts_even"},
        roles={"reference": {"model": "model"}},
        trainer={"steps": 1},
    )
    monkeypatch.chdir(workshop.folder)
    run = train(parse_config(tree)).absolute()
    elsewhere = workshop.folder / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    kept = run_config(run)
    further = kept.model_copy(update={"trainer": kept.trainer.model_copy(update={"steps": 2})})
    assert train(further, resume=run) == run
    assert [line["step"] for line in read_metrics(run)] == [1, 2] and not list(elsewhere.iterdir())


def test_only_names_of_files_that_are_there_are_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.py").touch()
    names = ["own.py:play", "agent:own.py:play", "package.module:play", "none.py:play", "gsm8k", "flow.yaml"]
    made = absolute({"names": names, "path": Path("own.py"), "home": Path("~/x")})
    assert made["names"] == [f"{tmp_path}/own.py:play", f"agent:{tmp_path}/own.py:play", *names[2:]]
    assert made["path"] == tmp_path / "own.py" and made["home"] == Path.home() / "x"


def fail_half_way(path: Path) -> None:
    with written_whole(path) as partial:
        (partial / "weights").write_text("half")
        raise RuntimeError("out of paper")


def test_a_folder_that_is_not_finished_does_not_appear(tmp_path: Path) -> None:
    with written_whole(tmp_path / "whole") as partial:
        (partial / "weights").write_text("all")
        assert not (tmp_path / "whole").exists()
    with pytest.raises(RuntimeError, match="out of paper"):
        fail_half_way(tmp_path / "whole")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert (tmp_path / "whole" / "weights").read_text() == "all" and latest_checkpoint(tmp_path) is None


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [("trainer", "learning_rate", 3e-5), ("rollout", "temperature", 0.5), ("evaluation", "every", 7)],
)
def test_a_resumed_run_shows_what_changed_and_keeps_both_configurations(
    section: str, key: str, value: float, tmp_path: Path
) -> None:
    before = config(tmp_path)
    folder = new_run_folder(before)
    changed = before.model_copy(update={section: getattr(before, section).model_copy(update={key: value})})
    old = getattr(getattr(before, section), key)
    line, kept = with_changes(folder, changed)
    assert f"{section}.{key}={value}" in line and f"before {old}" in line
    assert getattr(getattr(run_config(folder), section), key) == value
    earlier = parse_yaml((folder / "config.1.yaml").read_text(), "the configuration")
    assert str(folder / "config.1.yaml") in kept and earlier[section][key] == old
    assert with_changes(folder, changed) == [] and not (folder / "config.2.yaml").exists()
