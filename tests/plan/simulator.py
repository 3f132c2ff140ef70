"""All four runtimes in virtual time, on the scheduling functions that they use: how long a flow would take, and is each
row done once.

Under `streaming`, workers may die and answer late, leases expire, and rows are suspended.
"""

from collections.abc import Sequence
from functools import partial

from braidrl.data.rows import Uid
from braidrl.flow.batches import TrainingBatch
from braidrl.flow.selecting import Selection
from braidrl.flow.stage import Kind, Stage
from braidrl.plan.simulation import Runtime, SimulatedLease, SimulatedWorker, Streaming, Workload
from braidrl.queue.table import Lease
from braidrl.runtimes.streaming.admission import GroupAdmission
from braidrl.runtimes.streaming.schedule import StreamSchedule
from tests.plan.synchronous import Account, AnyWorkload, Distributed, Eager, Hybrid


class AccountedAdmission(GroupAdmission):
    """An admission that notes admitted rows and closed batches."""

    account: Account

    def admit(self, uids: Sequence[Uid]) -> None:
        super().admit(uids)
        self.account.admitted.update(uids)

    def close(self) -> Selection | None:
        outcome = super().close()
        if outcome is not None:
            self.account.finish_batch(outcome)
        return outcome


class AccountedSchedule(StreamSchedule):
    """A schedule that notes admissions, batches and versions."""

    def __init__(self, work: Workload, account: Account) -> None:
        super().__init__(work.flow, work.sizes)
        self.account = account
        self.admission = AccountedAdmission(work.sizes, self.consumers, self.tasks, self.progress, self.versions)
        self.admission.account = account

    def publish(self) -> TrainingBatch:
        batch = self.progress.batches[self.progress.published + 1]
        self.account.versions.append([self.versions.oldest[uid] for uid in batch.uids])
        return super().publish()


class FailingStreaming(Streaming):
    """A streaming run with the failures of its workload, and an account of its rows."""

    def __init__(self, work: AnyWorkload) -> None:
        super().__init__(work)
        self.failures, self.lease_seconds = work, work.lease_seconds
        self.result: Account = Account()
        self.schedule = AccountedSchedule(work, self.result)
        self.drawn: dict[Uid, float] = {}
        """Seconds that suspended rows have been generated for."""
        self.suspended: dict[int, float] = {}
        """The same of rows that are suspended at the end of a lease."""
        self.watching = False

    def simulate(self) -> Account:
        super().simulate()
        self.result.staleness = self.schedule.max_staleness_seen
        return self.result

    def _note(
        self, worker: SimulatedWorker, rows: Sequence[Uid], shares: Sequence[float], stage: Stage | None = None
    ) -> None:
        super()._note(worker, rows, shares, stage)
        if stage is not None and worker.training is not None:
            training = worker.training
            epoch = training.updates.steps_made // (training.batch.steps // self.work.sizes.epochs)
            self.result.trained.update(((stage.name, epoch), row) for row in rows)

    def _start(self, worker: SimulatedWorker, lease: Lease, shares: Sequence[float], version: int | None) -> None:
        if worker.consumer.kind is Kind.GENERATE:
            before, limit = self.drawn.get(lease.rows[0], 0.0), self.failures.most_seconds
            shares = [shares[0] - before]
            if shares[0] > limit and self.schedule.admission.may_suspend(lease.rows[0]):
                shares, self.suspended[lease.number] = [limit], before + limit
        super()._start(worker, lease, shares, version)
        work, fate = worker.work[lease.number], self.failures.fate(lease.number)
        if fate != "done":
            seconds = work.end - self.clock.now
            work.end = self.clock.now + (seconds / 2 if fate == "dies" else seconds + self.lease_seconds)
            work.turn += 1
            self.clock.after(work.end - self.clock.now, partial(self._end, worker, work, work.turn))
        self._watch()

    def _end(self, worker: SimulatedWorker, work: SimulatedLease, turn: int) -> None:
        lease = work.lease
        # Another row's end may have been the worker's death.
        if turn != work.turn or lease.number not in worker.work:
            return
        if self.failures.fate(lease.number) == "dies":
            worker.work.clear()
            self.schedule.tasks.give_up(self.schedule.tasks.leases.of(worker.name))
            return
        if lease.number not in self.suspended:
            super()._end(worker, work, turn)
            return
        del worker.work[lease.number]
        # A lost lease has rows that were leased again or dropped.
        if lease.number in self.schedule.tasks.leases.held:
            self.schedule.suspend(lease, dict.fromkeys(self.schedule.tasks.left(lease), work.version or 0))
            self.drawn[lease.rows[0]] = self.suspended[lease.number]

    def _watch(self, expired: bool = False) -> None:
        """Give up `expired` leases, and schedule a check when the next one expires."""
        tasks = self.schedule.tasks
        if expired:
            self.watching = False
            tasks.give_up(tasks.leases.expired(self.clock.now))
        deadlines = [lease.deadline for lease in tasks.leases.held.values()]
        if deadlines and not self.watching:
            self.watching = True
            # Slightly later, beyond rounding: a lease exactly at its deadline has not expired.
            seconds = min(deadlines) - self.clock.now + self.lease_seconds / 1000
            self.clock.after(seconds, partial(self._watch, expired=True))


def simulate(runtime: Runtime, work: AnyWorkload) -> Account:
    """Run a workload in virtual time. Raises Deadlock, TooStale or ValueError where a scheduling rule is broken."""
    if runtime == "streaming":
        return FailingStreaming(work).simulate()
    runs = {"eager": Eager, "hybrid": Hybrid, "distributed": Distributed}
    return runs[runtime](work).simulate()
