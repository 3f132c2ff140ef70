"""Versions of weights: which are kept, which an engine loads, and when they are freed."""

from __future__ import annotations

from braidrl.runtimes.streaming.weights import Versions, WeightLocation


def place(path: str) -> WeightLocation:
    return WeightLocation(0, 0, path)


def versions() -> Versions:
    """An actor that changes each time, and a rival that has rested at version 2."""
    known = Versions(["actor", "rival"])
    for role, number in (("actor", 1), ("rival", 1), ("actor", 2), ("actor", 3), ("rival", 3)):
        known.by_role[role][number] = place(f"{role}-{number}")
    return known


def test_engine_receives_changes_since_its_version_only() -> None:
    assert versions().between(0, 2) == [("actor", 2, place("actor-2")), ("rival", 1, place("rival-1"))]
    assert versions().between(1, 2) == [("actor", 2, place("actor-2"))]
    assert versions().between(2, 2) == []


def test_versions_of_lost_trainers_beyond_the_published_one_are_withdrawn() -> None:
    known = versions()
    assert [location.path for location in known.withdrawn(2)] == ["actor-3", "rival-3"]
    assert known.between(1, 3) == [("actor", 2, place("actor-2"))] and known.withdrawn(2) == []


def test_version_is_kept_while_an_engine_needs_it() -> None:
    known = versions()
    assert [location.path for location in known.outdated({2})] == ["actor-1"], "the rival skipped version 2"
    assert known.between(0, 2)[1] == ("rival", 1, place("rival-1"))
    assert sorted(location.path for location in known.outdated({3})) == ["actor-2", "rival-1"]
    assert sorted(location.path for location in known.locations()) == ["actor-3", "rival-3"]
    assert list(known.by_role["actor"]) == [3]


def test_offered_versions_end_with_trainers_but_files_remain() -> None:
    known = versions()
    assert known.outlive_trainers
    known.by_role["actor"][4] = place("")
    assert not known.outlive_trainers
