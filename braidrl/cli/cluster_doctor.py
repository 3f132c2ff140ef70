"""`braid doctor --cluster`: checks of every node of a Ray cluster before a run.

                                   ┌─ look ───▶ versions, devices, models, data and the run's folder as this node sees them
command ──▶ Inspector on each node ┴─ reach ──▶ a port of every other node               reports ──problems──▶ a line each

The speed of links is measured by nccl-tests.
"""

import contextlib
import os
import platform
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from braidrl.cluster.ray_cluster import RayCluster
from braidrl.config import ClusterConfig, Config
from braidrl.errors import UserError
from braidrl.importing import PACKAGES, version_of
from braidrl.runtimes.prepare.fetching import is_hub_name

CONNECT_LIMIT_S = 5.0


@dataclass
class NodeReport:
    """The findings on one node."""

    node: str
    versions: Mapping[str, str] = field(default_factory=dict)
    unseen: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys whose paths it cannot read or write, with the reasons."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """Nodes that it cannot reach, with the reasons."""
    devices: Sequence[str] = ()


class Inspector:
    """A Ray actor that inspects its node."""

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0))

    def place(self) -> tuple[str, str, int]:
        """Return the node's name, and the address and port that it listens on."""
        import ray

        return platform.node(), ray.util.get_node_ip_address(), self._server.getsockname()[1]

    def look(self, paths: Mapping[str, str], folder: str | None, mark: str, own: str) -> dict[str, Any]:
        """Return the node's versions, devices, and unusable paths with reasons.

        Args:
            paths: Paths by configuration key.
            folder: The run's folder, where the command has created the file `mark`.
            mark: Name of that file.
            own: Name of the file that this node creates.
        """
        versions = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
        unseen = {key: f"{path} is not there" for key, path in paths.items() if not readable(Path(path))}
        if folder is not None and (why := unusable(Path(folder), mark, own)):
            unseen["output"] = why
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "-"):  # Ray hides devices from an actor that requests none
            del os.environ["CUDA_VISIBLE_DEVICES"]
        import torch

        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        return {"versions": versions, "unseen": unseen, "devices": devices}

    def reach(self, others: Mapping[str, tuple[str, int]]) -> dict[str, str]:
        """Return the other nodes that refuse a connection, with the reasons."""
        closed = {}
        for name, place in others.items():
            try:
                socket.create_connection(place, CONNECT_LIMIT_S).close()
            except OSError as error:
                closed[name] = f"{place[0]}:{place[1]}: {error}"
        return closed


def readable(path: Path) -> bool:
    """Return whether a file or folder exists and may be read."""
    return path.exists() and os.access(path, os.R_OK)


def unusable(folder: Path, mark: str, own: str) -> str:
    """Create a file in the run's folder; return the reason if the node cannot use the folder, else empty text."""
    if not (folder / mark).exists():
        return (
            f"{folder} here is not the command's: a file written there is not seen; put the run on a shared file system"
        )
    try:
        (folder / own).touch()
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return ""


def examine_cluster(config: Config | None, say: Callable[[str], None]) -> bool:
    """Report each node and each problem in a line; return False if there is a problem. Raises UserError without a cluster."""
    settings = config.cluster if config is not None else ClusterConfig()
    address = settings.address or os.environ.get("RAY_ADDRESS") or "auto"
    cluster = RayCluster(settings.model_copy(update={"address": address}), "auto")
    try:
        reports = reports_of(cluster, config)
    finally:
        cluster.close()
    for report in reports:
        say(summary(report))
    found = problems(reports)
    for line in found:
        say(f"PROBLEM: {line}")
    return not found


def reports_of(cluster: RayCluster, config: Config | None) -> list[NodeReport]:
    """Return the findings on each live node."""
    ray, limit_s = cluster.ray, cluster.config.start_limit_s
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    own = {
        node: ray.remote(num_cpus=0, scheduling_strategy=affinity(node, soft=False))(Inspector).remote()
        for node in nodes
    }
    try:
        places = answers(ray, {node: actor.place.remote() for node, actor in own.items()}, limit_s)
        reports = {node: NodeReport(f"node {node[:8]}", unseen={"Ray": silent(limit_s)}) for node in nodes}
        for node, (name, ip, _) in places.items():
            reports[node] = NodeReport(f"{name} ({ip}, node {node[:8]})")
        look(ray, {node: own[node] for node in places}, config, reports, limit_s)
        connect(ray, own, {node: place[1:] for node, place in places.items()}, reports, limit_s)
        return list(reports.values())
    finally:
        for actor in own.values():
            ray.kill(actor)


