"""Things that a run uses late are tested before its first step, and a side file cannot make a checkpoint fail.

| touched late                                   | tried early by                                                   |
|------------------------------------------------|------------------------------------------------------------------|
| generation_config.json, tokenizer, config.json | `side_files`, when a trained model is loaded                     |
| the model's own folder, moved since            | the same: a checkpoint reads nothing from it                     |
| report.html, its template and packages         | an empty report before the first step                            |
| trackers and their folders                     | opened before the first step; one that cannot be ends a new run  |
| an evaluation that is first due at step 100    | data and verifiers when they are read; a prompt of each set      |
| the run's folder                               | `check_output`, the configuration that is written there          |
| code of verifiers, conversions, environments   | imported when the configuration is checked                       |
| the last recorded step of a replay             | the ends of all recordings, before the model loads               |
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.observe.report import plotly_script
from braidrl.observe.rollouts import recorded_steps, rollout_path
from braidrl.runtimes.run import TrainingRun
from tests.tiny import Workshop, sums, write_jsonl

SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1, "typical_p": 0.9}
"""Settings that some versions of transformers refuse to save without `do_sample`; the file is then copied."""


def test_refused_settings_a_lost_model_folder_and_a_failed_report_do_not_stop_the_checkpoint(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    model = workshop.folder / "model"
    shutil.copytree(workshop.model, model)
    known = json.loads((model / "generation_config.json").read_text())
    (model / "generation_config.json").write_text(json.dumps({**known, **SAMPLING}))
    with TrainingRun(workshop.config(model=str(model))) as run:
        run._one_step(run._snapshot())
        shutil.rmtree(model)
        monkeypatch.setattr("braidrl.observe.report.sample_groups", lambda _: 1 / 0)
        run.train()
    saved, output = run.folder / "checkpoints" / "step-2" / "actor", capfd.readouterr().err
    assert SAMPLING.items() <= json.loads((saved / "generation_config.json").read_text()).items()
    assert "report.html could not be written (ZeroDivisionError" in output
    AutoModelForCausalLM.from_pretrained(saved)
    AutoTokenizer.from_pretrained(saved)


def test_a_tokenizer_that_cannot_be_written_is_copied_with_a_warning(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(*arguments: Any, **settings: Any) -> None:
        raise NotImplementedError("this tokenizer is read only")

    monkeypatch.setattr("transformers.PreTrainedTokenizerBase.save_pretrained", refuse)
    run = workshop.run(trainer={"steps": 1})
    assert "(this tokenizer is read only)" in capfd.readouterr().err
    saved = AutoTokenizer.from_pretrained(run / "checkpoints" / "step-1" / "actor")
    assert saved.get_vocab() == AutoTokenizer.from_pretrained(workshop.model).get_vocab()


def refused(workshop: Workshop, **sections: Any) -> str:
    """Return the line with which a run ends before its first step."""
    with pytest.raises(UserError) as error:
        workshop.run(**sections)
    metrics = workshop.folder / "run" / "metrics.jsonl"
    assert not metrics.exists() or read_metrics(metrics) == []
    return str(error.value)


def test_a_module_that_the_report_lacks_ends_the_run_before_its_first_step(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    plotly_script.cache_clear()
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert refused(workshop).startswith("report.html needs plotly")


def test_a_report_without_its_template_ends_the_run_before_its_first_step(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braidrl.observe.report.TEMPLATES.get_template", lambda _: Path("/nowhere/report").read_text())
    assert refused(workshop).startswith("the run's report cannot be written")


class InReadOnlyFolder:
    """A tracker that writes into a read-only folder."""

    def __init__(self, run: Any) -> None:
        Path("/proc/braid").mkdir()

    def write(self, step: int, metrics: Any) -> None: ...

    def close(self) -> None: ...


def test_a_tracker_that_cannot_be_opened_ends_a_new_run_in_a_line(workshop: Workshop) -> None:
    said = refused(workshop, trackers=f"{__file__}:InReadOnlyFolder")
    assert "InReadOnlyFolder cannot be opened (FileNotFoundError" in said and "leave it out of trackers" in said
    assert len(read_metrics(workshop.run(trackers=[]))) == 2, "the run can be restarted under its name"


def test_a_damaged_recording_ends_a_replay_before_its_first_step(workshop: Workshop) -> None:
    recorded = workshop.run("recorded", trackers=[])
    last = rollout_path(recorded, 2)
    last.write_bytes(last.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"step-2\.parquet .*as a recording"):
        TrainingRun(workshop.config(trackers=[]), replay=recorded)
    assert not (workshop.folder / "run").exists()


LATER = {"every": 100, "before_first_step": False, "samples": 1}


def test_an_evaluation_set_that_cannot_be_evaluated_ends_the_run_before_its_first_step(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    held_out = write_jsonl(workshop.folder / "held-out.jsonl", sums(3))
    data = {"train": str(workshop.data), "eval": {"test": str(held_out)}}
    run = workshop.run("whole", data=data, evaluation=LATER, trainer={"steps": 1})
    assert recorded_steps(run, "test") == [1]
    monkeypatch.setattr("braidrl.runtimes.evaluation.avg_at_k", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        workshop.run("broken", data=data, evaluation=LATER, trainer={"steps": 1})
    assert read_metrics(workshop.folder / "broken") == []
