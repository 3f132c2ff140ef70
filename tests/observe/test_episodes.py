"""Recorded episodes are found by filters, and shown as turns in the terminal and on the page."""

from __future__ import annotations

import http.client
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models

from braidrl.algorithms.ragged import Ragged
from braidrl.cli.show_rollouts import show_row, show_table
from braidrl.data.images import ImageStore
from braidrl.data.rows import FinishReason, Objects, Rows
from braidrl.errors import UserError
from braidrl.observe.episodes import Filter, RowIndex, episode
from braidrl.observe.recorded_rows import write_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.observe.rollouts_page import PageServer

WORDS = ["<pad>", "ask", "look", "see", "say", "<script>alert(1)</script>", "again"]
TOKENS = [1, 2, 2, 3, 4, 5, 1, 6, 4]
"""Prompt, a turn of two tokens, an observation, a turn of two; then a second sequence: context and a turn."""
MASK = [False, True, True, False, True, True, False, False, True]


def rows_of(step: int, count: int = 6) -> Rows:
    """Return episodes of three turns; the last one failed before its first."""
    numbers, played = torch.arange(count), count - 1
    lengths = torch.tensor([5] * played + [0])
    return Rows(
        {
            "source": torch.zeros(count, dtype=torch.int64),
            "group": numbers // 2 + 100 * step,
            "sample": numbers % 2,
            "reward": numbers / count + step,
            "action_tokens": lengths,
            "finish_reason": torch.tensor([int(FinishReason.STOP)] * played + [int(FinishReason.ERROR)]),
            "tokens": Ragged.from_rows([TOKENS] * played + [[1]], torch.int64),
            "action_mask": Ragged.from_rows([MASK] * played + [[False]], torch.bool),
            "sequence_lengths": Ragged.from_rows([[6, 3]] * played + [[1]], torch.int64),
            "turn_lengths": Ragged.from_rows([[2, 2, 1]] * played + [[]], torch.int64),
            "turn_rewards": Ragged.from_rows([[0.0, 0.5, float("nan")]] * played + [[]], torch.float32),
            "rollout_log_probs": Ragged.from_lengths(-torch.arange(5.0 * played), lengths),
            "advantages": Ragged.from_lengths(torch.linspace(-1, 1, 5 * played), lengths),
            "wide": Ragged.from_lengths(torch.zeros(5 * played, 2), lengths),
            "metadata": Objects(tuple({"answer": str(number)} for number in range(count))),
        }
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    for step in (1, 2):
        rows = rows_of(step)
        write_rollouts(rollout_path(folder, step), rows, ["ask"] * len(rows), ["look"] * len(rows))
    rows = rows_of(2, 2)
    write_rollouts(rollout_path(folder, 2, "test"), rows, ["ask"] * 2, ["look"] * 2)
    Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>")).save(
        str(folder / "tokenizer.json")
    )
    (folder / "config.yaml").write_text(f"flow: grpo\nmodel: {folder}\n")
    return folder


def test_an_episode_has_its_turns_with_the_values_of_their_tokens(run: Path) -> None:
    index = RowIndex(run)
    shown = episode(*index.record(index.find(2, 200, 1)), None)
    parts = [(s["kind"], s["turn"], s["sequence"], [t["id"] for t in s["tokens"]]) for s in shown["segments"]]
    assert parts == [
        ("context", None, 0, [1]),
        ("model", 0, 0, [2, 2]),
        ("observation", None, 0, [3]),
        ("model", 1, 0, [4, 5]),
        ("context", None, 1, [1, 6]),
        ("model", 2, 1, [4]),
    ]
    turns = [segment for segment in shown["segments"] if segment["kind"] == "model"]
    assert [segment["values"]["turn_rewards"] for segment in turns] == [0.0, 0.5, None]
    assert [token["rollout_log_probs"] for segment in turns for token in segment["tokens"]] == [-5, -6, -7, -8, -9]
    assert shown["metadata"] == {"answer": "1"} and shown["other_columns"] == ["wide"]


