"""Partial rollout: suspended responses resume with the same draws, each row counts once, and staleness is bounded."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from braidrl.algorithms.policy_metrics import repeats_itself
from braidrl.data.rows import FinishReason
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.queue.table import Lease
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.saving.folders import run_config
from braidrl.runtimes.streaming.orders import StreamingBackend
from tests.invariants.traces import assert_same, merged, trace
from tests.runtimes.streaming.test_program import kill_when_it_holds_rows
from tests.runtimes.turns import PLAYED
from tests.tiny import Workshop, metrics_agree, recorded, sums, write_jsonl, write_model

STEPS = 5
SECTIONS: dict[str, Any] = {
    "dtype": "float64",
    "rollout": {"max_response_tokens": 40, "tokens_per_iteration": 12},
    "trainer": {
        "steps": STEPS,
        "prompts_per_step": 3,
        "max_staleness": 2,
        "surplus": "keep",
        "learning_rate": 3e-3,
        "checkpoint_every": 1,
        "keep_checkpoints": 9,
    },
}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("partial")
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", sums(64)))


@pytest.fixture(scope="module")
def eager(workshop: Workshop) -> Path:
    return workshop.run("eager", **SECTIONS)


def responses(run: Path, steps: int) -> dict[tuple[int, int, int], list[int]]:
    result = {}
    for step in range(1, steps + 1):
        rows = recorded(run, step)
        for i, uid in enumerate(rows.uids()):
            assert uid not in result, "a row is trained on once"
            result[uid] = rows["tokens"][i].tolist()
    return result


@pytest.mark.soak
def test_rows_have_tokens_of_several_versions_and_none_is_too_old(eager: Path) -> None:
    spans = []
    for step in range(1, STEPS + 1):
        rows = recorded(eager, step)
        assert len(rows) == 12 and int(rows["finish_reason"].max()) <= FinishReason.LENGTH
        assert step - 1 - int(rows["version"].min()) <= 2
        for i in range(len(rows)):
            versions, counts = rows["rollout_versions"][i].unique(return_counts=True)
            spans.append(len(versions))
            # Without a budget, an iteration samples the last tokens that staleness allows, or the tokens that the batch
            # lacked.
            assert all(count <= 12 for count in counts[:-1].tolist())
    assert max(spans) > 1 and len(responses(eager, STEPS)) == STEPS * 12


@pytest.fixture(scope="module")
def versions(eager: Path) -> list[Any]:
    """Return the model under each version of the eager run."""
    folders = [eager.parent / "model", *(eager / "checkpoints" / f"step-{step}" / "actor" for step in range(1, STEPS))]
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64) for folder in folders]


def under(model: Any, rows: Any, i: int) -> torch.Tensor:
    """Return a model's log-probs of a row's response."""
    tokens, start = rows["tokens"][i], int(rows["prompt_length"][i])
    with torch.no_grad():
        logits = model(tokens[None]).logits[0, start - 1 : -1]
    return logits.log_softmax(-1).gather(1, tokens[start:, None])[:, 0]


def test_each_token_keeps_log_prob_of_its_version(eager: Path, versions: list[Any]) -> None:
    for step in range(1, STEPS + 1):
        rows = recorded(eager, step)
        for i in range(len(rows)):
            for version in rows["rollout_versions"][i].unique().tolist():
                drawn = rows["rollout_versions"][i] == version
                expected, result = under(versions[version], rows, i), rows["rollout_log_probs"][i]
                torch.testing.assert_close(result[drawn], expected[drawn].to(result.dtype), rtol=0, atol=1e-5)


def test_an_update_weighs_each_token_by_the_version_that_drew_it(eager: Path, versions: list[Any]) -> None:
    """Compare an update's correction with a loop over rows, tokens and token versions."""
    sizes = []
    for step, line in enumerate(read_metrics(eager), 1):
        rows, ratios = recorded(eager, step), list[float]()
        for i in range(len(rows)):
            drawn_by = rows["rollout_versions"][i].tolist()
            told = {version: under(versions[version], rows, i) for version in {*drawn_by, step - 1}}
            ratios += [float((told[step - 1][t] - told[version][t]).exp()) for t, version in enumerate(drawn_by)]
        sizes.append(sum(ratios) ** 2 / (len(ratios) * sum(ratio**2 for ratio in ratios)))
        assert line["actor/effective_sample_size"] == pytest.approx(sizes[-1], abs=1e-6)
        assert line["actor/cut_fraction"] == pytest.approx(sum(ratio > 2 for ratio in ratios) / len(ratios))
    assert min(sizes) < 1 - 1e-4, "the test needs rows of several versions"


