"""A stopped process of any kind is detected and named, and the run continues or ends with one line."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from braidrl.cluster.watchdog import FrozenWatch, descendants, has_ended, name_of
from braidrl.observe.stalls import ENOUGH, WORK
from tests.cases import soak_but
from tests.tiny import Workshop, braid, metrics_agree, wait_for_steps

SILENCE_S = 3.0
NOTICED_S = 90.0
"""Time limit for a run to resume or end, also on a busy machine."""
LEFT_S = 60.0
"""Time limit for the last process of a run to disappear after its end."""
STREAMING = {"runtime": "streaming", "streaming": {"workers": {"actor": 2}, "wait_s": 0.5}}
KINDS: dict[str, tuple[dict[str, Any], str, bool]] = {
    # A run's settings, the process to stop, and whether the run continues.
    "streaming trainer": (STREAMING, "actor-0", False),
    "streaming trainer's second rank": (STREAMING, "actor-1", False),
    "streaming generator": (STREAMING, "actor.generate-", True),
    "verifier": ({"reward": {"sandbox": "process"}}, "verifier", True),
    "engine": ({"rollout": {"engines": 1}}, "engine", True),
    "rank 0": ({"runtime": "distributed", "workers": 2}, "rank 0", False),
    "rank 1": ({"runtime": "distributed", "workers": 2}, "rank 1", False),
    "rank's verifier": ({"runtime": "distributed", "workers": 2}, "verifier", True),
    "hybrid worker": ({"runtime": "hybrid", "workers": 2}, "ray::HybridWork", False),
    "raylet": ({"runtime": "hybrid", "workers": 2}, "raylet", False),
    "engine of a rank": ({"runtime": "distributed", "workers": 2, "rollout": {"engines": 2}}, "engine", True),
    "fork server": (STREAMING, "the fork server", True),
    "streaming inference": (STREAMING, "reference-0", True),
    "runtime environment agent": ({"runtime": "hybrid", "workers": 2}, "ray::RuntimeEnv", False),
    "dashboard agent": ({"runtime": "hybrid", "workers": 2}, "ray::DashboardA", False),
    "gcs": ({"runtime": "hybrid", "workers": 2}, "gcs_server", False),
}


def stop(run: subprocess.Popen[str], name: str) -> int:
    """Stop a process of a run by its name; return its number."""
    for _ in range(1200):
        result = [process for process in descendants(run.pid) if name_of(process).startswith(name)]
        if result:
            os.kill(result[0], signal.SIGSTOP)
            return result[0]
        time.sleep(0.05)
    raise AssertionError(f"no {name} among {sorted(map(name_of, descendants(run.pid)))}")


def still_there(processes: list[int]) -> list[str]:
    """Return the processes that still exist; Ray's agents check only occasionally whether their raylet has ended."""
    limit, left = time.monotonic() + LEFT_S, processes
    while left and time.monotonic() < limit:
        time.sleep(0.05)
        left = [each for each in left if not has_ended(each)]
    return [name_of(each) for each in left]


@pytest.mark.parametrize("kind", soak_but(["rank 1"], KINDS))
def test_stopped_process_is_named_and_run_continues_or_ends(workshop: Workshop, kind: str) -> None:
    settings, name, goes_on = KINDS[kind]
    config = workshop.config_file(cluster={"silence_s": SILENCE_S}, trackers=[], trainer={"steps": 100_000}, **settings)
    folder = workshop.folder / "run"
    with braid("train", config, folder=workshop.folder) as process:
        try:
            wait_for_steps(folder, 2, process)
            processes = [process.pid, *descendants(process.pid)]
            stopped, started = stop(process, name), time.monotonic()
            steps = (folder / "metrics.jsonl").read_text().count("\n")
            if goes_on:
                while not has_ended(stopped) and time.monotonic() < started + NOTICED_S:
                    time.sleep(0.05)
                wait_for_steps(folder, steps + 5, process, NOTICED_S)
                process.send_signal(signal.SIGINT)
            _, output = process.communicate(timeout=NOTICED_S)
        finally:
            process.kill()
    assert f"{name}" in output and "was stopped for" in output and f"process {stopped}" in output, output
    assert "Traceback" not in output, output
    assert process.returncode == (130 if goes_on else 1), output
    assert goes_on or any(line.startswith("braid: ") or "go on with" in line for line in output.splitlines()), output
    assert not still_there(processes)


@pytest.mark.soak
def test_a_main_program_that_was_paused_loses_nothing(workshop: Workshop) -> None:
    sections: dict[str, Any] = {"trackers": [], "trainer": {"steps": 40}, "dtype": "float64", **STREAMING}
    undisturbed = workshop.run("quiet", **sections)
    lease = {**sections["streaming"], "lease_s": SILENCE_S}
    config = workshop.config_file(cluster={"silence_s": SILENCE_S}, **{**sections, "streaming": lease})
    with braid("train", config, folder=workshop.folder) as process:
        try:
            wait_for_steps(workshop.folder / "run", 2, process)
            process.send_signal(signal.SIGSTOP)
            time.sleep(3 * SILENCE_S)
            process.send_signal(signal.SIGCONT)
            _, output = process.communicate(timeout=120)
        finally:
            process.kill()
    assert process.returncode == 0, output
    assert metrics_agree(workshop.folder / "run", undisturbed)


@pytest.mark.soak
def test_the_main_program_reports_its_own_stalled_work(tmp_path: Path) -> None:
    said: list[str] = []
    for _ in range(ENOUGH):
        with WORK.on("reward.verify"):
            pass
    with FrozenWatch(0.1, said.append, tmp_path), WORK.on("reward.verify"):
        while not said:
            time.sleep(0.01)
        time.sleep(0.1)
    (line,) = said
    said_so = r"made no progress in reward.verify for \d+ s, where \d+\.\d s were the longest of late; its stack is in "
    assert re.match(said_so, line)
    assert "in test_the_main_program_reports" in Path(line.partition("its stack is in ")[2]).read_text()


def test_stopped_process_leaves_its_stack(tmp_path: Path) -> None:
    code = (
        "from braidrl.cluster.watchdog import named\nimport time\nnamed('sleeper')\n"
        "def deeply():\n  print(1, flush=True)\n  time.sleep(600)\ndeeply()"
    )
    said: list[str] = []
    with (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process,
        FrozenWatch(0.5, said.append, tmp_path),
    ):
        assert process.stdout is not None and process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        assert process.wait(NOTICED_S) == -signal.SIGKILL
        while not said:
            time.sleep(0.01)
    (line,) = said
    assert line.startswith(f"sleeper (process {process.pid}) was stopped for ")
    assert "in deeply" in Path(line.partition("its stack is in ")[2]).read_text()


def test_stopped_process_is_continued_when_run_ends() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with FrozenWatch(3600.0, print):
            process.send_signal(signal.SIGSTOP)
            while descendants(os.getpid()).get(process.pid) != "stopped":
                time.sleep(0.01)
        process.communicate(b"\n", timeout=NOTICED_S)
    assert process.returncode == 0
