"""Games of textarena, in the environment that `make environments` makes: hints, players, and what cannot be made."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from braidrl.config import load_config
from braidrl.observe.metrics import read_metrics
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.restarts import train
from examples.guess_number import demo
from tests.agents.library_servers import OPENENV, need
from tests.tiny import ROOT

PLAYED = """
import json, random, sys
from braidrl.agents.environments import environments
from braidrl.errors import UserError

name, settings, seed, texts = json.loads(sys.argv[1])
try:
    game, before, seen = environments(name, settings)(), random.getstate(), []
    seen = [game.reset({"seed": seed}), *map(game.step, texts)]
except UserError as error:
    print(json.dumps({"refused": str(error)}))
else:
    assert random.getstate() == before, "a game has random numbers of its own"
    print(json.dumps([{**vars(o), "number": getattr(game._messages, "game_number", None)} for o in seen]))
"""


def play(name: str, settings: dict[str, Any], seed: int, texts: list[str]) -> Any:
    """Return what a game has answered, or why it was refused."""
    need(OPENENV)
    command = [str(OPENENV), "-c", PLAYED, json.dumps([f"textarena:{name}", settings, seed, texts])]
    done = subprocess.run(command, cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_game_is_played_with_its_hints_and_its_reward() -> None:
    settings = {"max_number": 10, "max_turns": 4}
    number = play("GuessTheNumber-v0", settings, 3, [])[0]["number"]
    rules, hint, end = play("GuessTheNumber-v0", settings, 3, ["10" if number < 10 else "9", f"I say [{number}]"])
    assert "between 1 and 10 within 4 turns" in rules["said"]
    assert hint["said"] == f"[GAME] The target number is {'lower' if number < 10 else 'higher'}."
    assert (end["reward"], end["done"], end["rewards"]) == (1.0, True, {})


def test_each_role_reads_what_it_has_not_read_and_gets_its_own_reward() -> None:
    first, *turns, end = play("TicTacToe-v0", {"policies": ["actor", "older"]}, 1, ["0", "3", "1", "4", "[2]"])
    roles = [turn["policy"] for turn in (first, *turns)]
    assert sorted(roles[:2]) == ["actor", "older"] and roles == [roles[0], roles[1]] * 2 + roles[:1]
    assert "[Player 0] [0]" in turns[0]["said"] and "Player 1 in Tic Tac Toe" in turns[0]["said"]
    assert "[Player 0]" not in turns[1]["said"] and "[Player 1] [3]" in turns[1]["said"]
    assert "Your goal" not in turns[1]["said"], "what was read before is not repeated"
    assert (end["reward"], end["rewards"], end["done"]) == (1.0, {roles[1]: -1.0}, True)


@pytest.mark.parametrize(
    ("name", "settings", "named"),
    [
        ("GuessTheNumer-v0", {}, "Did you mean 'GuessTheNumber-v0'"),
        ("GuessTheNumber-v0", {"most": 3}, "unexpected keyword argument 'most'"),
        ("TicTacToe-v0", {}, "number of players has to be 2"),
    ],
)
def test_what_cannot_be_played_is_refused_before_the_run(name: str, settings: dict[str, Any], named: str) -> None:
    refused = play(name, settings, 0, [])["refused"]
    assert named in refused and "\n" not in refused


@pytest.mark.soak
def test_a_step_is_trained_on_games_by_the_example_of_the_page(tmp_path: Path) -> None:
    need(OPENENV)
    demo.prepare(tmp_path, seed=1)
    changes = ["trainer.steps=2", "trainer.prompts_per_step=2", "threads=1", f"rollout.environment.python={OPENENV}"]
    changes += [f"model={tmp_path / 'model'}", f"data.train={tmp_path / 'games.jsonl'}", f"output={tmp_path}"]
    run = train(load_config(ROOT / "examples" / "guess_number" / "textarena.yaml", changes))
    rows, line = read_rollouts(rollout_path(run, 2)), read_metrics(run)[-1]
    assert len(rows) == 16 and not any(name.startswith("environment/failures/") for name in line)
    assert line["environment/turns"] > 1 and line["train/rollout_log_prob_gap"] < 1e-5
