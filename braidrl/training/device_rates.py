"""What the device of this process can do: of a CUDA device what its maker states, of a CPU what `braid doctor` has measured here.

braid doctor ──measured_rates──▶ rates of all cores ──kept──▶ a file of this user's ──own_rates──▶ operations and bytes per second
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

from braidrl.cluster.device_kinds import kind_named
from braidrl.cluster.process import usable_cores
from braidrl.native.building import cache_folder, processor
from braidrl.observe.lines import whole_file

SIDE = 2048
NUMBERS = 1 << 26
REPEATS, SECONDS = 7, 0.3
"""How often each thing is timed at least, and for how long: beside other programs few of many times are undisturbed."""
DTYPES = ("float32", "bfloat16", "float64")


@dataclass(frozen=True)
class DeviceRates:
    """What one process can reach at most."""

    operations: Mapping[str, float]
    """Per second, of matrix products, by dtype."""
    bandwidth: float
    """Bytes per second that are read from memory."""

    def times(self, share: float) -> "DeviceRates":
        """Return the rates of so many devices, or of a share of one."""
        return DeviceRates({name: rate * share for name, rate in self.operations.items()}, self.bandwidth * share)

    def maximum(self, other: "DeviceRates") -> "DeviceRates":
        """Return the higher of each rate, of two measurements of one machine: other programs only take from what it can do."""
        operations = {name: max(rate, other.operations.get(name, 0.0)) for name, rate in self.operations.items()}
        return DeviceRates(operations, max(self.bandwidth, other.bandwidth))


def own_rates(device: torch.device, threads: int) -> DeviceRates | None:
    """Return what this process can reach; None for a CUDA device of an unknown kind, and for a CPU that nobody has measured.

    Args:
        device: What it computes on.
        threads: How many cores it computes with on a CPU.
    """
    if device.type == "cuda":
        kind = kind_named(torch.cuda.get_device_name())
        return None if kind is None else DeviceRates(kind.peak, kind.bandwidth)
    kept = kept_rates()
    return None if kept is None else kept.times(min(1.0, threads / usable_cores()))


def kept_rates() -> DeviceRates | None:
    """Return what was measured of all cores that this process may use; None where nothing was, or on another machine."""
    path = rates_file()
    if not path.is_file():
        return None
    known = json.loads(path.read_text())
    return DeviceRates(known["operations"], known["bandwidth"]) if known["machine"] == machine() else None


def keep_rates(rates: DeviceRates) -> DeviceRates:
    """Write down what was measured of all cores, or earlier where that was more; return what is kept."""
    path, earlier = rates_file(), kept_rates()
    rates = rates.maximum(earlier) if earlier else rates
    path.parent.mkdir(parents=True, exist_ok=True)
    known = {"machine": machine(), "operations": dict(rates.operations), "bandwidth": rates.bandwidth}
    with whole_file(path) as unfinished:
        unfinished.write_text(json.dumps(known, indent=1))
    return rates


def rates_file() -> Path:
    """Return where rates are kept: what BRAID_RATES names, else a file of the user's cache."""
    return Path(os.environ.get("BRAID_RATES") or cache_folder() / "rates.json")


def machine() -> list[Any]:
    """Return what tells machines apart that share a home folder."""
    return [usable_cores(), *processor().values()]


def measured_rates(side: int = SIDE, numbers: int = NUMBERS) -> DeviceRates:
    """Measure what torch's threads reach together.

    Args:
        side: Of the square matrices that are multiplied.
        numbers: How many of float32 are read.

    Returns:
        Operations of the faster of torch's two libraries by dtype, and bytes per second of a sum over memory.
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
    """Return the least seconds of several times, since what disturbs only adds to it."""
    work()
    times: list[float] = []
    while len(times) < REPEATS or sum(times) < SECONDS:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
