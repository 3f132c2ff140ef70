"""What users write outside the package: each thing of examples/plugins keeps its contract, and a run chooses it by its name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from braidrl.models.optimizer_contract import CHECKS as OPTIMIZER_CHECKS
from braidrl.models.optimizer_contract import OptimizerUnderTest
from braidrl.observe.metrics import read_metrics
from braidrl.observe.trackers import check_tracker
from tests.tiny import ROOT, Workshop, weights_of

PLUGINS = ROOT / "examples" / "plugins"
PAGES = {"add-an-optimizer.md": "optimizer.py", "add-a-tracker.md": "tracker.py"}
"""Each page shows its example as it is."""


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_the_example(page: str) -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    assert shown[0].strip() in (PLUGINS / PAGES[page]).read_text()


def test_the_tracker_does_what_a_run_needs_and_a_run_writes_to_it(workshop: Workshop, tmp_path: Path) -> None:
    name = f"{PLUGINS}/tracker.py:Spreadsheet"
    check_tracker(name, tmp_path)
    run = workshop.run("tracked", trackers=[{"name": name, "params": {"columns": ["reward/mean"]}}])
    lines = [line.split("\t") for line in (run / "metrics.tsv").read_text().splitlines()]
    assert lines == [["step", "reward/mean"], *([str(m["step"]), str(m["reward/mean"])] for m in read_metrics(run))]
    assert not (run / "tensorboard").exists(), "what is not named is not written"


LION = OptimizerUnderTest(f"{PLUGINS}/optimizer.py:Lion", {"betas": [0.9, 0.95]})


@pytest.mark.parametrize("check", OPTIMIZER_CHECKS, ids=lambda check: check.__name__)
def test_the_optimizer_keeps_the_contract(check: Callable[[OptimizerUnderTest], None]) -> None:
    check(LION)


def test_a_run_trains_with_the_optimizer(workshop: Workshop) -> None:
    run = workshop.run("lion", trainer={"optimizer": LION.name, "learning_rate": 1e-3})
    before = load_file(workshop.model / "model.safetensors")
    moved = {name: (tensor - before[name]).abs().max().item() for name, tensor in weights_of(run).items()}
    # Two steps of the size of the rate: a sign has no other.
    assert max(moved.values()) == pytest.approx(2e-3, rel=1e-3)
