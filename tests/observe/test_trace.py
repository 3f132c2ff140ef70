"""Spans of several processes are written separately and read together."""

import multiprocessing
import threading
import time
from pathlib import Path

import pytest

from braidrl.cluster.local import main_module_hidden
from braidrl.errors import UserError
from braidrl.observe.trace import Span, TraceWriter, read_trace


def test_span_holds_counts_and_duration_of_block(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "actor/0")
    started = time.monotonic()
    with writer.span("actor", "actor.generate", 3, rows=8, version=2) as done:
        done.tokens = 512
    around = time.monotonic() - started
    with writer.span("actor", "actor.update", 3, state="waiting"):
        pass
    writer.close()
    generated, waited = read_trace(tmp_path)
    assert generated == Span("actor/0", "actor", "actor.generate", 3, 0.0, generated.end, 8, 512, 2, "busy")
    assert 0.0 <= generated.seconds <= around + 0.1
    assert (waited.state, waited.version, waited.stage) == ("waiting", None, "actor.update")
    assert generated.end <= waited.start <= waited.end


def test_a_span_is_recorded_when_its_block_fails(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "actor/0")

    def fail() -> None:
        with writer.span("actor", "actor.update", 1, rows=4):
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    writer.close()
    assert [span.rows for span in read_trace(tmp_path)] == [4]


def three_spans(folder: Path, worker: str) -> None:
    writer = TraceWriter(folder, worker)
    for k in range(3):
        with writer.span("actor", "actor.generate", k):
            time.sleep(0.01)
    writer.close()


def test_workers_of_several_processes_are_merged_by_start_from_zero(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    started = [context.Process(target=three_spans, args=(tmp_path, f"actor/{rank}")) for rank in range(2)]
    with main_module_hidden():
        for process in started:
            process.start()
    for process in started:
        process.join(120)
    assert [process.exitcode for process in started] == [0, 0]
    spans = read_trace(tmp_path)
    assert sorted(span.worker for span in spans) == ["actor/0"] * 3 + ["actor/1"] * 3
    assert [span.start for span in spans] == sorted(span.start for span in spans)
    assert spans[0].start == 0.0
    assert sorted(path.name for path in (tmp_path / "trace").iterdir()) == ["actor-0.jsonl", "actor-1.jsonl"]


def test_threads_of_a_worker_write_whole_lines(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "stream")

    def work(stage: str) -> None:
        for k in range(200):
            with writer.span("reward", stage, k):
                pass

    threads = [threading.Thread(target=work, args=(f"stage.{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    assert len(read_trace(tmp_path)) == 800


def test_killed_worker_keeps_finished_spans_and_replacement_appends(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, "actor/0")
    with writer.span("actor", "actor.update", 1):
        pass
    writer.close()
    path = tmp_path / "trace" / "actor-0.jsonl"
    path.write_bytes(path.read_bytes() + b'{"worker": "actor/0", "ro')
    assert [span.iteration for span in read_trace(tmp_path)] == [1]
    successor = TraceWriter(tmp_path, "actor/0")
    with successor.span("actor", "actor.update", 2):
        pass
    successor.close()
    assert [span.iteration for span in read_trace(tmp_path)] == [1, 2]


def test_a_run_without_a_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no trace"):
        read_trace(tmp_path)
