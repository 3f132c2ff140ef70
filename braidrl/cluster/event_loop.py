"""Coroutines for synchronous callers, also inside a running event loop (notebooks, asynchronous servers).

Ctrl-C first cancels the coroutines and is raised after they end. If it were raised inside the loop, tasks would be left
behind and Python would print their tracebacks.
"""

import asyncio
import contextvars
import inspect
import signal
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager
from types import FrameType
from typing import Any, TypeVar

import torch

from braidrl.cluster.process import interrupts_handled

T = TypeVar("T")


class Runner(AbstractContextManager["Runner"]):
    """An `asyncio.Runner` whose coroutines are cancelled by interrupts.

    Inside a running event loop they run in a separate thread.
    """

    def __init__(self) -> None:
        # With a factory, asyncio leaves the caller's event loop as the thread's current one.
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine to its end and return its result; an interrupt cancels it.

        Raises KeyboardInterrupt if the process's handler of SIGINT or SIGTERM raised it. A second interrupt does not
        wait for the end.
        """
        interrupts, running = list[int](), list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]]()

        async def cancellable() -> T:
            task = asyncio.current_task()
            assert task is not None
            running.append((asyncio.get_running_loop(), task))
            return await work

        def handle(number: int, frame: FrameType | None) -> None:
            try:
                handlers[number](number, frame)
            except KeyboardInterrupt:
                interrupts.append(number)
                if len(interrupts) > 1 or not running:
                    raise
                loop, task = running[0]
                loop.call_soon_threadsafe(task.cancel)

        guarded = cancellable()
        handlers: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with interrupts_handled(handle, [number for number in handlers if callable(handlers[number])]):
                result = outside_of_loops(lambda: self._runner.run(guarded))
        except BaseException:
            if interrupts:
                raise KeyboardInterrupt from None
            raise
        finally:
            # An interrupt may arrive before the loop starts: Python would warn of coroutines that were never awaited.
            for coroutine in (guarded, work):
                if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
                    coroutine.close()
        if interrupts:  # the interrupt came after the end
            raise KeyboardInterrupt
        return result

    def close(self) -> None:
        """Cancel the remaining tasks and close the event loop."""
        outside_of_loops(self._runner.close)

    def __exit__(self, *_: object) -> None:
        self.close()


def outside_of_loops(work: Callable[[], T]) -> T:
    """Return the result of `work()`; if an event loop runs in this thread, call it in a separate thread."""
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


@asynccontextmanager
async def all_or_none() -> AsyncIterator[asyncio.TaskGroup]:
    """Wait for all tasks of a group; after an exception cancel the rest and raise it."""
    try:
        async with asyncio.TaskGroup() as group:
            yield group
    except ExceptionGroup as several:
        raise several.exceptions[0] from None
