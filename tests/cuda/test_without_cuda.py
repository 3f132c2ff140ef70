"""CUDA code paths without CUDA: the runs of `checks.py` in a process whose torch has a simulated device."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent.parent
SOURCE = Path(__file__).parent / "device.cpp"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the compiled `device.cpp`."""
    if torch.version.cuda or sys.platform != "linux" or shutil.which("g++") is None:
        pytest.skip("needs torch for CPUs, Linux and g++")
    made, installed = tmp_path_factory.mktemp("device") / "device.so", Path(torch.__file__).parent
    libraries = installed / "lib"
    command = ["g++", "-std=c++20", "-shared", "-fPIC", f"-I{installed / 'include'}", str(SOURCE), "-o", str(made)]
    linked = [f"-L{libraries}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{libraries}"]
    done = subprocess.run([*command, *linked], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.soak
@pytest.mark.parametrize("which", ["not soak", "soak"])
def test_runs_pass_on_a_simulated_cuda_device(device: Path, which: str) -> None:
    unused = ["-p", "no:cacheprovider", "-p", "no:xdist", "--noconftest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *unused, "-m", which, "tests/cuda/checks.py"],
        cwd=ROOT,
        env={**os.environ, "LD_PRELOAD": str(device), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
