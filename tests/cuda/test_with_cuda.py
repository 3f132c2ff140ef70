"""Runs on a real CUDA device; without one they are skipped, and `test_without_cuda.py` checks the same code on shadows
of tensors.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.cli.check_model import check, config_of
from braidrl.config import load_config, parse_config
from braidrl.flow.recipes import RECIPES
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from braidrl.runtimes.run import TrainingRun
from braidrl.training.decoders.proof import Twin, best_plan, quietly
from tests.cuda.variants import VARIANTS
from tests.recipes.test_training import SETTINGS, placed
from tests.recipes.tiny import make_config, write_everything
from tests.tiny import Workshop, metrics_agree
from tests.training.decoders.families import FAMILIES, FLOWS, write_family, write_pairs

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_everything(tmp_path_factory.mktemp("recipes"))


def run(folder: Path, output: Path, flow: str = "grpo", **changes: Any) -> list[dict[str, Any]]:
    """Train two steps by default; return the lines of metrics."""
    usual = {"device": "cuda", "output": str(output), "trainer__prompts_per_step": 2, "reward__processes": 0}
    return read_metrics(train(make_config(folder, flow, **{**usual, **placed(folder, changes)})))


@pytest.mark.parametrize("name", list(RECIPES))
def test_every_recipe_trains_in_bfloat16_on_the_device(name: str, folder: Path, tmp_path: Path) -> None:
    lines = run(folder, tmp_path, name, **SETTINGS.get(name, {}))
    assert len(lines) == 2 and all(line["tokens/trained"] > 0 for line in lines)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_run_with_its_settings_trains_on_the_device(name: str, folder: Path, tmp_path: Path) -> None:
    lines = run(folder, tmp_path, **{**VARIANTS[name], "trainer__steps": 2})
    gap = lines[-1]["train/rollout_log_prob_gap"]
    assert gap is None or gap < 0.05, "the engine's log-probs equal those of training"


def test_the_device_trains_as_the_cpu_does(folder: Path, tmp_path: Path) -> None:
    settings = {"dtype": "float32", "algorithm": {"old": "recompute"}, "trainer__steps": 3}
    there = run(folder, tmp_path, **settings, name="cuda")
    here = run(folder, tmp_path, **settings, name="cpu", device="cpu")
    for key in ("loss/actor", "actor/grad_norm", "actor/entropy", "reward/mean"):
        assert [line[key] for line in there] == pytest.approx([line[key] for line in here], rel=1e-3, abs=1e-4), key


def test_one_rank_has_the_result_of_one_process(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": "float32", "trainer__steps": 3}
    alone = run(folder, tmp_path, **settings, name="eager")
    result = run(folder, tmp_path, **settings, name="ranks", runtime="distributed")
    for key in ("loss/actor", "actor/grad_norm", "reward/mean"):
        assert [line[key] for line in result] == pytest.approx([line[key] for line in alone], rel=1e-3, abs=1e-4), key


def test_a_run_resumes_on_the_device_with_the_same_result(folder: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "output": str(tmp_path),
        "trainer__checkpoint_async": True,
        "trainer__checkpoint_every": 1,
    }
    whole = train(make_config(folder, "grpo", **settings, name="whole", trainer__steps=4))
    first = train(make_config(folder, "grpo", **settings, name="first", trainer__steps=2))
    with TrainingRun(make_config(folder, "grpo", **settings, name="first", trainer__steps=4), resume=first) as resumed:
        resumed.train()
    assert load_config(first / "config.yaml").device == "cuda"
    assert metrics_agree(first, whole, 1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_families_train_on_the_device_as_on_the_cpu(name: str, tmp_path: Path) -> None:
    shop = Workshop(tmp_path, write_family(tmp_path / "model", name), write_pairs(tmp_path / "pairs.jsonl"))
    runs = {
        device: train(parse_config({**shop.tree(device, **FLOWS["grpo"]), "device": device, "dtype": "float32"}))
        for device in ("cuda", "cpu")
    }
    there, here = (read_metrics(runs[device])[0] for device in ("cuda", "cpu"))
    for key in ("loss/actor", "actor/grad_norm", "actor/entropy"):
        assert there[key] == pytest.approx(here[key], rel=1e-2, abs=1e-3), key


@pytest.mark.parametrize("name", FAMILIES)
def test_families_are_proven_on_the_device_too(name: str, tmp_path: Path) -> None:
    said: list[str] = []
    folder = write_family(tmp_path / "model", name)
    assert check(str(folder), False, said.append), said
    with quietly():
        plan, findings = best_plan(Twin(config_of(str(folder)), device="cuda"))
    print(*said, plan, *findings, sep="\n")
    assert all(finding.holds for finding in findings)
