"""Each process gets its number of threads and a sleeping wait policy."""

import os
import subprocess
import sys

import pytest

from braidrl.cluster.process import default_threads, usable_cores

WAITS = """
import os, sys
from braidrl.cli import commands
commands.app = lambda *arguments, **settings: print(os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
commands.main()
"""


@pytest.mark.parametrize(
    ("own", "policy"),
    [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "active"}, "active"), ({"GOMP_SPINCOUNT": "1000"}, "None")],
)
def test_threads_sleep_at_barriers_unless_user_sets_wait_policy(own: dict[str, str], policy: str) -> None:
    rest = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_WAIT", "GOMP_", "KMP_"))}
    done = subprocess.run(
        [sys.executable, "-c", WAITS], capture_output=True, text=True, env={**rest, **own}, check=True
    )
    assert done.stdout.split() == [policy, "False"], "torch reads the variable when it is loaded"


def test_processes_share_the_cores_unless_threads_are_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert default_threads(1) == usable_cores()
    assert default_threads(1000) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert default_threads(1) is None
