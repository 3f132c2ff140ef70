"""Peak rates of devices are the figures of `kinds.yaml`."""

from __future__ import annotations

import pytest
import torch

from braidrl.cluster.device_kinds import known_kinds
from braidrl.training.operations import device_rates


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
    result = device_rates(torch.device("cuda"), 1)
    assert result is not None and (result.operations["bfloat16"], result.bandwidth) == (operations, bandwidth)


def test_an_unlisted_device_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA GeForce GT 710")
    assert device_rates(torch.device("cuda"), 1) is None


def test_no_two_kinds_have_one_name() -> None:
    names = [name for kind in known_kinds().values() for name in kind.names]
    assert len(names) == len(set(names))


def test_a_process_on_a_cpu_has_the_rates_of_its_cores() -> None:
    one, four = (device_rates(torch.device("cpu"), cores) for cores in (1, 4))
    assert one is not None and four is not None and one.bandwidth == known_kinds()["cpu"].bandwidth
    assert four.operations["float32"] == 4 * one.operations["float32"] and four.bandwidth == 4 * one.bandwidth
