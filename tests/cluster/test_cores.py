"""Threads that follow the machine's load."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from braidrl.cluster.cores import Usage, threads_for
from braidrl.cluster.process import default_threads, usable_cores

START = Usage(0.0, 0.0, 0.0, 0.0)
COMPUTES = """
import time, torch
from braidrl.cluster.cores import adapt_threads, follow_load
torch.set_num_threads(len(__import__("os").sched_getaffinity(0)))
follow_load()
print("ready", flush=True)
input()
fewest, end = torch.get_num_threads(), time.monotonic() + 20
a = torch.randn(600, 600)
while fewest > 1 and time.monotonic() < end:
    adapt_threads()
    a @ a
    fewest = min(fewest, torch.get_num_threads())
print(fewest)
"""


@contextmanager
def other_programs(count: int) -> Iterator[None]:
    """Keep so many programs busy beside."""
    programs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for program in programs:
            program.kill()
            program.wait()


def test_a_process_that_waits_for_cores_computes_with_the_threads_it_got_cores_for() -> None:
    # 16 threads on 16 cores beside four busy programs: they ran on 12.4 cores and waited the rest.
    assert threads_for(16, 16, START, Usage(1.0, 12.4, 3.6, 0.0)) == 12
    assert threads_for(2, 2, START, Usage(1.0, 1.2, 0.8, 0.0)) == 1
    assert threads_for(2, 2, START, Usage(1.0, 1.9, 0.1, 0.0)) == 2


def test_it_takes_more_threads_while_cores_are_idle() -> None:
    assert threads_for(1, 2, START, Usage(1.0, 1.0, 0.0, 0.9)) == 2
    assert threads_for(1, 2, START, Usage(1.0, 1.0, 0.1, 0.05)) == 1
    assert threads_for(4, 16, START, Usage(2.0, 8.0, 0.0, 22.0)) == 15


@given(st.integers(1, 64), st.integers(1, 64), st.floats(0, 64), st.floats(0, 64), st.floats(0, 64))
def test_there_is_always_one_thread_and_never_more_than_the_most(
    threads: int, most: int, ran: float, waited: float, idle: float
) -> None:
    threads = min(threads, most)
    assert 1 <= threads_for(threads, most, START, Usage(1.0, ran, waited, idle)) <= most


@pytest.mark.skipif(usable_cores() < 2, reason="one core has no threads to leave out")
def test_beside_busy_programs_a_process_goes_down_to_fewer_threads() -> None:
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", COMPUTES], text=True, env=own, **pipes) as computes:
        assert computes.stdout is not None and computes.stdout.readline() == "ready\n"
        with other_programs(2 * usable_cores()):
            found, _ = computes.communicate("go\n")
    assert computes.returncode == 0 and int(found) < usable_cores()


@pytest.mark.parametrize("own", [{"OMP_NUM_THREADS": "2"}, {"OMP_WAIT_POLICY": "passive"}])
def test_the_users_own_settings_win(own: dict[str, str]) -> None:
    code = "from braidrl.cluster import cores; cores.follow_load(); print(cores._followed)"
    rest = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**rest, **own}, check=True
    )
    assert found.stdout.strip() == "None"


def test_processes_share_the_cores_unless_the_user_says_their_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads(1) == usable_cores()
    assert default_threads(1000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads(1) is None
