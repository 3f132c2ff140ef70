"""The router on a virtual clock: load is balanced for any lengths, and no row is lost or doubled when engines die."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.data.rows import Uid
from braidrl.engines.routing.dispatch import PREFIXES, Dispatcher

ENGINES, SLOTS, GROUPS, SAMPLES, PROMPT, LONGEST = 8, 16, 64, 8, 200, 2048


def long_tailed(seed: int) -> dict[Uid, int]:
    """Return the lengths of 512 rows: log-normal over and within groups, cut at a limit, as real responses are."""
    source = random.Random(seed)
    lengths = {}
    for group in range(GROUPS):
        median = 400 * source.lognormvariate(0, 0.6)
        for sample in range(SAMPLES):
            lengths[0, group, sample] = max(1, min(LONGEST, int(median * source.lognormvariate(0, 0.6))))
    return lengths


class SharedEngine:
    """Virtual time: an engine draws one token per unit, and its rows take turns."""

    def __init__(self) -> None:
        self.served = 0.0
        """Return the tokens that each continuously present row has got."""
        self.rows: list[tuple[float, Uid]] = []

    def begin(self, uid: Uid, length: int) -> None:
        heapq.heappush(self.rows, (self.served + length, uid))

    def next_end(self) -> float:
        """Return the time until the next row ends."""
        return (self.rows[0][0] - self.served) * len(self.rows) if self.rows else float("inf")

    def advance(self, time: float) -> None:
        if self.rows:
            self.served += time / len(self.rows)


def makespan(
    lengths: dict[Uid, int],
    assign: Callable[[], list[tuple[Uid, int]]],
    done: Callable[[Uid, int], None] = lambda uid, engine: None,
) -> float:
    """Return the time until all rows are done; `assign` is called for more rows after each end."""
    engines, now, left = [SharedEngine() for _ in range(ENGINES)], 0.0, len(lengths)
    while True:
        for uid, number in assign():
            engines[number].begin(uid, lengths[uid])
        if not left:
            return now
        number = min(range(ENGINES), key=lambda n: engines[n].next_end())
        step = engines[number].next_end()
        now += step
        for engine in engines:
            engine.advance(step)
        _, uid = heapq.heappop(engines[number].rows)
        left -= 1
        done(uid, number)


def over_lower_bound(time: float, lengths: dict[Uid, int]) -> float:
    """Return the ratio to a lower bound: no schedule beats its longest row alone, or engines that are busy to the
    end.
    """
    return time / max(max(lengths.values()), sum(lengths.values()) / ENGINES)


def routed(lengths: dict[Uid, int]) -> float:
    dispatcher = Dispatcher([SLOTS] * ENGINES)
    for uid in lengths:
        dispatcher.add(uid, PROMPT)
    return makespan(lengths, dispatcher.assign, lambda uid, _: dispatcher.done(uid, lengths[uid]))


def fixed(lengths: dict[Uid, int], choose: Callable[[Uid], int]) -> float:
    """Bind every row to an engine at once; an engine runs SLOTS rows at a time."""
    queues: list[list[Uid]] = [[] for _ in range(ENGINES)]
    for uid in reversed(lengths):
        queues[choose(uid)].append(uid)
    room = [SLOTS] * ENGINES

    def assign() -> list[tuple[Uid, int]]:
        taken = []
        for number, queue in enumerate(queues):
            while queue and room[number]:
                room[number] -= 1
                taken.append((queue.pop(), number))
        return taken

    def done(_: Uid, engine: int) -> None:
        room[engine] += 1

    return makespan(lengths, assign, done)


@pytest.mark.soak
def test_makespan_stays_near_its_bound_and_below_static_or_random_assignment() -> None:
    ratios: dict[str, list[float]] = {"router": [], "random": [], "static": []}
    for seed in range(100):
        lengths, source = long_tailed(seed), random.Random(seed)
        times = {
            "router": routed(lengths),
            "random": fixed(lengths, lambda _, source=source: source.randrange(ENGINES)),  # type: ignore[misc]
            "static": fixed(lengths, lambda uid: uid[1] % ENGINES),
        }
        for name, time in times.items():
            ratios[name].append(over_lower_bound(time, lengths))
    high = {name: sorted(values)[94] for name, values in ratios.items()}
    print("95th percentile over the lower bound:", {name: round(value, 3) for name, value in high.items()})
    assert high["router"] <= 1.15
    assert high["random"] > high["router"] + 0.1
    assert high["static"] > high["router"] + 0.2


def test_rows_go_to_the_engine_with_their_prefix_unless_load_is_uneven() -> None:
    dispatcher = Dispatcher([8, 8])
    for sample in range(4):
        dispatcher.add((0, 0, sample), PROMPT)
    for sample in range(4):
        dispatcher.add((0, 1, sample), PROMPT)
    engines = dict(dispatcher.assign())
    assert len({engines[0, 0, 0], engines[0, 0, 1]}) == 1, "the second row of a group follows the first"
    for uid in list(engines):
        dispatcher.done(uid, 100)
    for uid in reversed(list(engines)):
        dispatcher.add(uid, PROMPT + 100)
        assert dispatcher.assign() == [(uid, engines[uid])], "without load, the next turn goes to the same engine"
        dispatcher.done(uid, 100)
    many = [(0, group, 0) for group in range(2, 9)]
    for uid in many:
        dispatcher.add(uid, PROMPT)
    dispatcher.assign()
    loads = [state.rows for state in dispatcher.engines]
    assert max(loads) - min(loads) <= 1


@given(st.data())
def test_every_row_is_done_exactly_once_however_engines_die_and_come_back(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 4))
    slots = data.draw(st.lists(st.integers(1, 3), min_size=count, max_size=count))
    uids = [(0, number // 2, number % 2) for number in range(data.draw(st.integers(1, 12)))]
    dispatcher = Dispatcher(slots)
    for uid in uids:
        dispatcher.add(uid, PROMPT)
    running: dict[Uid, int] = {}
    done = []
    while len(done) < len(uids):
        for uid, engine in dispatcher.assign():
            assert uid not in running and dispatcher.engines[engine].alive
            running[uid] = engine
        assert all(sum(e == n for e in running.values()) <= slots[n] for n in range(count))
        what = data.draw(st.sampled_from(["end", "end", "die", "recover"]))
        engine = data.draw(st.integers(0, count - 1))
        if what == "end" and running:
            uid = data.draw(st.sampled_from(sorted(running)))
            del running[uid]
            dispatcher.done(uid, 5)
            done.append(uid)
        elif what == "die":
            lost = dispatcher.fail(engine)
            assert sorted(lost) == sorted(uid for uid, e in running.items() if e == engine)
            for uid in lost:
                del running[uid]
        elif what == "recover":
            dispatcher.engines[engine].alive = True
    assert sorted(done) == uids
    assert not dispatcher.waiting and not dispatcher.jobs and not any(state.rows for state in dispatcher.engines)


def test_rows_of_a_dead_engine_go_before_those_that_wait() -> None:
    dispatcher = Dispatcher([2, 2])
    for number in range(6):
        dispatcher.add((0, number, 0), PROMPT)
    first = dict(dispatcher.assign())
    lost = dispatcher.fail(0)
    for uid, engine in first.items():
        if engine == 1:
            dispatcher.done(uid, 5)
    assert dispatcher.assign() == [(uid, 1) for uid in lost]


def test_a_row_is_under_way_once_and_can_be_dropped() -> None:
    dispatcher = Dispatcher([1])
    dispatcher.add((0, 0, 0), PROMPT)
    dispatcher.add((0, 0, 1), PROMPT)
    assert dispatcher.assign() == [((0, 0, 0), 0)]
    for uid in ((0, 0, 0), (0, 0, 1)):
        with pytest.raises(ValueError, match="under way already"):
            dispatcher.add(uid, PROMPT)
    dispatcher.done((0, 0, 1), None)
    dispatcher.done((0, 0, 0), None)
    assert dispatcher.assign() == [] and not dispatcher.waiting
    with pytest.raises(KeyError, match="not under way"):
        dispatcher.done((0, 0, 0), None)


def test_remembered_prefixes_do_not_grow_without_bound() -> None:
    dispatcher = Dispatcher([1])
    for number in range(PREFIXES + 50):
        dispatcher.add((0, number, 0), 1)
        dispatcher.assign()
        dispatcher.done((0, number, 0), 1)
    assert len(dispatcher._prefixes) == PREFIXES