def test_suspension_with_constant_weights_equals_whole_responses(workshop: Workshop) -> None:
    still = merged(SECTIONS, {"trainer": {"learning_rate": 1e-30, "checkpoint_every": 0}})
    whole = responses(workshop.run("whole", **merged(still, {"rollout": {"tokens_per_iteration": 40}})), STEPS)
    parts = responses(workshop.run("parts", **still), STEPS)
    common = whole.keys() & parts.keys()
    assert len(common) > STEPS * 6
    assert {uid: parts[uid] for uid in common} == {uid: whole[uid] for uid in common}


EPISODES: dict[str, Any] = merged(
    SECTIONS,
    {
        "trainer": {"learning_rate": 1e-30, "steps": 3},
        "rollout": {
            "max_response_tokens": 8,
            "tokens_per_iteration": 5,
            "environment": {"name": PLAYED, "resume": "replay"},
        },
    },
)


def test_suspended_episodes_with_constant_weights_equal_whole_ones(workshop: Workshop) -> None:
    whole = workshop.run("whole-episodes", **merged(EPISODES, {"rollout": {"tokens_per_iteration": 99}}))
    first = workshop.run("episodes", **merged(EPISODES, {"trainer": {"steps": 1}}))
    config = run_config(first)
    trainer = config.trainer.model_copy(update={"steps": 3})
    with TrainingRun(config.model_copy(update={"trainer": trainer}), resume=first) as run:
        run.train()
    resumed, expected = responses(first, 3), responses(whole, 3)
    common = resumed.keys() & expected.keys()
    assert len(common) > 20 and {uid: resumed[uid] for uid in common} == {uid: expected[uid] for uid in common}
    rows = recorded(first, 3)
    assert any(len(versions.unique()) > 1 for versions in rows["rollout_versions"].unbind())
    assert not any("environment/failures/replay" in line for line in read_metrics(first))


@pytest.mark.soak
@pytest.mark.parametrize("runtime", ["distributed", "hybrid", "streaming"])
def test_every_runtime_suspends_episodes(workshop: Workshop, request: pytest.FixtureRequest, runtime: str) -> None:
    if runtime == "hybrid":
        request.getfixturevalue("warm_cluster")
    alone = workshop.run(f"{runtime}-alone", **EPISODES)
    run = workshop.run(f"{runtime}-episodes", runtime=runtime, workers=2, **EPISODES)
    resumed, expected = responses(run, 3), responses(alone, 3)
    common = resumed.keys() & expected.keys()
    assert len(common) > 20 and {uid: resumed[uid] for uid in common} == {uid: expected[uid] for uid in common}
    assert max(len(v.unique()) for step in (1, 2, 3) for v in recorded(run, step)["rollout_versions"].unbind()) > 1


@pytest.mark.parametrize("runtime", ["distributed", "hybrid"])
def test_every_runtime_sets_the_same_responses_aside(
    workshop: Workshop, eager: Path, request: pytest.FixtureRequest, runtime: str
) -> None:
    if runtime == "hybrid":
        request.getfixturevalue("warm_cluster")
    assert_same(trace(workshop.run(runtime, runtime=runtime, workers=2, **SECTIONS)), trace(eager))


def test_resumed_run_continues_suspended_responses(workshop: Workshop, eager: Path) -> None:
    first = workshop.run("resumed", **merged(SECTIONS, {"trainer": {"steps": 2}}))
    config = run_config(first)
    trainer = config.trainer.model_copy(update={"steps": STEPS})
    with TrainingRun(config.model_copy(update={"trainer": trainer}), resume=first) as run:
        run.train()
    assert metrics_agree(eager, first, tolerance=1e-9)
    assert responses(first, STEPS) == responses(eager, STEPS)


def check_each_row(run: Path, steps: int) -> int:
    """Assert that rows are trained once and in time, with versions that never decrease; return the most versions of a
    row.
    """
    responses(run, steps)
    most = 0
    for step in range(1, steps + 1):
        rows = recorded(run, step)
        assert len(rows) == 12
        assert {step - 1 - version for version in rows["version"].tolist()} <= {0, 1, 2}
        for i in range(len(rows)):
            versions = rows["rollout_versions"][i]
            assert len(versions) == len(rows["rollout_log_probs"][i]) <= 40 and bool((versions.diff() >= 0).all())
            most = max(most, len(versions.unique()))
    return most


