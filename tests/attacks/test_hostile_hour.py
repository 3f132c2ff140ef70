"""A hostile hour in small: runs in which every third row attacks, drawn from all kinds; the other rows are what they are without it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from braidrl.observe.rollouts import read_texts, rollout_path
from tests.attacks import test_answers, test_files, test_leftovers, test_memory
from tests.attacks.harness import needs_walls
from tests.tiny import Workshop, braid

ROWS, STEPS = int(os.environ.get("HOSTILE_ROWS", 2000)), 10
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
        "while True:\n    pass", "import os\nwhile True:\n    os.fork()", "import os\nos._exit(0)", "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
        "import os\nwhile True:\n    os.write(1, bytes(1 << 20))", "raise SystemExit", "import ctypes\nctypes.string_at(0)",
        "import threading, time\nfor _ in range(5000):\n    threading.Thread(target=time.sleep, args=(60,)).start()",
    ]  # fmt: skip
    found = [one for one in kinds if not any(slow in one for slow in SLOW)]
    random.Random(0).shuffle(found)
    return found


def run(
    workshop: Workshop, name: str, quiet: bool, runtime: dict[str, Any]
) -> tuple[list[tuple[Any, ...]], list[int], float]:
    """Return each row with its rewards, the memory of all processes every second, and the seconds that the run took."""
    variables = {"environment": ["BRAID_QUIET"]} if quiet else {}
    config = workshop.config_file(
        name=name, trackers=[], **runtime, trainer={"steps": STEPS, "prompts_per_step": ROWS // STEPS // 8, "learning_rate": 1e-4},
        rollout={"samples_per_prompt": 8, "max_response_tokens": 8}, cluster={"silence_s": 300},
        reward={"verify": f"{workshop.folder}/hostile.py:verdict", "sandbox": "process", "timeout_s": 2, "processes": 2, "memory_gib": 0.5, "max_processes": 16, **variables},
    )  # fmt: skip
    if quiet:
        os.environ["BRAID_QUIET"] = "1"
    begun, memory = time.monotonic(), list[int]()
    try:
        with braid("train", config, folder=workshop.folder) as process:
            said = list[Any]()
            reading = threading.Thread(target=lambda: said.append(process.communicate()))
            reading.start()
            while reading.is_alive():
                with contextlib.suppress(psutil.Error):
                    main = psutil.Process(process.pid)
                    memory.append(sum(held(one) for one in (main, *main.children(recursive=True))))
                time.sleep(1)
            assert process.returncode == 0, said
    finally:
        os.environ.pop("BRAID_QUIET", None)
    rows = [
        (step, *(row[column] for column in (*COLUMNS, "response_text")))
        for step in range(1, STEPS + 1)
        for row in read_texts(rollout_path(workshop.folder / name, step), COLUMNS)
    ]
    return sorted(rows), memory, time.monotonic() - begun


def held(process: psutil.Process) -> int:
    try:
        return process.memory_info().rss
    except psutil.Error:
        return 0


@needs_walls
@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("runtime", ["eager", "streaming"])
def test_honest_rows_get_undisturbed_rewards_and_nothing_is_left_behind(workshop: Workshop, runtime: str) -> None:
    shutil.copy(Path(__file__).with_name("hostile.py"), workshop.folder / "hostile.py")
    (workshop.folder / "hostile.json").write_text(json.dumps(drawn_tries()))
    free = {place: shutil.disk_usage(place).free for place in ("/tmp", "/dev/shm")}
    quiet, _, seconds = run(workshop, "quiet", True, {"runtime": runtime})
    hostile, memory, hostile_seconds = run(workshop, "hostile", False, {"runtime": runtime})
    left = [one.pid for one in psutil.process_iter(["cmdline"]) if str(workshop.folder) in str(one.info["cmdline"])]
    used = {place: (held - shutil.disk_usage(place).free) / 2**20 for place, held in free.items()}
    half, end = max(memory[len(memory) // 4 : len(memory) // 2]) / 2**20, max(memory[len(memory) // 2 :]) / 2**20
    print(
        f"{runtime}: {ROWS} rows in {seconds:.0f} s, hostile in {hostile_seconds:.0f} s; memory {half:.0f} then {end:.0f} MiB; disk {used} MiB"
    )
    assert len(hostile) == ROWS and hostile == quiet
    assert not left and end < half + 600
