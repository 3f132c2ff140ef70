"""Groups that a batch turns out not to need are given up while they are generated; what is trained on is the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from braidrl.errors import UserError
from braidrl.flow.recipes import load_flow
from braidrl.observe.metrics import read_metrics
from braidrl.rewards.verify import Pending
from braidrl.rollout.embedded import EmbeddedEngine
from braidrl.rollout.requests import Uid
from braidrl.runtimes.early_stop import segment_of
from tests.tiny import Workshop, recorded, weights_of

SECTIONS: dict[str, Any] = {
    "flow": "dapo", "algorithm": {"overlong_cache": 2},
    "rollout": {"samples_per_prompt": 4, "slots": 16, "reflection_phrases": ["+", "="]},
    "trainer": {"steps": 3, "prompts_per_step": 3, "learning_rate": 3e-3, "over_sampling": 3.0},
}  # fmt: skip


def at_once(check: Pending) -> bool:
    """Checks are waited for, so that a test does not depend on how fast they are."""
    check.result()
    return True


def assert_same_runs(ours: Path, theirs: Path) -> None:
    timed = ("time/", "throughput/")
    for our, their in zip(read_metrics(ours), read_metrics(theirs), strict=True):
        assert {n: v for n, v in our.items() if not n.startswith(timed)} == {
            n: v for n, v in their.items() if not n.startswith(timed)
        }
        assert recorded(ours, our["step"]).uids() == recorded(theirs, our["step"]).uids()
    assert all((weights_of(ours)[name] == tensor).all() for name, tensor in weights_of(theirs).items())


@pytest.mark.parametrize("engines", [{}, {"engines": 1}])
def test_what_is_given_up_is_not_drawn_to_its_end_and_changes_nothing(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, engines: dict[str, int]
) -> None:
    aborted: list[Uid] = []
    abort = EmbeddedEngine.abort

    def noting(engine: EmbeddedEngine, uid: Uid) -> Any:
        aborted.append(uid)
        return abort(engine, uid)

    monkeypatch.setattr(Pending, "done", at_once)
    monkeypatch.setattr(EmbeddedEngine, "abort", noting)
    sections = {**SECTIONS, "rollout": {**SECTIONS["rollout"], **engines}}
    early = workshop.run("early", **sections)
    if not engines:
        assert aborted, "no group was given up"
        last = recorded(early, 1)["group"].max()
        assert all(group > last for _, group, _ in aborted if group < 9), (
            "a group was given up that came before the batch's last"
        )
    assert any(line.get("groups/dropped/surplus", 0) for line in read_metrics(early))
    monkeypatch.setattr("braidrl.runtimes.iteration.segment_of", lambda flow, iteration: None)
    assert_same_runs(early, workshop.run("whole", **sections))


def test_groups_whose_selection_needs_more_than_rules_are_generated_to_their_ends() -> None:
    dapo = load_flow("dapo", {}, {"max_response_tokens": 8, "samples_per_prompt": 4})
    segment = segment_of(dapo, 1)
    assert segment is not None and [stage.type for stage in segment.verify] == ["verify"]
    assert segment_of(load_flow("grpo", {}, {"samples_per_prompt": 4}), 1) is None, "nothing is selected"


def test_a_flow_that_selects_nothing_has_nothing_to_begin_more_groups_for(workshop: Workshop) -> None:
    with pytest.raises(
        UserError, match=r"trainer.over_sampling=1.5 begins groups .* flow grpo selects none; remove it"
    ):
        workshop.run("refused", trainer={"over_sampling": 1.5})
