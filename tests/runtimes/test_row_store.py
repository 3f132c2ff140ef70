"""The origin of rows is a message to the process that makes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from braidrl.data.messages import pack_message, unpack_message
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import read_texts, rollout_path
from braidrl.runtimes.row_store import Admission, HeldOut, Origin, Surplus
from tests.tiny import Workshop


@pytest.mark.parametrize(
    "origin", [Admission([3, 4]), HeldOut("test"), HeldOut("test", prompts=1), Surplus(Path("/run/surplus-0.rows"))]
)
def test_an_origin_of_rows_is_the_same_after_a_message(origin: Origin) -> None:
    assert unpack_message(pack_message(origin), Admission | HeldOut | Surplus) == origin


def test_the_recorded_text_of_an_episode_has_its_turns_and_observations(workshop: Workshop) -> None:
    played = {"environment": f"{Path(__file__).parent}/two_turns.py:TwoTurns", "max_response_tokens": 4}
    run = workshop.run(trainer={"steps": 1}, rollout={**played, "max_sequence_tokens": 32})
    path = rollout_path(run, 1)
    texts, rows = read_texts(path), read_rollouts(path)
    for text, tokens, mask in zip(texts, rows["tokens"].tolist(), rows["action_mask"].tolist(), strict=True):
        first, second = text["response_text"].removeprefix("[turn 1]\n").split("\n[observation]\n2+2=\n[turn 2]\n")
        sampled = [token for token, acted in zip(tokens, mask, strict=True) if acted]
        assert "2+2=" not in first + second and 1 <= len(sampled) <= 8
        assert text["prompt_text"] == "1+1="
