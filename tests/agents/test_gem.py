"""Environments of gem-llm play by their own rules and use their own random numbers."""

from __future__ import annotations

import logging
import random
from importlib.util import find_spec

import pytest

from braidrl.agents.environments import environments
from braidrl.agents.libraries import GemEnvironment, load_gem
from braidrl.errors import UserError

NAME = "game:GuessTheNumber-v0-easy"
# Found, not imported, which takes a second in each process that collects the tests.
pytestmark = pytest.mark.skipif(find_spec("gem") is None, reason="gem-llm is not installed")


def secret(environment: GemEnvironment) -> int:
    return environment._environment.game_number


def test_a_game_is_played_to_its_end_with_gems_rewards() -> None:
    game = GemEnvironment(NAME, {})
    assert "between 1 and 10" in game.reset({"seed": 3})
    number = secret(game)
    wrong = game.step(f"\\boxed{{{number % 10 + 1}}}")
    assert (wrong.reward, wrong.done) == (0.0, False)
    assert "the target number is" in str(wrong.said) and str(wrong.said).endswith("Enter your next guess.")
    right = game.step(f"I say \\boxed{{{number}}}")
    assert (right.reward, right.done) == (1.0, True)


def test_the_seed_alone_determines_the_game() -> None:
    first, second, other = (GemEnvironment(NAME, {}) for _ in range(3))
    first.reset({"seed": 3})
    random.seed(99)
    before = random.getstate()
    second.reset({"seed": 3})
    assert random.getstate() == before
    assert secret(first) == secret(second)
    secrets = set()
    for seed in range(20):
        other.reset({"seed": seed})
        secrets.add(secret(other))
    assert len(secrets) > 3


def test_a_package_that_an_environment_of_gem_needs_is_named_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    load_gem()
    from gem.envs.registration import ENV_REGISTRY, EnvSpec

    monkeypatch.setitem(ENV_REGISTRY, "math:Proofs", EnvSpec("math:Proofs", "package_of_proofs:Proofs"))
    with pytest.raises(UserError, match=r"gem:math:Proofs .*package_of_proofs"):
        environments("gem:math:Proofs", {})


def test_names_are_checked_and_logging_stays_as_it_was() -> None:
    before = (logging.getLogger().level, list(logging.getLogger().handlers))
    environment = environments(f"gem:{NAME}", {"max_turns": 2})()
    assert isinstance(environment, GemEnvironment)
    with pytest.raises(UserError, match=r"'game:GuessTheNumber-v0-eas'. Did you mean"):
        environments("gem:game:GuessTheNumber-v0-eas", {})
    assert (logging.getLogger().level, list(logging.getLogger().handlers)) == before