@pytest.mark.soak
def test_rows_suspended_by_streaming_resume_under_another_runtime(workshop: Workshop) -> None:
    """The property holds even if an engine dies with rows that others have started."""
    sections = merged(SECTIONS, {"trainer": {"steps": 2}, "rollout": {"tokens_per_iteration": 4}})
    killed = list[int]()
    with TrainingRun(workshop.config("streamed", runtime="streaming", **sections)) as streamed:
        backend, first = streamed.backend, streamed.folder
        assert isinstance(backend, StreamingBackend)

        def goes_on(lease: Lease) -> bool:
            return any(row in backend.stream.schedule.versions.suspended for row in lease.rows)

        killer = Thread(
            target=kill_when_it_holds_rows, args=(backend, "actor.generate", killed), kwargs={"chosen": goes_on}
        )
        killer.start()
        streamed.train()
        killer.join()
        assert [m.starts for m in backend.processes.members if m.group.name == "actor.generate"] == [1]
    state = json.loads((first / "checkpoints" / "step-2" / "state.json").read_text())
    assert state["sampling"]["pending"] and state["surplus"]
    config = run_config(first)
    trainer = config.trainer.model_copy(update={"steps": STEPS})
    with TrainingRun(config.model_copy(update={"trainer": trainer, "runtime": "eager"}), resume=first) as run:
        run.train()
    assert check_each_row(first, STEPS) > 1
    trained = {group for step in (3, 4, 5) for group in recorded(first, step)["group"].tolist()}
    assert trained & set(state["sampling"]["pending"])


def test_streaming_draws_an_evaluations_responses_whole(workshop: Workshop) -> None:
    evaluation = {"every": 1, "samples": 2, "max_prompts": 3}
    sections = merged(SECTIONS, {"trainer": {"steps": 1}, "data": {"eval": {"sums": str(workshop.data)}}})
    run = workshop.run("evaluated", runtime="streaming", evaluation=evaluation, **sections)
    assert read_metrics(run)[-1]["eval/sums/length_mean"] > SECTIONS["rollout"]["tokens_per_iteration"]


@pytest.mark.soak
@pytest.mark.parametrize("way", ["end", "delayed", "rolling", "interrupt"])
def test_streaming_resumes_suspended_rows_under_each_update_policy(workshop: Workshop, way: str) -> None:
    streaming = {"weights": way, "workers": {"actor.generate": 2}}
    sections = merged(SECTIONS, {"runtime": "streaming", "streaming": streaming, "rollout": {"slots": 4}})
    first = workshop.run(f"streamed-{way}", **merged(sections, {"trainer": {"steps": 3}}))
    config = run_config(first)
    trainer = config.trainer.model_copy(update={"steps": 8})
    with TrainingRun(config.model_copy(update={"trainer": trainer}), resume=first) as run:
        run.train()
    assert check_each_row(first, 8) > 1


def test_a_response_that_repeats_itself_is_ended_and_counted(workshop: Workshop) -> None:
    assert repeats_itself(torch.tensor([9, 1, 2, 1, 2, 1, 2, 1, 2]), 8)
    assert not repeats_itself(torch.tensor([1, 2, 1, 2, 1, 2, 1, 3]), 8) and not repeats_itself(torch.ones(7), 8)
    # At a low temperature a tiny model often repeats a token four times.
    cold = {"temperature": 0.05, "repeated_tokens": 4}
    run = workshop.run("repeats", **merged(SECTIONS, {"rollout": cold, "trainer": {"steps": 2}}))
    lines = read_metrics(run)
    for step in (1, 2):
        rows = recorded(run, step)
        repeated = (rows["finish_reason"] == FinishReason.REPEAT).double().mean()
        assert lines[step - 1]["response/repeated_fraction"] == pytest.approx(float(repeated))
    assert any(line["response/repeated_fraction"] > 0 for line in lines)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"environment": "module:World"}}, "write rollout.environment.resume=replay"),
        ({"trainer": {"surplus": "drop"}}, "write trainer.max_staleness=1 and trainer.surplus=keep"),
        ({"flow": "remax"}, "flow remax generates none, several"),
        (
            {"runtime": "streaming", "streaming": {"on_policy_share": 0.5}},
            "trainer.surplus=keep adds others; write trainer.surplus=drop",
        ),
        ({"rollout": {"tokens_per_iteration": None, "repeated_tokens": 8}}, "write rollout.tokens_per_iteration too"),
    ],
)
def test_unsupported_suspension_is_refused_before_start(
    workshop: Workshop, sections: dict[str, Any], message: str
) -> None:
    if "environment" in sections.get("rollout", {}):
        (workshop.folder / "worlds.py").write_text("def world(texts, example):\n    return None\n")
        sections = {"rollout": {"environment": f"{workshop.folder}/worlds.py:world"}}
    with pytest.raises(UserError, match=message) as caught:
        TrainingRun(workshop.config("refused", **merged(SECTIONS, sections)))
    assert "\n" not in str(caught.value) and not (workshop.folder / "refused").exists()
