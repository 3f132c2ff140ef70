"""How many workers the nodes of a Ray cluster that live have room for."""

from __future__ import annotations

from braidrl.cluster.ray_cluster import Reservation, is_reachable, room_for
from tests.tiny import free_port

NODES = {"a": {"CPU": 4.0, "GPU": 2.0}, "b": {"CPU": 2.0}}


def test_room_is_what_others_leave_on_each_node() -> None:
    assert room_for(NODES, []) == 6
    assert room_for(NODES, [Reservation("a", None), Reservation("b", None, cpus=2)]) == 3
    assert room_for(NODES, [Reservation("lost", None)] * 4) == 6


def test_workers_with_devices_need_nodes_that_have_them() -> None:
    assert room_for(NODES, [], gpus=1) == 2
    assert room_for(NODES, [Reservation("a", None, gpus=1)], gpus=1) == 1
    assert room_for(NODES, [], gpus=4) == 0


def test_a_daemon_that_has_ended_is_not_reachable() -> None:
    assert not is_reachable("127.0.0.1", free_port())
