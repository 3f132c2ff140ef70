"""The peak rates of this process's device: the maker's figures for CUDA, the measurement of `braid doctor` for a CPU.

braid doctor ──measured_rates──▶ rates of all cores ──kept──▶ a file in the user's cache ──own_rates──▶ operations and bytes per second
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from braidrl.cluster.device_kinds import known_kinds
from braidrl.cluster.process import usable_cores
from braidrl.native.building import cache_folder, processor
from braidrl.observe.metrics import whole_file

SIDE = 2048
NUMBERS = 1 << 26
REPEATS, SECONDS = 7, 0.3
"""Least number of timings of each kind, and least seconds: with other programs running, few timings are undisturbed."""
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class DeviceRates:
    """The peak rates of one process."""

    operations: Mapping[str, float]
    """Operations per second of matrix products, by dtype."""
    bandwidth: float
    """Bytes per second read from memory."""


def own_rates(device: torch.device, threads: int) -> DeviceRates | None:
    """Return the peak rates of this process; None for an unknown CUDA device, and for a CPU without a measurement.

    Args:
        device: The device of the process.
        threads: The number of cores that it uses on a CPU.
    """
    if device.type == "cuda":
        name = torch.cuda.get_device_name()
        kind = next((kind for kind in known_kinds().values() if name in kind.names), None)
        return None if kind is None else DeviceRates(kind.peak, kind.bandwidth)
    if (kept := kept_rates()) is None:
        return None
    share = min(1.0, threads / usable_cores())
    return DeviceRates({name: rate * share for name, rate in kept.operations.items()}, kept.bandwidth * share)


def kept_rates() -> DeviceRates | None:
    """Read the measured rates of all usable cores; None without a measurement of this machine."""
    path = rates_file()
    if not path.is_file():
        return None
    known = json.loads(path.read_text())
    return DeviceRates(known["operations"], known["bandwidth"]) if known["machine"] == machine() else None


def keep_rates(rates: DeviceRates) -> DeviceRates:
    """Save the measured rates of all cores, or an earlier measurement if higher; return the saved rates.

    Other programs can only lower a measurement.
    """
    path, earlier = rates_file(), kept_rates()
    if earlier is not None:
        operations = {name: max(rate, earlier.operations.get(name, 0.0)) for name, rate in rates.operations.items()}
        rates = DeviceRates(operations, max(rates.bandwidth, earlier.bandwidth))
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"machine": machine(), "operations": dict(rates.operations), "bandwidth": rates.bandwidth}
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(known, indent=1))
    return rates


def rates_file() -> Path:
    """Return the path of the saved rates: BRAID_RATES, else a file in the user's cache."""
    return Path(os.environ.get("BRAID_RATES") or cache_folder() / "rates.json")


def machine() -> list[Any]:
    """Return an identifier that distinguishes machines with a shared home folder."""
    return [usable_cores(), *processor().values()]


def measured_rates(side: int = SIDE, numbers: int = NUMBERS) -> DeviceRates:
    """Measure the rates of all torch threads together.

    Args:
        side: Rows of the square matrices that are multiplied.
        numbers: float32 elements that are read.

    Returns:
        Operations per second of the faster of torch's two libraries by dtype, and bytes per second of a sum over memory.
    """
    found = {}
    for name in DTYPES:
        a, b = (torch.randn(side, side).to(getattr(torch, name)) for _ in range(2))
        ways: list[Callable[[], Any]] = [partial(torch.matmul, a, b)]
        if torch.backends.mkldnn.is_available() and name != "float64":
            ways.append(partial(torch.ops.mkldnn._linear_pointwise, a, b, None, "none", [], ""))
        found[name] = max(2 * side**3 / shortest(way) for way in ways)
    store = torch.ones(numbers)
    return DeviceRates(found, store.nbytes / shortest(store.sum))


def shortest(work: Callable[[], Any]) -> float:
    """Return the minimum of several timings in seconds: disturbances only add time."""
    work()
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < SECONDS:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
