"""The studies at full size show their expected effects. Finished runs are not repeated."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.engines.served import vllm_python
from tests.tiny import ARITHMETIC, ROOT, load_module

pytestmark = pytest.mark.soak

STUDIES = ("recipes", "rewards", "runtimes", "staleness", "techniques", "vllm")


@pytest.fixture(scope="module")
def studies() -> ModuleType:
    for name in ("task", "pages", "study", *(f"study_{of}" for of in STUDIES)):
        load_module(ARITHMETIC / f"{name}.py")
    return load_module(ARITHMETIC / "studies.py")


@pytest.fixture(scope="module")
def study(studies: ModuleType) -> Any:
    return studies.Study(ROOT / "build" / "studies", ROOT / "docs" / "results")


def test_learned_reward_model_ranks_pairs_and_ppo_raises_true_score(studies: ModuleType, study: Any) -> None:
    figures = studies.reward_model(study)
    assert figures["pair accuracy"] >= 0.9
    assert figures["score after"] > figures["score before"] + 0.1


def test_safe_rlhf_keeps_a_limit_that_reward_alone_breaks(studies: ModuleType, study: Any) -> None:
    figures = studies.safe_rlhf(study)
    assert figures["cost"] < figures["limit"] < figures["cost without a constraint"]
    assert figures["reward after"] > figures["reward before"]
    assert figures["spread of the multiplier"] < 0.1


def test_every_recipe_learns_sums_from_the_same_start(studies: ModuleType, study: Any) -> None:
    figures = studies.algorithms(study)
    recipes = load_module(ARITHMETIC / "study_recipes.py")
    for name in (*recipes.RECIPES, recipes.TWICE):
        assert figures[name] > figures["start"] + 0.05, name


def test_the_ablation_has_a_row_for_each_technique(studies: ModuleType, study: Any) -> None:
    figures = studies.ablation(study)
    assert list(figures) == [name for name, _ in load_module(ARITHMETIC / "study_recipes.py").ADDED]
    assert max(figures.values()) > 0.3


def test_a_technique_shows_where_its_argument_applies(studies: ModuleType, study: Any) -> None:
    figures = studies.techniques(study)
    assert figures["overlong filtering: share of long working, which is cut off, over all steps"] > 0, figures
    assert figures["soft overlong punishment: share cut off, steps 1 to 10"] < 0, figures


def test_the_example_learns_under_every_runtime(studies: ModuleType, study: Any) -> None:
    figures = studies.runtimes(study)
    for name in load_module(ARITHMETIC / "study_runtimes.py").RUNTIMES:
        assert figures[name] > figures["start"] + 0.05, name


def test_every_way_to_take_weights_late_learns_nearly_as_much(studies: ModuleType, study: Any) -> None:
    figures = studies.staleness(study)
    assert all(figures[name] > figures["synchronous"] - 0.1 for name in figures), figures


def test_a_run_learns_from_a_stock_vllm_server(studies: ModuleType, study: Any) -> None:
    vllm_python()
    figures = studies.vllm(study)
    assert figures["last"] > figures["first"] + 0.1 and figures["gap"] < 1e-4, figures


def test_studies_are_quick_when_asked(studies: ModuleType, tmp_path: Path) -> None:
    quick = studies.Study(tmp_path / "runs", tmp_path / "pages", quick=True)
    figures = studies.safe_rlhf(quick)
    assert figures["cost"] > 0 and (tmp_path / "pages" / "safe-rlhf.md").is_file()
    assert "task" in sys.modules
