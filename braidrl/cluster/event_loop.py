"""Coroutines for synchronous callers, also inside a running event loop (notebooks, asynchronous servers).

Ctrl-C first cancels the coroutines and is raised after they end. If it were raised inside the loop, tasks would be left behind
and Python would print their tracebacks.
"""

import asyncio
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class Runner:
    """An `asyncio.Runner` that also works inside a running event loop: coroutines then run in a separate thread."""

    def __init__(self) -> None:
        # With a factory, asyncio keeps the caller's event loop as the thread's current one.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result."""
        return outside_of_loops(partial(self._runner.run, coroutine))

    def close(self) -> None:
        """Cancel the remaining tasks and close the event loop."""
        outside_of_loops(self._runner.close)

    def __enter__(self) -> "Runner":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def outside_of_loops(work: Callable[[], T]) -> T:
    """Return `work()`, called in a separate thread if an event loop runs in this one."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return work()

    def in_the_callers_modes() -> T:
        with torch.set_grad_enabled(gradients), torch.inference_mode(inference):
            return work()

    gradients, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(contextvars.copy_context().run, in_the_callers_modes).result()


def run_cancelled_by_interrupts(runner: Runner, work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end; an interrupt cancels it.

    Args:
        runner: Its event loop runs the coroutine.
        work: The coroutine.

    Returns:
        The coroutine's result.

    Raises:
        KeyboardInterrupt: The process's handler of SIGINT or SIGTERM raised it. A second interrupt does not wait for the end.
    """
    interrupts, running = list[int](), list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]()

    async def cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        return await work

    def cancel(number: int) -> None:
        interrupts.append(number)
        if len(interrupts) > 1 or not running:
            raise KeyboardInterrupt
        loop, task = running[0]
        loop.call_soon_threadsafe(task.cancel)

    try:
        with interrupts_passed_to(cancel):
            result = runner.run(cancellable())
    except BaseException:
        if interrupts:
            raise KeyboardInterrupt from None
        raise
    if interrupts:  # the interrupt came after the end
        raise KeyboardInterrupt
    return result


@contextmanager
def interrupts_passed_to(cancel: Callable[[int], None]) -> Iterator[None]:
    """Call `cancel` with the signal number when the process's handler of SIGINT or SIGTERM raises KeyboardInterrupt inside the block."""
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
