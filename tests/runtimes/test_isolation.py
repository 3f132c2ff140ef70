"""A row that ends its engine, rank or worker is left out, with the same result in every runtime."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from braidrl.cluster.row_deaths import RowDeaths
from braidrl.data.rows import Rows
from braidrl.flow import Stage
from braidrl.flow.stages import make_stage
from braidrl.observe.metrics import read_metrics
from braidrl.runtimes.isolation import can_isolate, run_isolated
from tests.tiny import Workshop, braid, metrics_agree, recorded, sums, write_jsonl, write_model

DEADLY = """
import os, signal


def deadly(response: str, prompt: str) -> bool:
    if prompt.startswith({prompt!r}):
        os.kill(os.getpid(), signal.SIGKILL)
    return response[:1] in set("02468")
"""
RUNTIMES: dict[str, dict[str, Any]] = {
    "streaming": {},
    "distributed": {"workers": 3},
    "hybrid": {"workers": 2},
}
WORLDS = """
import os

from braidrl.agents.turns import Observation


class Deadly:
    turn = 0

    async def reset(self, example):
        self.group = example["group"]
        return None

    async def step(self, text):
        if self.group == 3:
            os._exit(3)
        self.turn += 1
        return Observation(" 4+4=", 0.5 * (text[:1] in set("02468")), done=self.turn == 2)
"""
LEFT_OUT = re.compile(r"row \((\d+), (\d+), (\d+)\) .*is left out: 3 ")


def test_suspects_run_alone_and_rows_keep_their_order() -> None:
    deaths, passes = RowDeaths(), list[list[int]]()
    rows = Rows({"source": torch.zeros(6, dtype=torch.int64), "group": torch.arange(6) // 2, "sample": torch.arange(6)})
    uids = rows.uids()
    deaths.learn(([uids[4], uids[1]], [uids[0]]))
    stage = make_stage("generate", role="actor")

    def run(stage: Stage, part: Rows) -> Rows:
        passes.append(part["sample"].tolist())
        assert stage.params["undrawn"] == {uids[0]}
        return part.with_columns({"written": part["sample"] * 10})

    done = run_isolated(run, stage, rows, uids, deaths)
    assert passes == [[0, 2, 3, 5], [1], [4]]
    assert done["sample"].tolist() == list(range(6)) and done["written"].tolist() == [0, 10, 20, 30, 40, 50]


def test_only_rows_that_are_generated_or_checked_one_by_one_can_be_isolated() -> None:
    isolated = {
        name: can_isolate(make_stage(name, role=role)) for name, role in [("generate", "actor"), ("verify", "reward")]
    }
    assert isolated == {"generate": True, "verify": True}
    assert not can_isolate(make_stage("log_probs", role="reference"))
    assert not can_isolate(make_stage("advantage.group_normalized"))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder, examples = tmp_path_factory.mktemp("isolation"), sums(8)
    (folder / "deadly.py").write_text(DEADLY.format(prompt=examples[3]["prompt"]))
    (folder / "worlds.py").write_text(WORLDS)
    return Workshop(folder, write_model(folder / "model", "qwen2"), write_jsonl(folder / "train.jsonl", examples))


def train(shop: Workshop, name: str, runtime: str, steps: int, *resumed: object, plays: bool = False) -> str:
    """Run `braid train` with a verifier or an environment that kills its process at one prompt; return what it says."""
    environment = {"environment": {"name": f"{shop.folder}/worlds.py:Deadly", "sandbox": "none"}} if plays else {}
    config = shop.config_file(
        name,
        **RUNTIMES[runtime],
        runtime=runtime,
        trackers=[],
        dtype="float64",
        reward={"verify": f"{shop.folder}/deadly.py:deadly", "processes": 0},
        rollout={"samples_per_prompt": 2, **environment},
        data={"shuffle": False},
        trainer={"steps": steps, "prompts_per_step": 2, "checkpoint_every": 1, "max_restarts": 12},
    )
    with braid("train", *(resumed or (config,)), folder=shop.folder) as process:
        _, output = process.communicate(timeout=250)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def streamed(workshop: Workshop) -> tuple[Path, str]:
    said = train(workshop, "streaming", "streaming", 3)
    return workshop.folder / "streaming", said


def rows_without_response(run: Path) -> set[tuple[int, int, int]]:
    rows = recorded(run, 2)
    return {uid for uid, tokens in zip(rows.uids(), rows["action_tokens"].tolist(), strict=True) if not tokens}


@pytest.mark.soak
def test_a_prompt_whose_verifier_kills_its_engine_is_left_out(workshop: Workshop, streamed: tuple[Path, str]) -> None:
    run, said = streamed
    left_out = {tuple(map(int, row)) for row in LEFT_OUT.findall(said)}
    assert len(left_out) == 2 and len({group for _, group, _ in left_out}) == 1, said
    assert sum(line["streaming/rows_left_out"] for line in read_metrics(run)) == 2
    assert said.count("(killed by signal 9); it stays without a response") == 2, said
    assert rows_without_response(run) == left_out


@pytest.mark.soak
@pytest.mark.parametrize("runtime", ["distributed", "hybrid"])
def test_ranks_leave_out_the_rows_that_engines_would(
    workshop: Workshop, streamed: tuple[Path, str], runtime: str
) -> None:
    run, said = workshop.folder / runtime, train(workshop, runtime, runtime, 3)
    assert {tuple(map(int, row)) for row in LEFT_OUT.findall(said)} == rows_without_response(run), said
    assert [line["ranks/rows_left_out"] for line in read_metrics(run)] == [0, 2, 0]
    assert metrics_agree(run, streamed[0])


@pytest.mark.soak
@pytest.mark.parametrize("runtime", ["streaming", "distributed"])
def test_a_row_is_left_out_again_after_a_resume(workshop: Workshop, streamed: tuple[Path, str], runtime: str) -> None:
    name = f"{runtime}-halves"
    train(workshop, name, runtime, 1)
    said = train(workshop, name, runtime, 3, "--resume", workshop.folder / name, "trainer.steps=3")
    assert len(LEFT_OUT.findall(said)) == 2, said
    assert metrics_agree(workshop.folder / name, streamed[0])


@pytest.mark.soak
def test_episodes_that_end_their_process_are_left_out(workshop: Workshop) -> None:
    for runtime in ("streaming", "distributed"):
        said = train(workshop, f"{runtime}-played", runtime, 3, plays=True)
        assert {row[1] for row in LEFT_OUT.findall(said)} == {"3"}, said
    assert metrics_agree(workshop.folder / "streaming-played", workshop.folder / "distributed-played")
