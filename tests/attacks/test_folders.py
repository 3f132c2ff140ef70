"""Folders that change under a run: what it needs later is kept, and a difference is a line."""

from __future__ import annotations

import json
import os
import resource
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from braidrl.cli.commands import main
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import latest_checkpoint, run_config
from tests.cases import soak_but
from tests.tiny import Workshop, braid, wait_for_steps, weights_of, write_jsonl

TRAINER = {"steps": 3, "checkpoint_every": 1}


def between_steps(run: TrainingRun, step: int, change: Callable[[], Any]) -> None:
    """Make a change before a step."""
    one_step = run._one_step

    def changed(state: Any) -> None:
        if run.step + 1 == step:
            change()
        one_step(state)

    run._one_step = changed  # type: ignore[method-assign]


LOST = {"the folder": "", "its tokenizer": "*token*", "its configuration": "config.json"}


@pytest.mark.parametrize("lost", soak_but(["the folder"], LOST))
@pytest.mark.parametrize("in_background", [False, True])
def test_a_models_folder_may_vanish_during_a_run(workshop: Workshop, lost: str, in_background: bool) -> None:
    model = workshop.folder / "model"
    shutil.copytree(workshop.model, model)
    files = [*model.glob(LOST[lost])] if LOST[lost] else [model]
    with TrainingRun(workshop.config(model=str(model), trainer={**TRAINER, "checkpoint_async": in_background})) as run:
        between_steps(run, 2, lambda: [shutil.rmtree(each) if each.is_dir() else each.unlink() for each in files])
        run.train()
    latest = latest_checkpoint(run.folder)
    assert latest is not None and latest.name == "step-3"
    saved = AutoTokenizer.from_pretrained(latest / "actor")
    assert saved.get_vocab() == AutoTokenizer.from_pretrained(workshop.model).get_vocab()


def replaced(folder: Path) -> None:
    """Another folder of the same name."""
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


FOLDERS: dict[str, Callable[[Path], Any]] = {
    "removed": shutil.rmtree,
    "replaced": replaced,
    "moved": lambda folder: folder.rename(folder.with_name("moved")),
}


@pytest.mark.parametrize("kind", soak_but(["replaced"], FOLDERS))
def test_a_runs_folder_that_vanishes_is_made_again_and_the_run_resumes(workshop: Workshop, kind: str) -> None:
    whole = workshop.run("whole", trainer=TRAINER)
    with TrainingRun(workshop.config(trainer=TRAINER)) as run:
        between_steps(run, 2, lambda: FOLDERS[kind](run.folder))
        with pytest.raises(UserError, match="was removed, or replaced") as ended:
            run.train()
    assert "step 2" in str(ended.value) and f"`braid train --resume {run.folder}`" in str(ended.value)
    with TrainingRun(run_config(run.folder), resume=run.folder) as resumed:
        resumed.train()
    assert read_metrics(run.folder)[-1]["actor/grad_norm"] == read_metrics(whole)[-1]["actor/grad_norm"]
    assert all(tensor.equal(weights_of(whole)[name]) for name, tensor in weights_of(run.folder).items())


