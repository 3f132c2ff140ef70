"""Ctrl-C in an event loop cancels the running tasks without a traceback."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable
from typing import Any

import pytest

from braidrl.cluster import event_loop
from braidrl.cluster.event_loop import Runner
from braidrl.cluster.process import interrupts_handled
from braidrl.runtimes.interfaces import Interrupts


async def interrupted_rows(ended: list[int]) -> None:
    async def row(number: int) -> None:
        try:
            await asyncio.sleep(0)
            if number == 1:
                signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(60)
        finally:
            ended.append(number)

    async with asyncio.TaskGroup() as group:
        for number in range(3):
            group.create_task(row(number))


def test_tasks_end_silently_before_the_interrupt_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    ended, before = list[int](), signal.getsignal(signal.SIGINT)
    with Runner() as runner, interrupts_handled(Interrupts().handle):
        own = signal.getsignal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            runner.run(interrupted_rows(ended))
        assert signal.getsignal(signal.SIGINT) is own
        assert sorted(ended) == [0, 1, 2]
    gc.collect()
    assert not caplog.records and signal.getsignal(signal.SIGINT) is before


def test_an_interrupt_before_the_loop_leaves_no_coroutine_to_warn_of(
    recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(work: Callable[[], Any]) -> Any:
        signal.raise_signal(signal.SIGINT)
        return work()

    with Runner() as runner, interrupts_handled(Interrupts().handle), monkeypatch.context() as patches:
        patches.setattr(event_loop, "outside_of_loops", interrupted)
        with pytest.raises(KeyboardInterrupt):
            runner.run(interrupted_rows([]))
    gc.collect()
    assert not [one for one in recwarn if "never awaited" in str(one.message)]


def test_a_held_interrupt_lets_the_loop_go_on() -> None:
    async def work() -> str:
        signal.raise_signal(signal.SIGINT)
        await asyncio.sleep(0)
        return "done"

    interrupts = Interrupts()
    with Runner() as runner, interrupts_handled(interrupts.handle), pytest.raises(KeyboardInterrupt), interrupts.hold():
        assert runner.run(work()) == "done"


def test_a_second_interrupt_does_not_wait() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                signal.raise_signal(signal.SIGINT)

    async def twice() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGINT)
        await stubborn()

    with Runner() as runner, interrupts_handled(Interrupts().handle), pytest.raises(KeyboardInterrupt):
        runner.run(twice())
