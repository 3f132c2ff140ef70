"""The placements of other frameworks run as configurations, with the result of a single process."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from braidrl.config import load_config
from braidrl.config.config import Config
from braidrl.runtimes.prepare.setup import prepare
from braidrl.runtimes.run import TrainingRun
from braidrl.runtimes.sizing import device_groups
from tests.invariants.traces import Step, assert_same, trace
from tests.runtimes.hybrid.warm import WarmCluster
from tests.tiny import ROOT

PLACEMENTS = ROOT / "examples" / "placements"
NAMES = ("deepspeed-chat", "openrlhf", "nemo-aligner", "verl")
ALONE = (
    "runtime=eager",
    "trainer.layout.shard=none",
    "trainer.layout.tensor=1",
    "rollout.tensor=1",
    "rollout.grouping=null",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder that the page's first command fills."""
    sys.path.insert(0, str(ROOT))
    from examples.placements.models import write

    folder = tmp_path_factory.mktemp("placements")
    write(folder)
    return folder


def configuration(name: str, made: Path, *more: str) -> Config:
    return load_config(
        PLACEMENTS / f"{name}.yaml",
        [
            f"model={made}/model",
            f"roles.reward.model={made}/reward-model",
            f"data.train={made}/train.jsonl",
            f"output={made}",
            "dtype=float64",
            "device=cpu",
            "threads=1",
            "trainer.steps=2",
            "trainer.prompts_per_step=8",
            "rollout.max_response_tokens=6",
            "rollout.slots=16",
            "trainer.checkpoint_every=1",
            "evaluation.every=0",
            "trainer.learning_rate=3e-3",
            *more,
        ],
    )


@pytest.fixture(scope="module")
def alone(made: Path) -> dict[str, list[Step]]:
    """Return the result of a single process, by the source of old log-probabilities."""
    result = {}
    for old in ("rollout", "recompute"):
        with TrainingRun(configuration("deepspeed-chat", made, *ALONE, f"name={old}", f"algorithm.old={old}")) as run:
            run.train()
        result[old] = trace(run.folder)
    return result


@pytest.mark.soak
@pytest.mark.parametrize("name", NAMES)
def test_each_placement_gives_the_result_of_one_process(
    name: str, made: Path, alone: dict[str, list[Step]], warm_cluster: WarmCluster
) -> None:
    config = configuration(name, made, f"name={name}")
    with TrainingRun(config) as run:
        run.train()
    assert_same(trace(run.folder), alone[config.algorithm.get("old", "recompute")])


def test_pools_are_those_of_the_framework_and_may_have_different_sizes(made: Path) -> None:
    sizes = {
        name: [group.devices for group in device_groups(prepare(configuration(name, made)).deployment)]
        for name in NAMES
    }
    assert sizes == {"deepspeed-chat": [4], "openrlhf": [1, 2, 1, 1, 1], "nemo-aligner": [2, 2], "verl": [4]}
