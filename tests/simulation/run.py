"""A streaming run in one process and in virtual time: the real control plane, stream, schedule, leases, versions and
parking of requests, between simulated workers, a network and a main program.

scenario: sizes, and what goes wrong when ──▶ SimulatedRun ──▶ `Broken`, or nothing
                                                 │ after each event: the invariants

Everything follows from the scenario, so a scenario that fails does so again.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist

from braidrl.algorithms.ragged import Ragged
from braidrl.cluster.membership import Members, member_name, wait_to_join
from braidrl.data.messages import pack_message, unpack_message
from braidrl.data.rows import Uid
from braidrl.flow import Flow, Kind, Scope
from braidrl.flow.batches import Sizes, trained_on
from braidrl.plan.simulation import Clock
from braidrl.queue.calls import Answer, Renew
from braidrl.queue.client import write_columns
from braidrl.queue.transport import Parking
from braidrl.runtimes.streaming.control import ControlPlane
from braidrl.runtimes.streaming.ranks import leader_of
from braidrl.runtimes.streaming.stream import Stream
from braidrl.runtimes.streaming.work import TakeWork, WorkerRequest
from braidrl.weights.versions import LoadingSchedule, Way
from tests.queue.made_up import CHECK, GENERATE, NORMALISE, SAMPLES, UPDATE, born, stage
from tests.queue.test_queue import even_groups
from tests.simulation.actors import LEASE_S, WAIT_S, Engine, Scorer, Trainer, Worker
from tests.simulation.memory import Memory, MemoryPlane

TICK_S = 0.5
TRANSIT_S = 0.01
LIMIT_S = 600.0
"""Virtual seconds after which a run stands still."""
RESTART_S = 1.0
"""Seconds from a death to the start of the replacement."""
EXAMPLES = 10_000
MEET_S, RETURN_S = 0.3, 2.0
"""Seconds in which ranks of a trainer meet anew, and after which a lost one is back."""
EventKind = Literal["lose", "duplicate", "delay", "die", "rank", "pause", "full", "join", "leave", "clock", "poison"]
PLAIN = Flow("plain", [GENERATE, CHECK, NORMALISE, UPDATE])
SELECT = stage("informative", Kind.SELECT, ("length",), (), Scope.GROUP)
EVEN = replace(SELECT, type=f"{even_groups.__module__}:{even_groups.__name__}")
SELECTING = Flow("selecting", [GENERATE, EVEN, CHECK, NORMALISE, UPDATE])


class Event(NamedTuple):
    """Something that goes wrong, or an arrival."""

    at: float
    kind: EventKind
    worker: int
    """Its worker, counted among those that live then, or the trainer's rank; of a row that kills its engines, its
    group.
    """
    seconds: float = 0.0


@dataclass(frozen=True)
class Scenario:
    """A run and its events."""

    iterations: int = 2
    prompts: int = 2
    epochs: int = 1
    staleness: int = 0
    loading: Way = "end"
    engines: int = 2
    ranks: int = 1
    """Processes of the trainer."""
    selects: bool = False
    budget: float | None = None
    """Seconds after which rows are suspended (partial rollout)."""
    seed: int = 0
    events: tuple[Event, ...] = ()

    @property
    def fixes_batches(self) -> bool:
        """Return True if the groups of each batch follow from their numbers alone."""
        return self.budget is None and not (self.selects and self.staleness)


class Broken(AssertionError):
    """An invariant does not hold."""


@dataclass
class Fate:
    """The delivery of a worker's next messages."""

    lose: int = 0
    duplicate: list[float] = field(default_factory=list)
    delay: list[float] = field(default_factory=list)


