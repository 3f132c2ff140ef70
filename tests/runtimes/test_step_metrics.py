"""The metrics of a step, from the sums that its stages have counted."""

from __future__ import annotations

import pytest

from braidrl.data.rows import Rows
from braidrl.flow.recipes import load_flow
from braidrl.observe.metrics import Sums, read_metrics
from braidrl.runtimes.interfaces import IterationResult
from braidrl.runtimes.step_metrics import GAP, LearningWatch, training_metrics
from tests.tiny import Workshop


@pytest.mark.parametrize("roles", [("first", "second"), ("second", "first")])
def test_gap_is_that_of_the_trained_role_that_differs_most_from_its_engine(roles: tuple[str, str]) -> None:
    sums, of_role = Sums(), {"first": 0.3, "second": 0.001}
    for role in roles:
        sums.add(f"{role}/rollout_log_prob_gap", of_role[role])
    sums.add("third/rollout_log_prob_gap", 0.0, 0)
    assert training_metrics(IterationResult(Rows({}), Rows({}), None, None, sums)) == {GAP: 0.3}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([1.0, 1.0, 1.0, 1.0], ["groups/no_signal_fraction", "response/truncated_fraction"]),
        ([1.0, 1.0, 0.9, 1.0, 1.0], []),
    ],
)
def test_steps_without_a_signal_get_one_line_with_likely_causes(steps: list[float], expected: list[str]) -> None:
    said: list[str] = []
    watch = LearningWatch(load_flow("grpo"), said.append)
    for share in steps:
        watch.note({"groups/no_signal_fraction": share, "response/truncated_fraction": share})
    assert [line.split()[0] for line in said] == expected
    assert all("rollout.samples_per_prompt" in line or "rollout.max_response_tokens" in line for line in said)


def test_equal_rewards_are_no_fault_of_a_flow_with_a_critic() -> None:
    said: list[str] = []
    watch = LearningWatch(load_flow("ppo"), said.append)
    for _ in range(4):
        watch.note({"groups/no_signal_fraction": 1.0, "response/truncated_fraction": 0.0})
    assert said == []


def test_metrics_have_the_learning_rate_after_warm_up(workshop: Workshop) -> None:
    run = workshop.run("warm", trainer={"steps": 2, "warmup_steps": 2, "learning_rate": 4e-3})
    assert [line["actor/learning_rate"] for line in read_metrics(run)] == pytest.approx([2e-3, 4e-3])
