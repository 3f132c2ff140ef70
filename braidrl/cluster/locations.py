"""Reports the locations of ranks to the store, for the error after a failed collective: one message per machine and
second.

rank ──datagram each second──▶ speaker, a rank of the machine ──if they have changed──▶ store: `places/N`
     ◀──newest membership──────                               ◀──newest membership──

The speaker has bound an address of the run, which the kernel frees when its process ends: then another rank binds it.
Any user of the machine can send to these addresses; the kernel reports the sender, and messages of other users are
ignored. After a failure each rank writes its own location, so that a frozen speaker hides no other rank.
"""

import errno
import os
import select
import socket
import struct
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import torch.distributed as dist

from braidrl.cluster.process_groups import count_at, has_message, message_at, put_first, put_message
from braidrl.data.messages import pack_message, unpack_message

MOST_BYTES = 1 << 16
CREDENTIALS = struct.Struct("3i")
"""A sender's process, user and group, as the kernel knows them."""


class Location(NamedTuple):
    """A rank, its number of collectives so far, and its current activity."""

    rank: int
    meetings: int
    place: str


class Locations:
    """The locations of a machine's ranks, sent by a thread of each rank."""

    def __init__(self, store: dist.Store) -> None:
        """Take the store through which the ranks of all machines exchange locations."""
        self.store, self.speaks, self._number = store, False, 0
        self._address = f"\0braid-{put_first(store, 'name of machines', uuid.uuid4().hex)}"
        self._heard, self._sent = dict[int, Location](), dict[int, Location]()
        self._listeners = set[bytes]()
        self._socket, self._speaker = (socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2))
        for end in (self._socket, self._speaker):
            end.setblocking(False)
            end.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def close(self) -> None:
        self._socket.close()
        self._speaker.close()

    def exchange(self, location_here: Location, seconds: float, newest: Callable[[], int]) -> int:
        """Exchange locations with the machine's other ranks for some seconds; return the number of the newest
        membership.

        The speaker gets that number from `newest`.
        """
        self._tell(location_here)
        newest_number, end = 0, time.monotonic() + seconds
        sockets = [self._socket, self._speaker] if self.speaks else [self._socket]
        while (left := end - time.monotonic()) > 0:
            for ready in select.select(sockets, [], [], left)[0]:
                with suppress(ValueError, BlockingIOError):
                    message, sender = received(ready)
                    if ready is self._socket:
                        newest_number = unpack_message(message, int)
                        continue
                    location = unpack_message(message, Location)
                    self._heard[location.rank] = location
                    self._listeners.add(sender)
        if not self.speaks:
            return newest_number
        if self._heard != self._sent:
            self._number = write(self.store, list(self._heard.values()), self._number)
            self._sent = dict(self._heard)
        newest_number = newest()
        for listener in list(self._listeners):
            if not self._sends(newest_number, listener):
                self._listeners.discard(listener)
        return newest_number

    def _tell(self, location: Location) -> None:
        """Send this rank's location to the speaker; become the speaker if there is none."""
        if not self.speaks:
            try:
                if not self._socket.getsockname():
                    self._socket.bind("")  # an address for answers
                if self._sends(location, self._address):
                    return
                self._speaker.bind(self._address)
            except OSError as error:
                if error.errno == errno.EADDRINUSE:
                    return
                # A system without such addresses: each rank writes its location.
            self.speaks = True
        self._heard[location.rank] = location

    def _sends(self, message: object, address: str | bytes) -> bool:
        """Send a datagram; return False if no process is bound to the address."""
        try:
            self._socket.sendto(pack_message(message), address)
        except BlockingIOError:  # its queue is full, and the message is repeated in a second
            return True
        except (ConnectionRefusedError, FileNotFoundError):
            return False
        return True


def received(ready: socket.socket) -> tuple[bytes, bytes]:
    """Return a datagram and its sender's address. Raises ValueError if it is of another user or has no address."""
    message, about, _, sender = ready.recvmsg(MOST_BYTES, socket.CMSG_SPACE(CREDENTIALS.size))
    users = [CREDENTIALS.unpack(data)[1] for _, kind, data in about if kind == socket.SCM_CREDENTIALS]
    if users != [os.getuid()]:
        raise ValueError("a message of another user")
    if not sender:
        raise ValueError("a message that cannot be answered")
    return message, sender


def write(store: dist.Store, locations: list[Location], number: int = 0) -> int:
    """Write locations to the store, in place of those with a number; return the new number."""
    number = number or count_at(store, "machines", 1)
    put_message(store, f"places/{number}", locations)
    return number


def known_locations(store: dist.Store) -> dict[int, Location]:
    """Return the latest location of each rank that has one in the store."""
    latest = dict[int, Location]()
    for number in range(1, count_at(store, "machines") + 1):
        if has_message(store, key := f"places/{number}"):
            for location in message_at(store, key, list[Location]):
                latest[location.rank] = max(latest.get(location.rank, location), location)
    return latest