class SimulatedRun:
    """One run."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.clock, self.memory = scenario, Clock(now=100.0), Memory()
        self.offset = 0.0
        """By how much the control plane's clock is ahead."""
        partial_rollout = scenario.budget is not None
        sizes = Sizes(
            scenario.iterations,
            scenario.prompts,
            SAMPLES,
            scenario.prompts * SAMPLES,
            scenario.epochs,
            max_staleness=scenario.staleness,
            surplus="keep" if partial_rollout else "drop",
            epoch_groups=EXAMPLES,
            partial_rollout=partial_rollout,
        )
        self.stream = Stream(SELECTING if scenario.selects else PLAIN, sizes)
        loading = LoadingSchedule(scenario.loading, max(1, scenario.engines // 2))
        self.control = ControlPlane(self.stream, MemoryPlane(self.memory, "main"), LEASE_S, ["actor"], loading)
        self.control.clock = lambda: self.clock.now + self.offset
        self.parking = Parking(self.control.handle, self._answer)
        self.control.steps.allow(scenario.iterations)
        self.workers: list[Worker] = []
        self.fates: dict[str, Fate] = {}
        self.arrivals: dict[str, float] = {}
        """When the last message of each connection arrives."""
        self.numbers = Counter[str]()
        self.admitting, self.touched = False, True
        self.generated: dict[Uid, float] = {}
        """Seconds for which suspended rows were generated."""
        self.possible: dict[Uid, set[int]] = {}
        """The versions with which engines have reported each row as complete."""
        self.admitted: set[Uid] = set()
        self.published = Counter[Uid]()
        self.batches: list[tuple[int, ...]] = []
        self.trained: dict[int, Counter[Uid]] = {}
        """Rows of the steps towards each version, of the trainer that lives."""
        self.poison = {(0, event.worker, 0) for event in scenario.events if event.kind == "poison"}
        """Rows that kill each engine that draws them."""
        self.other_deaths = 0
        """Deaths of workers without such a row."""
        self.ranks = Members(dist.HashStore(), [member_name(number, 0) for number in range(scenario.ranks)])
        self.living_ranks = dict.fromkeys(range(scenario.ranks), 0)
        """How often each living process of the trainer was started before."""
        for group in [*["actor.generate"] * scenario.engines, "judge", "actor"]:
            self.join(group)
        for event in scenario.events:
            self.clock.after(event.at, partial(self._happen, event))
        self.clock.after(TICK_S, self._tick)

    def run(self) -> None:
        """Run to the end of the last iteration. Raises Broken."""
        while len(self.batches) < self.scenario.iterations:
            self.check(self.clock.now < 100.0 + LIMIT_S, f"only {len(self.batches)} iterations have ended")
            assert self.clock.step()
            # What workers do between two messages changes nothing in the main program.
            if self.touched:
                self.touched = False
                self._admit()
                self._publish()
                self._check_invariants()
        # With staleness, groups admitted ahead may wait for a batch after the last one; so does kept surplus, as groups
        # that took the places of suspended ones which came back in time.
        schedule, last = self.stream.schedule, self.scenario.iterations
        iteration_of, sampling = schedule.admission.iteration_of, schedule.admission.sampling
        waiting = sampling.waiting if self.scenario.budget is not None else {}
        left = [
            uid
            for uid in self.stream.tasks.rows
            if (iteration_of[uid[1]] <= last or not self.scenario.staleness) and uid[1] not in waiting
        ]
        self.check(not left, f"rows are left: {left[:4]}")
        if not self.other_deaths:
            innocent = self.control.deaths.left_out - self.poison
            self.check(not innocent, f"rows are left out that have killed no engine: {innocent}")

    def check(self, holds: bool, message: str) -> None:
        """Raise Broken unless something holds."""
        if not holds:
            raise Broken(message)

    def seconds(self, uid: Uid) -> float:
        """Return how long an engine needs for a row."""
        return round(random.Random(f"{self.scenario.seed} {uid}").choice([0.3, 0.8, 1.5, 4.0]), 2)

    # The network

    def to_queue(self, worker: Worker, message: tuple[str, int, float, bytes, Sequence[bytes]]) -> None:
        """Send a message of a worker to the control plane."""
        for seconds in self._transits(worker.holder, message[0], duplicates=True):
            self.clock.after(seconds, partial(self._receive, message))

    def _transits(self, holder: str, connection: str, duplicates: bool = False) -> list[float]:
        """Return after how many seconds a message arrives: none if it is lost, two if it is doubled.

        Messages of one connection arrive in their order.
        """
        fate = self.fates.setdefault(holder, Fate())
        seconds = [TRANSIT_S]
        if fate.lose:
            fate.lose -= 1
            seconds = []
        elif fate.delay:
            seconds = [TRANSIT_S + fate.delay.pop()]
        elif fate.duplicate and duplicates:
            seconds = [TRANSIT_S, TRANSIT_S + fate.duplicate.pop()]
        arrivals = []
        for one in seconds:
            self.arrivals[connection] = max(self.arrivals.get(connection, 0.0), self.clock.now + one)
            arrivals.append(self.arrivals[connection] - self.clock.now)
        return arrivals

    def _receive(self, message: tuple[str, int, float, bytes, Sequence[bytes]]) -> None:
        name, number, wait_s, packed, frames = message
        request, leases = unpack_message(packed, WorkerRequest), len(self.stream.tasks.leases.held)
        self.parking.receive(name.encode(), number, request, frames, self.clock.now, wait_s)
        # A worker that asks for work, or is alive, enables no other, and changes nothing unless it gets rows.
        if not isinstance(request, TakeWork | Renew):
            self.parking.retry(self.clock.now)
            self.touched = True
        elif len(self.stream.tasks.leases.held) != leases:
            self.touched = True

    def _answer(self, sender: bytes, number: int, answer: Answer) -> None:
        name, packed = sender.decode(), pack_message(answer[0])
        frames = [bytes(frame) for frame in answer[1]]
        worker = next((one for one in self.workers if name in one.conversations), None)
        if worker is None:
            return
        for seconds in self._transits(worker.holder, f"to {name}"):
            worker.after(seconds, partial(worker.conversations[name].hear, number, packed, frames))

    # The main program

    def join(self, group: str, number: int | None = None, starts: int = 0) -> None:
        """Start a worker."""
        if number is None:
            number = self.numbers[group]
            self.numbers[group] += 1
        kind = {"actor.generate": Engine, "judge": Scorer, "actor": Trainer}[group]
        self.workers.append(kind(self, group, number, starts))

    def remove(self, worker: Worker) -> None:
        """End a worker without a replacement, unless it is the last one of its group."""
        if worker in self.workers:
            worker.alive, self.touched = False, True
            if all(other is worker or other.group != worker.group for other in self.workers):
                self._replace(worker)
                return
            self.workers.remove(worker)
            self.control.fail(worker.holder, died=False)
            self.control.change(lambda: None)
            self.parking.retry(self.clock.now)

    def die(self, worker: Worker, by_a_row: bool = False) -> None:
        """Kill a worker; the main program notices and starts another."""
        self.other_deaths += not by_a_row
        worker.alive = False
        if not isinstance(worker, Trainer):
            self.clock.after(RESTART_S, partial(self._replace, worker))
        else:
            self.lose_rank(worker.number)

    def _replace(self, worker: Worker) -> None:
        if worker not in self.workers:
            return
        self.workers.remove(worker)
        self.touched = True
        self.control.fail(worker.holder)
        self.control.change(lambda: None)
        self.join(worker.group, worker.number, worker.starts + 1)
        self.parking.retry(self.clock.now)

    # The ranks of the trainer

    @property
    def leader(self) -> str:
        """Return the name at the queue of the first rank."""
        return leader_of("actor", self.ranks.membership)

    def lose_rank(self, number: int) -> None:
        """Kill a process of the trainer; the main program notices, and starts it again."""
        starts = self.living_ranks.pop(number, None)
        if starts is None:
            return
        self.other_deaths += 1
        for worker in self.workers:
            if isinstance(worker, Trainer) and worker.number == number:
                worker.alive = False
        self.clock.after(RESTART_S, partial(self._notice, number, starts))

    def _notice(self, number: int, starts: int) -> None:
        self.clock.after(RETURN_S, partial(self._return, number, starts + 1))
        lost = member_name(number, starts)
        if lost in self.ranks.membership.members:
            self._regroup([lost], member_name(number, starts + 1))
        else:
            self.ranks.lose(lost)

    def _return(self, number: int, starts: int) -> None:
        self.living_ranks[number] = starts
        if member_name(number, starts) not in self.ranks.membership.members:
            wait_to_join(self.ranks.store, member_name(number, starts))
        self._meet()

    def _regroup(self, dead: Sequence[str] = (), again: str = "") -> None:
        """Let the ranks meet anew: without dead ones, and with those that wait; the last one alone comes back to the
        checkpoint of the published version.
        """
        before, came = self.leader, self.ranks.waiting()
        left = [member for member in self.ranks.membership.members if member not in dead]
        self.ranks.change(dead, came if left or came else [again])
        self.control.fail(before, died=False)
        self.control.continue_from_memory({"actor": self.leader})
        self.trained.pop(self.stream.schedule.progress.published + 1, None)
        self.workers = [one for one in self.workers if one.alive or not isinstance(one, Trainer)]
        self.touched = True
        self.parking.retry(self.clock.now)
        self.clock.after(MEET_S, self._meet)

    def _meet(self) -> None:
        """Let the first rank register if all have come, and none is still at work with the ranks before."""
        living = {member_name(*rank) for rank in self.living_ranks.items()}
        known = self.ranks.membership
        trainers = [worker for worker in self.workers if isinstance(worker, Trainer)]
        is_free = not any(worker.alive or worker.holder == self.leader for worker in trainers)
        if is_free and living.issuperset(known.members):
            self.join("actor", int(known.members[0].partition(".")[0]), known.number)

    def ended(self, trainer: Trainer) -> None:
        """A trainer has learned that its ranks have changed."""
        self.check(trainer.holder != self.leader or self.control.stopping, f"{trainer.holder} is stopped")
        if trainer in self.workers:
            trainer.alive = False
            self.workers.remove(trainer)
            self.clock.after(MEET_S, self._meet)

    def went_back(self, trainer: Trainer, version: int) -> None:
        """A trainer has gone back to a version."""
        if trainer.holder == self.leader:
            published = self.stream.schedule.progress.published
            self.check(version == published, f"{trainer.holder} goes back to {version}, and {published} is published")

    def _tick(self) -> None:
        self.touched = True
        self.control.tick()
        for lease in self.stream.tasks.leases.held.values():
            late = self.control.clock() - lease.deadline
            self.check(late <= 0, f"{lease.holder} still holds lease {lease.number}, {late:.1f} s after its end")
        for name in self.control.silent(LEASE_S + WAIT_S):
            for worker in [worker for worker in self.workers if worker.holder == name and worker.alive]:
                self.die(worker)
        self.parking.retry(self.clock.now)
        self.clock.after(TICK_S, self._tick)

    def _admit(self) -> None:
        """Let the rows process make rows of the groups that are wanted."""
        if self.admitting:
            return
        schedule = self.stream.schedule
        before = schedule.admission.opened, schedule.admission.lookahead
        expected = schedule.admission.groups_wanted(self.control.loading.target)
        if before != (schedule.admission.opened, schedule.admission.lookahead):
            self.control.change(lambda: None)
            self.parking.retry(self.clock.now)
        if expected:
            first = schedule.admission.sampling.admitted + 1
            self.admitting = True
            self.clock.after(0.05, partial(self._made, range(first, first + expected)))

    def _made(self, groups: range) -> None:
        self.admitting, self.touched = False, True
        schedule = self.stream.schedule
        if not schedule.admission.is_open or schedule.admission.sampling.admitted + 1 != groups.start:
            return  # their batch was closed meanwhile
        columns = dict(born(groups).items())
        if self.scenario.budget is not None:
            # Rows that may be suspended begin with empty responses.
            nothing = torch.zeros(len(columns["group"]), dtype=torch.int64)
            empty = Ragged.from_lengths(torch.empty(0, dtype=torch.int64), nothing)
            columns |= {"tokens": empty, "length": nothing, "version": nothing}
        rows = write_columns(self.control.data, columns)
        self.admitted |= set(rows.uids())
        self.control.admit(self.stream, self.control.held.hold_for(rows))
        self.parking.retry(self.clock.now)

    def _publish(self) -> None:
        while self.control.finished:
            record = self.control.finished.popleft()
            uids, iteration = record.final.uids(), record.iteration
            self.published.update(uids)
            self.check(max(self.published.values()) == 1, f"a row of iteration {iteration} is published twice")
            steps = self.trained.get(iteration, Counter())
            expected = Counter(dict.fromkeys(uids, self.scenario.epochs))
            self.check(steps == expected, f"iteration {iteration} trained {dict(steps)} in place of {dict(expected)}")
            drawn = [uid for uid in uids if uid in self.poison and uid not in self.control.deaths.left_out]
            self.check(not drawn, f"rows that kill their engines are drawn: {drawn}")
            for uid, version in zip(uids, record.final.index["version"].tolist(), strict=True):
                known = self.possible.get(uid, set())
                self.check(version in known, f"row {uid} has version {version}, and was reported with {known}")
                late = trained_on(iteration) - version
                self.check(0 <= late <= self.scenario.staleness, f"row {uid} is {late} versions late")
            self.batches.append(tuple(sorted({uid[1] for uid in uids})))
            if self.ranks.waiting():
                self._regroup()

    # What workers do

    def started(self, engine: Engine, uid: Uid) -> None:
        """An engine starts a row."""
        held = self.control.loading.version_of(engine.holder)
        self.check(held in (None, engine.version), f"{engine.holder} has {engine.version}, and counts as {held}")

    def reported(self, uid: Uid, version: int, seconds: float | None) -> None:
        """An engine reports a row as complete, or as suspended without `seconds`."""
        if seconds is not None:
            self.possible.setdefault(uid, set()).add(version)

    def stepped(self, trainer: Trainer, iteration: int, uids: Sequence[Uid]) -> None:
        """A trainer makes a step."""
        if trainer.holder == self.leader:
            self.trained.setdefault(iteration, Counter()).update(uids)

    # What happens

    def _happen(self, event: Event) -> None:
        engines = [worker for worker in self.workers if isinstance(worker, Engine) and worker.alive]
        living = [worker for worker in self.workers if worker.alive]
        if not living:
            return
        worker = living[event.worker % len(living)]
        fate = self.fates.setdefault(worker.holder, Fate())
        match event.kind:
            case "lose":
                fate.lose += 1
            case "duplicate":
                fate.duplicate.append(event.seconds)
            case "delay":
                fate.delay.append(event.seconds)
            case "die":
                self.die(worker)
            case "rank":
                self.lose_rank(event.worker % self.scenario.ranks)
            case "pause":
                worker.frozen_until = self.clock.now + event.seconds
            case "full":
                self.memory.full.add(worker.holder)
                self.clock.after(event.seconds, partial(self.memory.full.discard, worker.holder))
            case "join":
                self.join("actor.generate")
                self.control.loading.limit_draining(len(engines) + 1)
            case "leave":
                if len(engines) > (2 if self.scenario.loading == "rolling" else 1):
                    engines[event.worker % len(engines)].leave()
                    self.control.loading.limit_draining(len(engines) - 1)
            case "clock":
                self.offset += event.seconds
            case "poison":
                pass  # since the beginning

    # Invariants

    def _check_invariants(self) -> None:
        """Check what must hold after each event."""
        tasks, schedule = self.stream.tasks, self.stream.schedule
        holders = self.control.holders
        leased = Counter[int]()
        for name, task in tasks.tasks.items():
            for row, number in task.lease.items():
                self.check(row in tasks.rows, f"{name} has row {row}, which is gone")
                if number is not None:
                    leased[number] += 1
            for ready in task.ready.values():
                doubled = [row for row in ready.rows.values() if row in task.lease]
                self.check(not doubled, f"{name} offers rows that are held or done: {doubled[:2]}")
        for lease in tasks.leases.held.values():
            self.check(leased.pop(lease.number, 0) == lease.left, f"lease {lease.number} counts its rows wrongly")
            self.check(lease.holder in holders, f"{lease.holder} is gone and holds lease {lease.number}")
        self.check(not leased, f"rows are held by leases that have ended: {dict(leased)}")
        dead = holders.keys() - {worker.holder for worker in self.workers}
        self.check(not dead, f"workers that are gone are registered: {dead}")
        strangers = self.control.loading.engines.keys() - holders.keys()
        self.check(not strangers, f"engines that are gone still count: {strangers}")
        for writer, parts in self.stream.table.parts.items():
            for part in set(parts.values()):
                missing = [block.name for block in part.blocks if block.name not in self.memory.segments]
                self.check(not missing, f"{writer} has written rows that are not stored: {missing[:2]}")
        for uid in tasks.rows:
            self.check(uid not in self.published, f"row {uid} is published and still in work")
        joined = {group for batch in schedule.progress.batches.values() for group in batch.joined}
        lost = [group for group in joined if group not in schedule.admission.rows_of]
        self.check(not lost, f"groups of a batch are gone: {lost}")


def outcome(scenario: Scenario) -> tuple[str, list[tuple[int, ...]]]:
    """Return what is broken in a run, or an empty string, and its batches; an error in a request counts too."""
    run = SimulatedRun(scenario)
    try:
        run.run()
    except Exception as error:  # also an error of the code under test
        return f"{type(error).__name__}: {error}", run.batches
    return "", run.batches


def failure(scenario: Scenario) -> str:
    """Return what is broken in a run, or an empty string; batches must be those of the run without events."""
    broken, batches = outcome(scenario)
    if not broken and batches and scenario.fixes_batches and scenario.events:
        broken, expected = undisturbed(scenario.iterations, scenario.prompts, scenario.staleness, scenario.selects)
        if not broken and batches != expected:
            return f"Broken: the batches are {batches}, and without events {expected}"
    return broken


@cache
def undisturbed(iterations: int, prompts: int, staleness: int, selects: bool) -> tuple[str, list[tuple[int, ...]]]:
    """Return the outcome of a run in which nothing goes wrong; batches depend on nothing else."""
    return outcome(Scenario(iterations, prompts, staleness=staleness, selects=selects))


def with_events(scenario: Scenario, events: Sequence[Event]) -> Scenario:
    """Return the scenario with other events."""
    return replace(scenario, events=tuple(events))


def drawn(seed: int) -> Scenario:
    """Draw a scenario."""
    chance = random.Random(seed)
    staleness = chance.choice([0, 0, 1, 2])
    budget = chance.choice([None, 1.0]) if staleness else None
    loading: Any = chance.choice(["end", "delayed", "rolling", "interrupt"] if staleness else ["end", "delayed"])
    if budget is not None:
        loading = "end"
    weights: dict[EventKind, int] = {"lose": 6, "duplicate": 6, "delay": 6, "die": 3, "rank": 2, "pause": 3, "full": 2}
    weights |= {"join": 1, "leave": 1, "clock": 1, "poison": 1}
    events = []
    for _ in range(chance.randint(0, 30)):
        kind = chance.choices(list(weights), list(weights.values()))[0]
        seconds = chance.choice([0.05, 0.3, 1.0, 3.0, 9.0])
        events.append(Event(round(chance.uniform(0.0, 20.0), 2), kind, chance.randrange(8), seconds))
    return Scenario(
        chance.randint(2, 3),
        chance.randint(1, 2),
        chance.choice([1, 1, 2]),
        staleness,
        loading,
        chance.randint(2, 3),
        chance.randint(1, 3),
        budget is None and chance.random() < 0.4,
        budget,
        seed,
        tuple(sorted(events)),
    )


def shrunk(scenario: Scenario, tries: int = 300) -> Scenario:
    """Return a scenario that fails in the same way with as few events as possible."""
    kind = failure(scenario)[:20]
    step = max(1, len(scenario.events) // 2)
    while tries > 0:
        position = 0
        while position < len(scenario.events) and tries > 0:
            fewer = with_events(scenario, scenario.events[:position] + scenario.events[position + step :])
            tries -= 1
            if failure(fewer)[:20] == kind:
                scenario = fewer
            else:
                position += step
        if step == 1:
            break
        step //= 2
    return scenario
