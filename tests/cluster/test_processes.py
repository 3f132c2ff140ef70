"""Ranks start together and end together; after a timeout the error names the missing ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from braidrl.cluster.membership import RepairBudget
from braidrl.cluster.process import LOOPBACK
from braidrl.cluster.ranks import run_ranks
from braidrl.cluster.world import World
from braidrl.errors import LostPeers, LostProcess, UserError, WorkerError
from tests.leftovers import family, listening, open_sockets

ROOT = Path(__file__).parent.parent.parent
LAUNCH = """
import sys
from braidrl.cluster.ranks import run_ranks
run_ranks("tests.cluster.ranks:waiting", {"folder": sys.argv[1]}, 2, 200.0)
"""


@pytest.fixture(autouse=True)
def no_port_is_left() -> Iterator[None]:
    """Fail a test after which this process, or a child of it, listens on a new port."""
    before = listening(family())
    yield
    assert listening(family()) <= before


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_gather_reduce_exchange_and_share(size: int) -> None:
    of_ranks = run_ranks("tests.cluster.ranks:words", {"a": [1, None]}, size, 200.0)
    assert of_ranks["task"] == {"a": [1, None]}
    numbers = [number for rank in range(size) for number in range(rank + 1)]
    rows = {"number": numbers, "whole": [n > 0 for n in numbers], "pair": [[n, n] for n in numbers]}
    for rank, told in enumerate(of_ranks["of all"]):
        assert told["gathered"] == ["x" * number for number in range(size)]
        assert told["exchanged"] == [f"{sender}>{rank}" for sender in range(rank + 1, size)]
        assert told["rows"] == rows and told["names"] == "".join(f"{number} " for number in range(size))
        assert told["shared"] == {"from": 0, "long": ""}
        letters = [number * "x" for number in range(size)]
        assert told["collected"] == (letters if rank == 0 else None), "on the first rank alone"


def test_ranks_go_on_without_lost_ones_and_take_them_in_again(capfd: pytest.CaptureFixture[str]) -> None:
    dies = [["2.0", 2], ["0.0", 4]]
    task = {"rounds": 6, "size": 3, "dies": dies}
    rounds = run_ranks("tests.cluster.ranks:renewed", task, 3, 60.0, repairs=RepairBudget(2, "trainer.max_restarts"))
    assert [number for number, _ in rounds] == list(range(1, len(rounds) + 1))
    assert len(rounds) >= 6 and rounds[0][1] == 3 and {ranks for _, ranks in rounds} <= {1, 2, 3}
    assert capfd.readouterr().err.count("the others go on") == 2
    budget = RepairBudget(1, "trainer.max_restarts")
    with pytest.raises(LostProcess, match="rank 0 is gone") as lost:
        run_ranks("tests.cluster.ranks:renewed", {**task, "dies": [["2.0", 1], ["0.0", 3]]}, 3, 60.0, repairs=budget)
    assert not lost.value.is_counted and not budget.spend()


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        (
            "raise",
            WorkerError,
            ["rank 1 failed in step 3, reward.verify on rows (0, 7, 1): ValueError: no such luck", "ranks.py"],
        ),
        ("user", UserError, ["row (0, 7, 1) is too long; write a shorter one"]),
        ("die", WorkerError, ["rank 1 is gone without a word (killed by signal 9)"]),
        pytest.param(
            "sleep",
            WorkerError,
            ["waited", "actor.update: index columns for rank 1, last seen in step 3, reward.verify"],
            marks=pytest.mark.soak,
        ),
        ("astray", WorkerError, ["made another call"]),
    ],
)
def test_failing_rank_ends_all_and_its_error_is_shown(
    tmp_path: Path, how: str, error: type[Exception], words: list[str]
) -> None:
    with pytest.raises(error) as caught:
        run_ranks(
            "tests.cluster.ranks:failing",
            {"folder": str(tmp_path), "how": how},
            2,
            10.0 if how == "sleep" else 200.0,
        )
    assert all(part in str(caught.value) for part in words), str(caught.value)
    assert_gone(tmp_path)


def test_failed_library_collective_names_missing_ranks_other_errors_pass() -> None:
    store = dist.HashStore()
    World(1, 2, None, store).at("step 3, reward.verify")
    world = World(0, 2, None, store)
    world.at("step 3, actor.update")
    with (
        pytest.raises(LostPeers, match=r"actor.update: .*rank 1,.*step 3, reward.verify:.*Timed"),
        world.supervised("a sum"),
    ):
        raise RuntimeError(
            "[/gloo/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 10000ms for send operation"
        )
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), world.supervised("a sum"):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_columns_of_a_single_row_are_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(0, 2, object())  # type: ignore[arg-type]
    monkeypatch.setattr(World, "peers", SimpleNamespace(all_gather_rows=lambda rows, counts: rows))
    columns = {"sample": torch.tensor([3], dtype=torch.uint8), "length": torch.tensor([300], dtype=torch.int16)}
    gathered = world.gather_columns("index columns", columns, torch.tensor([1, 0]))
    assert {name: column.tolist() for name, column in gathered.items()} == {"sample": [3], "length": [300]}


def test_a_function_that_is_not_there_is_named() -> None:
    with pytest.raises(WorkerError, match="no_such_function"):
        run_ranks("tests.cluster.ranks:no_such_function", {}, 1, 200.0)


@pytest.mark.soak
@pytest.mark.parametrize(
    "number",
    [*(pytest.param(mild, marks=pytest.mark.soak) for mild in (signal.SIGINT, signal.SIGTERM)), signal.SIGKILL],
)
def test_no_rank_outlives_its_launcher(tmp_path: Path, number: signal.Signals) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE)
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2)
    opened = open_sockets(family(launcher.pid))
    assert opened and {host for host, _ in opened} == {LOOPBACK}, "the store of the rendezvous"
    sockets = listening(family(launcher.pid))
    if number == signal.SIGKILL:  # A rank that is stopped at that moment ends too.
        os.kill(int(next(tmp_path.iterdir()).read_text()), signal.SIGSTOP)
    launcher.send_signal(number)
    _, words = launcher.communicate(timeout=200)
    if number != signal.SIGKILL:
        assert b"KeyboardInterrupt" in words
    assert_gone(tmp_path)
    wait_until(lambda: not sockets & listening())


def assert_gone(folder: Path) -> None:
    """Assert that the processes whose ids the ranks wrote have ended."""
    numbers = [int(path.read_text()) for path in folder.iterdir()]
    assert len(numbers) == 2
    wait_until(lambda: not any(running(number) for number in numbers))


def running(number: int) -> bool:
    try:
        return number != os.getpid() and psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until(true: Callable[[], bool], seconds: float = 200.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.05)
