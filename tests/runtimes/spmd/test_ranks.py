"""Rows move between ranks at most once, directly to their rank, and not at all if they can stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.observe.trace import read_trace
from tests.invariants.traces import EVERY_STEP, TOLERANCE, assert_same, assert_same_weights, merged, trace, weights
from tests.recipes.tiny import write_data
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.tiny import Workshop, write_jsonl

DIAMOND = Path(__file__).parents[1] / "diamond.yaml"
ROWS = 16
STEPS = 2
# Two updates in a batch, so that each must be balanced; inference before them must not move rows a second time.
DAPO: dict[str, Any] = {
    "flow": "dapo",
    "algorithm": {"dynamic_sampling": False, "overlong_cache": 2},
    "runtime": "distributed",
    "trainer": {"steps": STEPS, "rows_per_update": 8},
}


def test_rows_move_at_most_once_to_their_rank(
    workshop: Workshop,
) -> None:
    away = workshop.tree("away", **DAPO, workers=3)
    # Twelve rows of like lengths in one update: a third for each rank, as they were generated.
    data = {"train": str(workshop.data), "eval": {"held_out": str(workshop.data)}}
    more = {
        "trainer": {"rows_per_update": 12, "prompts_per_step": 3},
        "data": data,
        "evaluation": {"every": 1, "samples": 1},
    }
    stay = workshop.tree("stay", **merged(DAPO, more), workers=3)
    moved, stayed = run_in_ranks([away, stay], 3)
    # A row moves at most once to be balanced, and its new columns return for the recording.
    assert 0 < sum(count["rows"] for count in moved) <= 2 * STEPS * ROWS
    assert [count["rows"] for count in stayed] == [count["bytes"] for count in stayed] == [0, 0, 0]
    # Of 40 held-out prompts each rank makes its own.
    assert [count["made"] for count in stayed] == [13, 13, 14]
    spans = read_trace(workshop.folder / "away")
    assert {span.worker for span in spans} == {"rank-0", "rank-1", "rank-2"}
    assert len(read_rollouts(rollout_path(workshop.folder / "away", 1))) == ROWS


@pytest.mark.soak
def test_more_ranks_than_rows_give_the_result_of_eager(workshop: Workshop) -> None:
    few = {"flow": str(DIAMOND), "rollout": {"samples_per_prompt": 2}, "trainer": {"steps": 2, "prompts_per_step": 1}}
    settings = merged(EVERY_STEP, few)
    run_in_ranks([workshop.tree("ranks", **settings, runtime="distributed", workers=3)], 3)
    assert_same(trace(workshop.folder / "ranks"), trace(workshop.run("alone", **settings)))


def test_the_two_answers_of_a_preference_stay_on_one_rank(workshop: Workshop, tmp_path: Path) -> None:
    data = {"train": str(write_data(tmp_path))}
    dpo = {"flow": "dpo", "dtype": "float64", "data": data, "rollout": {"samples_per_prompt": 2}}
    trainer = {"trainer": {"steps": 2, "prompts_per_step": 5, "checkpoint_every": 1}}
    run_in_ranks([workshop.tree("ranks", **merged(dpo, trainer), runtime="distributed", workers=2)], 2)
    ranks, alone = workshop.folder / "ranks", workshop.run("alone", **merged(dpo, trainer))
    for ours, theirs in zip(read_metrics(ranks), read_metrics(alone), strict=True):
        assert ours["loss/actor"] == pytest.approx(theirs["loss/actor"], abs=TOLERANCE)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], abs=TOLERANCE)
    assert_same_weights(weights(ranks / "checkpoints" / "step-2"), weights(alone / "checkpoints" / "step-2"))


@pytest.mark.soak
def test_answers_are_verified_where_inference_moved_rows(workshop: Workshop) -> None:
    """Old log-probs come between generation and verification, and each of the two updates must be balanced."""
    flow = {"flow": "grpo", "algorithm": {"old": "recompute"}, "trainer": {"steps": 1, "rows_per_update": 8}}
    run_in_ranks([workshop.tree("ranks", **merged(EVERY_STEP, flow), runtime="distributed", workers=2)], 2)
    assert_same(trace(workshop.folder / "ranks"), trace(workshop.run("alone", **merged(EVERY_STEP, flow))))


@pytest.mark.soak
def test_a_function_of_whole_groups_that_reads_payload_gets_all_rows_of_its_groups(workshop: Workshop) -> None:
    settings = merged(EVERY_STEP, {"flow": str(Path(__file__).with_name("whole_groups.yaml"))})
    run_in_ranks([workshop.tree("ranks", **settings, runtime="distributed", workers=3)], 3)
    assert_same(trace(workshop.folder / "ranks"), trace(workshop.run("alone", **settings)))


def test_ranks_evaluate_pairs_during_training_as_eager_does(workshop: Workshop) -> None:
    pairs = [{"prompt": f"{n}+1=", "chosen": "1" * (1 + n % 7), "rejected": "2" * (1 + n % 5)} for n in range(9)]
    path = str(write_jsonl(workshop.folder / "pairs.jsonl", pairs))
    settings = {
        "flow": "reward_model",
        "data": {"train": path, "eval": {"pairs": path}},
        "dtype": "float64",
        "rollout": {"samples_per_prompt": 2},
        "evaluation": {"every": 1},
        "trainer": {"steps": 1},
    }
    run_in_ranks([workshop.tree("ranks", **settings, runtime="distributed", workers=3)], 3)
    ours, theirs = (read_metrics(run)[-1] for run in (workshop.folder / "ranks", workshop.run("alone", **settings)))
    names = ("eval/pairs/pair_accuracy", "eval/pairs/margin")
    assert [ours[name] for name in names] == pytest.approx([theirs[name] for name in names], rel=1e-9)
    assert ours["eval/pairs/margin"] != 0
