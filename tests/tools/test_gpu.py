"""Every part of `make gpu` runs on a CPU at a small size, with only torch and transformers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.checks import CHECKS, lacking
from benchmarks.gpu.models import SHAPES
from benchmarks.gpu.tables import TABLES
from tests.tiny import ROOT

NOT_NEEDED = (
    "aiohttp", "gem", "hypothesis", "math_verify", "msgspec", "plotly", "psutil", "pyarrow", "pydantic", "ray", "tensorboard", "zmq",
)  # fmt: skip
WITHOUT_THEM = f"import runpy, sys; sys.modules |= dict.fromkeys({NOT_NEEDED}); runpy.run_module('benchmarks.gpu', run_name='__main__')"


def test_the_cpu_twin_of_make_gpu_runs_every_part_without_other_packages(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_THEM, "--device", "cpu", "--size", "tiny", "--output", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "gpu-cpu-tiny.json").read_text())
    shapes = [shape.name for shape in SHAPES["tiny"]]
    parts = [name for name, (_, packages) in CHECKS.items() if not lacking(packages)]
    parts += ["rates", *(f"{table}, {shape}" for shape in shapes for table in TABLES)]
    assert list(found["parts"]) == parts
    assert {part["status"] for part in found["parts"].values()} == {"ok"}
    (step,) = found["parts"]["GRPO step, tiny"]["found"]
    assert step["seconds"] > 0 and "| GRPO step, tiny: model |" in (tmp_path / "gpu-cpu-tiny.md").read_text()
    assert all(f"{name}: ok" in done.stdout for name in parts), "each part prints as it ends"
