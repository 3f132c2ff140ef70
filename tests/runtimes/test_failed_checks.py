"""Failing checks and trajectories are counted by verifier and kind, shown in the report, and end the run if there are
too many.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braidrl.errors import FailedStep
from braidrl.observe.metrics import FAILURE, Sums, read_metrics
from braidrl.runtimes.evaluation import evaluate_model
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.step_metrics import FailureWatch
from tests.tiny import Workshop

HERE = __file__


def often(response: str, metadata: dict[str, Any]) -> float:
    raise LookupError("no key" if response else "no answer")


def half(response: str) -> float:
    return 0.5


def test_metrics_and_report_have_each_verifiers_mean_and_failures_by_kind(workshop: Workshop) -> None:
    verify = [f"{HERE}:half", f"{workshop.folder}/verifiers.py:starts_even", f"{HERE}:often"]
    reward = {"verify": verify, "sandbox": "none", "wrong_score": -1.0, "max_failed_fraction": 1, "processes": 0}
    run = workshop.run(reward=reward)
    lines = read_metrics(run)
    assert [line["checks/half/score_mean"] for line in lines] == [0.5, 0.5]
    assert all(-1 < line["checks/starts_even/score_mean"] < 1 for line in lines)
    assert [line["checks/often/score_mean"] for line in lines] == [-1.0, -1.0]
    assert [line["reward/failures/often/exception"] for line in lines] == [16, 16]
    report = (run / "report.html").read_text()
    assert "Score of each verifier" in report and "reward/failures/often/exception" in report.replace(
        "failures/often", "reward/failures/often"
    )


def test_the_line_names_the_commonest_reason_and_not_the_first() -> None:
    sums = Sums({"reward/failed_fraction": (4, 4)})
    for words, count in (("verifier a: timeout", 1), ("verifier b: exception", 3)):
        sums.add(FAILURE + words, 0.0, count)
    with pytest.raises(FailedStep, match=r"4 checks failed; .*verifier b: exception"):
        FailureWatch(0.99, 1, Path("run")).check(7, sums)


@pytest.mark.parametrize(
    ("failed", "most", "steps", "ends"), [(3, 0.5, 1, True), (2, 0.5, 1, False), (4, 1.0, 1, False), (4, 0.9, 0, False)]
)
def test_only_a_larger_share_than_the_limit_ends_the_run(failed: int, most: float, steps: int, ends: bool) -> None:
    watch = FailureWatch(most, steps, Path("run"))
    try:
        watch.check(1, Sums({"environment/failed_fraction": (failed, 4)}))
    except FailedStep:
        assert ends
    else:
        assert not ends


def test_a_saved_run_resumes_after_its_verifier_is_fixed(workshop: Workshop) -> None:
    verifier = workshop.folder / "mine.py"
    verifier.write_text("def score(response):\n    raise OSError('the judge is down')\n")
    config = workshop.config(reward={"verify": f"{verifier}:score", "sandbox": "process"})
    with (
        pytest.raises(FailedStep, match=r"step 1: .*16 checks.*verifier score:.*OSError"),
        TrainingRun(config) as run,
    ):
        run.train()
    verifier.write_text("def score(response):\n    return 1.0\n")
    changed = config.model_copy(update={"trainer": config.trainer.model_copy(update={"accept_changes": ["code"]})})
    with TrainingRun(changed, resume=run.folder) as resumed:
        resumed.train()
    assert [line["checks/score/score_mean"] for line in read_metrics(run.folder)] == [0.0, 1.0]


def test_an_evaluation_with_only_failed_checks_has_no_result(workshop: Workshop) -> None:
    sections = {
        "reward": {"verify": f"{HERE}:often", "sandbox": "none", "processes": 0},
        "data": {"eval": {"test": str(workshop.data)}},
    }
    with pytest.raises(FailedStep, match=r"evaluation: .*8 checks .*verifier often: exception"):
        evaluate_model(workshop.config(evaluation={"samples": 1, "max_prompts": 8}, **sections))
