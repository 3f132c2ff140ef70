"""An episode's time is shown by spans: the episode, and in it the turns of models and the calls of the environment."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from braidrl.agents.spans import EpisodeSpans
from braidrl.errors import UserError
from tests.agents.test_player import Debate, rows_of, script_play

HAS_SDK = importlib.util.find_spec("opentelemetry") and importlib.util.find_spec("opentelemetry.sdk")


@pytest.mark.skipif(bool(HAS_SDK), reason="OpenTelemetry is installed")
def test_spans_without_opentelemetry_are_refused_with_what_installs_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"braidrl\[spans\]"):
        EpisodeSpans(str(tmp_path))


@pytest.mark.skipif(not HAS_SDK, reason="OpenTelemetry is not installed")
def test_a_file_has_a_span_for_each_episode_turn_and_call(tmp_path: Path) -> None:
    spans = EpisodeSpans(str(tmp_path))
    script_play(Debate, rows_of(["actor", "judge"]), policies=("rival",), spans=spans)
    spans.close()
    (file,) = tmp_path.iterdir()
    recorded = [json.loads(line) for line in file.read_text().splitlines()]
    episodes = {span["context"]["span_id"]: span for span in recorded if span["name"] == "episode"}
    ended = {span["attributes"]["group"]: span["attributes"] for span in episodes.values()}
    assert (ended[0]["score"], ended[0]["turns"], ended[1]["error.type"]) == (0.0, 4, "policy")
    inside = [span for span in recorded if episodes.get(span["parent_id"], {}).get("attributes", {}).get("group") == 0]
    names = [span["name"] for span in sorted(inside, key=lambda span: span["start_time"])]
    assert names == ["made", "reset", *["chat", "step"] * 4]
    turns = [span["attributes"] for span in inside if span["name"] == "chat"]
    assert [(turn["policy"], turn["turn"]) for turn in turns] == [
        ("rival", 0),
        ("actor", 0),
        ("rival", 1),
        ("actor", 1),
    ]
    assert all(turn["gen_ai.usage.output_tokens"] > 0 for turn in turns)
