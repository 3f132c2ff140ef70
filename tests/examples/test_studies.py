"""The studies of learned rewards at a reduced size: their data, and that they run to their page."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny import ARITHMETIC, load_module


@pytest.fixture(scope="module")
def studies() -> ModuleType:
    for name in ("task", "pages", "study", "study_recipes", "study_rewards", "study_runtimes", "study_staleness"):
        load_module(ARITHMETIC / f"{name}.py")
    return load_module(ARITHMETIC / "studies.py")


def test_no_copy_of_a_held_out_pair_is_trained_on(studies: ModuleType) -> None:
    rewards = load_module(ARITHMETIC / "study_rewards.py")
    pairs = rewards.preferences(seed=1)
    held_out, trained = rewards.held_apart(pairs)
    apart = {tuple(sorted(pair.items())) for pair in held_out}
    assert len(apart) == len(held_out) >= 200
    assert apart.isdisjoint(tuple(sorted(pair.items())) for pair in trained)
    assert apart | {tuple(sorted(pair.items())) for pair in trained} == {tuple(sorted(pair.items())) for pair in pairs}


def test_a_reward_model_and_ppo_with_it_end_in_a_page(studies: ModuleType, tmp_path: Path) -> None:
    found = studies.reward_model(studies.Study(tmp_path / "runs", tmp_path / "pages", quick=True))
    assert 0 <= found["pair accuracy"] <= 1 and found["score after"] >= 0
    assert "held-out pairs told apart" in (tmp_path / "pages" / "reward-model.md").read_text()