def silent(limit_s: float) -> str:
    """Return the finding for a node that did not answer."""
    return f"it did not answer within {limit_s:g} s"


def look(
    ray: Any, own: Mapping[str, Any], config: Config | None, reports: Mapping[str, NodeReport], limit_s: float
) -> None:
    """Add versions, devices and paths of each node to the reports."""
    with MarkedFolder(config) as (folder, mark):
        asked = {
            node: actor.look.remote(paths_of(config), folder, mark, f"{mark}-{node[:8]}") for node, actor in own.items()
        }
        found = answers(ray, asked, limit_s)
    for node in own:
        vars(reports[node]).update(found.get(node, {"unseen": {"its files": silent(limit_s)}}))


def connect(
    ray: Any,
    own: Mapping[str, Any],
    places: Mapping[str, tuple[str, int]],
    reports: Mapping[str, NodeReport],
    limit_s: float,
) -> None:
    """Add the nodes that each node cannot reach to the reports."""
    others = {node: {reports[peer].node: place for peer, place in places.items() if peer != node} for node in places}
    reached = answers(ray, {node: own[node].reach.remote(others[node]) for node in places}, limit_s)
    for node, closed in reached.items():
        reports[node].closed = closed


def answers(ray: Any, asked: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answers of nodes that answer within `limit_s` seconds; a node lost meanwhile gives none."""
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
    found = {}
    for node, reference in asked.items():
        if reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                found[node] = ray.get(reference)
    return found


class MarkedFolder:
    """A context with a marker file in the run's folder, for the nodes to find; it removes their files at the end."""

    def __init__(self, config: Config | None) -> None:
        self.folder = None if config is None else Path(os.path.abspath(config.output))
        self.mark = f".braid-doctor-{secrets.token_hex(8)}"

    def __enter__(self) -> tuple[str | None, str]:
        if self.folder is None:
            return None, self.mark
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / self.mark).touch()
        except OSError as error:
            raise UserError(
                f"output: {self.folder} cannot be written ({error.strerror}); set output to a folder that can be"
            ) from error
        return str(self.folder), self.mark

    def __exit__(self, *_: object) -> None:
        if self.folder is not None:
            for left in self.folder.glob(f"{self.mark}*"):
                left.unlink()


def paths_of(config: Config | None) -> dict[str, str]:
    """Return the absolute paths of models and data in a configuration, by key, without names of a hub."""
    if config is None:
        return {}
    data = config.data
    named = {
        "model": config.model,
        **{f"roles.{role}.model": own.model for role, own in config.roles.items()},
        **{f"data.train.{n}" if n else "data.train": source.path for n, source in enumerate(data.train)},
        **{f"data.eval.{name}": source.path for name, source in data.eval.items()},
    }
    return {key: os.path.abspath(path) for key, path in named.items() if path is not None and not is_hub_name(path)}


def summary(report: NodeReport) -> str:
    """Return a line about a node."""
    devices = f"{len(report.devices)} of {report.devices[0]}" if report.devices else "no CUDA device"
    return f"{report.node}: {devices}"


def problems(reports: Sequence[NodeReport]) -> list[str]:
    """Return a line for each problem, starting with the node's name."""
    return [*unequal_versions(reports), *unequal_devices(reports), *unreached(reports)]


def unequal_versions(reports: Sequence[NodeReport]) -> list[str]:
    """Return a line for each version that differs from the first node's."""
    answered = [report for report in reports if report.versions]
    return [
        f"{report.node} has {name} {report.versions[name]}, and {answered[0].node} has {usual}; install one version everywhere"
        for name, usual in (answered[0].versions.items() if answered else ())
        for report in answered[1:]
        if report.versions[name] != usual
    ]


def unequal_devices(reports: Sequence[NodeReport]) -> list[str]:
    """Return a line for each node without a device if other nodes have some."""
    have = sum(bool(report.devices) for report in reports)
    return [
        f"{report.node} sees no CUDA device, and {have} others do; look at its driver with nvidia-smi"
        for report in reports
        if have and report.versions and not report.devices
    ]


def unreached(reports: Sequence[NodeReport]) -> list[str]:
    """Return a line for each path that a node cannot use, and each node that it cannot reach."""
    unseen = [f"{report.node}: {key}: {why}" for report in reports for key, why in report.unseen.items()]
    closed = [
        f"{report.node} does not reach {peer} ({why}); open all ports between the nodes"
        for report in reports
        for peer, why in report.closed.items()
    ]
    return [*unseen, *closed]
