"""If a disk or shared memory fills up during a write, the run ends with one line, and the previous checkpoint is
intact.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.cases import soak_but
from tests.tiny import Workshop, braid

CASES: dict[str, dict[str, Any]] = {
    "distributed": {"runtime": "distributed", "workers": 2},
    "streaming": {"runtime": "streaming"},
    "hybrid": {"runtime": "hybrid", "workers": 2},
}


def in_a_mount(place: Path, size: str, *arguments: Any) -> tuple[int, str]:
    """Run `braid ...` with a private file system of that size at a folder; return the exit code and stderr."""
    place.mkdir()
    if subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "braid", place], capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    command = braid(
        *arguments, folder=place.parent, prefix=f"from tests.commands import mount; mount({str(place)!r}, {size!r})"
    )
    with command:
        _, output = command.communicate(timeout=300)
    return command.returncode, output


@pytest.mark.parametrize("case", soak_but(["streaming"], CASES))
def test_full_disk_ends_multiprocess_run_in_one_line(workshop: Workshop, case: str) -> None:
    disk = workshop.folder / "disk"
    trainer = {"steps": 6, "checkpoint_every": 1, "keep_checkpoints": 1}
    config = workshop.config_file(output=str(disk), trainer=trainer, trackers=[], **CASES[case])
    code, said = in_a_mount(disk, "400k", "train", config)
    last = said.splitlines()[-1]
    assert code == 2 and "Traceback" not in said, said
    assert last.startswith("braid: ") and "No space left" in last and "go on with `braid train --resume" in last


@pytest.mark.parametrize(("size", "prompts"), [("64k", 1), pytest.param("16k", 4, marks=pytest.mark.soak)])
def test_full_shared_memory_ends_streaming_run_in_one_line(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, size: str, prompts: int
) -> None:
    """64 kB hold a group's rows, at most a page per column, but not the model's 68 kB, which a thread of the trainer
    writes.
    """
    config = workshop.config_file(runtime="streaming", trackers=[], trainer={"prompts_per_step": prompts})
    memory = workshop.folder / "memory"
    monkeypatch.setenv("BRAID_SHARED_MEMORY", str(memory))
    code, said = in_a_mount(memory, size, "train", config)
    last = said.splitlines()[-1]
    assert code == 2 and "Traceback" not in said, said
    assert last.startswith("braid: ") and "No space left" in last and str(memory) in last
