"""Progress is shown only for long work: redrawn on a terminal, as plain lines elsewhere."""

import io

import pytest

from braidrl.observe.progress import Progress, spell_seconds


class Clock:
    """Clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "140")
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Terminal()


def test_a_log_file_gets_plain_lines_every_ten_seconds(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(100, stream, clock)
    progress.step = 3
    with progress.stage("rollout", 256) as bar:
        for _ in range(25):
            clock.now += 1
            bar.update(rows=10, tokens=1000, in_flight=64)
    assert stream.getvalue().splitlines() == [
        "step 3/100 rollout: 100/256 rows, 1,000 tokens/s, 64 in flight, 10 s",
        "step 3/100 rollout: 200/256 rows, 1,000 tokens/s, 64 in flight, 20 s",
    ]
    assert "\x1b" not in stream.getvalue() and "\r" not in stream.getvalue()


def test_short_stages_leave_no_line_in_a_log_file(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=clock)
    for _ in range(50):
        with progress.stage("train", 8) as bar:
            clock.now += 1
            bar.update(rows=8)
    assert stream.getvalue() == ""


def test_terminal_shows_rows_rate_and_in_flight_after_two_seconds(clock: Clock, terminal: Terminal) -> None:
    progress = Progress(10, terminal, clock)
    progress.step = 7
    with progress.stage("rollout", 64) as bar:
        clock.now += 1.9
        bar.update(rows=1, tokens=1900)
        assert terminal.getvalue() == ""
        clock.now += 2.1
        bar.update(rows=31, tokens=2100, in_flight=16)
        shown = terminal.getvalue()
    for part in ("step 7/10", "rollout", "32/64 rows", "1,000 tokens/s", "16 in flight"):
        assert part in shown
    assert terminal.getvalue().endswith("\x1b[?25h\r\x1b[1A\x1b[2K"), "the line is gone and the cursor is back"


def test_nested_stages_have_own_lines_and_cursor_returns_after_error(clock: Clock, terminal: Terminal) -> None:
    progress = Progress(stream=terminal, clock=clock)

    def fail_inside() -> None:
        with progress.stage("evaluation", 10) as outer, progress.stage("rollout") as inner:
            clock.now += 3
            outer.update(rows=1)
            clock.now += 1
            inner.update(rows=5, total_rows=7)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    shown = terminal.getvalue()
    assert "1/10 rows" in shown and "5/7 rows" in shown
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") > -1


def test_more_rows_than_announced_are_counted(clock: Clock) -> None:
    stream = io.StringIO()
    progress = Progress(stream=stream, clock=clock)
    with progress.stage("rollout", 4) as bar:
        clock.now += 11
        bar.update(rows=6)
    assert stream.getvalue() == "rollout: 6/4 rows, 11 s\n"


def test_lines_with_brackets_are_printed_as_they_are() -> None:
    stream = io.StringIO()
    Progress(stream=stream).print("reward [bold]0.5[/] " + "x" * 200)
    assert stream.getvalue() == "reward [bold]0.5[/] " + "x" * 200 + "\n"


@pytest.mark.parametrize(("seconds", "text"), [(7.9, "7 s"), (187, "3:07 min"), (7500, "2:05 h")])
def test_durations_are_spelled_short(seconds: float, text: str) -> None:
    assert spell_seconds(seconds) == text
