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
from collections.abc import Callable, Iterator, Mapping, Sequence
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

        `paths` are by configuration key. The command has created the file `mark` in the run's `folder`; this node creates the file
        `own`.
        """
        versions = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
        unseen = {key: f"{path} is not there" for key, path in paths.items() if not os.access(path, os.R_OK)}
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
        devices = f"{len(report.devices)} of {report.devices[0]}" if report.devices else "no CUDA device"
        say(f"{report.node}: {devices}")
    found = problems(reports)
    for line in found:
        say(f"PROBLEM: {line}")
    return not found


def reports_of(cluster: RayCluster, config: Config | None) -> list[NodeReport]:
    """Return the findings on each live node."""
    ray, limit_s = cluster.ray, cluster.config.start_limit_s
    silent = f"it did not answer within {limit_s:g} s"
    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy
    own = {
        node: ray.remote(num_cpus=0, scheduling_strategy=affinity(node, soft=False))(Inspector).remote()
        for node in nodes
    }
    try:
        places = answers(ray, {node: actor.place.remote() for node, actor in own.items()}, limit_s)
        reports = {node: NodeReport(f"node {node[:8]}", unseen={"Ray": silent}) for node in nodes}
        for node, (name, ip, _) in places.items():
            reports[node] = NodeReport(f"{name} ({ip}, node {node[:8]})")
        with marked_folder(config) as (folder, mark):
            paths = paths_of(config)
            asked = {node: own[node].look.remote(paths, folder, mark, f"{mark}-{node[:8]}") for node in places}
            found = answers(ray, asked, limit_s)
        for node in places:
            vars(reports[node]).update(found.get(node, {"unseen": {"its files": silent}}))
        others = {
            node: {reports[peer].node: place[1:] for peer, place in places.items() if peer != node} for node in places
        }
        reached = answers(ray, {node: own[node].reach.remote(others[node]) for node in places}, limit_s)
        for node, closed in reached.items():
            reports[node].closed = closed
        return list(reports.values())
    finally:
        for actor in own.values():
            ray.kill(actor)


def answers(ray: Any, asked: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answers of nodes that answer within `limit_s` seconds; a node lost meanwhile gives none."""
    ready, _ = ray.wait(list(asked.values()), num_returns=len(asked), timeout=limit_s)
    found = {}
    for node, reference in asked.items():
        if reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                found[node] = ray.get(reference)
    return found


@contextlib.contextmanager
def marked_folder(config: Config | None) -> Iterator[tuple[str | None, str]]:
    """Create a marker file in the run's folder, for the nodes to find; remove their files at the end."""
    mark = f".braid-doctor-{secrets.token_hex(8)}"
    if config is None:
        yield None, mark
        return
    folder = Path(os.path.abspath(config.output))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / mark).touch()
    except OSError as error:
        raise UserError(
            f"output: {folder} cannot be written ({error.strerror}); set output to a folder that can be"
        ) from error
    try:
        yield str(folder), mark
    finally:
        for left in folder.glob(f"{mark}*"):
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


def problems(reports: Sequence[NodeReport]) -> list[str]:
    """Return a line for each problem, starting with the node's name."""
    answered = [report for report in reports if report.versions]
    have = sum(bool(report.devices) for report in reports)
    lines = [
        f"{report.node} has {name} {report.versions[name]}, and {answered[0].node} has {usual}; install one version everywhere"
        for name, usual in (answered[0].versions.items() if answered else ())
        for report in answered[1:]
        if report.versions[name] != usual
    ]
    lines += [
        f"{report.node} sees no CUDA device, and {have} others do; look at its driver with nvidia-smi"
        for report in answered
        if have and not report.devices
    ]
    lines += [f"{report.node}: {key}: {why}" for report in reports for key, why in report.unseen.items()]
    lines += [
        f"{report.node} does not reach {peer} ({why}); open all ports between the nodes"
        for report in reports
        for peer, why in report.closed.items()
    ]
    return lines
