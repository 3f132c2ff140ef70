"""A stopped run resumes with the same result, under its own runtime and under another."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from braidrl.config import parse_config
from braidrl.observe.metrics import read_metrics
from braidrl.observe.trace import read_trace
from braidrl.runtimes.restarts import train
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from tests.invariants.traces import assert_same, trace
from tests.tiny import Workshop, braid, wait_for_steps

STEPS = 5
# Surplus groups stay for the next batch, so that checkpoints hold rows.
SETTINGS: dict[str, Any] = {
    "flow": "dapo",
    "algorithm": {"overlong_cache": 4},
    "dtype": "float64",
    "rollout": {"samples_per_prompt": 2},
    "trainer": {
        "steps": STEPS,
        "rows_per_update": 4,
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
        "surplus": "keep",
        "max_staleness": 1,
    },
    "evaluation": {"every": 2, "samples": 2, "max_prompts": 3, "before_first_step": False},
}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], sums_file: Path) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("runs"), tiny_models["qwen3"], sums_file)


def tree(shop: Workshop, name: str, **more: Any) -> dict[str, Any]:
    data = {"train": str(shop.data), "eval": {"sums": str(shop.data)}}
    return shop.tree(name, data=data, **SETTINGS, **more)


@pytest.fixture(scope="module")
def uninterrupted(shop: Workshop) -> Path:
    """Return the run under eager."""
    return train(parse_config(tree(shop, "uninterrupted")))


def copied(run: Path, name: str, runtime: str, step: int | None = None) -> Path:
    """Return a copy of the run for another runtime, at its latest checkpoint or at that of `step`."""
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    config = yaml.safe_load((copy / "config.yaml").read_text())
    (copy / "config.yaml").write_text(yaml.safe_dump({**config, "runtime": runtime, "workers": 2}))
    if step is not None:
        (copy / "checkpoints" / "latest").write_text(f"step-{step}\n")
    return copy


def test_interrupted_distributed_run_resumes_exactly_under_either_runtime(shop: Workshop, uninterrupted: Path) -> None:
    run = shop.folder / "interrupted"
    path = shop.folder / "interrupted.yaml"
    path.write_text(yaml.safe_dump(tree(shop, "interrupted", runtime="distributed", workers=2)))
    process = braid("train", path)
    wait_for_steps(run, 1, process)
    ranks = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    _, words = process.communicate(timeout=240)
    assert process.returncode == 130, words
    assert "go on with: braid train --resume" in words and "Traceback" not in words and len(ranks) >= 2
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
    assert len(read_metrics(run)) <= STEPS, "the run ended before the interrupt"

    under_eager = copied(run, "interrupted-eager", "eager")
    with TrainingRun(run_config(under_eager), resume=under_eager) as resumed:
        resumed.train()
    assert_same(trace(under_eager), trace(uninterrupted))

    train(run_config(run), resume=run)
    assert_same(trace(run), trace(uninterrupted))
    assert {span.worker for span in read_trace(run)} == {"rank-0", "rank-1"}
    assert (run / "report.html").exists()


@pytest.mark.soak
def test_a_checkpoint_of_eager_resumes_on_ranks(shop: Workshop, uninterrupted: Path) -> None:
    kept = sorted(path.parent.name for path in uninterrupted.glob("checkpoints/step-*/surplus-*.rows"))
    step = int(kept[0].removeprefix("step-"))
    assert step < STEPS, "the checkpoint must hold kept rows"
    run = copied(uninterrupted, "continued", "distributed", step)
    assert train(run_config(run), resume=run) == run
    assert_same(trace(run), trace(uninterrupted))
