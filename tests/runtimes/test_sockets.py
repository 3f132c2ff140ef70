"""What listens during a run: on its own interface alone, and only for those who know its secret."""

from __future__ import annotations

import contextlib
import os
import random
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest
import zmq

from braidrl.cluster.groups import LOOPBACK, interface_of, open_store
from braidrl.runtimes.run import TrainingRun
from tests.leftovers import family
from tests.tiny import Workshop, braid, metrics_agree, wait_for_steps

REQUESTS = ("take", "done", "stepped", "ordered", "weights", "given", "hello", "renew", "unlink", "read", "selected")


def open_ports(process: int | None = None) -> set[tuple[str, int]]:
    """Where a process and all that it has started listen."""
    pids = set(family(process))
    found = [c for c in psutil.net_connections("inet") if c.status == psutil.CONN_LISTEN and c.pid in pids]
    return {(each.laddr.ip, each.laddr.port) for each in found}


@pytest.mark.parametrize(
    "more", [{"runtime": "distributed", "workers": 2}, {"runtime": "streaming", "streaming": {"workers": {"actor": 2}}}]
)
def test_a_run_of_this_machine_listens_on_loopback_alone(workshop: Workshop, more: dict[str, Any]) -> None:
    config = workshop.config_file(trainer={"steps": 500}, **more)
    with braid("train", config, folder=workshop.folder) as process:
        try:
            wait_for_steps(workshop.folder / "run", 2, process)
            seen = open_ports(process.pid)
        finally:
            process.kill()
    assert seen and {address for address, _ in seen} == {LOOPBACK}, seen


def test_a_store_listens_on_the_address_that_it_is_given() -> None:
    before = open_ports()
    store = open_store(LOOPBACK, 5.0)
    store.set("a", "b")
    assert open_ports() - before == {(LOOPBACK, store.port)} and store.get("a") == b"b"
    assert interface_of(LOOPBACK) == "lo" and interface_of("203.0.113.1") == ""


@contextlib.contextmanager
def flooded(address: str, seconds: float = 60.0) -> Iterator[list[int]]:
    """Send a server garbage, and requests as its own would but without the secret, from threads; yields how many were sent."""
    sent, ending = [0], threading.Event()
    host, port = address.removeprefix("tcp://").split(":")

    def garbage() -> None:
        draw = random.Random(0)
        while not ending.is_set():
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1) as line:
                # Four bytes that once ended its thread, and whatever else.
                line.sendall(
                    draw.choice(
                        [
                            b"\x81\x91\x01\x02",
                            draw.randbytes(draw.randrange(1, 4096)),
                            b"\xff" + b"\0" * 8 + b"\x01\x7f",
                        ]
                    )
                )
                sent[0] += 1

    def forged() -> None:
        draw, context = random.Random(1), zmq.Context()
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(address)
        number = 0
        while not ending.is_set():
            number += 1
            request = {
                "request": draw.choice(REQUESTS),
                "number": number,
                "holder": "actor.0.0",
                "stage": "actor.update",
                "leases": [number],
            }
            with contextlib.suppress(zmq.Again):
                dealer.send_multipart([msgpack.packb(request), os.urandom(32)], zmq.NOBLOCK)
                sent[0] += 1
            assert not dealer.poll(0), "it was answered"
        dealer.close()
        context.term()

    threads = [threading.Thread(target=work, daemon=True) for work in (garbage, forged)]
    for thread in threads:
        thread.start()
    try:
        yield sent
    finally:
        ending.set()
        for thread in threads:
            thread.join(seconds)


def test_garbage_and_forged_requests_change_nothing_in_a_run(workshop: Workshop) -> None:
    quiet = workshop.run("quiet", runtime="streaming", dtype="float64", trainer={"steps": 4})
    with TrainingRun(workshop.config("flooded", runtime="streaming", dtype="float64", trainer={"steps": 4})) as run:
        program: Any = run.controller
        before = psutil.Process().memory_info().rss
        with flooded(program.server.address) as sent, flooded(program.processes.places["here"].address):
            run.train()
        grown = psutil.Process().memory_info().rss - before
    assert sent[0] > 200 and grown < 256 << 20, (sent, grown)
    assert metrics_agree(run.folder, quiet)


def test_a_store_s_keys_are_not_those_that_a_stranger_would_write(tmp_path: Path) -> None:
    """Ranks meet under keys that begin with their run's secret."""
    from braidrl.cluster.ranks import run_ranks

    found = run_ranks("tests.cluster.ranks:keys_of_strangers", {}, 2, 60.0)
    assert found == [False, False]
