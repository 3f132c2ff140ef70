"""Machines without something usual: a loopback interface, a writable /dev/shm."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import ROOT

SCRIPT = """
import tempfile, time
from pathlib import Path
from braidrl.cluster.process_groups import open_store
from braidrl.errors import UserError
from braidrl.cluster.shared_memory import shared_folder

assert shared_folder() == Path(tempfile.gettempdir()), shared_folder()
begin = time.monotonic()
try:
    open_store("127.0.0.1", 600.0)
except UserError as error:
    print(error)
assert time.monotonic() - begin < 30, "torch waited, and heard no signal"
"""


@pytest.mark.soak
def test_without_loopback_or_shared_memory_a_run_reports_it_or_uses_the_disk(tmp_path: Path) -> None:
    place = tmp_path / "shared"
    place.mkdir()
    namespaces = ["unshare", "-n", "-m", "bash", "-c"]
    mounted = f"mount -t tmpfs -o ro braid {place}"
    if subprocess.run([*namespaces, mounted], capture_output=True).returncode:
        pytest.skip("namespaces of its own need root")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BRAID_SHARED_MEMORY": str(place)}
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*namespaces, f"{mounted} && {sys.executable} {script}"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "meet at 127.0.0.1" in done.stdout
