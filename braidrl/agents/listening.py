"""The endpoint's listening socket, and its limit on connections.

connection ──accepted──▶ waits for a request ──its body is read──▶ busy ──answered──▶ waits again
                         └── if there are too many, the longest-waiting one is closed
"""

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from aiohttp import web

MOST_CONNECTIONS = 4096
BACKLOG = 1024
PAUSE_S = 0.05
"""Seconds to wait after a connection could not be accepted."""
NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class BoundedConnections:
    """The connections of a server, limited in number."""

    def __init__(self, server: web.Server, listener: socket.socket) -> None:
        self._server, self._listener = server, listener
        self._listener.setblocking(False)
        # Half of the descriptors are for this process's other files.
        self.most = max(4, min(MOST_CONNECTIONS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2))
        self._waiting: dict[asyncio.Protocol, None] = {}
        """Connections without a complete request, in the order of waiting time, longest first."""
        self._busy: set[asyncio.Protocol] = set()
        self.closed = self.failures = 0
        """Number of connections that were closed to make room, and of connections that could not be accepted."""
        self._accepting = asyncio.ensure_future(self._accept())

    async def close(self) -> None:
        """Stop accepting, and log in one line the connections that were closed or refused."""
        self._accepting.cancel()
        await asyncio.wait((self._accepting,))
        self._listener.close()
        if self.closed or self.failures:
            logging.getLogger(__name__).warning(
                f"the endpoint has room for {self.most} connections: {self.closed} without a request were closed, and "
                f"{self.failures} times none could be accepted; a client holds connections that it does not use"
            )

    @contextmanager
    def busy(self, connection: asyncio.Protocol) -> Iterator[None]:
        """Keep a connection with a complete request open in this context; afterwards it counts as waiting again."""
        self._waiting.pop(connection, None)
        self._busy.add(connection)
        try:
            yield
        finally:
            self._busy.discard(connection)
            self._waiting[connection] = None

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in NO_ROOM:
                    # Other parts of the process use descriptors that were reserved for connections.
                    self.failures += 1
                    self.most = max(4, len(self._waiting) + len(self._busy) - 8)
                    self._make_room(self.most)
                    await asyncio.sleep(PAUSE_S)
                elif error.errno == errno.EBADF:
                    return
                continue
            if not self._make_room(self.most - 1):
                self.closed += 1
                accepted.close()
                continue
            with suppress(OSError):
                _, protocol = await loop.connect_accepted_socket(self._server, accepted)
                self._waiting[protocol] = None

    def _make_room(self, most: int) -> bool:
        """Close the longest-waiting connections until at most `most` are left; return False if more remain."""
        self._waiting = {
            connection: None for connection in self._waiting if getattr(connection, "transport", None) is not None
        }
        for oldest in list(self._waiting)[: max(0, len(self._waiting) + len(self._busy) - most)]:
            del self._waiting[oldest]
            self.closed += 1
            oldest.transport.abort()  # type: ignore[attr-defined]
        return len(self._waiting) + len(self._busy) <= most
