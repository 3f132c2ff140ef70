"""Read which devices a plan is for: kinds as data, and a cluster of one kind or several.

"8x8xH100-80GB"  8 nodes of 8 devices        "4x8xH100-80GB+2x8xA100-80GB"  mixed kinds        "cpu"  the cores of this machine
"devices.yaml"   {kinds: {...}, groups: [{kind: H100-80GB, nodes: 8, devices: 8}]}
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError

from braidrl.cluster.device_kinds import DeviceKind, known_kinds
from braidrl.config.reading import explain
from braidrl.config.section import Section
from braidrl.errors import UserError, suggest
from braidrl.yaml_text import read_yaml

USABLE = 0.92
"""Share of a device's memory that a plan fills: allocators and communication libraries keep the rest."""
FORM = re.compile(r"(?:(\d+)x)?(?:(\d+)x)?([A-Za-z][\w.-]*)")


class NodeGroup(Section):
    """Nodes of one kind of device."""

    kind: str
    """A kind's name."""
    nodes: int = Field(1, ge=1)
    """How many nodes."""
    devices: int = Field(1, ge=1)
    """Devices of each."""

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return self.nodes * self.devices


class ClusterFile(Section):
    """What a YAML file of devices holds."""

    kinds: dict[str, DeviceKind] = Field(default_factory=dict)
    """Kinds beside those that are known, or in their place."""
    groups: list[NodeGroup] = Field(min_length=1)
    """The cluster."""


@dataclass(frozen=True)
class Cluster:
    """Groups of devices with what their kinds can do."""

    groups: tuple[NodeGroup, ...]
    kinds: dict[str, DeviceKind]

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return sum(group.size for group in self.groups)

    @property
    def device(self) -> Literal["cpu", "cuda"]:
        """Return what a configuration calls these devices."""
        return "cpu" if all(group.kind == "cpu" for group in self.groups) else "cuda"

    def __str__(self) -> str:
        return "+".join(f"{group.nodes}x{group.devices}x{group.kind}" for group in self.groups)


def read_cluster(text: str) -> Cluster:
    """Return the cluster that `--devices` names.

    Raises:
        UserError: for a form that cannot be read and a kind that is not known, naming the nearest.
    """
    if text.endswith((".yaml", ".yml")):
        return read_cluster_file(Path(text))
    return _checked([_group(part) for part in text.split("+")], known_kinds())


def read_cluster_file(path: Path) -> Cluster:
    """Return the cluster of a YAML file. Raises UserError as `read_cluster`."""
    if not path.is_file():
        raise UserError(f"--devices: there is no file {path}")
    try:
        read = ClusterFile.model_validate(read_yaml(path))
    except ValidationError as error:
        raise UserError(f"{path}: {explain(error)}") from None
    return _checked(read.groups, {**known_kinds(), **read.kinds})


def _group(text: str) -> NodeGroup:
    match = FORM.fullmatch(text)
    if match is None:
        raise UserError(
            f"--devices: {text!r} is not NODESxDEVICESxKIND, as in 8x8xH100-80GB; or write cpu, or a .yaml file"
        )
    first, second, kind = match.groups()
    if kind == "cpu" and first is None:
        return NodeGroup(kind=kind, devices=os.cpu_count() or 1)
    nodes, devices = (int(first), int(second)) if second else (1, int(first or 1))
    if nodes < 1 or devices < 1:
        raise UserError(f"--devices: {text!r} has no devices; write numbers of at least 1, as in 1x8x{kind}")
    return NodeGroup(kind=kind, nodes=nodes, devices=devices)


def _checked(groups: list[NodeGroup], kinds: dict[str, DeviceKind]) -> Cluster:
    for group in groups:
        if group.kind not in kinds:
            raise UserError(f"--devices: no kind of device is called {group.kind!r}. {suggest(group.kind, kinds)}")
    return Cluster(tuple(groups), {group.kind: kinds[group.kind] for group in groups})
