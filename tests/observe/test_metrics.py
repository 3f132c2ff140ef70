"""metrics.jsonl has exact keys and whole lines, and after a resume still one line per step."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from braidrl.errors import UserError
from braidrl.observe.metrics import REQUIRED_KEYS, MetricsWriter, Sums, read_metrics
from braidrl.observe.trace import read_trace
from tests.observe.made_up import metrics_of


def test_required_keys_are_those_of_the_documented_file() -> None:
    documented = """step version loss/actor reward/mean score/mean response/length_mean response/truncated_fraction
        groups/all_correct_fraction groups/all_wrong_fraction actor/entropy actor/log_prob_mean actor/kl_old
        actor/clip_fraction actor/grad_norm train/rollout_log_prob_gap tokens/generated tokens/trained time/step
        throughput/tokens_per_second staleness/max"""
    assert set(REQUIRED_KEYS) == set(documented.split())


@pytest.mark.parametrize("key", REQUIRED_KEYS)
def test_missing_required_key_is_named(key: str, tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    metrics = metrics_of(1)
    del metrics[key]
    with pytest.raises(ValueError, match=f"lack {key}"):
        writer.write(metrics)
    writer.close()
    assert read_metrics(tmp_path) == []


def test_number_types_are_written_and_nonfinite_becomes_null(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    odd = {"actor/kl_old": math.nan, "actor/grad_norm": math.inf, "loss/actor": torch.tensor(0.5), "extra": 3}
    writer.write(metrics_of(1) | odd)
    with pytest.raises(ValueError, match=r"actor/kl_old .* number, got 'high'"):
        writer.write(metrics_of(2) | {"actor/kl_old": "high"})
    writer.close()
    (line,) = read_metrics(tmp_path)
    assert (line["actor/kl_old"], line["actor/grad_norm"], line["loss/actor"], line["extra"]) == (None, None, 0.5, 3)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()


def test_a_step_is_written_only_once_and_in_order(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    writer.write(metrics_of(3))
    for step in (3, 2):
        with pytest.raises(ValueError, match=f"step {step} .*follow step 3"):
            writer.write(metrics_of(step))
    writer.close()
    assert [line["step"] for line in read_metrics(tmp_path)] == [3]


def test_incomplete_last_line_is_ignored_and_overwritten(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in (1, 2):
        writer.write(metrics_of(step))
    writer.close()
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [line["step"] for line in read_metrics(path)] == [1]
    writer = MetricsWriter(tmp_path, resume_step=1)
    writer.write(metrics_of(2))
    writer.close()
    assert read_metrics(path) == [metrics_of(1), metrics_of(2)]


@pytest.mark.soak
def test_what_was_written_survives_a_kill(tmp_path: Path) -> None:
    program = (
        "import os, pathlib, signal\n"
        "from braidrl.observe.metrics import MetricsWriter\n"
        "from tests.observe.made_up import metrics_of\n"
        f"writer = MetricsWriter(pathlib.Path({str(tmp_path)!r}))\n"
        "for step in (1, 2, 3): writer.write(metrics_of(step))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    root = Path(__file__).parents[2]
    result = subprocess.run([sys.executable, "-c", program], cwd=root, check=False, timeout=120)
    assert result.returncode == -9
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_resume_cuts_off_lines_after_checkpoint(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path)
    for step in range(1, 8):
        writer.write(metrics_of(step))
    writer.close()
    writer = MetricsWriter(tmp_path, resume_step=4)
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3, 4]
    writer.write(metrics_of(5) | {"reward/mean": 9.0})
    writer.close()
    lines = read_metrics(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert lines[4]["reward/mean"] == 9.0


def test_a_new_run_does_not_write_into_an_old_one(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1}) + "\n")
    with pytest.raises(UserError, match="--resume"):
        MetricsWriter(tmp_path)


def test_a_damaged_line_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n{oops\n" + json.dumps({"step": 3}) + "\n")
    with pytest.raises(UserError, match="line 2"):
        read_metrics(path)
    with pytest.raises(UserError, match="no file"):
        read_metrics(tmp_path / "elsewhere")


@given(st.lists(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-50, 50), st.integers(0, 5)))))
def test_sums_do_not_depend_on_how_they_are_split_among_workers(workers: list[list[tuple[str, int, int]]]) -> None:
    parts = []
    for worker in workers:
        part = Sums()
        for name, total, count in worker:
            part.add(name, total, count)
        parts.append(Sums(json.loads(json.dumps(part.pairs()))))
    alone = Sums()
    for name, total, count in (entry for worker in workers for entry in worker):
        alone.add(name, total, count)
    assert Sums().merge(*parts).pairs() == alone.pairs()


def test_means_are_sums_over_counts_and_absent_without_counts() -> None:
    sums = Sums()
    sums.add("length", torch.tensor(6.0), torch.tensor(2))
    sums.add("length", 3)
    sums.add("empty", 0.0, 0)
    means = sums.means()
    assert means["length"] == 3.0
    assert math.isnan(means["empty"])


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"step": 1, "loss": "x"}', "'loss' is 'x', and metrics are numbers"),
        ('{"step": 1, "\\u001b[2J": []}', r"'\\x1b\[2J' is \[\]"),
        ('{"step": 1.5}', "step is 1.5"),
        ('{"loss": 1}', "step is None"),
        ('{"step": NaN}', "not a JSON object"),
    ],
)
def test_an_edited_line_that_is_no_metrics_is_named(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"line 2: {reason}"):
        read_metrics(tmp_path)


def test_an_edited_line_of_a_trace_is_named(tmp_path: Path) -> None:
    (tmp_path / "trace").mkdir()
    (tmp_path / "trace" / "eager.jsonl").write_text('{"worker": "eager", "start": "soon"}\n')
    with pytest.raises(UserError, match=r"eager.jsonl, line 1: not a span"):
        read_trace(tmp_path)
