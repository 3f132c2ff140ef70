"""Groups that a batch does not need are aborted during generation, and the trained rows stay the same."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster import rounds
from braidrl.cluster.process_groups import group_between
from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.data.rows import Rows, Uid
from braidrl.engines.embedded.embedded_engine import EmbeddedEngine
from braidrl.errors import UserError
from braidrl.flow.recipes import load_flow
from braidrl.observe.metrics import MEASURED, read_metrics
from braidrl.observe.progress import Progress
from braidrl.observe.trace import read_trace
from braidrl.rewards.verify import RIGHT_OR_WRONG, Pending, Scores
from braidrl.runtimes.generating.verification import EarlyStop, Segment, segment_of
from braidrl.runtimes.run import TrainingRun
from tests.invariants.traces import assert_same_weights
from tests.queue.made_up import GENERATE
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
    monkeypatch.setattr(rounds, "ROUND_EVERY_S", 0.0)
    dapo = load_flow("dapo", {}, {"max_response_tokens": 8, "samples_per_prompt": 2})
    segment = segment_of(dapo, 1, 1)
    assert segment is not None
    (verify,) = segment.verify
    # The rows of group 0 are on two ranks; the third has the only rows that turn out not to be needed.
    shares = [[(0, 0, 0)], [(0, 0, 1)], [(0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1)]]

    def play(alone: World) -> list[Uid]:
        stop = EarlyStop(segment, dapo, shares[alone.rank], 2, alone, wave=1)
        if alone.rank < 2:
            # Group 0 has right and wrong answers and is kept, which makes groups 1 and 2 unnecessary.
            stop.add(row(0, alone.rank), {verify.name: Done(float(alone.rank), ready=alone.rank == 0)})
            stop.close()
            return stop.rounds.totals.sums[0] if stop.rounds and stop.rounds.totals else []  # type: ignore[return-value]
        ended: list[Uid] = []
        while not ended:
            ended = stop.rows_to_end()
        stop.close()
        return ended

    assert in_threads(3, play) == [1, 1, shares[2]]


def test_two_episodes_at_once_are_two_on_three_ranks() -> None:
    grpo, playing, most, seen = load_flow("grpo", {}, {"samples_per_prompt": 4}), set[int](), [0], dict[int, str]()

    def play(alone: World) -> str:
        screen = io.StringIO()
        with Progress(stream=screen).stage("actor.generate", 2) as bar:
            stop = EarlyStop(None, grpo, [(0, alone.rank, 0), (0, alone.rank, 1)], 2, alone)
            stop.bar = bar
            stop.wait_for_turn(2)
            playing.add(alone.rank)
            most[0] = max(most[0], len(playing))
            for _ in range(2):
                time.sleep(0.05)
                bar.update(1, 10)
                stop.count(10)
            playing.discard(alone.rank)
            stop.close()
            rows, tokens, total = bar.other_ranks
            return f"{bar.rows + rows}/{2 + total} rows, {bar.tokens + tokens} tokens"

    seen = in_threads(3, play)
    assert most == [2] and seen == ["6/6 rows, 60 tokens"] * 3


def in_threads(ranks: int, play: Callable[[World], Any]) -> list[Any]:
    """Return the result of each rank of a world whose ranks are threads."""
    store, limit_s = dist.HashStore(), 20.0

    def one(rank: int) -> Any:
        own = World(rank, ranks, group_between(store, rank, ranks, limit_s, False, "127.0.0.1"), store)
        try:
            return play(own)
        finally:
            own.leave_store()

    with ThreadPoolExecutor(ranks) as threads:
        return list(threads.map(one, range(ranks)))


@given(st.lists(st.booleans(), min_size=1, max_size=12), st.integers(1, 5), st.data())
def test_the_batch_does_not_depend_on_completion_order_or_aborts(
    kept: list[bool], wanted: int, data: st.DataObject
) -> None:
    segment, decided = Segment(GENERATE, (), (), wanted), dict[int, bool]()
    for group in data.draw(st.permutations(range(len(kept)))):
        decided[group] = kept[group]
        undecided = min(set(range(len(kept))) - decided.keys(), default=len(kept))
        if segment.is_enough(sum(keep for one, keep in decided.items() if one < undecided), undecided):
            break
    batch = [group for group in sorted(decided) if decided[group]][:wanted]
    assert batch == [group for group, keep in enumerate(kept) if keep][:wanted]


def test_a_fast_group_never_replaces_a_slow_earlier_group() -> None:
    segment = Segment(GENERATE, (), (), 2, kept=(0, 5))
    assert not segment.is_enough(0, undecided=4), "group 4 can still be kept, and group 5 then is not needed"
    assert segment.is_enough(0, undecided=6) and segment.is_enough(1, undecided=1)


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
    segment = segment_of(dapo, 1, 1)
    assert segment is not None and [stage.type for stage in segment.verify] == ["verify"]
    grpo = load_flow("grpo", {}, {"samples_per_prompt": 4})
    assert segment_of(grpo, 1, 1) is None, "the flow has no selection"


def test_flow_without_selection_starts_no_extra_groups(workshop: Workshop) -> None:
    with pytest.raises(UserError, match=r"trainer.over_sampling .*flow grpo .*; remove it"):
        workshop.run("refused", trainer={"over_sampling": 1.5})
