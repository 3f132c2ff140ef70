"""Damaged files of a run are found and named before anything is written, and the newest intact checkpoint can be
used.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.saving.checkpoints import (
    checkpoint_damage,
    export_model,
    load_checkpoint,
    resume_point,
    write_manifest,
)
from braidrl.runtimes.saving.folders import held_alone, latest_checkpoint, run_config
from tests.tiny import ROOT, Workshop, metrics_without_times


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], sums_file: Path) -> Path:
    """Return a run with checkpoints of steps 1 and 2, whose configuration says 3."""
    workshop = Workshop(tmp_path_factory.mktemp("whole"), tiny_models["qwen3"], sums_file)
    run = workshop.run(trainer={"steps": 2, "checkpoint_every": 1, "keep_checkpoints": 3})
    settings = run / "config.yaml"
    settings.write_text(settings.read_text().replace("steps: 2\n", "steps: 3\n", 1))
    return run


@pytest.fixture
def run(whole_run: Path, tmp_path: Path) -> Path:
    """Return a copy that tests may damage."""
    return Path(shutil.copytree(whole_run, tmp_path / "run"))


def garble(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 64] = bytes(255 - byte for byte in content[middle : middle + 64])
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def widen(path: Path) -> None:
    """Write tensors of a wider model into a readable file."""
    save_file({name: torch.cat([t, t]) if t.dim() else t for name, t in load_file(path).items()}, path)


def recount(path: Path) -> None:
    path.write_text(path.read_text().replace('"version": 2', '"version": 7'))


DAMAGES: list[tuple[str, Callable[[Path], None]]] = [
    *[
        (f"actor/{name}.safetensors", do)
        for name in ("model", "optimizer")
        for do in (garble, cut, empty, widen, Path.unlink)
    ],
    *[(f"actor/{name}.json", do) for name in ("config", "tokenizer") for do in (garble, cut, empty, Path.unlink)],
    *[("state.json", do) for do in (garble, cut, empty, recount, Path.unlink)],
    *[("manifest.json", do) for do in (garble, cut, empty, Path.unlink)],
    ("actor/adapter/notes", lambda path: (path.parent.mkdir(), path.write_text("more"), None)[-1]),
    ("pickled", lambda path: path.write_text("more") and None),
]


@pytest.mark.parametrize(("name", "do"), DAMAGES, ids=lambda part: getattr(part, "__name__", part))
def test_damaged_checkpoint_error_names_whole_one_and_overwrites_nothing(
    run: Path, name: str, do: Callable[[Path], None]
) -> None:
    do(run / "checkpoints" / "step-2" / name)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        train(run_config(run), resume=run)
    said = str(caught.value)
    assert name in said and f"`braid train --resume {run} --newest-whole`" in said
    assert "\n" not in said
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="nothing was exported"):
        export_model(run, run.parent / "exported")


def test_resume_from_newest_whole_checkpoint_equals_undisturbed_run(run: Path, whole_run: Path) -> None:
    garble(run / "checkpoints" / "step-2" / "actor" / "model.safetensors")
    train(run_config(run), resume=run, newest_whole=True)
    undisturbed = Path(shutil.copytree(whole_run, run.parent / "undisturbed"))
    train(run_config(undisturbed), resume=undisturbed)
    assert [line["step"] for line in read_metrics(run)] == [1, 2, 3]
    assert metrics_without_times(run) == metrics_without_times(undisturbed)
    assert not checkpoint_damage(run / "checkpoints" / "step-2"), "the folder was made again"


def test_a_run_without_an_intact_checkpoint_is_reported(run: Path) -> None:
    for step in (1, 2):
        cut(run / "checkpoints" / f"step-{step}" / "actor" / "optimizer.safetensors")
    with pytest.raises(UserError, match="no other checkpoint is whole"):
        train(run_config(run), resume=run, newest_whole=True)


@pytest.mark.parametrize("named", ["step-9", "../../elsewhere", "/", "", "\x00\x93", "step-2/actor"])
def test_a_pointer_to_no_checkpoint_of_the_run_is_refused(run: Path, named: str) -> None:
    (run / "checkpoints" / "latest").write_text(named)
    with pytest.raises(UserError, match=r"no checkpoint .*write step-2"):
        resume_point(run)


def test_without_the_pointer_the_newest_checkpoint_is_the_latest(run: Path) -> None:
    (run / "checkpoints" / "latest").unlink()
    assert latest_checkpoint(run) == run / "checkpoints" / "step-2"


@pytest.mark.parametrize("content", [b"", b"trainer: {steps", b"\x93\x00\xff", b"- 3\n", b"trainer: 3\n"])
def test_a_damaged_configuration_is_one_line(run: Path, content: bytes) -> None:
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(UserError) as caught:
        run_config(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("lost", [["1"], ["1", "2"]])
def test_missing_lines_of_metrics_are_reported(run: Path, lost: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = run / "metrics.jsonl"
    kept = [line for line in path.read_text().splitlines() if str(json.loads(line)["step"]) not in lost]
    path.write_text("".join(line + "\n" for line in kept))
    train(run_config(run), resume=run)
    output = " ".join("".join(capsys.readouterr()).split())
    assert f"{', '.join(lost)}; it goes on" in output


def test_a_checkpoint_without_a_manifest_is_refused_whatever_format_it_names(run: Path) -> None:
    folder = run / "checkpoints" / "step-2"
    (folder / "manifest.json").unlink()
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "format": 1}))
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        train(run_config(run), resume=run)
    write_manifest(folder)
    with pytest.raises(UserError, match=r"format 1; .*reads 2"):
        train(run_config(run), resume=run)


@pytest.mark.parametrize("keep", [0.5, 2.0])
def test_the_optimizer_of_another_model_is_refused_also_with_a_manifest(run: Path, keep: float) -> None:
    folder = run / "checkpoints" / "step-2"
    path = folder / "actor" / "optimizer.safetensors"
    tensors = load_file(path)
    save_file(
        {
            name: t[: int(len(t) * keep)].clone() if keep < 1 else torch.cat([t, t])
            for name, t in tensors.items()
            if t.dim()
        }
        | {name: t for name, t in tensors.items() if not t.dim()},
        path,
    )
    write_manifest(folder)
    with pytest.raises(UserError, match="holds another model"):
        train(run_config(run), resume=run)


@pytest.mark.soak
def test_a_run_that_lives_is_not_resumed_a_second_time(run: Path) -> None:
    held = "import sys; from pathlib import Path; from braidrl.runtimes.saving.folders import held_alone\n" + (
        "with held_alone(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", held, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert other.stdin and other.stdout and other.stdout.readline() == b"held\n"
    with pytest.raises(UserError, match="by another process; wait until"):
        train(run_config(run), resume=run)
    other.kill()
    other.wait()
    with held_alone(run):
        pass


def test_rows_that_several_workers_have_kept_are_no_role_to_export(run: Path) -> None:
    checkpoint = run / "checkpoints" / "step-2"
    (checkpoint / "surplus-0.rows").mkdir()
    (checkpoint / "surplus-0.rows" / "00000").write_bytes(b"rows")
    (checkpoint / "actor").rename(checkpoint / "reward")
    write_manifest(checkpoint)
    assert "from" in export_model(run, run.parent / "exported")
    with pytest.raises(UserError, match="role 'critic', only reward; name one"):
        export_model(run, run.parent / "again", "critic")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", float("nan")),
        ("step", -3),
        ("step", 10**30),
        ("step", 7),
        ("version", -1),
        ("started", [[1]]),
        ("loader", {"admitted": -5}),
        ("loader", []),
        ("sampling", {"judged": "x"}),
        ("surplus", -4),
        ("fingerprints", 7),
    ],
    ids=str,
)
def test_an_edited_state_is_named_whatever_its_manifest_says(run: Path, name: str, value: object) -> None:
    folder = run / "checkpoints" / "step-2"
    state = json.loads((folder / "state.json").read_text())
    part = {**state[name], **value} if isinstance(value, dict) else value
    (folder / "state.json").write_text(json.dumps({**state, name: part}))
    write_manifest(folder)
    with pytest.raises(UserError, match=r"state\.json is .*; remove this checkpoint"):
        load_checkpoint(folder)