def test_turns_that_touch_are_two_segments(run: Path) -> None:
    record = {"tokens": [1, 2, 2], "action_mask": [False, True, True], "turn_lengths": [1, 1], "metadata": None}
    described = {"tokens": {"kind": "ragged", "shape": []}, "turn_lengths": {"kind": "ragged", "shape": []}}
    segments = episode(record, described, None)["segments"]
    assert [(s["kind"], s["turn"], len(s["tokens"])) for s in segments] == [
        ("context", None, 1),
        ("model", 0, 1),
        ("model", 1, 1),
    ]


def test_filters_choose_what_a_plain_loop_chooses(run: Path) -> None:
    index = RowIndex(run)
    rewards = index.numbers["reward"].tolist()
    chosen = index.choose(Filter(min_reward=1.3, max_reward=2.4, sort="-reward")).tolist()
    assert chosen == sorted((n for n, r in enumerate(rewards) if 1.3 <= r <= 2.4), key=lambda n: -rewards[n])
    assert index.choose(Filter(ended="error")).tolist() == [5, 11]
    assert index.choose(Filter(step=2, max_tokens=0)).tolist() == [11]
    for wrong, named in ((Filter(ended="eror"), "error"), (Filter(sort="rewrad"), "reward")):
        with pytest.raises(UserError, match=named):
            index.choose(wrong)


def test_the_terminal_shows_the_table_and_one_episode(run: Path) -> None:
    lines: list[str] = []
    show_table(run, None, Filter(sort="-reward"), 2, lines.append)
    assert lines[1].split()[0] == "2.202.1" and lines[2].split()[0] == "2.202.0" and "12" in lines[-1]
    lines.clear()
    show_row(run, None, "1.100.0", lines.append)
    whole = "\n".join(lines)
    assert whole.count("--- turn") == 3 and "look look" in whole and "wide" in whole
    for name, named in (("1.999.0", "braid rollouts"), ("1.100", "STEP.GROUP.SAMPLE")):
        with pytest.raises(UserError, match=named):
            show_row(run, None, name, lines.append)


@pytest.fixture
def page(run: Path) -> Iterator[PageServer]:
    with PageServer(run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def ask(server: PageServer, path: str, host: str | None = None) -> tuple[int, Any, dict[str, str]]:
    client = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    client.request("GET", path, headers={} if host is None else {"Host": host})
    answer = client.getresponse()
    content = answer.read()
    is_json = answer.headers["Content-Type"] == "application/json"
    return answer.status, json.loads(content) if is_json else content.decode(), dict(answer.headers)


def test_the_page_filters_opens_an_episode_and_finds_its_turns(page: PageServer) -> None:
    status, html, headers = ask(page, "/")
    assert status == 200 and "src=" not in html and "http" not in html and "innerHTML" not in html
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert ask(page, "/api/run")[1]["sets"] == ["test"]
    _, result, _ = ask(page, "/api/rows?min_reward=2.5&ended=stop&sort=-reward&count=1")
    assert (result["total"], len(result["rows"])) == (2, 1)
    _, opened, _ = ask(page, f"/api/row?row={result['rows'][0]['row']}")
    assert [s["turn"] for s in opened["segments"] if s["kind"] == "model"] == [0, 1, 2]
    assert opened["segments"][3]["tokens"][1]["text"] == WORDS[5]
    assert ask(page, "/api/rows?set=test")[1]["total"] == 2


def write_seeing_run(folder: Path) -> str:
    """Write a run of one episode whose observation has an image, and return the image's name."""
    store = ImageStore(folder / "images", 1000)
    content = io.BytesIO()
    Image.new("RGB", (8, 8), "red").save(content, "PNG")
    name = store.add(content.getvalue(), folder)
    tokens, mask = [1, 2, 6, 6, 6, 3, 4], [False, True, False, False, False, False, True]
    columns = dict.fromkeys(("source", "group", "sample", "finish_reason"), torch.tensor([0]))
    ragged = {"tokens": Ragged.from_rows([tokens], torch.int64), "action_mask": Ragged.from_rows([mask], torch.bool)}
    turns = {"turn_lengths": Ragged.from_rows([[1, 1]], torch.int64), "images": Objects(([[name, 2, 3]],))}
    rows = Rows({**columns, "reward": torch.tensor([1.0]), "action_tokens": torch.tensor([2]), **ragged, **turns})
    write_rollouts(rollout_path(folder, 1), rows, ["ask"], ["look"])
    Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="<pad>")).save(
        str(folder / "tokenizer.json")
    )
    settings = {"model": str(folder), "data": {"images": {"folder": str(store.folder)}}}
    (folder / "config.yaml").write_text(json.dumps(settings))
    return name


