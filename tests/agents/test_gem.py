"""Environments of gem-llm play by their own rules and use their own random numbers."""

from __future__ import annotations

import logging
import random
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from braidrl.agents.environments import environments
from braidrl.agents.libraries import GemEnvironment, context_of, load_gem
from braidrl.data.images import BrokenImage, ImageStore, decoded, kept_messages
from braidrl.errors import UserError

NAME = "game:GuessTheNumber-v0-easy"
# Found, not imported, which takes a second in each process that collects the tests.
pytestmark = pytest.mark.skipif(find_spec("gem") is None, reason="gem-llm is not installed")


def secret(environment: GemEnvironment) -> int:
    return environment._environment.game_number


def test_a_game_is_played_to_its_end_with_gems_rewards() -> None:
    game = GemEnvironment(NAME, {})
    assert "between 1 and 10" in str(game.reset({"seed": 3}).said)
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


def test_a_problem_with_images_is_a_message_with_them_at_its_marks(tmp_path: Path) -> None:
    problem = {"problem": "<image>Which color?", "images": [Image.new("RGB", (28, 28), "red")]}
    store = ImageStore(tmp_path / "store", 1 << 20)
    (message,) = kept_messages(context_of(problem, {"suffix": "Answer in one word."}), store, tmp_path)
    image, text = message["content"]
    assert text["text"] == "Which color?\nAnswer in one word."
    assert decoded(store.path(image["image"]).read_bytes(), 1 << 20).getpixel((3, 3)) == (255, 0, 0)
    assert context_of("Which color?", {}) == "Which color?"
    with pytest.raises(BrokenImage, match="1 marks of images, and the record has 2"):
        context_of({**problem, "images": problem["images"] * 2}, {})
