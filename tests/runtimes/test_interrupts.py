"""An interrupt comes at once, but not while weights change, unless one insists."""

from __future__ import annotations

import signal

import pytest

from braidrl.runtimes.interrupts import Interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_waits_for_the_end_of_a_hold(number: signal.Signals) -> None:
    interrupts, done = Interrupts(), []
    with interrupts.active(), pytest.raises(KeyboardInterrupt), interrupts.hold():
        with interrupts.hold():
            signal.raise_signal(number)
        done.append("the outer hold goes on")
    assert done and not interrupts.torn


def test_without_a_hold_it_comes_at_once_and_the_handlers_are_put_back() -> None:
    before, interrupts = signal.getsignal(signal.SIGINT), Interrupts()
    with pytest.raises(KeyboardInterrupt), interrupts.active():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before and not interrupts.torn


def test_a_second_one_breaks_into_the_hold_and_what_it_left_is_known_to_be_torn() -> None:
    interrupts = Interrupts()
    with interrupts.active(), pytest.raises(KeyboardInterrupt), interrupts.hold():
        signal.raise_signal(signal.SIGINT)
        assert not interrupts.torn
        signal.raise_signal(signal.SIGINT)
        pytest.fail("a second interrupt is not kept waiting")
    assert interrupts.torn
