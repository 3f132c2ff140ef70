"""Concurrent calls of one `async` verifier on an event loop, in the process that calls verifiers (`worker.py`)."""

import asyncio
from collections.abc import Mapping
from multiprocessing.connection import Connection

from braidrl.rewards.verifier import Verifier
from braidrl.rewards.worker import ORPHAN_GRACE_S, Message, die_after, failure_of, judgement, receive, send
from braidrl.sandbox.sandbox import raised

HEARTBEAT_S = 0.5
"""How often the event loop shows that it turns."""


def serve(connection: Connection, verifiers: Mapping[str, Verifier], limit_s: float) -> None:
    """Answer each message by a task of its own, until the pipe ends; raises EOFError then.

    Args:
        connection: The pipe to the run.
        verifiers: By their keys, which messages name.
        limit_s: Seconds that a call may take; an event loop that does not turn for longer ends the process.
    """
    asyncio.run(_serve(connection, verifiers, limit_s))


async def _serve(connection: Connection, verifiers: Mapping[str, Verifier], limit_s: float) -> None:
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()
    ended: asyncio.Future[None] = loop.create_future()

    async def answer(message: Message) -> None:
        send(connection, {"call": message["call"], **await _call_limited(verifiers[message["key"]], message)})

    def on_message() -> None:
        try:
            task = loop.create_task(answer(receive(connection)))
        except (EOFError, ConnectionError) as error:
            loop.remove_reader(connection.fileno())
            if not ended.done():
                ended.set_exception(error)
        else:
            running.add(task)
            task.add_done_callback(on_done)

    def on_done(task: asyncio.Task[None]) -> None:
        running.discard(task)
        # Ours, or the pipe's: a verifier's own has become an answer.
        error = None if task.cancelled() else task.exception()
        if error is not None and not ended.done():
            ended.set_exception(error)

    loop.add_reader(connection.fileno(), on_message)
    heartbeat = loop.create_task(_stay_alive(limit_s + ORPHAN_GRACE_S))
    try:
        await ended
    finally:
        heartbeat.cancel()


async def _stay_alive(seconds: float) -> None:
    """Postpone `die_after` as long as the event loop turns."""
    while True:
        die_after(seconds)
        await asyncio.sleep(HEARTBEAT_S)


async def _call_limited(verifier: Verifier, message: Message) -> Message:
    deadline = asyncio.timeout(message["limit_s"])
    try:
        async with deadline:
            return judgement(await verifier(message["completion"]))
    except raised() as error:
        if deadline.expired():
            return {"failure": "timeout", "detail": f"no answer within {message['limit_s']:g} s"}
        return failure_of(error)