def other_tree(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    """Return a change of a JSON file."""

    def changed(text: str) -> str:
        tree = json.loads(text)
        change(tree)
        return json.dumps(tree)

    return changed


def swap_tokens(tree: dict[str, Any]) -> None:
    vocabulary = tree["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]


NAMED = {
    "data": "the data of data.train.0",
    "tokenizer": "the tokenizer of model",
    "model": "the model of model",
    "template": "the template of model",
    "code": "the code of reward.verify.0.name",
}
# The kind of a change, its file, and the file's new text.
CHANGES: dict[str, tuple[str, str, Callable[[str], str]]] = {
    "other answers": ("data", "own.jsonl", lambda text: text.replace('"answer": "1', '"answer": "2')),
    "another order of lines": ("data", "own.jsonl", lambda text: "".join(reversed(text.splitlines(True)))),
    "one prompt": ("data", "own.jsonl", lambda text: text.replace("+", "-", 1)),
    "two tokens swapped": ("tokenizer", "model/tokenizer.json", other_tree(swap_tokens)),
    "a normalizer": (
        "tokenizer",
        "model/tokenizer.json",
        other_tree(lambda tree: tree.update(normalizer={"type": "Lowercase"})),
    ),
    "another end": ("tokenizer", "model/tokenizer_config.json", other_tree(lambda tree: tree.update(eos_token="9"))),
    "one bit of the last weight": ("model", "model/model.safetensors", lambda text: text[:-1] + chr(ord(text[-1]) ^ 1)),
    "a weight in the middle": ("model", "model/model.safetensors", lambda text: text[:-5000] + "\x3f" + text[-4999:]),
    "another base of positions": ("model", "model/config.json", other_tree(lambda tree: tree.update(rms_norm_eps=0.5))),
    "a template": (
        "template",
        "model/chat_template.jinja",
        lambda text: "{% for m in messages %}{{ m.content }}{% endfor %}",
    ),
    "a template of blanks": ("template", "model/chat_template.jinja", lambda text: " "),
    "a template in a configuration": (
        "template",
        "model/tokenizer_config.json",
        other_tree(lambda tree: tree.update(chat_template="a")),
    ),
    "a line of code": ("code", "verifiers.py", lambda text: text + "\n# changed\n"),
    "one letter of code": ("code", "verifiers.py", lambda text: text.replace("02468", "13579")),
    "other code": ("code", "verifiers.py", lambda text: "def starts_even(response):\n    return True\n"),
}


@pytest.mark.soak
def test_what_changed_before_a_resume_is_named_and_may_be_accepted(workshop: Workshop) -> None:
    """A changed file keeps its time, and often its size."""
    shutil.copytree(workshop.model, workshop.folder / "model")
    data = write_jsonl(
        workshop.folder / "own.jsonl", [json.loads(line) for line in workshop.data.read_text().splitlines()]
    )
    run = workshop.run(model=str(workshop.folder / "model"), data={"train": str(data)}, trainer={**TRAINER, "steps": 1})
    more = ["trainer.steps=2"]
    for name, (kind, file, change) in CHANGES.items():
        path = workshop.folder / file
        before = path.read_bytes() if path.exists() else None
        times = path.stat() if before is not None else workshop.data.stat()
        path.write_text(change((before or b"").decode("latin-1")), "latin-1")
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(UserError, match=r"checkpoint of step 1 .*changed") as refused:
            TrainingRun(run_config(run, more), resume=run)
        said = str(refused.value)
        assert NAMED[kind] in said and f"trainer.accept_changes=[{kind}]" in said, (name, said)
        path.unlink() if before is None else path.write_bytes(before)
    for name in ("other answers", "two tokens swapped", "one bit of the last weight", "a template", "a line of code"):
        _, file, change = CHANGES[name]
        path = workshop.folder / file
        path.write_text(change(path.read_bytes().decode("latin-1") if path.exists() else ""), "latin-1")
    accepted = run_config(run, [*more, f"trainer.accept_changes=[{', '.join(NAMED)}]"])
    with TrainingRun(accepted, resume=run) as resumed:
        resumed.train()
    assert run_config(run).trainer.accept_changes == [], "it holds for one resume"


PAUSES_S = (0.0, 0.1, 0.3)


@pytest.mark.parametrize("pause_s", soak_but([0.0], PAUSES_S))
def test_a_second_interrupt_waits_for_the_save(workshop: Workshop, pause_s: float) -> None:
    process = braid("train", workshop.config_file(trainer={"steps": 100_000}))
    wait_for_steps(workshop.folder / "run", 2, process)
    process.send_signal(signal.SIGINT)
    threading.Event().wait(pause_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors, errors


ULIMITS = {
    "1.5 GB of addresses": (
        resource.RLIMIT_AS,
        1_500_000_000,
        "1.397 GiB of address space (ulimit -v), and needs at least 2",
    ),
    "1 GiB of addresses": (resource.RLIMIT_AS, 1 << 30, "1 GiB of address space (ulimit -v), and needs at least 2"),
    "a little too few addresses": (resource.RLIMIT_AS, (2 << 30) - 4096, "address space (ulimit -v)"),
    "40 files": (resource.RLIMIT_NOFILE, 40, "40 open files (ulimit -n), and needs at least 128"),
    "no files": (resource.RLIMIT_NOFILE, 0, "0 open files (ulimit -n)"),
    "127 files": (resource.RLIMIT_NOFILE, 127, "127 open files (ulimit -n)"),
}


@pytest.mark.parametrize("kind", ULIMITS)
def test_a_command_with_too_low_a_limit_is_refused_in_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    limit, most, said = ULIMITS[kind]
    before = resource.getrlimit(limit)
    monkeypatch.setattr("sys.argv", ["braid", "train", "a.yaml"])
    try:
        resource.setrlimit(limit, (most, before[1]))
        with pytest.raises(SystemExit) as ended:
            main()
    finally:
        resource.setrlimit(limit, before)
    (line,) = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2 and line.startswith("braid: this process may have ") and said in line, line
