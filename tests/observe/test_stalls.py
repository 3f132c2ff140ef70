"""Work that makes no progress is found from its own history; other work is not reported."""

from __future__ import annotations

from braidrl.observe.stalls import ENOUGH, TIMES, OwnWork, Stall


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def done(work: OwnWork, clock: Clock, name: str, *stretches: float) -> None:
    """Do work with a sign of progress after each stretch."""
    with work.on(name):
        for seconds in stretches:
            clock.now += seconds
            work.advanced()


def test_work_is_stalled_after_ten_times_its_longest_stretch_without_progress() -> None:
    clock = Clock()
    work = OwnWork(clock)
    for _ in range(ENOUGH):
        done(work, clock, "update", 1.0, 3.0, 2.0)
    clock.now += 1000.0
    assert work.stalled() is None, "no work is running"
    with work.on("update"):
        for _ in range(5):  # Long in total, with progress in between.
            clock.now += 0.9 * TIMES * 3.0
            assert work.stalled() is None
            work.advanced()
        clock.now += 1.1 * TIMES * 3.0
        assert work.stalled() == Stall("update", clock.now - work._advanced, 3.0)


def test_work_without_a_history_may_take_as_long_as_it_takes() -> None:
    clock = Clock()
    work = OwnWork(clock)
    for _ in range(ENOUGH - 1):
        done(work, clock, "load", 1.0)
    with work.on("load"):
        clock.now += 1e6
        assert work.stalled() is None


def test_nested_work_counts_as_progress_of_its_parent() -> None:
    clock = Clock()
    work = OwnWork(clock)
    for _ in range(ENOUGH):
        done(work, clock, "inner", 1.0)
        done(work, clock, "outer", 2.0)
    with work.on("outer"):
        for _ in range(100):
            done(work, clock, "inner", 1.0)
        assert work.stalled() is None
        clock.now += 11.0
        assert work.stalled() is None
        with work.on("inner"):
            clock.now += 11.0
            stall = work.stalled()
    assert stall == Stall("inner", 11.0, 1.0)
