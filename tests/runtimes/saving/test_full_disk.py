"""If a disk or shared memory fills up during a write, the run ends with one line, and the previous checkpoint is intact."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import ROOT, Workshop

CASES: dict[str, dict[str, Any]] = {
    "distributed": {"runtime": "distributed", "workers": 2},
    "streaming": {"runtime": "streaming"},
    "hybrid": {"runtime": "hybrid", "workers": 2},
}


def in_a_mount(place: Path, size: str, *arguments: Any, shared_memory: bool = False) -> tuple[int, str]:
    """Run `braid ...` with a private file system of that size at a folder; return the exit code and stderr."""
    place.mkdir()
    mount = ["unshare", "-m", "bash", "-c"]
    if subprocess.run([*mount, f"mount -t tmpfs -o size={size} braid {place}"], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        **({"BRAID_SHARED_MEMORY": str(place)} if shared_memory else {}),
    }
    command = shlex.join([sys.executable, "-m", "braidrl.cli", *map(str, arguments)])
    ended = subprocess.run(
        [*mount, f"mount -t tmpfs -o size={size} braid {place}; {command}"],
        capture_output=True, text=True, cwd=place.parent, env=environment, timeout=300,
    )  # fmt: skip
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case == "streaming" else pytest.mark.soak) for case in CASES]
)
def test_full_disk_ends_multiprocess_run_in_one_line(workshop: Workshop, case: str) -> None:
    disk = workshop.folder / "disk"
    trainer = {"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 1}
    config = workshop.config_file(output=str(disk), trainer=trainer, trackers=[], **CASES[case])
    code, said = in_a_mount(disk, "400k", "train", config)
    last = said.splitlines()[-1]
    assert code == 2 and "Traceback" not in said, said
    assert (
        last.startswith("braid: ")
        and "No space left" in last
        and "make room, and go on with `braid train --resume" in last
    )


@pytest.mark.parametrize(("size", "prompts"), [("64k", 1), pytest.param("16k", 4, marks=pytest.mark.soak)])
def test_full_shared_memory_ends_streaming_run_in_one_line(workshop: Workshop, size: str, prompts: int) -> None:
    """64 kB hold a group's rows, at most a page per column, but not the model's 68 kB, which a thread of the trainer writes."""
    config = workshop.config_file(runtime="streaming", trackers=[], trainer={"prompts_per_step": prompts})
    memory = workshop.folder / "memory"
    code, said = in_a_mount(memory, size, "train", config, shared_memory=True)
    last = said.splitlines()[-1]
    assert code == 2 and "Traceback" not in said, said
    assert last.startswith("braid: ") and "No space left" in last and str(memory) in last
