"""A hostile hour in small: runs in which every third row attacks, drawn from all kinds; the other rows are what they
are without it.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.observe.rollouts import read_texts, rollout_path
from tests.attacks import test_answers, test_files, test_leftovers, test_memory
from tests.attacks.harness import needs_walls
from tests.tiny import Workshop, braid

ROWS, STEPS, SAMPLES = int(os.environ.get("HOSTILE_ROWS", 2000)), 50, 8
KEPT_S = 5
"""Seconds from which on a process counts as one that stays: a call is ended after two."""
SLOW = ("sleep(8)", "sleep(60)", "1 << 30")
COLUMNS = ("group", "sample", "score", "correct", "reward")


def drawn_tries() -> list[str]:
    """All tries that take less than seconds, and some that end their call's time, processes or pipe."""
    kinds = [
        *test_memory.TRIES.values(),
        *(leave for leave, _, _ in test_leftovers.TRIES.values()),
        *test_files.KERNEL.values(),
        *test_answers.ASYNC.values(),
    ]
    kinds += [test_answers.FORGED.format(text=text) for text in test_answers.ANSWERS.values()]
    kinds += [
        "while True:\n    pass",
        "import os\nwhile True:\n    os.fork()",
        "import os\nos._exit(0)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import os\nwhile True:\n    os.write(1, bytes(1 << 20))",
        "raise SystemExit",
        "import ctypes\nctypes.string_at(0)",
        "import threading, time\nfor _ in range(5000):\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    ]
    outcomes = [one for one in kinds if not any(slow in one for slow in SLOW)]
    random.Random(0).shuffle(outcomes)
    return outcomes


@dataclass(frozen=True)
class Look:
    """Memory in MiB and disk in KiB at one second of a run, after so many steps."""

    steps: int
    staying: float
    """Resident memory of the processes that stay: the run's own and the verifiers' hosts."""
    all: float
    """Resident memory of all processes, the attacks' included."""
    files: int
    """Open files of the processes that stay."""
    scratch: int
    """Files in the run's temporary folder and in its shared memory."""


def run(workshop: Workshop, name: str, quiet: bool, runtime: str) -> tuple[list[tuple[Any, ...]], list[Look], float]:
    """Return each row with its rewards, a look of every second, and the seconds that the run took."""
    scratch = [workshop.folder / "temporary", workshop.folder / "shared"]
    for place in scratch:
        place.mkdir(exist_ok=True)
    config = workshop.config_file(
        name=name,
        trackers=[],
        runtime=runtime,
        trainer={"steps": STEPS, "prompts_per_step": ROWS // STEPS // SAMPLES, "learning_rate": 1e-4},
        rollout={"samples_per_prompt": SAMPLES, "max_response_tokens": 8},
        cluster={"silence_s": 300},
        reward={
            "verify": f"{workshop.folder}/hostile.py:verdict",
            "sandbox": "process",
            "timeout_s": 2,
            "processes": 2,
            "memory_gib": 0.5,
            "max_processes": 16,
            "environment": ["BRAID_QUIET"] if quiet else [],
        },
    )
    variables = {"TMPDIR": str(scratch[0]), "BRAID_SHARED_MEMORY": str(scratch[1]), "BRAID_QUIET": "1"}
    started, looks, seen = time.monotonic(), list[Look](), dict[int, float]()
    with pytest.MonkeyPatch.context() as patched:
        for variable, value in variables.items() if quiet else [*variables.items()][:2]:
            patched.setenv(variable, value)
        with braid("train", config, folder=workshop.folder) as process:
            said = list[Any]()
            reading = threading.Thread(target=lambda: said.append(process.communicate()))
            reading.start()
            while reading.is_alive():
                with contextlib.suppress(psutil.Error, OSError):
                    looks.append(look(psutil.Process(process.pid), seen, scratch, workshop.folder / name))
                time.sleep(1)
            assert process.returncode == 0, said
    assert sum(len([*place.rglob("*")]) for place in scratch) == 0, [*scratch[0].rglob("*"), *scratch[1].rglob("*")]
    rows = [
        (step, *(row[column] for column in (*COLUMNS, "response_text")))
        for step in range(1, STEPS + 1)
        for row in read_texts(rollout_path(workshop.folder / name, step), COLUMNS)
    ]
    return sorted(rows), looks, time.monotonic() - started


def look(main: psutil.Process, seen: dict[int, float], scratch: list[Path], folder: Path) -> Look:
    staying = everything = files = 0
    for one in (main, *main.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            resident = one.memory_info().rss
            everything += resident
            if time.monotonic() - seen.setdefault(one.pid, time.monotonic()) > KEPT_S:
                staying, files = staying + resident, files + one.num_fds()
    steps = (folder / "metrics.jsonl").read_text().count("\n")
    used = sum(each.stat().st_blocks // 2 for place in scratch for each in place.rglob("*"))
    return Look(steps, staying / 2**20, everything / 2**20, files, used)


def kib(folder: Path) -> int:
    return sum(each.stat().st_blocks // 2 for each in folder.rglob("*"))


@needs_walls
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runtime", ["eager", "streaming"])
def test_honest_rows_get_undisturbed_rewards_and_nothing_is_left_behind(workshop: Workshop, runtime: str) -> None:
    shutil.copy(Path(__file__).with_name("hostile.py"), workshop.folder / "hostile.py")
    (workshop.folder / "hostile.json").write_text(json.dumps(drawn_tries()))
    kernel = [Path("/proc/sysvipc") / kind for kind in ("shm", "sem", "msg")]
    before = [place.read_text() for place in kernel]
    quiet, _, seconds = run(workshop, "quiet", True, runtime)
    hostile, looks, hostile_seconds = run(workshop, "hostile", False, runtime)
    left = [one.pid for one in psutil.process_iter(["cmdline", "cwd"]) if str(workshop.folder) in str(one.info)]
    # Kernels for new shapes are kept until there are enough: the first half of the steps is not looked at. The last one
    # saves.
    third, last = ([one for one in looks if STEPS * n // 4 <= one.steps < STEPS * (n + 1) // 4] for n in (2, 3))
    figures = {
        name: [round(max(getattr(one, name) for one in part)) for part in (third, last)]
        for name in ("staying", "all", "files", "scratch")
    }
    folders = {name: kib(workshop.folder / name) for name in ("quiet", "hostile")}
    print(
        f"{runtime}: {ROWS} rows in {seconds:.0f} s, hostile in {hostile_seconds:.0f} s; third and last quarter "
        f"{figures}; folders {folders}"
    )
    assert len(hostile) == ROWS and hostile == quiet
    assert not left and [place.read_text() for place in kernel] == before
    assert figures["staying"][1] < figures["staying"][0] + 16 and figures["files"][1] < figures["files"][0] + 20
    assert figures["scratch"][1] < figures["scratch"][0] + 1024 and abs(folders["hostile"] - folders["quiet"]) < 256
