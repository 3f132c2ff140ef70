"""Which weights are kept, who gets which, and when they are let go."""

from __future__ import annotations

from braidrl.queue.table import Block
from braidrl.runtimes.streaming.weights import Copies, Versions


def block(name: str) -> Block:
    return Block("here", "tcp://here", name, 1)


def versions() -> Versions:
    """An actor that changes each time, and a rival that has rested at version 2."""
    known = Versions(["actor", "rival"])
    for role, number in (("actor", 1), ("rival", 1), ("actor", 2), ("actor", 3), ("rival", 3)):
        known.add(role, number, [block(f"{role}-{number}")])
    return known


def test_an_engine_is_given_what_has_changed_since_the_version_that_it_holds_and_no_later_one() -> None:
    assert versions().between(0, 2) == [("actor", 2, [block("actor-2")]), ("rival", 1, [block("rival-1")])]
    assert versions().between(1, 2) == [("actor", 2, [block("actor-2")])]
    assert versions().between(2, 2) == []
    assert versions().newest == 3 and Versions(["actor"]).newest == 0


def test_a_version_is_kept_as_long_as_an_engine_may_need_it() -> None:
    known = versions()
    assert [b.name for b in known.outdated({2})] == ["actor-1"], "the rival's first is what its second was"
    assert known.between(0, 2)[1] == ("rival", 1, [block("rival-1")])
    assert sorted(b.name for b in known.outdated({3})) == ["actor-2", "rival-1"]
    assert sorted(b.name for b in known.blocks()) == ["actor-3", "rival-3"]
    assert known.has("actor", 3) and not known.has("actor", 2)


def test_a_version_is_known_when_every_ranks_share_has_come_and_shares_of_ranks_that_are_gone_are_let_go() -> None:
    known = versions()
    known.add("actor", 4, [block("late")], 2)
    known.add("rival", 4, [block("whole")])
    assert not known.has("actor", 4) and known.between(3, 4) == [("rival", 4, [block("whole")])]
    assert block("late") in known.blocks()
    assert known.lost("rival") == [] and known.lost("actor") == [block("late")]
    for number in (1, 2):
        assert not known.has("actor", 4)
        known.add("actor", 4, [block(f"share-{number}")], 2)
    assert known.between(3, 4)[0] == ("actor", 4, [block("share-1"), block("share-2")])


def test_weights_for_a_role_that_follows_are_given_once_by_whoever_was_asked_last() -> None:
    copies = Copies()
    copies.ask("follow", "first")
    assert "follow" in copies and copies.given("follow") is None
    copies.lost("first")
    assert "follow" not in copies
    copies.ask("follow", "second")
    late = [block("late")]
    assert copies.give("follow", "first", late) == late, "nobody reads what one gives who was given up"
    assert copies.give("follow", "second", [block("taken")]) == []
    copies.lost("second")
    assert copies.given("follow") == [block("taken")] == list(copies.blocks()), "what is given outlives its giver"
    assert copies.taken("follow") == [block("taken")]
    assert copies.taken("follow") == [] == list(copies.blocks())
