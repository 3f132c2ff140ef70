"""Local processes report their outcome, end on request, and end their children, for every start method."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from braidrl.cluster.local import LocalLauncher, LocalProcess, Spawned, from_server
from braidrl.cluster.process import Failure, ProcessSpec
from braidrl.cluster.ranks import run_ranks
from braidrl.errors import LostProcess, UserError, WorkerError
from tests.cluster.test_processes import running, wait_until

Start = Callable[[ProcessSpec], LocalProcess]
both = pytest.mark.parametrize("start", [pytest.param(Spawned, marks=pytest.mark.soak), from_server])


def spec(how: str, path: Path | None = None) -> ProcessSpec:
    arguments = {"how": how, "path": str(path)}
    return ProcessSpec("echo-0", "tests.cluster.ranks:echo", arguments, orphaned="tests.cluster.ranks:left_alone")


@both
def test_return_value_or_error_is_process_outcome(start: Start) -> None:
    processes = {how: start(spec(how)) for how in ("return", "refuse", "raise", "die")}
    for process in processes.values():
        assert LocalLauncher().answered([process], 100.0) == [process]
    outcomes = {how: process.outcome for how, process in processes.items()}
    ends = [process.describe_end() for process in processes.values()]
    for process in processes.values():
        process.close()
    assert ends == ["exit status 0", "exit status 1", "exit status 1", "killed by signal 9"]
    assert outcomes["return"] and outcomes["return"].result == {"told": "return", "lock": None}
    assert outcomes["refuse"] and outcomes["refuse"].failure == Failure("user", "write something else")
    assert outcomes["raise"] and (failure := outcomes["raise"].failure)
    assert failure.message.startswith("echo-0 failed: ZeroDivisionError: no such luck\nTraceback")
    assert outcomes["die"] is None


def test_a_failure_is_the_exception_that_the_user_sees() -> None:
    kinds = {kind: Failure(kind, "words").error() for kind in ("user", "error", "died", "interrupted")}
    assert [type(error) for error in kinds.values()] == [UserError, WorkerError, LostProcess, KeyboardInterrupt]


@both
def test_process_cleans_up_and_ends_when_parent_closes_connection(start: Start, tmp_path: Path) -> None:
    process = start(spec("sleep", tmp_path / "note"))
    wait_until(lambda: (tmp_path / "note").exists())
    process.hang_up()
    assert process.wait(100.0)
    process.close()
    assert (tmp_path / "note").read_text() == "alone"


def test_stalled_process_is_named_with_its_stack(tmp_path: Path) -> None:
    process = from_server(spec("stall"))
    wait_until(lambda: process.outcome is None and process.stall is not None and process.stall.seconds > 0.5)
    assert process.end_if_silent(0.5, tmp_path)
    said, _, stack = process.describe_end().partition("; its stack is in ")
    process.close()
    assert said.startswith("made no progress in score for ") and said.endswith(
        "were the longest of late, and was killed"
    )
    assert "in stall_in_work" in Path(stack).read_text()


@pytest.mark.soak
def test_children_of_fresh_process_are_killed_with_it(tmp_path: Path) -> None:
    process = Spawned(spec("sleep", tmp_path / "note"))
    wait_until(lambda: (tmp_path / "note").exists() and (tmp_path / "note").read_text() != "")
    own = int((tmp_path / "note").read_text())
    assert running(own)
    process.kill()
    wait_until(lambda: not running(own))
    process.close()


def test_subgroups_inherit_time_limit_of_global_group() -> None:
    assert run_ranks("tests.cluster.ranks:limits", {}, 2, 123.0) == [123.0] * 5


def test_ranks_missing_from_group_are_named() -> None:
    process = Spawned(ProcessSpec("alone", "tests.cluster.ranks:lonely", {}))
    assert LocalLauncher().answered([process], 100.0)
    outcome = process.outcome
    process.close()
    assert outcome and str(outcome.result).startswith("waited 0.5 s for ranks 1 to join")
