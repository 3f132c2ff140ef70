"""Every rank reads every notice once, in the same order, without waiting."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch.distributed as dist

from braidrl.cluster import world
from braidrl.cluster.process_groups import put_message
from braidrl.cluster.world import Notices


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> tuple[Notices, Notices]:
    monkeypatch.setattr(world, "HEAR_EVERY_S", 0.0)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False, timeout=timedelta(seconds=5))
    return Notices(store), Notices(other)


def test_everybody_hears_every_message_once_in_one_order(two: tuple[Notices, Notices]) -> None:
    one, other = two
    for each in two:
        each.begin("first")
    assert list(one.hear()) == []
    one.tell(b"a\x00\xff")
    other.tell(b"b")
    assert list(one.hear()) == [b"a\x00\xff", b"b"] == list(other.hear())
    other.tell(b"c")
    assert list(one.hear()) == [b"c"] and list(one.hear()) == []


def test_a_new_list_begins_empty_and_the_old_one_is_gone(two: tuple[Notices, Notices]) -> None:
    one, other = two
    for name in ("first", "second"):
        for each in two:
            each.begin(name)
        one.tell(name.encode())
        assert list(other.hear()) == [name.encode()]
    other.begin("first")
    assert list(other.hear()) == []


def test_numbered_but_missing_notice_does_not_block(two: tuple[Notices, Notices]) -> None:
    one, other = two
    for each in two:
        each.begin("first")
    one._store.add("first/count", 1)
    other.tell(b"second")
    assert list(one.hear()) == []
    put_message(one._store, "first/0", b"first")
    assert list(one.hear()) == [b"first", b"second"]


def test_a_rank_looks_only_now_and_then() -> None:
    alone = Notices(dist.HashStore())
    alone.begin("first")
    alone.hear()
    alone.tell(b"soon")
    assert list(alone.hear()) == []
