"""Ranks that nobody leads: the same result as in one process, whatever the number of ranks and of those that generate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braidrl.config import parse_config
from braidrl.runtimes.run import train
from tests.runtimes.ranks import CASES, assert_same_run, run_in_ranks, tree_of
from tests.tiny import Workshop

TWO_GENERATE = {"actor": {"generate_workers": 2}}


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory, tiny_models: dict[str, Path], sums_file: Path) -> Workshop:
    return Workshop(tmp_path_factory.mktemp("runs"), tiny_models["qwen3"], sums_file)


@pytest.fixture(scope="module")
def eager(shop: Workshop, tiny_models: dict[str, Path]) -> dict[str, Path]:
    """Each case under eager."""
    return {case: train(parse_config(tree_of(shop, case, f"{case}-eager", tiny_models["llama"]))) for case in CASES}


def test_two_ranks_train_as_one_process_does(
    shop: Workshop, eager: dict[str, Path], tiny_models: dict[str, Path]
) -> None:
    trees = [tree_of(shop, case, f"{case}-2", tiny_models["llama"], runtime="distributed", workers=2) for case in CASES]
    run_in_ranks(trees, 2)
    for case in CASES:
        assert_same_run(eager[case], shop.folder / f"{case}-2")


def test_four_ranks_of_which_two_generate_train_as_one_process_does(
    shop: Workshop, eager: dict[str, Path], tiny_models: dict[str, Path]
) -> None:
    trees = [
        tree_of(shop, case, f"{case}-4", tiny_models["llama"], runtime="distributed", workers=4, roles=TWO_GENERATE)
        for case in ("grpo", "dapo")
    ]
    counts = run_in_ranks(trees, 4)
    for case in ("grpo", "dapo"):
        assert_same_run(eager[case], shop.folder / f"{case}-4")
    # Each row of DAPO travels once to the rank that infers and trains on it; to be recorded, what was added goes back.
    first, second, third, fourth = (count["moved_rows"] for count in counts[1])
    away = third + fourth
    assert 0 < away <= 5 * 16 * 0.6 and abs(third - fourth) <= 5 and first + second <= away * 2


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_any_number_of_ranks_trains_as_one_process_does(
    shop: Workshop, eager: dict[str, Path], tiny_models: dict[str, Path], ranks: int
) -> None:
    everywhere: list[dict[str, Any]] = [{}] if ranks < 4 else [{}, TWO_GENERATE]
    trees = {f"{case}-{ranks}-{number}": (case, roles) for case in CASES for number, roles in enumerate(everywhere)}
    run_in_ranks(
        [
            tree_of(shop, case, f"soak-{name}", tiny_models["llama"], runtime="distributed", workers=ranks, roles=roles)
            for name, (case, roles) in trees.items()
        ],
        ranks,
    )
    for name, (case, _) in trees.items():
        assert_same_run(eager[case], shop.folder / f"soak-{name}")
