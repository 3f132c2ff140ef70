"""A proxy in front of a server that disturbs connections, each in its turn: it hangs, closes, breaks off, or sends
something else.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

FAULTS = ("passes", "passes", "hangs", "passes", "breaks off", "garbles", "passes", "floods", "closes")
GARBAGE, FLOOD = b"\x81\x05{]{]{" * 20, 50 << 20


@contextmanager
def disturbed(port: int, faults: Sequence[str] = FAULTS, after: int = 200) -> Iterator[int]:
    """Yield the port of a proxy for a server, which disturbs a connection after so many bytes of the server."""
    kinds = itertools.cycle(faults)

    async def one(client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        kind = next(kinds)
        server, to_server = await asyncio.open_connection("127.0.0.1", port)

        async def upwards() -> None:
            while data := await client.read(1 << 16):
                to_server.write(data)
                await to_server.drain()
            to_server.close()

        async def downwards() -> None:
            sent = 0
            while data := await server.read(1 << 16):
                part = data if kind == "passes" else data[: max(0, after - sent)]
                to_client.write(part)
                await to_client.drain()
                sent += len(part)
                if len(part) < len(data):
                    break
            if kind == "hangs":
                await asyncio.sleep(600)
            if kind == "garbles":
                to_client.write(GARBAGE)
            for _ in range(FLOOD >> 16 if kind == "floods" else 0):
                to_client.write(b"x" * (1 << 16))
                await to_client.drain()
            if kind == "breaks off":
                to_client.transport.abort()
            to_client.close()

        await asyncio.gather(upwards(), downwards(), return_exceptions=True)

    loop, ports, started = asyncio.new_event_loop(), list[int](), threading.Event()

    async def serve() -> None:
        server = await asyncio.start_server(one, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        started.set()
        await server.serve_forever()

    task = loop.create_task(serve())
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait((task,))), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(task.cancel)
        thread.join(10)
