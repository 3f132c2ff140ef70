"""The studies of learned rewards at a small size make their data and run up to their page."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.tiny import ARITHMETIC, load_module

STUDIES = ("mixtures", "recipes", "rewards", "runtimes", "staleness", "techniques", "vllm")


@pytest.fixture(scope="module")
def studies() -> ModuleType:
    for name in ("task", "pages", "study", *(f"study_{of}" for of in STUDIES)):
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


@pytest.mark.soak
def test_a_reward_model_and_ppo_with_it_end_in_a_page(studies: ModuleType, tmp_path: Path) -> None:
    result = studies.reward_model(studies.Study(tmp_path / "runs", tmp_path / "pages", quick=True))
    assert 0 <= result["pair accuracy"] <= 1 and result["score after"] >= 0
    assert "held-out pairs ranked correctly" in (tmp_path / "pages" / "reward-model.md").read_text()


def test_a_mean_over_seeds_has_students_interval(studies: ModuleType) -> None:
    pages = load_module(ARITHMETIC / "pages.py")
    result = pages.Mean.of([1.0, 2.0, 3.0, 4.0, 5.0])
    # 2.776 standard errors for four degrees of freedom; the standard deviation of 1 to 5 is the root of 2.5.
    assert result.mean == 3 and result.half == pytest.approx(2.776 * (2.5 / 5) ** 0.5)
    assert result.text("+.1f") == "+3.0 ± 1.963" and pages.Mean.of([0.25]).text(".2f") == "0.25"


def test_what_was_written_by_hand_stays_when_a_page_is_written_again(tmp_path: Path) -> None:
    pages, page = load_module(ARITHMETIC / "pages.py"), tmp_path / "page.md"
    pages.write_markdown(page, "# First\n")
    assert page.read_text() == "# First\n"
    page.write_text(f"# First\n\n{pages.BY_HAND}\n\nWhy it is so.\n")
    pages.write_markdown(page, "# Second\n\n")
    assert page.read_text() == f"# Second\n\n{pages.BY_HAND}\n\nWhy it is so.\n"


def test_a_careful_teacher_makes_fewer_mistakes_where_it_rambles(studies: ModuleType) -> None:
    teacher = load_module(ARITHMETIC / "study_techniques.py").CAREFUL
    pairs = load_module(ARITHMETIC / "task.py").problems(2000, 2, seed=1)
    wrong: dict[bool, list[bool]] = {False: [], True: []}
    for example in teacher.answers(pairs):
        working, answer = example["response"].split(" #### ")
        wrong[len(working) > len("9+9+1=19 9+9+1=19")].append(answer != example["answer"])
    # A mistake in a column need not change the answer, and one-digit sums stay short even when they are repeated.
    assert len(wrong[True]) == pytest.approx(1000, abs=120)
    assert sum(wrong[True]) / len(wrong[True]) < 0.15 < 0.4 < sum(wrong[False]) / len(wrong[False])


def test_a_technique_counts_only_with_the_predicted_sign(studies: ModuleType) -> None:
    verdict, mean = load_module(ARITHMETIC / "study_techniques.py").verdict, load_module(ARITHMETIC / "pages.py").Mean
    assert verdict(mean(0.2, 0.1), True) == verdict(mean(-0.2, 0.1), False) == "yes"
    assert verdict(mean(-0.2, 0.1), True) == "the opposite" and verdict(mean(0.1, 0.2), True) == "no"


def test_techniques_are_compared_seed_by_seed(studies: ModuleType) -> None:
    recipes, study = load_module(ARITHMETIC / "study_recipes.py"), load_module(ARITHMETIC / "study.py")

    def runs(*finals: float) -> list[list[dict[str, float]]]:
        return [
            [{"step": 0, study.SCORE: 0.1}, {"step": 5, study.SCORE: final, "rows/generated": 40}] for final in finals
        ]

    result = {
        "plain": runs(0.2, 0.6, 0.9),
        "+ a little": runs(0.3, 0.7, 1.0),
        "+ noise": runs(0.1, 0.9, 0.9),
        "- a little": runs(0.0, 0.8, 0.8),
    }
    gained = recipes.gains(result)
    assert gained["+ a little"].mean == pytest.approx(0.1) and gained["+ a little"].half < 1e-9
    told = recipes.what_reproduces(gained, 3)
    assert "above 0: + a little.\n" in told and "below 0: - a little.\n" in told and told.endswith("+ noise.")
    assert recipes.reached(result["+ a little"], [0.3, 0.8, 1.0]) == ["2 of 3", "5", "40"]
    assert recipes.reached(result["- a little"], [0.9, 0.9, 0.9]) == ["0 of 3", "", ""]
