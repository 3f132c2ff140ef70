"""Device rates are looked up for CUDA devices and measured for CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from braidrl.cluster.device_kinds import known_kinds
from braidrl.cluster.process import usable_cores
from braidrl.training import operations as machine
from braidrl.training.operations import DeviceRates, keep_rates, kept_rates, measured_rates, own_rates

MEASURED = DeviceRates({"float32": 8e11, "bfloat16": 9e11}, 4e10)
CPU = torch.device("cpu")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the path of this test's rates file, which does not exist yet."""
    monkeypatch.setenv("BRAID_RATES", str(tmp_path / "braidrl" / "rates.json"))
    return tmp_path / "braidrl" / "rates.json"


@pytest.mark.parametrize(
    ("name", "operations", "bandwidth"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12, 3350e9),
        ("NVIDIA A100-SXM4-40GB", 312e12, 1555e9),
        ("NVIDIA A100 80GB PCIe", 312e12, 1935e9),
        ("NVIDIA GeForce RTX 4090", 165.2e12, 1008e9),
    ],
)
def test_rates_of_a_cuda_device_are_its_makers_figures(
    monkeypatch: pytest.MonkeyPatch, name: str, operations: float, bandwidth: float
) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: name)
    found = own_rates(torch.device("cuda"), 1)
    assert found is not None and (found.operations["bfloat16"], found.bandwidth) == (operations, bandwidth)


def test_an_unlisted_device_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA GeForce GT 710")
    assert own_rates(torch.device("cuda"), 1) is None


def test_no_two_kinds_have_one_name() -> None:
    names = [name for kind in known_kinds().values() for name in kind.names]
    assert len(names) == len(set(names))


def test_a_process_has_its_share_of_the_measured_rates(kept: Path) -> None:
    assert own_rates(CPU, 1) is None, "the machine was not measured"
    keep_rates(MEASURED)
    assert kept_rates() == MEASURED == own_rates(CPU, usable_cores()) == own_rates(CPU, 1000)
    share = 1 / usable_cores()
    assert own_rates(CPU, 1) == DeviceRates({"float32": 8e11 * share, "bfloat16": 9e11 * share}, 4e10 * share)
    assert [path.name for path in kept.parent.iterdir()] == ["rates.json"]


def test_slower_measurement_does_not_lower_saved_rates(kept: Path) -> None:
    disturbed = DeviceRates({"float32": 1e11, "bfloat16": 9.5e11}, 1e10)
    both = DeviceRates({"float32": 8e11, "bfloat16": 9.5e11}, 4e10)
    assert keep_rates(MEASURED) == MEASURED
    assert keep_rates(disturbed) == kept_rates() == both


def test_rates_of_another_machine_in_the_same_home_are_ignored(kept: Path) -> None:
    keep_rates(MEASURED)
    kept.write_text(json.dumps({**json.loads(kept.read_text()), "machine": [96, "another processor"]}))
    assert own_rates(CPU, 1) is None


def test_measuring_finds_rates_of_every_type(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "REPEATS", 2)
    monkeypatch.setattr(machine, "SECONDS", 0.0)
    found = measured_rates(64, 1 << 16)
    assert set(found.operations) == {"float32", "bfloat16", "float64"}
    assert all(1e6 < rate < 1e16 for rate in (*found.operations.values(), found.bandwidth))
