"""The busy table is correct, lanes do not overlap, and the Chrome trace is valid."""

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.observe.trace import ALL_STAGES, Busy, Span, TraceWriter, busy_table, chrome_trace, covered, timeline

# Ten seconds: two actors generate and train, one reward worker checks; the second actor finishes generating late.
SPANS = [
    Span("actor/0", "actor", "actor.generate", 1, 0.0, 4.0, 32, 3200, 0),
    Span("actor/1", "actor", "actor.generate", 1, 0.0, 6.0, 32, 4800, 0),
    Span("actor/0", "actor", "actor.update", 1, 4.0, 7.0, state="waiting"),
    Span("reward/0", "reward", "reward.verify", 1, 6.0, 7.0, 64, 8000, None),
    Span("actor/0", "actor", "actor.update", 1, 7.0, 10.0, 32, 4000, 1),
    Span("actor/1", "actor", "actor.update", 1, 7.0, 9.0, 32, 4000, 1),
]


def write_trace(run: Path, spans: list[Span]) -> None:
    for worker in {span.worker for span in spans}:
        writer = TraceWriter(run, worker)
        for span in spans:
            if span.worker == worker:
                writer.record(span)
        writer.close()


def test_the_table_adds_up_a_trace_made_by_hand() -> None:
    assert busy_table(SPANS) == [
        Busy("actor", ALL_STAGES, 2, 128, 16000, 15.0, 3.0, 0.75, 0.15),
        Busy("actor", "actor.generate", 2, 64, 8000, 10.0, 0.0, 0.5, 0.0),
        Busy("actor", "actor.update", 2, 64, 8000, 5.0, 3.0, 0.25, 0.15),
        Busy("reward", ALL_STAGES, 1, 64, 8000, 1.0, 0.0, 0.1, 0.0),
        Busy("reward", "reward.verify", 1, 64, 8000, 1.0, 0.0, 0.1, 0.0),
    ]


def test_overlapping_spans_of_a_worker_count_once() -> None:
    spans = [
        Span("actor/0", "actor", "actor.generate", 1, 0.0, 8.0),
        Span("actor/0", "actor", "actor.log_probs", 1, 6.0, 10.0),
    ]
    whole, generate, log_probs = busy_table(spans)
    assert (whole.busy_seconds, whole.busy_share) == (10.0, 1.0)
    assert (generate.busy_seconds, log_probs.busy_seconds) == (8.0, 4.0)


def test_time_between_stop_and_resume_is_not_counted() -> None:
    first = Span("actor/0", "actor", "actor.update", 1, 0.0, 5.0)
    resumed = Span("actor/0", "actor", "actor.update", 2, 50_000.0, 50_005.0)
    (whole, _) = busy_table([first, resumed])
    assert (whole.busy_seconds, whole.busy_share) == (10.0, 1.0)
    slow = Span("actor/0", "actor", "actor.update", 2, 15.0, 20.0)
    (whole, _) = busy_table([first, slow])
    assert whole.busy_share == 0.5


spans_of_any_kind = st.lists(
    st.builds(
        lambda worker, start, length, state: Span(
            worker, "actor", "s", 1, start / 8, (start + length) / 8, state=state
        ),
        st.sampled_from(["a/2", "a/10"]),
        st.integers(0, 400),
        st.integers(0, 80),
        st.sampled_from(["busy", "waiting"]),
    ),
    min_size=1,
)


@given(spans_of_any_kind)
def test_lanes_hold_every_span_once_and_none_overlap(spans: list[Span]) -> None:
    events = chrome_trace(spans)["traceEvents"]
    workers = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(workers.values()) == sorted(workers.values(), key=lambda worker: int(worker[2:]))
    drawn = [event for event in events if event["ph"] == "X"]
    places = sorted((workers[event["pid"]], event["ts"], event["dur"]) for event in drawn)
    assert places == sorted((span.worker, span.start * 1e6, span.seconds * 1e6) for span in spans)
    lanes = {event["tid"]: [one for one in drawn if one["tid"] == event["tid"]] for event in drawn}
    for lane in lanes.values():
        assert len({event["pid"] for event in lane}) == 1
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(lane))


@given(spans_of_any_kind)
def test_covered_time_equals_a_fine_grained_count(spans: list[Span]) -> None:
    marks = {mark for span in spans for mark in range(round(span.start * 8), round(span.end * 8))}
    assert covered(spans) == pytest.approx(len(marks) / 8)


def test_the_chrome_trace_is_valid_and_tells_everything() -> None:
    trace = json.loads(json.dumps(chrome_trace(SPANS), allow_nan=False))
    events = trace["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["actor/0", "actor/1", "reward/0"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(SPANS)
    for event in complete:
        assert {"name", "cat", "pid", "tid", "ts", "dur", "args"} <= set(event)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
    first = next(event for event in complete if names[event["pid"]] == "actor/1")
    assert (first["ts"], first["dur"]) == (0.0, 6e6)
    assert first["args"] == {"iteration": 1, "rows": 32, "tokens": 4800, "version": 0}
    assert [event["name"] for event in complete if "waiting" in event["cat"]] == ["waiting for actor.update"]


def test_the_command_writes_the_chrome_trace_and_says_the_shares(tmp_path: Path) -> None:
    write_trace(tmp_path, SPANS)
    heads, actor, *_, last = timeline(tmp_path)
    assert actor.split() == ["actor", "all", "2", "128", "16,000", "15.00", "3.00", "75%", "15%"]
    assert len(heads) == len(actor) and str(tmp_path / "timeline.json") in last
    assert len(json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]) == 6 + 2 * 3
