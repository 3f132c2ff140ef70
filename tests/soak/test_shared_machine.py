"""A run on a machine with other load."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from braidrl.cluster.process import usable_cores
from braidrl.observe.metrics import read_metrics

ARITHMETIC = Path(__file__).parents[2] / "examples" / "arithmetic"
RUN = """
import sys
from pathlib import Path
from demo import learn
print(learn(Path(sys.argv[1]), 0, 50, dapo=["trainer.steps=8"]))
"""


def step_seconds(folder: Path) -> float:
    """Return the median seconds of a step of DAPO in the demo, after the first."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, "-c", RUN, str(folder)]
    done = subprocess.run(command, cwd=ARITHMETIC, env=own, capture_output=True, text=True, check=True)
    steps = [line["time/step"] for line in read_metrics(Path(done.stdout.split()[-1])) if line.get("time/step")]
    return statistics.median(steps[1:])


@pytest.mark.soak
def test_steps_on_busy_machine_take_at_most_three_times_longer(tmp_path: Path) -> None:
    quiet = step_seconds(tmp_path / "quiet")
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(usable_cores())]
    try:
        shared = step_seconds(tmp_path / "shared")
    finally:
        for other in others:
            other.kill()
            other.wait()
    print(f"{quiet:.2f} s alone, {shared:.2f} s beside others")
    assert shared <= 3 * quiet, f"{shared:.2f} s beside others, {quiet:.2f} s alone"
