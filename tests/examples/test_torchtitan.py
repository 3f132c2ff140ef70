"""The guest backend of examples/torchtitan keeps the contract, and trains to the built-in backend's result in two
layouts.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from braidrl.observe.metrics import read_metrics
from tests.tiny import ROOT, Workshop, weights_of

BACKEND = ROOT / "examples" / "torchtitan" / "backend.py"
CONTRACT = """
import sys
from pathlib import Path
from braidrl.training.backend_contract import CHECKS, BackendUnderTest
from braidrl.training.backends import BackendSpec
from braidrl.training.names import BACKENDS
from braidrl.training.objective import Objective, denominators
from tests.training.parallel.laid_out import config_of, make_rows

model, folder = sys.argv[1:]
config, rows = config_of(model, learning_rate=1e-2), make_rows()
objective = Objective.of("actor", {"loss": "clip", "aggregate": "token-mean"})
for number, check in enumerate(CHECKS):
    make = lambda: BACKENDS.find("GUEST:TitanBackend")(BackendSpec("actor", config))
    counts = {"tokens": denominators(rows)["tokens"]}
    check(BackendUnderTest(make, objective, rows, counts, Path(folder) / str(number), lambda: None, True))
"""


@pytest.fixture
def python() -> Path:
    """The interpreter of `make torchtitan`."""
    environment = ROOT / "build" / "torchtitan-venv"
    if not (environment / "installed").is_file():
        pytest.skip("torchtitan is not installed; `make torchtitan` installs it")
    return environment / "bin" / "python"


def run(python: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.soak
def test_torchtitan_keeps_the_backend_contract(python: Path, workshop: Workshop, tmp_path: Path) -> None:
    run(python, "-c", CONTRACT.replace("GUEST", str(BACKEND)), str(workshop.model), str(tmp_path))


@pytest.mark.soak
@pytest.mark.parametrize("axis", ["data", "tensor"])
@pytest.mark.parametrize("runtime", ["distributed", "streaming"])
def test_torchtitan_trains_to_the_result_of_the_built_in_backend(
    python: Path, workshop: Workshop, runtime: str, axis: str
) -> None:
    workers = 2 if runtime == "distributed" else 1
    common = {"runtime": runtime, "workers": workers, "algorithm": {"old": "recompute", "kl_coef": 0}}
    for name, interpreter, backend in (
        ("ours", Path(sys.executable), "torch"),
        ("guest", python, f"{BACKEND}:TitanBackend"),
    ):
        trainer = {"layout": {axis: 2}, "backend": backend}
        run(interpreter, "-m", "braidrl.cli", "train", str(workshop.config_file(name, **common, trainer=trainer)))
    ours, guest = (workshop.folder / name for name in ("ours", "guest"))
    for one, other in zip(read_metrics(ours), read_metrics(guest), strict=True):
        assert other["actor/grad_norm"] == pytest.approx(one["actor/grad_norm"], rel=1e-4)
    tensors, expected = weights_of(guest), weights_of(ours)
    assert all(torch.allclose(tensors[name], tensor, rtol=0, atol=1e-5) for name, tensor in expected.items())
