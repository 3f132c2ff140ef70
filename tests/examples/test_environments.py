"""The examples with environments train, and in each row of each step the engine's log-probs equal those of training."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path

import pytest
import torch

from braidrl.config import load_config
from braidrl.data.rows import Rows
from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.restarts import train
from examples.turn_credit import demo as turn_credit
from tests.agents.library_servers import AGENTS, need
from tests.cases import soak_but
from tests.tiny import braid

EXAMPLES = Path(__file__).parents[2] / "examples"
FILES = {
    "guess_number": ("games.jsonl", "games.jsonl", "games", "model"),
    "tool_arithmetic": ("train.jsonl", "held_out.jsonl", "held_out", "untrained"),
    "outside_agent": ("train.jsonl", "held_out.jsonl", "held_out", "untrained"),
    "coding_agent": ("train.jsonl", "held_out.jsonl", "held_out", "untrained"),
    "summaries": ("train.jsonl", "held_out.jsonl", "held_out", "untrained"),
}
"""Return training data, held-out data, its name, and the model that `prepare` writes."""


def two_steps(name: str, folder: Path) -> list[Rows]:
    """Return the rows of two steps of a small version of an example; log-probs are recomputed because a batch is two
    updates.
    """
    importlib.import_module(f"examples.{name}.demo").prepare(folder, seed=1)
    data, held_out, label, model = FILES[name]
    config = load_config(
        EXAMPLES / name / "config.yaml",
        [
            f"model={folder / model}",
            f"data.train={folder / data}",
            f"data.eval.{label}={folder / held_out}",
            f"output={folder}",
            "trainer.steps=2",
            "trainer.prompts_per_step=4",
            "trainer.rows_per_update=8",
            "rollout.samples_per_prompt=4",
            "evaluation.every=2",
            "evaluation.max_prompts=4",
            "threads=1",
            f"rollout.environment.python={AGENTS}"
            if name == "coding_agent"
            else f"rollout.environment.name={environment_of(name)}",
        ],
    )
    run = train(config)
    assert [line["step"] for line in read_metrics(run)] == [0, 1, 2]
    assert all(
        line["eval/" + label + "/score_mean"] is not None for line in (read_metrics(run)[0], read_metrics(run)[2])
    )
    return [read_rollouts(rollout_path(run, step)) for step in (1, 2)]


def environment_of(name: str) -> str:
    """Return the example's environment, independent of the current folder."""
    own = load_config(EXAMPLES / name / "config.yaml").rollout.environment.name
    assert own is not None
    scheme, place = ("agent:", own.removeprefix("agent:")) if own.startswith("agent:") else ("", own)
    return own if own.startswith("gem:") else f"{scheme}{EXAMPLES.parent / place}"


@pytest.mark.parametrize("name", soak_but(["guess_number"], FILES))
def test_two_steps_of_each_example_train_on_exactly_what_was_generated(name: str, tmp_path: Path) -> None:
    if name == "guess_number" and importlib.util.find_spec("gem") is None:
        pytest.skip("gem-llm is not installed")
    if name == "coding_agent":
        need(AGENTS)
    for rows in two_steps(name, tmp_path / name):
        assert len(rows) == 16
        assert (rows["action_tokens"] > 0).all()
        assert torch.equal(rows["sequence_lengths"].row_sums(), rows["length"])
        gaps = (rows["old_log_probs"].values - rows["rollout_log_probs"].values).abs()
        worst = [
            float(gaps[a:b].max())
            for a, b in zip(rows["old_log_probs"].offsets[:-1], rows["old_log_probs"].offsets[1:], strict=True)
        ]
        print(f"{name}: largest gap of a row {max(worst):.1e} nats")
        assert all(gap <= 1e-5 for gap in worst), worst
        if name == "summaries":
            assert (rows["sequence_lengths"].lengths == 4).all(), "three parts and the question are a sequence each"
        elif name == "outside_agent":
            tries = torch.where(rows["reward"] == 1, 1, 2)
            assert torch.equal(rows["sequence_lengths"].lengths, tries), "a conversation is one sequence"
        elif name != "coding_agent":  # its agent leaves replies without a call out of the conversation
            assert (rows["sequence_lengths"].lengths == 1).all()


@pytest.mark.soak
def test_credit_by_turn_finds_the_right_first_turn_by_the_command_of_the_page(tmp_path: Path) -> None:
    turn_credit.prepare(tmp_path, 0)
    own = [f"model={tmp_path}/model", f"data.train={tmp_path}/doors.jsonl", f"data.eval.doors={tmp_path}/doors.jsonl"]
    shares = []
    for flow in ("row_credit", "turn_credit"):
        changes = [f"flow=examples/turn_credit/{flow}.yaml", f"output={tmp_path}", f"name={flow}", *own]
        with braid("train", "examples/turn_credit/config.yaml", *changes, folder=EXAMPLES.parent) as process:
            output = "".join(text or "" for text in process.communicate(timeout=300))
        assert process.returncode == 0, output[-2000:]
        shares.append(read_metrics(tmp_path / flow)[-1]["eval/doors/avg@4"])
    print(f"right first turns: {shares[0]:.2f} with credit by row, {shares[1]:.2f} by turn")
    assert shares[1] > max(0.6, shares[0])
