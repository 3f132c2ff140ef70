"""Folders that change under a run: what it needs later is kept, and a difference is a line."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import latest_checkpoint, run_config
from tests.tiny import Workshop, braid, wait_for_steps, weights_of, write_jsonl

TRAINER = {"steps": 3, "checkpoint_every": 1}


def between_steps(run: TrainingRun, step: int, change: Callable[[], Any]) -> None:
    """Make a change before a step."""
    one_step = run._one_step

    def changed() -> None:
        if run.step + 1 == step:
            change()
        one_step()

    run._one_step = changed  # type: ignore[method-assign]


@pytest.mark.parametrize("lost", ["the folder", "its tokenizer", "its configuration"])
@pytest.mark.parametrize("in_background", [False, True])
def test_a_models_folder_may_vanish_during_a_run(workshop: Workshop, lost: str, in_background: bool) -> None:
    model = workshop.folder / "model"
    shutil.copytree(workshop.model, model)
    files = {
        "the folder": [model],
        "its tokenizer": [*model.glob("*token*")],
        "its configuration": [model / "config.json"],
    }[lost]
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


@pytest.mark.parametrize("change", [shutil.rmtree, replaced, lambda folder: folder.rename(folder.with_name("moved"))])
def test_a_runs_folder_that_vanishes_is_made_again_and_the_run_resumes(
    workshop: Workshop, change: Callable[[Path], Any]
) -> None:
    whole = workshop.run("whole", trainer=TRAINER)
    with TrainingRun(workshop.config(trainer=TRAINER)) as run:
        between_steps(run, 2, lambda: change(run.folder))
        with pytest.raises(UserError, match="was removed, or replaced") as ended:
            run.train()
    assert (
        f"a checkpoint of step 2, without the metrics and rollouts of earlier steps: go on with `braid train --resume {run.folder}`"
        in str(ended.value)
    )
    with TrainingRun(run_config(run.folder), resume=run.folder) as resumed:
        resumed.train()
    assert read_metrics(run.folder)[-1]["actor/grad_norm"] == read_metrics(whole)[-1]["actor/grad_norm"]
    assert all(tensor.equal(weights_of(whole)[name]) for name, tensor in weights_of(run.folder).items())


def other_answers(workshop: Workshop) -> None:
    path = workshop.folder / "own.jsonl"
    path.write_text(path.read_text().replace('"answer": "1', '"answer": "2'))


def other_tokenizer(workshop: Workshop) -> None:
    path = workshop.folder / "model" / "tokenizer.json"
    tree = json.loads(path.read_text())
    first, second = list(tree["model"]["vocab"])[-2:]
    vocabulary = tree["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    path.write_text(json.dumps(tree))


def other_weights(workshop: Workshop) -> None:
    path = workshop.folder / "model" / "model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(bytes(raw))


def other_template(workshop: Workshop) -> None:
    (workshop.folder / "model" / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")


def other_code(workshop: Workshop) -> None:
    with (workshop.folder / "verifiers.py").open("a") as file:
        file.write("\n# changed\n")


CHANGES: dict[str, tuple[Callable[[Workshop], None], str]] = {
    "data": (other_answers, "the data of data.train.0"),
    "tokenizer": (other_tokenizer, "the tokenizer of model"),
    "model": (other_weights, "the model of model"),
    "template": (other_template, "the template of model"),
    "code": (other_code, "the code of reward.verify.0.name"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_what_changed_before_a_resume_is_named_and_may_be_accepted(workshop: Workshop, kind: str) -> None:
    change, named = CHANGES[kind]
    shutil.copytree(workshop.model, workshop.folder / "model")
    data = write_jsonl(
        workshop.folder / "own.jsonl", [json.loads(line) for line in workshop.data.read_text().splitlines()]
    )
    run = workshop.run(model=str(workshop.folder / "model"), data={"train": str(data)}, trainer={**TRAINER, "steps": 1})
    change(workshop)
    more = ["trainer.steps=2"]
    with pytest.raises(
        UserError, match="since the checkpoint of step 1 something has changed that the run reads"
    ) as refused:
        TrainingRun(run_config(run, more), resume=run)
    assert named in str(refused.value) and f"trainer.accept_changes=[{kind}" in str(refused.value)
    accepted = run_config(run, [*more, "trainer.accept_changes=[model, tokenizer, template, data, code]"])
    with TrainingRun(accepted, resume=run) as resumed:
        resumed.train()
    assert run_config(run).trainer.accept_changes == [], "it holds for one resume"


@pytest.mark.parametrize("pause_s", [0.0, 0.1, 0.3])
def test_a_second_interrupt_waits_for_the_save(workshop: Workshop, pause_s: float) -> None:
    process = braid("train", workshop.config_file(trainer={"steps": 100_000}))
    wait_for_steps(workshop.folder / "run", 2, process)
    process.send_signal(signal.SIGINT)
    threading.Event().wait(pause_s)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in errors, errors
