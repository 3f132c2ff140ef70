"""Groups that a batch does not need are aborted during generation, and the trained rows stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from braidrl.cluster import world
from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import Notices
from braidrl.data.rows import Rows, Uid
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.errors import UserError
from braidrl.flow.recipes import load_flow
from braidrl.flow.selecting import GroupSelector
from braidrl.observe.metrics import MEASURED, read_metrics
from braidrl.observe.trace import read_trace
from braidrl.rewards.verify import RIGHT_OR_WRONG, Pending, Scores
from braidrl.runtimes.generating.verification import EarlyStop, segment_of
from braidrl.runtimes.run import TrainingRun
from tests.invariants.traces import assert_same_weights
from tests.runtimes.hybrid.warm import WarmCluster
from tests.runtimes.patience import at_once
from tests.runtimes.spmd.ranks import WAIT_S
from tests.tiny import Workshop, recorded, weights_of

SECTIONS: dict[str, Any] = {
    "flow": "dapo",
    "algorithm": {"overlong_cache": 2},
    "rollout": {"samples_per_prompt": 4, "slots": 16, "reflection_phrases": ["+", "="]},
    "trainer": {"steps": 3, "prompts_per_step": 3, "learning_rate": 3e-3, "over_sampling": 3.0},
}


def assert_same_batches(ours: Path, theirs: Path) -> None:
    """Assert that each step trained the same rows with the same result, up to rounding."""
    for our, their in zip(read_metrics(ours), read_metrics(theirs), strict=True):
        # Ranks write their rows one after the other.
        rows, others = (recorded(run, our["step"]).ordered() for run in (ours, theirs))
        assert rows.uids() == others.uids() and rows["tokens"].tolist() == others["tokens"].tolist()
        same = ("response/", "groups/", "score/", "reward/", "tokens/")
        assert {n: v for n, v in our.items() if n.startswith(same)} == {
            n: v for n, v in their.items() if n.startswith(same)
        }
    assert_same_weights(weights_of(ours), weights_of(theirs))


def assert_same_runs(ours: Path, theirs: Path) -> None:
    for our, their in zip(read_metrics(ours), read_metrics(theirs), strict=True):
        assert {n: v for n, v in our.items() if not n.startswith(MEASURED)} == {
            n: v for n, v in their.items() if not n.startswith(MEASURED)
        }
        assert recorded(ours, our["step"]).uids() == recorded(theirs, our["step"]).uids()
    assert all((weights_of(ours)[name] == tensor).all() for name, tensor in weights_of(theirs).items())


@pytest.mark.parametrize("engines", [{}, pytest.param({"engines": 1}, marks=pytest.mark.soak)])
def test_abandoned_groups_end_early_without_changing_result(
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
        assert aborted, "no group was aborted"
        last = recorded(early, 1)["group"].max()
        assert all(group > last for _, group, _ in aborted if group < 9), (
            "an aborted group precedes the batch's last group"
        )
    assert any(line.get("groups/dropped/surplus", 0) for line in read_metrics(early))
    monkeypatch.setattr("braidrl.runtimes.controller.segment_of", lambda *_: None)
    assert_same_runs(early, workshop.run("whole", **sections))


def test_checks_of_rows_whose_group_ended_early_are_not_kept(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Pending, "done", at_once)
    # The engine has rows of a group whose other rows wait.
    sections = {**SECTIONS, "rollout": {"samples_per_prompt": 5, "slots": 16}}
    with TrainingRun(workshop.config("left", **{**sections, "trainer": {**SECTIONS["trainer"], "steps": 2}})) as run:
        run.train()
        left = [rows for some in run.backend.executor.generation.checks.pending.values() for rows, _ in some]
    # At most those of the last wave, behind its batch.
    assert all(rows["group"].min() > recorded(run.folder, 2)["group"].max() for rows in left)


def drawn_in(run: Path) -> int:
    """Return the number of tokens that engines sampled, including those of aborted rows."""
    return sum(span.tokens for span in read_trace(run) if span.stage == "actor.generate")


@pytest.mark.parametrize("tensor", [pytest.param(1, marks=pytest.mark.soak), 2])
@pytest.mark.parametrize("runtime", [pytest.param("distributed", marks=pytest.mark.soak), "hybrid"])
def test_ranks_abort_rows_that_other_ranks_make_unnecessary(
    workshop: Workshop, warm_cluster: WarmCluster, monkeypatch: pytest.MonkeyPatch, runtime: str, tensor: int
) -> None:
    """Ranks of one `tensor` group decode together, and end rows in the same step."""
    # Each rank decodes 16 of its 54 rows at once, so most rows wait while the first groups are decided.
    rollout = {**SECTIONS["rollout"], "max_response_tokens": 50}
    trainer = {**SECTIONS["trainer"], "steps": 2, "over_sampling": 9.0}
    sections = {**SECTIONS, "rollout": rollout, "trainer": trainer, "dtype": "float64"}
    apart = {"trainer": {**trainer, "layout": {"tensor": tensor}}, "rollout": {**rollout, "tensor": tensor}}
    tree = workshop.tree("early", **{**sections, **apart}, runtime=runtime, workers=2)
    if runtime == "distributed":
        run_ranks("tests.runtimes.patience:run_all_patiently", {"runs": [tree]}, 2, WAIT_S)
    else:
        workshop.run("early", **{**sections, **apart}, runtime=runtime, workers=2)
    monkeypatch.setattr("braidrl.runtimes.controller.segment_of", lambda *_: None)
    early, whole = workshop.folder / "early", workshop.run("whole", **sections)
    print(f"{runtime}: {drawn_in(early)} tokens were drawn, and {drawn_in(whole)} without giving up")
    assert drawn_in(early) < 0.8 * drawn_in(whole)
    assert_same_batches(early, whole)


def test_rank_aborts_own_rows_using_other_ranks_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "HEAR_EVERY_S", 0.0)
    dapo = load_flow("dapo", {}, {"max_response_tokens": 8, "samples_per_prompt": 2})
    sampling, store = GroupSelector(1, 9, over_sampling=3.0), dist.HashStore()
    segment = segment_of(dapo, 1, sampling.needless)
    assert segment is not None
    (verify,) = segment.verify
    sampling.admit([0, 1, 2])
    uids = [(0, group, sample) for group in (0, 1, 2) for sample in (0, 1)]
    first, second, third = (EarlyStop(segment, dapo, uids, Notices(store), wave=1) for _ in range(3))
    # Group 0 has right and wrong answers and is kept, which makes groups 1 and 2 unnecessary.
    first.add(row(0, 0), {verify.name: Done(1.0)})
    assert first.rows_to_end() == third.rows_to_end() == []
    second.add(row(0, 1), {verify.name: Done(0.0, ready=False)})
    assert second.rows_to_end() == first.rows_to_end() == []
    # Its own rows have ended, and the others need not wait until the ranks meet.
    second.close()
    assert first.rows_to_end() == third.rows_to_end() == uids[2:]


class Done(Pending):
    """Return a finished check with this score."""

    def __init__(self, score: float, ready: bool = True) -> None:
        self.score, self.ready = score, ready

    def done(self) -> bool:
        return self.ready

    def result(self, scores: Scores = RIGHT_OR_WRONG) -> dict[str, Any]:
        score = torch.tensor([self.score])
        return {"score": score, "correct": score}


def row(group: int, sample: int) -> Rows:
    identity = {"source": 0, "group": group, "sample": sample}
    return Rows({name: torch.tensor([number]) for name, number in identity.items()})


def test_groups_finish_if_selection_needs_more_than_rules() -> None:
    dapo = load_flow("dapo", {}, {"max_response_tokens": 8, "samples_per_prompt": 4})
    needless = GroupSelector(1, 9).needless
    segment = segment_of(dapo, 1, needless)
    assert segment is not None and [stage.type for stage in segment.verify] == ["verify"]
    grpo = load_flow("grpo", {}, {"samples_per_prompt": 4})
    assert segment_of(grpo, 1, needless) is None, "the flow has no selection"


def test_flow_without_selection_starts_no_extra_groups(workshop: Workshop) -> None:
    with pytest.raises(
        UserError, match=r"trainer.over_sampling replaces dropped groups, and flow grpo selects none; remove it"
    ):
        workshop.run("refused", trainer={"over_sampling": 1.5})
