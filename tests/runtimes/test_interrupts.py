"""An interrupt comes at once, but not while weights change, unless one insists."""

from __future__ import annotations

import signal

import pytest

from braidrl.runtimes.interrupts import Interrupts


def signals_in_a_hold(interrupts: Interrupts, number: signal.Signals, times: int) -> None:
    """Takes so many signals inside two holds; reaches its end if none of them comes through before."""
    with interrupts.hold():
        with interrupts.hold():
            for _ in range(times):
                signal.raise_signal(number)
        interrupts.reached_the_end = True


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_a_hold(number: signal.Signals) -> None:
    interrupts = Interrupts()
    with interrupts.active(), pytest.raises(KeyboardInterrupt):
        signals_in_a_hold(interrupts, number, 1)
    assert interrupts.reached_the_end and not interrupts.torn


def test_without_a_hold_it_comes_at_once_and_the_handlers_are_put_back() -> None:
    before, interrupts = signal.getsignal(signal.SIGINT), Interrupts()
    with interrupts.active(), pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before and not interrupts.torn


def test_a_second_one_breaks_into_the_hold_and_what_it_left_is_known_to_be_torn() -> None:
    interrupts = Interrupts()
    with interrupts.active(), pytest.raises(KeyboardInterrupt):
        signals_in_a_hold(interrupts, signal.SIGINT, 2)
    assert interrupts.torn and not hasattr(interrupts, "reached_the_end")
