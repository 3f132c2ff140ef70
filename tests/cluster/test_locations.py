"""The ranks of a machine leave their locations in the store together."""

import socket
import threading
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from braidrl.cluster import locations
from braidrl.cluster.locations import Location, Locations, known_locations, write
from braidrl.data.messages import pack_message

SECONDS = 0.2


@pytest.fixture
def ranks() -> Iterator[list[Locations]]:
    store = dist.HashStore()
    ranks = [Locations(store) for _ in range(3)]
    yield ranks
    for one in ranks:
        one.close()


def a_second_of(ranks: dict[int, Locations], meetings: int, newest: int = 0) -> dict[int, int]:
    """Return the number of the newest membership as each rank knows it afterwards."""
    known = dict[int, int]()

    def exchange(rank: int, one: Locations) -> None:
        known[rank] = one.exchange(Location(rank, meetings, f"place {meetings}"), SECONDS, lambda: newest)

    threads = [threading.Thread(target=exchange, args=each) for each in ranks.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return known


def written(store: dist.Store) -> list[str]:
    return [f"places/{number}" for number in range(1, 9) if store.check([f"places/{number}"])]


def reaches(
    holds: Callable[[dict[int, int]], bool], ranks: dict[int, Locations], meetings: int, newest: int = 0
) -> bool:
    """Let ranks exchange locations until something holds of what they know; return False if it never does."""
    return any(holds(a_second_of(ranks, meetings, newest)) for _ in range(100))


def test_one_rank_writes_the_locations_of_all_and_another_one_when_it_ends(ranks: list[Locations]) -> None:
    store, every = ranks[0].store, dict(enumerate(ranks))

    def latest() -> dict[int, int]:
        return {rank: each.meetings for rank, each in known_locations(store).items()}

    assert reaches(lambda known: latest() == dict.fromkeys(every, 3), every, 3)
    assert sum(one.speaks for one in ranks) == 1 and written(store) == ["places/1"]
    (gone,) = [rank for rank, one in every.items() if one.speaks]
    every.pop(gone).close()
    assert reaches(lambda known: latest() == {gone: 3, **dict.fromkeys(every, 6)}, every, 6)
    assert sum(one.speaks for one in every.values()) == 1 and written(store) == ["places/1", "places/2"]


def test_the_speaker_tells_the_newest_membership(ranks: list[Locations]) -> None:
    every = dict(enumerate(ranks))
    assert reaches(lambda known: known == dict.fromkeys(every, 7), every, 1, newest=7)


def test_a_rank_that_writes_itself_is_known_though_the_speaker_is_frozen(ranks: list[Locations]) -> None:
    a_second_of({0: ranks[0]}, 1)
    write(ranks[1].store, [Location(1, 4, "a sum")])
    assert known_locations(ranks[0].store) == {0: Location(0, 1, "place 1"), 1: Location(1, 4, "a sum")}


def test_messages_of_other_users_and_broken_ones_are_not_read(
    ranks: list[Locations], monkeypatch: pytest.MonkeyPatch
) -> None:
    every, store = dict(enumerate(ranks)), ranks[0].store
    a_second_of(every, 1)
    (speaker,) = [one for one in ranks if one.speaks]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other, socket.socket(other.family, other.type) as unbound:
        unbound.sendto(pack_message(Location(7, 7, "without an address for answers")), speaker._address)
        other.bind("")
        other.sendto(b"\xc1", speaker._address)
        other.sendto(pack_message(["far", 1, 2]), speaker._address)
        other.sendto(pack_message(Location(8, 8, "of this user")), speaker._address)
        assert reaches(lambda known: 8 in known_locations(store), every, 2)
        monkeypatch.setattr(locations.os, "getuid", lambda: -1)
        other.sendto(pack_message(Location(9, 9, "of another user")), speaker._address)
        a_second_of(every, 3)
        monkeypatch.undo()
    assert reaches(lambda known: known_locations(store)[0].meetings == 4, every, 4)
    assert not {7, 9} & known_locations(store).keys()
