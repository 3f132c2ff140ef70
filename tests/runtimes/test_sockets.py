"""Each socket of a run listens only on its own interface, and only for clients that know the secret."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.cluster.process import LOOPBACK
from braidrl.cluster.process_groups import interface_of, open_store
from braidrl.queue.calls import Hello
from braidrl.queue.transport import Connection
from braidrl.runtimes.run import TrainingRun
from tests.leftovers import family, open_sockets
from tests.tiny import ROOT, Workshop, braid, metrics_agree, wait_for_steps


@pytest.mark.soak
@pytest.mark.parametrize(
    "more", [{"runtime": "distributed", "workers": 2}, {"runtime": "streaming", "streaming": {"workers": {"actor": 2}}}]
)
def test_a_run_of_this_machine_listens_on_loopback_alone(workshop: Workshop, more: dict[str, Any]) -> None:
    config = workshop.config_file(trainer={"steps": 500}, **more)
    with braid("train", config, folder=workshop.folder) as process:
        try:
            wait_for_steps(workshop.folder / "run", 2, process)
            seen = open_sockets(family(process.pid))
        finally:
            process.kill()
    assert seen and {address for address, _ in seen} == {LOOPBACK}, seen


def test_a_store_listens_on_the_address_that_it_is_given() -> None:
    before = open_sockets(family())
    store = open_store(LOOPBACK, 5.0)
    store.set("a", "b")
    assert open_sockets(family()) - before == {(LOOPBACK, store.port)} and store.get("a") == b"b"
    assert interface_of(LOOPBACK) == "lo" and interface_of("203.0.113.1") == ""


def recorded_hello(address: str, secret: str, name: str, memory: str) -> bytes:
    """Record a handshake of the run's own client, and return all bytes that it has sent."""
    host, port = address.removeprefix("tcp://").split(":")
    sent = bytearray()
    with socket.create_server((LOOPBACK, 0)) as relay:

        def carry(source: socket.socket, target: socket.socket, note: bool) -> None:
            with contextlib.suppress(OSError):
                while content := source.recv(1 << 16):
                    sent.extend(content if note else b"")
                    target.sendall(content)

        def serve() -> None:
            theirs, _ = relay.accept()
            with theirs, socket.create_connection((host, int(port))) as ours:
                back = threading.Thread(target=carry, args=(ours, theirs, False), daemon=True)
                back.start()
                carry(theirs, ours, True)
                ours.shutdown(socket.SHUT_RDWR)
                back.join(10)

        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        connection = Connection("tcp://{}:{}".format(*relay.getsockname()), 30.0, secret)
        try:
            connection.ask(Hello(memory, holder=name))
        finally:
            connection.close()
        serving.join(10)
    return bytes(sent)


def memory() -> int:
    """Return the private memory of the run's processes, in bytes."""
    result = 0
    for process in family():
        with contextlib.suppress(psutil.Error):
            result += psutil.Process(process).memory_full_info().uss
    return result


@pytest.mark.parametrize(("count", "steps"), [(60, 2), pytest.param(100_000, 60, marks=pytest.mark.soak)])
def test_forged_replayed_or_malformed_messages_change_nothing(workshop: Workshop, count: int, steps: int) -> None:
    """Attack every socket of the run: the queue, its memory, the store of ranks, and those of the ranks; all on
    loopback.
    """
    sections: dict[str, Any] = {
        "runtime": "streaming",
        "streaming": {"workers": {"actor": 2}},
        "dtype": "float64",
        "trainer": {"steps": steps},
    }
    quiet = workshop.run("quiet", **sections)
    mine = open_sockets(family())
    with TrainingRun(workshop.config("flooded", **sections)) as run:
        program: Any = run.controller
        while not set(program.processes.leaders().values()) <= set(program.control.holders):
            program.wait()  # Ranks that have met listen for each other.
        memory_of_run = program.processes.storage_locations["here"].address
        hello = recorded_hello(program.server.address, program.processes.secret, "recorded", memory_of_run)
        assert "recorded" in program.control.holders and len(hello) > 500
        program.control.fail("recorded")
        (recording := workshop.folder / "recording").write_bytes(hello)
        first = program.server.address.removeprefix("tcp://")
        opened = open_sockets(family()) - mine
        others = sorted({f"{host}:{port}" for host, port in opened} - {first})
        assert len(others) >= 4 and {host for host, _ in opened} == {LOOPBACK}, opened
        command = [sys.executable, "-m", "tests.runtimes.strangers", str(count), str(recording), first, *others]
        before = memory()
        with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}) as stranger:
            try:
                run.train()
                assert stranger.wait(1800) == 0, "a server answered"
            finally:
                stranger.kill()
        assert not {"recorded", "stranger"} & set(program.control.holders)
        grown = memory() - before
        print(f"{count} messages to {1 + len(others)} sockets; bytes more than before: {grown}")
        assert grown < 128 << 20, grown
        assert run.step == steps
    assert metrics_agree(run.folder, quiet)


def test_store_keys_cannot_be_guessed(tmp_path: Path) -> None:
    """Ranks meet under keys that begin with their run's secret."""
    from braidrl.cluster.ranks import run_ranks

    of_ranks = run_ranks("tests.cluster.ranks:keys_of_strangers", {}, 2, 60.0)
    assert of_ranks == [False, False]
