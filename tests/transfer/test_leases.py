"""Rows are done once each, whoever dies, expires or answers late."""

import pytest
from braidrl.transfer.leases import LeaseLost, Leases
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from braidrl.flow.readiness import Consumer, Uid

ROWS = [(0, group, sample) for group in range(3) for sample in range(2)]
CONSUMERS = [Consumer("actor.update"), Consumer("actor.update", 1), Consumer("critic.values")]
VALUES = CONSUMERS[2]


class LeaseMachine(RuleBasedStateMachine):
    """Holders take, finish, die and are late in any order; a plain record says what must hold."""

    @initialize()
    def begin(self) -> None:
        self.leases = Leases()
        self.now = 0.0
        self.numbers: list[int] = []
        self.done: list[tuple[Consumer, Uid]] = []

    def free(self, consumer: Consumer) -> list[Uid]:
        held = {row for lease in self.leases.held.values() if lease.consumer == consumer for row in lease.rows}
        return [row for row in ROWS if row not in held and (consumer, row) not in self.done]

    @rule(consumer=st.sampled_from(CONSUMERS), holder=st.sampled_from("ab"), count=st.integers(1, 4))
    def take(self, consumer: Consumer, holder: str, count: int) -> None:
        rows = self.free(consumer)[:count]
        lease = self.leases.take(consumer, holder, rows, self.now, 10.0)
        self.numbers.append(lease.number)

    @rule(consumer=st.sampled_from(CONSUMERS), row=st.sampled_from(ROWS))
    def take_what_is_not_free(self, consumer: Consumer, row: Uid) -> None:
        if row not in self.free(consumer):
            with pytest.raises(ValueError, match="second time"):
                self.leases.take(consumer, "c", [row], self.now, 10.0)

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.numbers))
        lease = self.leases.held.get(number)
        if lease is None or lease.deadline < self.now:
            with pytest.raises(LeaseLost):
                self.leases.acknowledge(number, self.now)
        else:
            self.leases.acknowledge(number, self.now)
            self.done += [(lease.consumer, row) for row in lease.rows]

    @precondition(lambda self: self.numbers)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(self.numbers))
        try:
            assert self.leases.renew(number, self.now, 10.0).deadline == self.now + 10.0
        except LeaseLost:
            lease = self.leases.held.get(number)
            assert lease is None or lease.deadline < self.now

    @rule(holder=st.sampled_from("ab"))
    def holder_dies(self, holder: str) -> None:
        self.leases.fail_holder(holder)
        assert all(lease.holder != holder for lease in self.leases.held.values())

    @rule(seconds=st.floats(0, 8))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.leases.expire(self.now)
        deadline = self.leases.next_deadline()
        assert deadline is None or deadline >= self.now

    @rule()
    def nothing_is_done_twice(self) -> None:
        assert len(set(self.done)) == len(self.done)
        for consumer in CONSUMERS:
            for row in ROWS:
                assert self.leases.is_done(consumer, [row]) == ((consumer, row) in self.done)

    def teardown(self) -> None:
        if not hasattr(self, "leases"):
            return
        self.leases.expire(self.now + 100)
        for consumer in CONSUMERS:
            rows = self.free(consumer)
            self.leases.acknowledge(self.leases.take(consumer, "z", rows, self.now, 1.0).number, self.now)
            assert self.leases.is_done(consumer, ROWS)


TestLeases = LeaseMachine.TestCase


def test_a_late_acknowledgement_is_refused_although_nobody_looked_at_the_clock() -> None:
    leases = Leases()
    lease = leases.take(VALUES, "a", ROWS[:2], now=0.0, duration=5.0)
    with pytest.raises(LeaseLost, match="free again"):
        leases.acknowledge(lease.number, now=5.1)
    assert leases.expire(5.1) == [lease]
    again = leases.take(VALUES, "b", ROWS[1::-1], now=5.1, duration=5.0)
    with pytest.raises(LeaseLost):
        leases.acknowledge(lease.number, now=5.2)
    leases.acknowledge(again.number, now=10.1)
    assert leases.is_done(VALUES, ROWS[:2])


@given(st.sets(st.sampled_from(ROWS)), st.sets(st.sampled_from(ROWS)))
def test_rows_that_leave_free_the_others_of_their_lease(held: set[Uid], gone: set[Uid]) -> None:
    leases = Leases()
    lease = leases.take(VALUES, "a", sorted(held), 0.0, 1.0)
    lost = leases.forget(gone)
    assert lost == ([lease] if held & gone else [])
    rest = sorted(held - gone)
    if lost:
        leases.take(VALUES, "b", rest, 0.0, 1.0)
