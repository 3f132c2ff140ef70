"""A user's column per token passes from the engine to the loss, whatever carries the rows in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from tests.invariants.traces import merged
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.spmd.ranks import run_in_ranks
from tests.runtimes.turns import PLAYED
from tests.tiny import ROOT, Workshop, metrics_agree, recorded, sums, write_jsonl, write_model

PLUGIN = ROOT / "examples" / "plugins" / "token_column.py"
COLUMN = "top_two"
SECTIONS: dict[str, Any] = {
    "flow": f"{PLUGIN}:flow",
    "dtype": "float64",
    "rollout": {"temperature": 0.8, "max_response_tokens": 20},
    "trainer": {"steps": 2, "prompts_per_step": 3, "checkpoint_every": 1},
}
PARTIAL = merged(
    SECTIONS,
    {
        "rollout": {"tokens_per_iteration": 7},
        "trainer": {"steps": 4, "max_staleness": 2, "surplus": "keep", "keep_checkpoints": 9, "learning_rate": 1e-30},
    },
)
"""Rows are suspended after 7 tokens, and the weights stay, so that one model explains all of their tokens."""


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("columns")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(64)))


@pytest.fixture(scope="module")
def eager(workshop: Workshop) -> Path:
    return workshop.run("eager", **SECTIONS)


def expected(model: Any, rows: Any, row: int) -> torch.Tensor:
    """Return the log-probs of the two likeliest tokens at each action of a row, (A, 2), by transformers' forward."""
    result, start = [], 0
    for length in rows["sequence_lengths"][row].tolist():
        ids, actions = (rows[name][row][start : start + length] for name in ("tokens", "action_mask"))
        with torch.no_grad():
            log_probs = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1)
        result.append(log_probs.topk(2, -1).values[actions[1:]])
        start += length
    return torch.cat(result)


def check_columns(workshop: Workshop, run: Path, steps: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(workshop.model, dtype=torch.float64)
    for step in range(1, steps + 1):
        rows = recorded(run, step)
        for row in range(len(rows)):
            values = rows[COLUMN][row]
            assert values.dtype == torch.float32 and len(values) == int(rows["action_tokens"][row])
            torch.testing.assert_close(values.double(), expected(model, rows, row), rtol=0, atol=1e-5)


def test_the_column_is_that_of_the_distribution_which_drew_each_token(workshop: Workshop, eager: Path) -> None:
    check_columns(workshop, eager, steps=1)


def test_a_flow_without_a_reader_has_no_such_column(workshop: Workshop) -> None:
    run = workshop.run("unread", **merged(SECTIONS, {"flow": "grpo", "trainer": {"steps": 1}}))
    assert COLUMN not in recorded(run, 1)


def same_columns(one: Path, other: Path, steps: int) -> bool:
    pairs = [[recorded(run, step).ordered()[COLUMN] for run in (one, other)] for step in range(1, steps + 1)]
    return all(torch.equal(a.values, b.values) and torch.equal(a.offsets, b.offsets) for a, b in pairs)


def test_workers_of_the_queue_train_on_the_same_column(workshop: Workshop, eager: Path) -> None:
    run = workshop.run("streaming", **SECTIONS, runtime="streaming")
    assert metrics_agree(eager, run) and same_columns(eager, run, 2)


@pytest.mark.soak
def test_workers_of_a_driver_train_on_the_same_column(
    workshop: Workshop, eager: Path, warm_cluster: WarmCluster
) -> None:
    run = workshop.run("hybrid", **SECTIONS, runtime="hybrid", placement="split", workers=2)
    assert metrics_agree(eager, run) and same_columns(eager, run, 2)


@pytest.mark.soak
def test_ranks_exchange_the_column_with_their_rows(workshop: Workshop, eager: Path) -> None:
    tree = workshop.tree("distributed", **SECTIONS, runtime="distributed", workers=2)
    run_in_ranks([tree], 2)
    run = workshop.folder / "distributed"
    assert metrics_agree(eager, run) and same_columns(eager, run, 2)


def test_suspended_rows_keep_the_values_of_their_earlier_tokens(workshop: Workshop) -> None:
    run = workshop.run("partial", **PARTIAL)
    assert (
        max(len(recorded(run, step)["rollout_versions"][row].unique()) for step in range(1, 5) for row in range(12)) > 1
    )
    check_columns(workshop, run, steps=4)


def test_a_row_of_several_turns_has_a_value_for_each_sampled_token(workshop: Workshop) -> None:
    run = workshop.run("turns", **merged(SECTIONS, {"rollout": {"max_response_tokens": 4, "environment": PLAYED}}))
    assert max(len(lengths) for lengths in recorded(run, 1)["sequence_lengths"].tolist()) >= 1
    check_columns(workshop, run, steps=1)


def test_recorded_rows_train_again_on_their_column(workshop: Workshop, eager: Path) -> None:
    again = workshop.run("again", replay=eager, **merged(SECTIONS, {"trainer": {"steps": 1}}))
    assert torch.equal(recorded(again, 1)[COLUMN].values, recorded(eager, 1)[COLUMN].values)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("before", "after"), [pytest.param("eager", "streaming", marks=pytest.mark.soak), ("streaming", "eager")]
)
def test_suspended_rows_of_a_checkpoint_resume_under_another_runtime(
    workshop: Workshop, before: str, after: str
) -> None:
    run = workshop.run(f"from-{before}", **merged(PARTIAL, {"trainer": {"steps": 2}}), runtime=before)
    state = json.loads((run / "checkpoints" / "step-2" / "state.json").read_text())
    assert state["sampling"]["pending"], "some rows are suspended"
    config = run_config(run)
    trainer = config.trainer.model_copy(update={"steps": 4})
    with TrainingRun(config.model_copy(update={"trainer": trainer, "runtime": after}), resume=run) as resumed:
        resumed.train()
    check_columns(workshop, run, steps=4)
