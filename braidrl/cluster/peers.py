"""Collectives of messages over the connections of a group, in which each rank communicates with few others.

all-gather   Bruck (1997): in round k a rank sends its first 2^k blocks to rank r - 2^k, and receives as many of rank
             r + 2^k; after ceil(log2 N) rounds it has all blocks, from twice as many neighbours
collect      up a binomial tree to rank 0, in the order of ranks
reduce       the same; the result goes down that tree
broadcast    down that tree
exchange     one message for each receiver, from each known sender

Gloo's own all-gather and all-reduce are rings of N - 1 messages one after the other, and its all-to-all connects every
pair of ranks. A message is a frame of fixed size, and a second one with the remainder if it is longer.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

Buffer = bytes | bytearray | memoryview
TAG = 1
"""The tag of these messages; collectives of gloo have others."""
FRAME, HEAD = 512, 16
"""Bytes of a frame, and of the two numbers at its beginning: the message's sign and its size."""


class Peers:
    """The members of a process group as partners of single messages. All members make the same calls in one order.

    A call has the same tag on all ranks. Raises RuntimeError for a partner that makes a different call, or that does
    not answer within the group's time limit.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, group.rank(), group.size()
        self.limit: timedelta = group._get_backend(torch.device("cpu")).options._timeout

    def all_gather(self, message: Buffer, sign: int) -> list[memoryview]:
        """Return the messages of all ranks, in the order of ranks."""
        blocks = [as_tensor(message)]
        for distance in distances(self.size):
            count = min(distance, self.size - distance)
            sent = torch.cat(blocks[:count])
            sizes = torch.tensor([sign, *map(len, blocks[:count])])
            coming = torch.empty_like(sizes)
            to, sender = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            self._shift(sizes, to, coming, sender)
            self._check(sender, int(coming[0]), sign)
            received = torch.empty(int(coming[1:].sum()), dtype=torch.uint8)
            self._shift(sent, to, received, sender)
            blocks += received.split(coming[1:].tolist())
        return [blocks[(rank - self.rank) % self.size].numpy().data for rank in range(self.size)]

    def all_gather_rows(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the rows (B, W) of all ranks, in their order.

        `rows` (K, W) are those of this rank; `counts` (N,) has every rank's number of rows.
        """
        width = rows.shape[1]
        starts = torch.cat([torch.zeros(1, dtype=torch.int64), counts.roll(-self.rank).cumsum(0)]).tolist()
        gathered = torch.empty(starts[-1], width, dtype=rows.dtype)
        gathered[: starts[1]] = rows
        for distance in distances(self.size):
            count = min(distance, self.size - distance)
            to, sender = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            self._shift(gathered[: starts[count]], to, gathered[starts[distance] : starts[distance + count]], sender)
        first = starts[self.size - self.rank]
        return torch.cat([gathered[first:], gathered[:first]])

    def collect(self, message: bytes, combine: Callable[[bytes, bytes], bytes], sign: int) -> bytes:
        """Return the combination of all ranks' messages on rank 0, and on another rank of those below it.

        `combine` is associative, and gets the message of lower ranks first.
        """
        for child in self._children():
            message = combine(message, self._receive(child, sign))
        if self.rank:
            self._send(message, self._parent(), sign)
        return message

    def reduce(self, message: bytes, combine: Callable[[bytes, bytes], bytes], sign: int) -> bytes:
        """Return what `collect` returns on rank 0, the same bytes on every rank."""
        return self.broadcast(self.collect(message, combine, sign), sign)

    def broadcast(self, message: bytes, sign: int) -> bytes:
        """Return rank 0's message."""
        if self.rank:
            message = self._receive(self._parent(), sign)
        for child in reversed(list(self._children())):
            self._send(message, child, sign)
        return message

    def exchange(self, messages: Mapping[int, Buffer], senders: Collection[int], sign: int) -> dict[int, memoryview]:
        """Send a message to each rank in `messages`; return the messages from `senders` by rank.

        A barrier comes first, so that a hanging rank is detected on open connections.
        """
        self.reduce(b"", lambda mine, _: mine, sign)
        works: list[tuple[dist.Work, Tensor]] = []
        for rank, message in messages.items():
            works += [(self.group.send([part], rank, TAG), part) for part in framed(message, sign)]
        received = {sender: self._receive_data(sender, sign) for sender in sorted(senders)}
        for work, _ in works:
            work.wait(self.limit)
        return received

    def _children(self) -> Iterator[int]:
        """Yield the children of this rank in the tree, nearest first."""
        for distance in distances(self.size):
            if self.rank % (2 * distance):
                return
            if self.rank + distance < self.size:
                yield self.rank + distance

    def _parent(self) -> int:
        """Return the parent in the tree: the rank with its lowest set bit cleared."""
        return self.rank & (self.rank - 1)

    def _shift(self, sent: Tensor, to: int, received: Tensor, sender: int) -> None:
        """Send a tensor to one rank while receiving from another."""
        work = self.group.send([sent], to, TAG) if sent.numel() else None
        if received.numel():
            self.group.recv([received], sender, TAG).wait(self.limit)
        if work is not None:
            work.wait(self.limit)

    def _send(self, message: Buffer, to: int, sign: int) -> None:
        for part in framed(message, sign):
            self.group.send([part], to, TAG).wait(self.limit)

    def _receive(self, sender: int, sign: int) -> bytes:
        return bytes(self._receive_data(sender, sign))

    def _receive_data(self, sender: int, sign: int) -> memoryview:
        frame = torch.empty(FRAME, dtype=torch.uint8)
        self.group.recv([frame], sender, TAG).wait(self.limit)
        data = frame.numpy().data
        sign_received, size = (int.from_bytes(data[start : start + 8], "little") for start in (0, 8))
        self._check(sender, sign_received, sign)
        begun = data[HEAD : HEAD + size]
        if len(begun) == size:
            return begun
        message = torch.empty(size, dtype=torch.uint8)
        message[: len(begun)] = frame[HEAD:]
        self.group.recv([message[len(begun) :]], sender, TAG).wait(self.limit)
        return message.numpy().data

    def _check(self, sender: int, received: int, sign: int) -> None:
        if received != sign:
            raise RuntimeError(f"rank {sender} made another call: all ranks must make the same calls")


def distances(size: int) -> Iterator[int]:
    """Yield 1, 2, 4, ..., below the number of ranks."""
    distance = 1
    while distance < size:
        yield distance
        distance *= 2


def framed(message: Buffer, sign: int) -> list[Tensor]:
    """Return the frame of a message, and a second tensor with the bytes beyond the frame."""
    room, frame = FRAME - HEAD, bytearray(FRAME)
    frame[:HEAD] = sign.to_bytes(8, "little") + len(message).to_bytes(8, "little")
    begun = memoryview(message)[:room]
    frame[HEAD : HEAD + len(begun)] = begun
    parts = [as_tensor(frame)]
    if len(message) > room:
        parts.append(as_tensor(message)[room:])
    return parts


def as_tensor(message: Buffer) -> Tensor:
    """View bytes as (N,) uint8; a writable buffer is not copied."""
    if len(message) == 0:
        return torch.empty(0, dtype=torch.uint8)
    buffer = message if isinstance(message, bytearray) else bytearray(message)
    return torch.frombuffer(buffer, dtype=torch.uint8)
