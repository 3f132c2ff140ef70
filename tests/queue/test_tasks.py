"""Each task gets ready rows once and completes them once, despite dead holders, expired leases and late answers."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from braidrl.queue.samplers import SAMPLERS, Candidate, Sampler, sampler_named
from braidrl.queue.tasks import PATIENCE, Tasks

Row = tuple[int, int]
ROWS = [(group, sample) for group in range(3) for sample in range(2)]
TASKS = {"generate": [], "check": ["generate"], "train": ["generate", "check"], "groups": ["generate"]}


def begin(rows: list[Row] | None = None) -> Tasks:
    tasks = Tasks(TASKS, ["groups"])
    tasks.facts = lambda row: Candidate(row, row[0], 2, sum(row), row[1])
    tasks.admit(ROWS if rows is None else rows, lambda row: row[0])
    return tasks


class TaskMachine(RuleBasedStateMachine):
    """Holders take, finish, die and are late in any order; a plain record says what must hold."""

    @initialize()
    def begin(self) -> None:
        self.tasks = begin([])
        self.now = 0.0
        self.numbers: list[int] = []
        self.work: list[Row] = []
        self.written: set[tuple[str, Row]] = set()
        self.done: set[tuple[str, Row]] = set()
        self.new = itertools.count()

    def ready(self, name: str) -> list[Row]:
        """Rows that can be taken, searched for among all rows in work."""
        leases = [lease for lease in self.tasks.leases.held.values() if lease.task == name]
        held = {row for lease in leases for row in self.tasks.left(lease)}
        free = [
            row
            for row in self.work
            if row not in held
            and (name, row) not in self.done
            and all((writer, row) in self.written for writer in TASKS[name])
        ]
        if name != "groups":
            return free
        return [row for row in free if all(other in free for other in self.work if other[0] == row[0])]

    @rule(size=st.integers(1, 3))
    def admit(self, size: int) -> None:
        group = next(self.new)
        rows = [(group, sample) for sample in range(size)]
        self.tasks.admit(rows, lambda row: row[0])
        self.work += rows

    @rule(
        name=st.sampled_from(list(TASKS)),
        holder=st.sampled_from("ab"),
        most=st.integers(1, 4),
        ranks=st.integers(1, 3),
        sampler=st.sampled_from(list(SAMPLERS)),
    )
    def take(self, name: str, holder: str, most: int, ranks: int, sampler: str) -> None:
        ready = self.ready(name)
        lease = self.tasks.take(name, holder, self.now, 10.0, most, sampler_named(sampler), ranks)
        assert (lease is not None) == bool(ready), "there is work exactly where something is ready"
        if lease is not None:
            assert len(set(lease.rows)) == len(lease.rows) and set(lease.rows) <= set(ready)
            if name == "groups":
                groups = {row[0] for row in lease.rows}
                assert set(lease.rows) == {row for row in ready if row[0] in groups}
                assert len(groups) == 1 or len(lease.rows) <= 3 * most
            else:
                assert len(lease.rows) <= most
            self.numbers.append(lease.number)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.numbers))
        lease = self.tasks.leases.held.get(number)
        if lease is None or lease.deadline < self.now:
            assert self.tasks.rows_by_lease([(number, None)], [], self.now) == ([number], {})
            return
        places = data.draw(st.none() | st.sets(st.integers(0, len(lease.rows) - 1)))
        left = set(self.tasks.left(lease))
        rows = self.tasks.complete(lease, None if places is None else sorted(places))
        assert set(rows) == (left if places is None else left & {lease.rows[place] for place in places})
        assert not self.done & {(lease.task, row) for row in rows}, "no row is done twice"
        self.done |= {(lease.task, row) for row in rows}
        self.written |= {(lease.task, row) for row in rows}
        self.tasks.write(lease.task, rows)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        lease = self.tasks.leases.held.get(data.draw(st.sampled_from(self.numbers)))
        if lease is not None and lease.deadline >= self.now:
            lease.deadline = self.now + 10.0

    @rule(holder=st.sampled_from("ab"))
    def holder_dies(self, holder: str) -> None:
        self.tasks.give_up(self.tasks.leases.of(holder))
        assert all(lease.holder != holder for lease in self.tasks.leases.held.values())

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.tasks.give_up(self.tasks.leases.expired(self.now))
        assert all(lease.deadline >= self.now for lease in self.tasks.leases.held.values())

    @precondition(lambda self: self.work)
    @rule(data=st.data())
    def rows_leave(self, data: st.DataObject) -> None:
        gone = set(data.draw(st.lists(st.sampled_from(self.work), max_size=3)))
        lost = {lease: own for lease in self.tasks.leases.held.values() if (own := gone & {*self.tasks.left(lease)})}
        assert {lease: set(rows) for lease, rows in self.tasks.forget(gone).items()} == lost
        self.work = [row for row in self.work if row not in gone]

    @precondition(lambda self: self.work)
    @rule(data=st.data(), name=st.sampled_from(list(TASKS)), table=st.integers(0, 1))
    def a_group_moves(self, data: st.DataObject, name: str, table: int) -> None:
        group = data.draw(st.sampled_from(self.work))[0]
        self.tasks[name].move([row for row in self.work if row[0] == group], table)

    @rule()
    def what_is_not_done_is_counted(self) -> None:
        for name, task in self.tasks.tasks.items():
            left = [row for row in self.work if (name, row) not in self.done]
            assert sum(task.undone.values()) == len(left)
            for table in set(task.undone):
                assert task.undone[table] == sum(task.table[row] == table for row in left)

    def teardown(self) -> None:
        if not hasattr(self, "tasks"):
            return
        self.tasks.give_up(self.tasks.leases.expired(self.now + 100))
        for name in TASKS:
            while (lease := self.tasks.take(name, "z", self.now, 1.0, 5)) is not None:
                self.tasks.complete(lease)
                self.tasks.write(name, lease.rows)
                self.done |= {(name, row) for row in lease.rows}
        assert {(name, row) for name in TASKS for row in self.work} <= self.done, "every row comes to its end"


TestTasks = TaskMachine.TestCase


def test_late_acknowledgement_is_refused_without_clock_tick() -> None:
    tasks = begin()
    lease = tasks.take("generate", "a", 0.0, 5.0, 2)
    assert lease is not None
    done = [(lease.number, None)]
    assert tasks.rows_by_lease(done, [], now=5.1) == ([lease.number], {})
    assert tasks.give_up(tasks.leases.expired(5.1)) == [lease]
    again = tasks.take("generate", "b", 5.1, 5.0, 2)
    assert again is not None and again.rows == lease.rows
    assert tasks.rows_by_lease(done, [], now=5.2) == ([lease.number], {})
    assert tasks.rows_by_lease([(again.number, None)], [], now=10.1) == ([], {again: list(again.rows)})


def test_group_is_leased_alone_once_complete() -> None:
    tasks = begin()
    tasks.write("generate", [(0, 0), (1, 0), (1, 1)])
    lease = tasks.take("groups", "a", 0.0, 5.0, 1)
    assert lease is not None and lease.rows == ((1, 0), (1, 1))
    assert tasks.take("groups", "a", 0.0, 5.0, 9) is None
    tasks.write("generate", [(0, 1)])
    assert (lease := tasks.take("groups", "a", 0.0, 5.0, 9)) is not None and lease.rows == ((0, 0), (0, 1))


def test_what_cannot_be_is_refused() -> None:
    tasks = begin(ROWS[:1])
    with pytest.raises(ValueError, match="admitted twice"):
        tasks.admit([(0, 0)], lambda row: row[0])
    tasks.write("generate", [(0, 0)])
    with pytest.raises(ValueError, match="second time"):
        tasks.write("generate", [(0, 0)])
    with pytest.raises(ValueError, match="before it is ready"):
        tasks.lease("train", [(0, 0)], "a", 0.0, 1.0)


def test_the_oldest_row_is_not_passed_over_for_ever() -> None:
    tasks, newest = Tasks({"one": []}), Sampler("newest", lambda ready, most, ranks: [len(ready) - 1])
    tasks.admit(range(100), lambda row: None)
    given = []
    for _ in range(2 * PATIENCE):
        lease = tasks.take("one", "a", 0.0, 1.0, 1, newest)
        assert lease is not None
        given += lease.rows
    assert given.index(0) == PATIENCE - 1 and 1 in given


@given(st.sets(st.sampled_from(ROWS)), st.sets(st.sampled_from(ROWS)))
def test_rows_that_leave_are_taken_out_of_their_lease_alone(held: set[Row], gone: set[Row]) -> None:
    tasks = begin()
    lease = tasks.lease("generate", sorted(held), "a", 0.0, 1.0)
    lost = tasks.forget(gone)
    assert {one: set(rows) for one, rows in lost.items()} == ({lease: held & gone} if held & gone else {})
    assert tasks.leases.rows_of["a"] == len(held - gone)
    if lease is not None and held - gone:
        assert tasks.complete(lease) == sorted(held - gone)
