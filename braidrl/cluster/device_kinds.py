"""Kinds of devices as their makers state them: memory, bandwidths and peak operations, from `kinds.yaml`."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import yaml
from pydantic import Field, field_validator

from braidrl.config.section import Section

GIB = 1 << 30


class DeviceKind(Section):
    """One kind of device, as its maker states it."""

    source: str
    """Where the numbers are from."""
    names: list[str] = Field(default_factory=list)
    """What `torch.cuda.get_device_name` says of such a device."""
    peak: dict[str, float]
    """Dense operations per second by dtype."""
    memory: int
    """Bytes; in YAML as in `80 GiB`, or `all` of this machine's, divided by its cores."""
    bandwidth: float = Field(gt=0)
    """Bytes per second of its memory."""
    link: float = Field(gt=0)
    """Bytes per second and device within a node, one way."""
    network: float = Field(gt=0)
    """Bytes per second and device between nodes, one way."""
    host: float = Field(gt=0)
    """Bytes per second to and from host memory."""

    @field_validator("memory", mode="before")
    @classmethod
    def _bytes(cls, value: Any) -> Any:
        if value == "all":
            return psutil.virtual_memory().total // (os.cpu_count() or 1)
        if isinstance(value, str) and value.endswith("GiB"):
            return int(float(value.removesuffix("GiB")) * GIB)
        return value


def kind_named(name: str) -> DeviceKind | None:
    """Return the kind of a device that torch calls by this name; None where it is not among those that come with the package."""
    return next((kind for kind in known_kinds().values() if name in kind.names), None)


@cache
def known_kinds() -> dict[str, DeviceKind]:
    """Return the kinds that come with the package."""
    tree = yaml.safe_load(Path(__file__).with_name("kinds.yaml").read_text())
    return {name: DeviceKind.model_validate(value) for name, value in tree.items()}
