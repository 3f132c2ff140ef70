"""Faults planted in the code under test, each of a kind that such systems have had."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

from braidrl.cluster.membership import Members
from braidrl.flow.selecting import GroupSelector
from braidrl.queue.table import Block, HeldBlocks, Leases
from braidrl.queue.transport import Parking
from braidrl.runtimes.streaming import admission as scheduling
from braidrl.runtimes.streaming import control
from braidrl.runtimes.streaming.consumers import TrainingProgress
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.schedule import StreamSchedule
from braidrl.weights.versions import LoadingSchedule
from tests.simulation.memory import MemoryStorage
from tests.simulation.run import undisturbed

Fault = Callable[[pytest.MonkeyPatch], None]


@contextmanager
def planted(fault: Fault) -> Iterator[None]:
    """Plant a fault for the time of the block."""
    with pytest.MonkeyPatch.context() as patches:
        fault(patches)
        undisturbed.cache_clear()
        try:
            yield
        finally:
            undisturbed.cache_clear()


def lease_not_returned(patches: pytest.MonkeyPatch) -> None:
    """The leases of a dead worker stay with it."""
    patches.setattr(Leases, "of", lambda self, holder: [])


def expired_lease_kept(patches: pytest.MonkeyPatch) -> None:
    """A lease without heartbeats is held for ever."""
    patches.setattr(Leases, "expired", lambda self, now: [])


def version_loaded_twice(patches: pytest.MonkeyPatch) -> None:
    """An engine's load is not recorded."""
    patches.setattr(LoadingSchedule, "loaded", lambda self, name, version: None)


def acknowledged_before_stored(patches: pytest.MonkeyPatch) -> None:
    """A write to a full store passes for done."""
    write = MemoryStorage.write

    def unstored(self: MemoryStorage, frames: Sequence[Any]) -> tuple[str, int]:
        try:
            return write(self, frames)
        except OSError:
            return self.next_name(), 0

    patches.setattr(MemoryStorage, "write", unstored)


def late_duplicate_accepted(patches: pytest.MonkeyPatch) -> None:
    """A repeated request is handled a second time."""
    receive = Parking.receive

    def forgetful(self: Parking, *arguments: Any, **named: Any) -> None:
        self._answered.clear()
        receive(self, *arguments, **named)

    patches.setattr(Parking, "receive", forgetful)


def closed_without_suspended_row(patches: pytest.MonkeyPatch) -> None:
    """A suspended row counts as generated."""
    suspend = StreamSchedule.suspend

    def complete(self: StreamSchedule, lease: Any, rows: Any) -> None:
        if self.progress.published:
            self.tasks.finish(lease, list(rows))
            self.done(lease.task, list(rows), rows)
        else:
            suspend(self, lease, rows)

    patches.setattr(StreamSchedule, "suspend", complete)


def engine_counted_after_its_end(patches: pytest.MonkeyPatch) -> None:
    """An engine that is gone, and comes back under another name, is counted twice."""
    patches.setattr(LoadingSchedule, "leave", lambda self, name: None)


def staleness_not_bounded(patches: pytest.MonkeyPatch) -> None:
    """Engines may start rows one version too early."""
    admissible = scheduling.admissible
    patches.setattr(scheduling, "admissible", lambda iteration, version, most: admissible(iteration, version, most + 1))


def steps_forgotten_by_half(patches: pytest.MonkeyPatch) -> None:
    """After a trainer's death its steps still count."""

    def train_again(self: TrainingProgress) -> None:
        if (batch := self.coming) is not None:
            for consumer in self.consumers.trainers:
                done = [uid for uid in batch.uids if uid in self.tasks.written[consumer.name]]
                self.tasks.unwrite(consumer.name, done)
                self.tasks[consumer.name].reopen(done)

    patches.setattr(TrainingProgress, "train_again", train_again)


def published_before_trained(patches: pytest.MonkeyPatch) -> None:
    """A version is published when its rows are done, whatever steps are missing."""
    patches.setattr(TrainingProgress, "_is_made", lambda self, stage, batch: batch.steps_made[stage.name] > 0)


def freed_while_referenced(patches: pytest.MonkeyPatch) -> None:
    """A block is freed with the first of its references."""

    def release(self: HeldBlocks, blocks: Any) -> list[Block]:
        freed = list(blocks)
        for block in freed:
            self.counts.pop(block, None)
        return freed

    patches.setattr(HeldBlocks, "release", release)


def batch_by_arrival(patches: pytest.MonkeyPatch) -> None:
    """The first groups to be kept are the batch, whatever their numbers."""

    def batch(self: GroupSelector) -> tuple[int, ...] | None:
        kept = [*self.waiting, *(group for group, verdict in self.verdicts.items() if verdict.reason is None)]
        return tuple(sorted(kept[: self.target])) if len(kept) >= self.target else None

    patches.setattr(GroupSelector, "batch", batch)


def rows_beside_a_suspect(patches: pytest.MonkeyPatch) -> None:
    """A row that may kill its engine runs beside others, which are left out with it."""
    patches.setattr(StreamSchedule, "_isolated", lambda self, lease, now, seconds, suspects: lease)


def poison_drawn_for_ever(patches: pytest.MonkeyPatch) -> None:
    """A row that kills its engines is drawn again each time."""
    patches.setattr(ControlPlane, "_suspect", lambda self, task, rows: None)


def rank_counted_after_its_death(patches: pytest.MonkeyPatch) -> None:
    """A rank of the trainer that has died is a member beside the one that replaces it."""
    patches.setattr(Members, "living", property(lambda self: list(self.known.members)))


def replaced_leader_heard(patches: pytest.MonkeyPatch) -> None:
    """The steps of a leader whose ranks have changed count."""
    patches.setattr(control, "OF_LEADERS", ())


def lost_version_not_published_again(patches: pytest.MonkeyPatch) -> None:
    """Weights that lost ranks had not written yet are not published by those that are left."""
    patches.setattr(ControlPlane, "lacks_weights", lambda self, role: False)


FAULTS: tuple[Fault, ...] = (
    lease_not_returned,
    expired_lease_kept,
    version_loaded_twice,
    acknowledged_before_stored,
    late_duplicate_accepted,
    closed_without_suspended_row,
    engine_counted_after_its_end,
    staleness_not_bounded,
    steps_forgotten_by_half,
    published_before_trained,
    freed_while_referenced,
    batch_by_arrival,
    rows_beside_a_suspect,
    poison_drawn_for_ever,
    rank_counted_after_its_death,
    replaced_leader_heard,
    lost_version_not_published_again,
)
