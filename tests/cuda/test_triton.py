"""Triton kernels without a device: equal to plain torch by Triton's interpreter, and compiled for devices."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
BENCH = ROOT / "build/bench-venv/bin/python"
"""A Python with Triton that `make bench` installs."""


@pytest.mark.soak
@pytest.mark.parametrize(("interpreted", "dtype"), [("1", "float32"), ("1", "bfloat16"), ("0", "fp32"), ("0", "bf16")])
def test_kernels_of_a_decode_step_equal_torch_and_compile(interpreted: str, dtype: str, tmp_path: Path) -> None:
    python = sys.executable if importlib.util.find_spec("triton") else str(BENCH)
    if not Path(python).exists():
        pytest.skip("needs triton")
    done = subprocess.run(
        [python, "-m", "tests.cuda.triton_kernels", dtype],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": interpreted, "TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-4000:]
