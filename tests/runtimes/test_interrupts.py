"""An interrupt takes effect at once, except while weights change, unless it is repeated."""

from __future__ import annotations

import signal

import pytest

from braidrl.cluster.process import interrupts_handled
from braidrl.runtimes.interfaces import Interrupts


def signals_in_a_hold(interrupts: Interrupts, number: signal.Signals, times: int) -> None:
    """Receive this many signals inside two holds; return normally if none of them gets through."""
    with interrupts.hold():
        with interrupts.hold():
            for _ in range(times):
                signal.raise_signal(number)
        interrupts.reached_the_end = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_a_hold(number: signal.Signals) -> None:
    interrupts = Interrupts()
    with interrupts_handled(interrupts.handle), pytest.raises(KeyboardInterrupt):
        signals_in_a_hold(interrupts, number, 1)
    assert interrupts.reached_the_end and not interrupts.torn


def test_interrupt_without_hold_is_immediate_and_restores_handlers() -> None:
    before, interrupts = signal.getsignal(signal.SIGINT), Interrupts()
    with interrupts_handled(interrupts.handle), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before and not interrupts.torn


def test_second_interrupt_breaks_hold_and_marks_state_torn() -> None:
    interrupts = Interrupts()
    with interrupts_handled(interrupts.handle), pytest.raises(KeyboardInterrupt):
        signals_in_a_hold(interrupts, signal.SIGINT, 2)
    assert interrupts.torn and not hasattr(interrupts, "reached_the_end")


def test_ranks_stop_when_they_meet_and_not_before() -> None:
    interrupts = Interrupts(alone=False)
    with interrupts_handled(interrupts.handle):
        signal.raise_signal(signal.SIGINT)
        assert interrupts.stop_requested
        with interrupts.hold():
            interrupts.agree(True)
        interrupts.agree(False)
        with pytest.raises(KeyboardInterrupt):
            interrupts.agree(True)


def test_local_work_is_interrupted_at_once_unless_held() -> None:
    interrupts = Interrupts(alone=False)
    with interrupts_handled(interrupts.handle), pytest.raises(KeyboardInterrupt), interrupts.local():
        signal.raise_signal(signal.SIGINT)
    held = Interrupts(alone=False)
    with interrupts_handled(held.handle), held.hold(), held.local():
        signal.raise_signal(signal.SIGINT)
    assert interrupts.stop_requested and held.stop_requested


def test_duplicate_interrupt_still_waits_for_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    interrupts = Interrupts(alone=False)
    with interrupts_handled(interrupts.handle):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        monkeypatch.setattr("braidrl.runtimes.interfaces.REPEATED_S", 0.0)
        assert not interrupts.torn
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert interrupts.torn
