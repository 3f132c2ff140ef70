"""Kinds of devices with their makers' figures (memory, bandwidths, peak operations) from `kinds.yaml`, and clusters of
them.

"8x8xH100-80GB"  8 nodes of 8 devices        "4x8xH100-80GB+2x8xA100-80GB"  mixed kinds        "cpu"  the cores of this
                 machine
"devices.yaml"   {kinds: {...}, groups: [{kind: H100-80GB, nodes: 8, devices: 8}]}
"""

import os
import re
from functools import cache
from pathlib import Path
from typing import Any, Literal

import psutil
import yaml
from pydantic import Field, ValidationError, field_validator

from braidrl.config.reading import explain
from braidrl.config.section import MOST_PROCESSES, Section
from braidrl.errors import UserError, suggest
from braidrl.parsing import LOADER, read_yaml

GIB = 1 << 30
FORM = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w.-]*)")


class DeviceKind(Section):
    """One kind of device, with its maker's figures."""

    source: str
    names: list[str] = Field(default_factory=list)
    """Result of `torch.cuda.get_device_name` on such a device."""
    peak: dict[str, float]
    """Dense operations per second by dtype."""
    memory: int
    """Bytes of memory; in YAML `80 GiB`, or `all` for this machine's memory divided by its cores."""
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


@cache
def known_kinds() -> dict[str, DeviceKind]:
    """Return the built-in kinds."""
    tree = yaml.load(Path(__file__).with_name("kinds.yaml").read_text(), LOADER)
    return {name: DeviceKind.model_validate(value) for name, value in tree.items()}


class NodeGroup(Section):
    """Nodes of one kind of device."""

    kind: str
    nodes: int = Field(1, ge=1)
    devices: int = Field(1, ge=1)

    @property
    def size(self) -> int:
        return self.nodes * self.devices


class Cluster(Section):
    """Groups of devices and the figures of their kinds; also the content of a YAML file of devices."""

    kinds: dict[str, DeviceKind] = Field(default_factory=dict)
    """The kinds of the groups; in a file, those that extend or replace the built-in ones."""
    groups: tuple[NodeGroup, ...] = Field(min_length=1)

    @property
    def size(self) -> int:
        return sum(group.size for group in self.groups)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Return the name of these devices in a configuration."""
        return "cpu" if all(group.kind == "cpu" for group in self.groups) else "cuda"

    def __str__(self) -> str:
        return "+".join(f"{group.nodes}x{group.devices}x{group.kind}" for group in self.groups)


def read_cluster(text: str) -> Cluster:
    """Parse the value of `--devices`.

    Raises UserError for a wrong form or an unknown kind; the message names the nearest one.
    """
    kinds, groups = known_kinds(), list[NodeGroup]()
    if text.endswith((".yaml", ".yml")):
        path = Path(text)
        if not path.is_file():
            raise UserError(f"--devices: there is no file {path}")
        try:
            read = Cluster.model_validate(read_yaml(path))
        except ValidationError as error:
            raise UserError(f"{path}: {explain(error, Cluster)[0]}") from None
        kinds, groups = {**kinds, **read.kinds}, [*read.groups]
    for part in () if groups else text.split("+"):
        match = FORM.fullmatch(part)
        if match is None:
            raise UserError(f"--devices: {part!r} is not NODESxDEVICESxKIND, as in 8x8xH100-80GB; or cpu, or FILE.yaml")
        first, second, kind = match.groups()
        nodes, devices = (int(first), int(second)) if second else (1, int(first or 1))
        if kind == "cpu" and first is None:
            devices = os.cpu_count() or 1
        if nodes < 1 or devices < 1:
            raise UserError(f"--devices: {part!r} has no devices; write numbers of at least 1, as in 1x8x{kind}")
        groups.append(NodeGroup(kind=kind, nodes=nodes, devices=devices))
    for group in groups:
        if group.kind not in kinds:
            raise UserError(f"--devices: no kind of device is called {group.kind!r}. {suggest(group.kind, kinds)}")
    if (size := sum(group.size for group in groups)) > MOST_PROCESSES:
        raise UserError(f"--devices: {text} are {size:,} devices, and a run has at most {MOST_PROCESSES:,} processes")
    return Cluster(groups=tuple(groups), kinds={group.kind: kinds[group.kind] for group in groups})
