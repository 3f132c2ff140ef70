"""A process group that answers for all other ranks, from a model in which every rank has equal rows.

rank 0 is played first ──what it says──▶ record
rank r: all-gather   the record of rank 0, and its own message for every other rank, with the groups of that rank
        all-reduce   a sum times the number of ranks; a minimum or maximum as it is
        broadcast    the record of rank 0

Every rank makes the same calls in the same order, so that the record's k-th entry answers the k-th call. Seconds that
the model takes are counted apart.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future  # type: ignore[attr-defined]
from torch.futures import Future

from braidrl.cluster.world import World
from braidrl.data.codec import pack_rows, unpack_rows
from braidrl.data.messages import pack_message, unpack_message

RECORDED_BYTES = 1 << 20
"""Tensors of at most so many bytes are recorded; larger ones are gradients, which no other rank's call needs."""


class PlayedGroup(dist.ProcessGroup):
    """The group of all ranks, of which one is real."""

    def __init__(self, rank: int, size: int, groups_each: int, record: list[Tensor] | None) -> None:
        """Play `rank`; each has `groups_each` groups of rows. Without a `record` this is rank 0, which makes it."""
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.number, self.count, self.groups_each = rank, size, groups_each
        self.record, self.calls = record or [], 0
        self.makes_record = record is None
        self.sent, self.messages, self.modelled_s = Counter[str](), Counter[str](), 0.0

    def getBackendName(self) -> str:
        return "played"

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return self.number

    @contextmanager
    def _call(self, name: str, said: Tensor, messages: int) -> Any:
        """Count a call, and answer it; `said` is what this rank sends, in so many messages.

        An all-reduce needs no record: how many rounds a wave has depends on time.
        """
        start = time.process_time()
        self.sent[name] += said.numel() * said.element_size()
        self.messages[name] += messages
        if name == "all_reduce":
            yield said
            self.modelled_s += time.process_time() - start
            return
        self.calls += 1
        if self.makes_record:
            small = said.numel() * said.element_size() <= RECORDED_BYTES
            self.record.append(said.detach().clone() if small else torch.empty(0))
        yield self.record[self.calls - 1]
        self.modelled_s += time.process_time() - start

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        operation = options.reduceOp if options is not None else dist.ReduceOp.SUM
        with self._call("all_reduce", tensors[0], 2 * log2(self.count)):
            for tensor in tensors:
                if operation == dist.ReduceOp.SUM:
                    tensor.mul_(self.count)
        return ended(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], options: Any = None) -> dist.Work:
        return self.allreduce(tensors, options)

    def barrier(self, options: Any = None) -> dist.Work:
        return self.allreduce([torch.ones(1)])

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        with self._call("broadcast", tensors[0], log2(self.count)) as first:
            if first.shape == tensors[0].shape:
                tensors[0].copy_(first)
        return ended(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], options: Any = None) -> dist.Work:  # type: ignore[override]
        with self._call("all_gather", inputs[0], self.count - 1) as first:
            of_rank = self._as_rank(inputs[0])
            for rank, output in enumerate(outputs[0]):
                output.copy_(first if rank == 0 and first.shape == output.shape else of_rank(rank))
        return ended(outputs)

    def _allgather_base(self, output: Tensor, given: Tensor, options: Any = None) -> dist.Work:
        return self.allgather([list(output.chunk(self.count))], [given], options)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> dist.Work:
        return self._allgather_base(output, input, opts)

    def alltoall_base(
        self, output: Tensor, given: Tensor, output_splits: Any = None, input_splits: Any = None, options: Any = None
    ) -> dist.Work:
        with self._call("all_to_all", given, self.count - 1) as first:
            if output.shape == given.shape:
                output.copy_(given)
            if not output_splits and first.shape == given.shape:
                output.view(self.count, -1)[0] = first.view(self.count, -1)[self.number]
        return ended([output])

    def all_to_all_single(self, *arguments: Any, **named: Any) -> dist.Work:
        return self.alltoall_base(*arguments, **named)

    def _as_rank(self, message: Tensor) -> Callable[[int], Tensor]:
        """Return what each rank says where this one says `message`: the same, with the groups of its own rows."""
        try:
            said = unpack_message(message.numpy().tobytes()) if message.dtype == torch.uint8 else None
            rows = unpack_rows(said[2]) if isinstance(said, list) and len(said) == 3 else None
        except (ValueError, TypeError, RuntimeError):
            said = rows = None
        if said is None or rows is None or "group" not in rows:
            return lambda rank: message
        known = rows

        def of_rank(rank: int) -> Tensor:
            group = known["group"]
            assert isinstance(group, Tensor)
            moved = {"group": group + (rank - self.number) * self.groups_each}
            own = known.with_columns({**dict(known.items()), **moved})
            packed = pack_message((*said[:2], bytes(pack_rows(own))))
            assert len(packed) == len(message)
            return torch.frombuffer(bytearray(packed), dtype=torch.uint8)

        return of_rank


def log2(number: int) -> int:
    return max(1, (number - 1).bit_length())


def ended(result: Any) -> dist.Work:
    """Return a work that has ended."""
    future: Future[Any] = Future()
    future.set_result(result)
    work: dist.Work = _create_work_from_future(future)
    return work


class PlayedWorld(World):
    """The world of a played rank. It counts the seconds of each place, without those of the model."""

    def __init__(self, group: PlayedGroup) -> None:
        super().__init__(group.number, group.count, group, dist.HashStore())
        self.played, self.seconds = group, defaultdict[str, float](float)
        self._since, self._modelled = time.process_time(), 0.0
        self.folder: Path | None = None
        """The run's folder, where the model leaves the recorded rows of other ranks."""

    def gather(self, purpose: str, value: Any, type: Any = Any) -> list[Any]:
        if purpose == "written rows" and self.first and self.folder is not None:
            start = time.process_time()
            for part in self.folder.glob("rollouts/.*rank-0"):
                for rank in range(1, self.size):
                    part.with_name(part.name.removesuffix("0") + str(rank)).write_bytes(part.read_bytes())
            self.played.modelled_s += time.process_time() - start
        return super().gather(purpose, value, type)

    def at(self, place: str) -> None:
        self.mark()
        super().at(place)

    def mark(self) -> None:
        """Add the seconds since the last mark to the place where this rank is."""
        now = time.process_time()
        self.seconds[self.place] += now - self._since - (self.played.modelled_s - self._modelled)
        self._since, self._modelled = now, self.played.modelled_s


def join_played(rank: int, size: int, groups_each: int, record: Sequence[Tensor] | None) -> PlayedWorld:
    """Join the played group as the group of all ranks of torch.distributed."""
    made: list[PlayedGroup] = []

    def create(store: Any, number: int, count: int, timeout: Any) -> PlayedGroup:
        made.append(PlayedGroup(number, count, groups_each, list(record) if record is not None else None))
        return made[-1]

    dist.Backend.register_backend("played", create, devices=["cpu"])
    dist.init_process_group("played", store=dist.HashStore(), rank=rank, world_size=size)
    return PlayedWorld(made[0])
