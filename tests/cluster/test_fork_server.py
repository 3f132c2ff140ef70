"""Copies of a command's fork server share exactly the intended state with the command."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.tiny import ROOT

COMMAND = """
import json, os, sys, threading
from braidrl.cluster.local import LocalLauncher, copy_as_fork_server
from braidrl.cluster.process import ProcessSpec
from braidrl.cluster.watchdog import descendants, name_of
from braidrl.cluster.pools import Pool

kept = open(sys.argv[1])
sys.modules["told_apart"] = sys  # what only the command has, and its copies
{before}
made = copy_as_fork_server(["json.tool"])
launcher = LocalLauncher()
launcher.reserve([Pool(("echo",), 1, engines={engines})])
process = launcher.start("echo", 0, ProcessSpec("echo-0", "tests.cluster.copies:{does}", {{"file": sys.argv[1]}}))
process.wait(60)
names = sorted(map(name_of, descendants(os.getpid())))  # now that it has started a process it has its name
print(json.dumps([made, names, process.outcome.result]))
process.close()
"""


def run(before: str = "", engines: int = 0, does: str = "seen") -> list[Any]:
    command = [sys.executable, "-c", COMMAND.format(before=before, engines=engines, does=does), __file__]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and not done.stderr, done.stderr
    result: list[Any] = json.loads(done.stdout)
    return result


def test_copies_share_imports_but_not_open_files() -> None:
    made, names, copy = run()
    assert made and "the fork server" in names
    assert (copy["modules"], copy["holds"]) == (["told_apart", "json.tool"], False)
    assert (copy["next"]["modules"], copy["next"]["holds"]) == ([], False), (
        "the copy's own server is a fresh interpreter"
    )
    assert copy["collects"] and copy["next"]["collects"], (
        "garbage collection is off in a fresh server and on in its copies"
    )


@pytest.mark.soak
def test_copy_that_starts_engines_forks_its_own_server() -> None:
    _, _, copy = run(engines=1)
    assert (copy["next"]["modules"], copy["next"]["holds"]) == (["told_apart", "json.tool"], False)


@pytest.mark.soak
def test_a_command_that_has_threads_is_not_copied() -> None:
    made, _, copy = run("threading.Thread(target=threading.Event().wait, daemon=True).start()")
    assert not made
    assert copy["modules"] == [] and copy["collects"]


@pytest.mark.soak
def test_a_stream_of_the_command_writes_into_no_socket_of_a_copy() -> None:
    made, _, received = run("sys.modules['log'] = open(os.devnull, 'w')", does="overheard")
    assert made and received == 0
