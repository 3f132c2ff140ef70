"""The games that pages tell a reader to play: a league improves against a fixed opponent, and two adapters duel."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from braidrl.observe.metrics import read_metrics
from tests.tiny import ROOT, braid


def play(folder: Path, flow: str, *changes: str) -> tuple[Path, dict[str, list[float]]]:
    """Run the demo's command; return the run's folder, and the share of won games by opponent and evaluation."""
    command = [sys.executable, "-m", "examples.nim.demo", "--folder", str(folder), f"flow=examples/nim/{flow}.yaml"]
    done = subprocess.run([*command, "name=played", *changes], cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    lines = read_metrics(folder / "played")
    names = {opponent: f"eval/{opponent}/avg@4" for opponent in ("random", "perfect")}
    return folder / "played", {
        opponent: [line[name] for line in lines if line.get(name) is not None] for opponent, name in names.items()
    }


@pytest.mark.soak
def test_a_league_improves_against_a_fixed_opponent(tmp_path: Path) -> None:
    run, won = play(tmp_path, "league", "rollout.environment.params={opponents: [older, newer]}")
    lines = [line for line in read_metrics(run) if line["step"]]
    ratings = [round(line["shape.elo.older/rating"]) for line in lines[9::10]]
    print(f"won {won}, lead over the older state {ratings}, {sum(line['time/step'] for line in lines):.0f} s")
    assert won["random"][-1] > won["random"][0] + 0.2, (won, ratings)


@pytest.mark.soak
def test_two_adapters_on_one_base_duel_by_the_command_of_the_page(tmp_path: Path) -> None:
    lora = [f"roles.{role}.lora.rank=8" for role in ("actor", "rival")]
    run, won = play(tmp_path, "duel", *lora, "rollout.shared_base=true", "trainer.steps=4", "evaluation.every=4")
    last = read_metrics(run)[-1]
    assert len(won["random"]) == 2 and last["actor/grad_norm"] > 0 and last["rival/grad_norm"] > 0
    with braid("rollouts", run, "--step", 4, "--rows", 3) as process:
        output = "".join(text or "" for text in process.communicate(timeout=60))
    assert process.returncode == 0 and output.count("\n") >= 4, output
