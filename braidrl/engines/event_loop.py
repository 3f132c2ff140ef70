"""Coroutines for callers without an event loop: Ctrl-C cancels what is under way, and is raised when that has ended.

An exception raised in the midst of a loop would leave its tasks behind, which Python reports with their tracebacks.
"""

import asyncio
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")


def run_cancelled_by_interrupts(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end.

    Args:
        runner: Whose loop runs it.
        work: The coroutine.

    Returns:
        What the coroutine returns.

    Raises:
        KeyboardInterrupt: The process's own handler of SIGINT or SIGTERM raised it; a second one does not wait for the end.
    """
    interrupts = list[int]()

    async def cancellable() -> T:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel(number: int) -> None:
            interrupts.append(number)
            if len(interrupts) > 1:
                raise KeyboardInterrupt
            loop.call_soon_threadsafe(task.cancel)

        with interrupts_passed_to(cancel):
            return await work

    try:
        result = runner.run(cancellable())
    except BaseException:
        if interrupts:
            raise KeyboardInterrupt from None
        raise
    if interrupts:  # it came when all was done
        raise KeyboardInterrupt
    return result


@contextmanager
def interrupts_passed_to(cancel: Callable[[int], None]) -> Iterator[None]:
    """Call `cancel` with the signal's number inside, where this process's own handler of SIGINT or SIGTERM raises KeyboardInterrupt."""
    own: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        try:
            own[number](number, frame)
        except KeyboardInterrupt:
            cancel(number)

    handled = [number for number in own if callable(own[number])]
    if threading.current_thread() is not threading.main_thread():
        handled = []
    for number in handled:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, own[number])