def test_an_image_of_an_observation_is_shown_in_its_place(tmp_path: Path) -> None:
    name = write_seeing_run(tmp_path)
    with PageServer(tmp_path) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        _, opened, headers = ask(server, "/api/row?row=0")
        server.shutdown()
    context, first, seen, second = opened["segments"]
    assert [(one["kind"], one["count"]) for one in (context, first, seen, second)] == [
        ("context", 1),
        ("model", 1),
        ("observation", 4),
        ("model", 1),
    ]
    assert [token.get("image") for token in seen["tokens"]] == [name, None]
    assert seen["text"].startswith(f"[image {name}, 3 tokens]") and seen["text"].endswith("see")
    assert opened["images"][name].startswith("data:image/png;base64,")
    assert "img-src data:" in headers["Content-Security-Policy"]


def test_wrong_requests_of_the_page_are_refused(page: PageServer) -> None:
    for asked in ("rows?min_reward=a", "rows?start=-1", "row?row=99", "rows?set=none", "row?row=x"):
        status, answer, _ = ask(page, f"/api/{asked}")
        assert status == 400 and answer["error"], asked
    assert ask(page, "/etc/passwd")[0] == ask(page, "/api/other")[0] == 404
    assert ask(page, "/", host="evil.example:80")[0] == 403


def test_a_run_of_50000_rows_opens_within_two_seconds_of_cpu_time(tmp_path: Path) -> None:
    for step in range(1, 11):
        numbers, lengths = torch.arange(5000), torch.full((5000,), 20)
        columns = dict.fromkeys(("source", "group", "sample", "finish_reason", "action_tokens"), numbers)
        tokens = Ragged.from_lengths(torch.zeros(100_000, dtype=torch.int64), lengths)
        rows = Rows({**columns, "reward": numbers / 5000, "finish_reason": numbers * 0, "tokens": tokens})
        write_rollouts(rollout_path(tmp_path, step), rows, ["p"] * 5000, ["r"] * 5000)
    began = time.process_time()
    index = RowIndex(tmp_path)
    chosen = index.choose(Filter(min_reward=0.5, sort="-reward"))
    record, _ = index.record(int(chosen[-1]))
    assert time.process_time() - began < 2
    assert len(index) == 50_000 and len(chosen) == 25_000 and np.isclose(record["reward"], 0.5)


def test_looking_at_rollouts_imports_no_torch() -> None:
    code = "import braidrl.cli.show_rollouts, braidrl.observe.rollouts_page, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_segments_of_further_policies_follow_with_their_name_and_values(run: Path) -> None:
    kinds = {"tokens": "ragged", "advantages": "ragged", "rival.advantages": "ragged", "rival.tokens": "ragged"}
    described = {name: {"kind": kind, "shape": []} for name, kind in kinds.items()}
    described["rival.reward"] = {"kind": "index", "shape": []}
    record = {
        "tokens": [1, 2],
        "action_mask": [False, True],
        "advantages": [3.0],
        "metadata": None,
        "rival.reward": 1.0,
    }
    record |= {"rival.tokens": [4, 5, 6], "rival.action_mask": [False, True, True], "rival.advantages": [7.0, 8.0]}
    shown = episode(record, described, None)
    assert [(s.get("policy"), s["kind"], [t.get("advantages") for t in s["tokens"]]) for s in shown["segments"]] == [
        (None, "context", [None]),
        (None, "model", [3.0]),
        ("rival", "context", [None]),
        ("rival", "model", [7.0, 8.0]),
    ]
    assert shown["numbers"] == {"rival.reward": 1.0} and not shown["other_columns"]
