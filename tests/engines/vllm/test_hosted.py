"""vLLM on the ranks that train, in place: a run is that of the embedded engine, in every layout and runtime, and after
a kill.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.config import parse_config
from braidrl.errors import UserError
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.restarts import train
from tests.engines.vllm.hosted_runs import ENVIRONMENT, hosted, vllm_interpreter, write_wide_model
from tests.invariants.traces import merged
from tests.runtimes.turns import PLAYED
from tests.tiny import ROOT, Workshop, metrics_without_times, recorded, weights_of

# Each rank starts vLLM, on a busy machine for minutes.
pytestmark = pytest.mark.timeout(900)
IN_PLACE: dict[str, Any] = {"rollout": {"engine": "vllm", "engines": 0, "reproducible": True}}
BY_TENSOR = merged(IN_PLACE, {"rollout": {"tensor": 2}})
RANKS: dict[str, Any] = {"runtime": "distributed", "workers": 2}
TRAINED_BY_TENSOR: dict[str, Any] = {"trainer": {"layout": {"tensor": 2}}}
GRPO: dict[str, Any] = {
    "algorithm": {"old": "recompute"},
    "trainer": {"steps": 2, "prompts_per_step": 4, "rows_per_update": 8, "checkpoint_every": 2},
    "rollout": {"samples_per_prompt": 2, "max_response_tokens": 8},
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "shards": merged(BY_TENSOR, {"trainer": {"layout": {"shard": "full"}}}),
    "copies": IN_PLACE,
    "whole of halves": merged(IN_PLACE, TRAINED_BY_TENSOR),
    "halves of halves": merged(BY_TENSOR, TRAINED_BY_TENSOR),
    "neighbours": merged(merged(BY_TENSOR, TRAINED_BY_TENSOR), {"rollout": {"grouping": "neighbour"}}),
}
ON_FOUR: dict[str, dict[str, Any]] = {
    "interval": merged(BY_TENSOR, {"trainer": {"layout": {"tensor": 4}}}),
    "interval twice": merged(BY_TENSOR, {"trainer": {"layout": {"tensor": 2, "data": 2}}}),
    "pipeline": merged(BY_TENSOR, {"trainer": {"layout": {"pipeline": 2, "tensor": 2}}}),
}
LORA: dict[str, Any] = {"trainer": {"lora": {"rank": 4, "alpha": 16}, "learning_rate": 1e-2}}


@pytest.fixture
def wide(workshop: Workshop) -> Workshop:
    workshop.model = write_wide_model(workshop.folder / "wide")
    return workshop


def run_in_place(workshop: Workshop, runs: dict[str, dict[str, Any]], workers: int = 2, **sections: Any) -> None:
    """Make runs under `distributed` on the same ranks, or with other sections each in a process of its own."""
    sections = sections or {"runtime": "distributed", "workers": workers}
    trees = [workshop.tree(name, **merged(merged(GRPO, own), sections)) for name, own in runs.items()]
    hosted({"runs": trees, "workers": workers if sections["runtime"] == "distributed" else 0}, workshop.folder)


def assert_equal_runs(ours: Path, theirs: Path, steps: int = 2, step: float = 1e-3) -> None:
    """Tokens are identical; weights differ by less than half a step of the learning rate, since Adam magnifies what
    float32 rounds.
    """
    for number in range(1, steps + 1):
        one, other = (recorded(folder, number).ordered() for folder in (ours, theirs))
        assert one.uids() == other.uids()
        assert one["tokens"].values.tolist() == other["tokens"].values.tolist()
    assert max(line["train/rollout_log_prob_gap"] for line in read_metrics(ours)) < 1e-5
    weights = weights_of(theirs)
    for name, tensor in weights_of(ours).items():
        torch.testing.assert_close(tensor, weights[name], atol=step / 2, rtol=0)


@pytest.mark.soak
def test_vllm_in_place_trains_the_embedded_engines_run(wide: Workshop) -> None:
    run_in_place(wide, {"halves": BY_TENSOR})
    assert_equal_runs(wide.folder / "halves", wide.run("alone", **GRPO))
    # Each rank has all of the matrices of which it generates with half.
    assert read_metrics(wide.folder / "halves")[0].get("weights/actor/received") is None


@pytest.mark.soak
def test_vllm_of_two_ranks_plays_the_embedded_engines_episodes(wide: Workshop) -> None:
    played = {"rollout": {"environment": PLAYED}, "trainer": {"prompts_per_step": 3, "rows_per_update": 6}}
    run_in_place(wide, {"played": merged(BY_TENSOR, played)})
    assert_equal_runs(wide.folder / "played", wide.run("played-alone", **merged(GRPO, played)))


@pytest.mark.soak
def test_every_layout_of_two_ranks_trains_one_run(wide: Workshop) -> None:
    run_in_place(wide, LAYOUTS)
    alone = wide.run("alone", **GRPO)
    for name in LAYOUTS:
        assert_equal_runs(wide.folder / name, alone)
    # Half of each matrix lies where it is generated with.
    assert read_metrics(wide.folder / "halves of halves")[0].get("weights/actor/received") is None


@pytest.mark.soak
def test_generation_groups_at_intervals_of_four_ranks_train_one_run(wide: Workshop) -> None:
    run_in_place(wide, ON_FOUR, 4)
    alone = wide.run("alone", **GRPO)
    for name in ON_FOUR:
        assert_equal_runs(wide.folder / name, alone)


@pytest.mark.soak
def test_one_process_hosts_vllm(wide: Workshop) -> None:
    run_in_place(wide, {"eager": IN_PLACE}, runtime="eager")
    assert_equal_runs(wide.folder / "eager", wide.run("alone", **GRPO))


@pytest.mark.soak
def test_hybrid_hosts_vllm_colocated_and_apart(wide: Workshop) -> None:
    apart = {
        "placement": [{"roles": ["actor.generate"], "workers": 2}, {"roles": ["actor", "reference"], "workers": 2}]
    }
    by_tensor = {**merged(BY_TENSOR, TRAINED_BY_TENSOR), "workers": 2}
    runs = {"colocated": by_tensor, "apart": {**by_tensor, **apart}}
    run_in_place(wide, runs, runtime="hybrid", cluster={"cpus": 4})
    alone = wide.run("alone", **GRPO)
    for name in runs:
        assert_equal_runs(wide.folder / name, alone)


@pytest.mark.soak
def test_a_stock_vllm_in_place_draws_by_its_own_numbers(wide: Workshop) -> None:
    stock = merged(merged(BY_TENSOR, TRAINED_BY_TENSOR), {"rollout": {"reproducible": False}})
    run_in_place(wide, {"one": stock, "two": stock})
    drawn = [recorded(wide.folder / name, 1).ordered()["tokens"].values.tolist() for name in ("one", "two")]
    assert drawn[0] != drawn[1]
    for name in ("one", "two"):
        assert max(line["train/rollout_log_prob_gap"] for line in read_metrics(wide.folder / name)) < 1e-5


@pytest.mark.soak
def test_adapters_alone_are_sent_in_place(wide: Workshop) -> None:
    runs = {"divided": merged(merged(BY_TENSOR, TRAINED_BY_TENSOR), LORA), "copies": merged(IN_PLACE, LORA)}
    run_in_place(wide, runs)
    alone = wide.run("alone", **merged(GRPO, LORA))
    for name in runs:
        assert_equal_runs(wide.folder / name, alone, step=1e-2)


@pytest.mark.soak
def test_a_killed_run_in_place_resumes_exactly(wide: Workshop) -> None:
    sections = merged(merged(BY_TENSOR, TRAINED_BY_TENSOR), {"trainer": {"steps": 6}})
    run_in_place(wide, {"whole": sections})
    file = wide.config_file("killed", **merged(merged(GRPO, sections), RANKS))
    command = [vllm_interpreter(), "-m", "braidrl.cli", "train", str(file)]
    process = subprocess.Popen(command, cwd=ROOT, env=os.environ | ENVIRONMENT, start_new_session=True)
    end = time.monotonic() + 300
    while not (wide.folder / "killed" / "checkpoints" / "step-2").is_dir():
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    assert (
        subprocess.run(
            [*command[:-1], "--resume", str(wide.folder / "killed")], cwd=ROOT, env=os.environ | ENVIRONMENT
        ).returncode
        == 0
    )
    assert metrics_without_times(wide.folder / "killed") == metrics_without_times(wide.folder / "whole")


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"python": "/usr/bin/python3"}}, "remove rollout.python"),
        ({"trainer": {"resident_gib": 1.0}}, "trainer.resident_gib does not move vLLM"),
        (
            {"rollout": {"pipeline": 2}},
            r"rollout.pipeline=2: .*tensor parallelism alone",
        ),
        ({"rollout": {"vllm": {"enable_sleep_mode": False}}}, "enable_sleep_mode=false"),
        ({"rollout": {"tensor": 3}, "workers": 3}, "rollout.tensor=3 does not divide"),
        ({"runtime": "streaming"}, "write rollout.engines=1"),
        ({"runtime": "eager", "rollout": {"tensor": 2}}, "write rollout.engines=1"),
    ],
)
def test_what_ranks_that_host_vllm_cannot_do_is_one_line(
    workshop: Workshop, sections: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("braidrl.runtimes.prepare.setup.has_package", lambda name, python=None: True)
    with pytest.raises(UserError, match=words) as caught:
        train(parse_config(workshop.tree("refused", **merged(merged(RANKS, IN_PLACE), sections))))
    assert "\n" not in str(caught.value)
