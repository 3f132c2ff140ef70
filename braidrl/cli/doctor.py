"""`braid doctor`: a report on this machine with a training step of a tiny model, or with `--cluster` on every node of a
Ray cluster.

                                  ┌─ look ──▶ versions, devices, models, data, the run's folder: as this node sees them
command ─▶ Inspector on each node ┴─ reach ─▶ a port of every other node             reports ──problems──▶ a line each

The speed of links is measured by nccl-tests.
"""

import contextlib
import os
import platform
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from braidrl.cluster.devices import assign_devices, device_lines
from braidrl.cluster.pools import Pool
from braidrl.cluster.ray_cluster import RayCluster
from braidrl.config import ClusterConfig, Config
from braidrl.config.paths import is_hub_name
from braidrl.errors import UserError
from braidrl.importing import PACKAGES, version_of
from braidrl.training.compute.attention import ATTENTION, PackedSequences
from braidrl.training.compute.log_probs import linear_log_probs
from braidrl.training.decoders.body import run_body

LEAST_DISK = 1 << 30
CONNECT_LIMIT_S = 5.0


def examine(say: Callable[[str], None]) -> bool:
    """Report each finding in a line; return False if a run could not work."""
    say(f"python {platform.python_version()} on {platform.platform()}")
    for name in PACKAGES:
        say(f"{name} {version_of(name)}")
    cores = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    memory = psutil.virtual_memory()
    say(f"{cores} cores, {torch.get_num_threads()} threads, {memory.available / 2**30:.1f} GiB of memory free")
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        say(f"cuda:{i} {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    devices = torch.cuda.device_count()
    for line in device_lines(assign_devices([Pool(("rank",), devices)], devices)):
        say(f"of {devices} ranks, {line}")
    if not torch.cuda.is_available():
        say("no CUDA device: runs use the CPU")
    room = shutil.disk_usage(Path.cwd()).free
    say(f"{room / 2**30:.1f} GiB free on disk here")
    if room < LEAST_DISK:
        say("PROBLEM: less than 1 GiB free; set `output` to a folder with room for checkpoints")
    return trains(say) and room >= LEAST_DISK


def trains(say: Callable[[str], None]) -> bool:
    """Run one forward and backward pass of a random model through the attention and log-probs that runs use."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Variable-length attention on CUDA supports only half precision.
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        attn_implementation=ATTENTION,
    )
    model = Qwen3ForCausalLM(config).to(device, dtype)
    tokens = torch.arange(48, device=device) % 64
    start = time.perf_counter()
    sequences = PackedSequences.of((24, 24), device)
    hidden = run_body(model, tokens[None], sequences.position_ids(), sequences)[0]
    log_probs, _ = linear_log_probs(hidden[:-1], model.get_output_embeddings().weight, tokens[1:])
    log_probs.sum().backward()
    finite = all(bool(torch.isfinite(p.grad).all()) for p in model.parameters() if p.grad is not None)
    seconds = time.perf_counter() - start
    say(f"a training step of a tiny model on {device}: {seconds:.2f} s" + ("" if finite else "; PROBLEM: not finite"))
    return finite


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
    place: tuple[str, int] = ("", 0)
    """The address and port that its inspector listens on."""


class Inspector:
    """A Ray actor that inspects its node."""

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0))

    def look(self, node: str, paths: Mapping[str, str], folder: Path | None, mark: str) -> NodeReport:
        """Return the findings on this node.

        The command has made the file `mark` in the run's `folder`; `paths` are by key.
        """
        import ray

        versions = {"python": platform.python_version(), **{name: version_of(name) for name in PACKAGES}}
        unseen = {key: f"{path} is not there" for key, path in paths.items() if not os.access(path, os.R_OK)}
        if folder is not None and (why := unusable(folder, mark, f"{mark}-{node}")):
            unseen["output"] = why
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "-"):  # Ray hides devices from an actor that requests none
            del os.environ["CUDA_VISIBLE_DEVICES"]
        devices = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
        address = ray.util.get_node_ip_address(), self._server.getsockname()[1]
        name = f"{platform.node()} ({address[0]}, node {node})"
        return NodeReport(name, versions, unseen, devices=devices, place=address)

    def reach(self, others: Sequence[NodeReport]) -> dict[str, str]:
        """Return the other nodes that refuse a connection, with the reasons."""
        closed = {}
        for peer in others:
            try:
                socket.create_connection(peer.place, CONNECT_LIMIT_S).close()
            except OSError as error:
                closed[peer.node] = "{}:{}: {}".format(*peer.place, error)
        return closed

    def close(self) -> None:
        self._server.close()


def unusable(folder: Path, mark: str, mark_here: str) -> str:
    """Create a file in the run's folder; return the reason if the node cannot use the folder, else empty text."""
    if not (folder / mark).exists():
        return f"{folder} here is not the command's: its files are not seen; put the run on a shared file system"
    try:
        (folder / mark_here).touch()
    except OSError as error:
        return f"{folder} cannot be written: {error.strerror}"
    return ""


def examine_cluster(config: Config | None, say: Callable[[str], None]) -> bool:
    """Report each node and each problem in a line; return False if there is a problem.

    Raises UserError without a cluster.
    """
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
    faults = problems(reports)
    for line in faults:
        say(f"PROBLEM: {line}")
    return not faults


def reports_of(cluster: RayCluster, config: Config | None) -> list[NodeReport]:
    """Return the findings on each live node. Raises UserError if this machine cannot write the run's folder."""
    limit_s, mark = cluster.config.start_limit_s, f".braid-doctor-{secrets.token_hex(8)}"
    folder = None if config is None else Path(os.path.abspath(config.output))
    try:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / mark).touch()
            except OSError as error:
                raise UserError(f"output: {folder} cannot be written ({error.strerror}); set another folder") from error
        nodes = [node["NodeID"] for node in cluster.ray.nodes() if node["Alive"]]
        inspectors = {node[:8]: cluster.start_on(node, Inspector) for node in nodes}
        looks = {
            node: inspector.look.remote(node, paths_of(config), folder, mark) for node, inspector in inspectors.items()
        }
        reports: dict[str, NodeReport] = answers(cluster.ray, looks, limit_s)
        others = {node: [report for peer, report in reports.items() if peer != node] for node in reports}
        reached = {node: inspectors[node].reach.remote(peers) for node, peers in others.items()}
        for node, closed in answers(cluster.ray, reached, limit_s).items():
            reports[node].closed = closed
        silent = {"Ray": f"it did not answer within {limit_s:g} s"}
        return [reports.get(node) or NodeReport(f"node {node}", unseen=silent) for node in inspectors]
    finally:
        for left in folder.glob(f"{mark}*") if folder is not None else ():
            left.unlink()


def answers(ray: Any, references: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """Return the answers of nodes that answer within `limit_s` seconds; a node lost meanwhile gives none."""
    ready, _ = (
        ray.wait(list(references.values()), num_returns=len(references), timeout=limit_s) if references else ([], [])
    )
    answered = {}
    for node, reference in references.items():
        if reference in ready:
            with contextlib.suppress(ray.exceptions.RayError):
                answered[node] = ray.get(reference)
    return answered


def paths_of(config: Config | None) -> dict[str, str]:
    """Return the absolute paths of models and data in a configuration, by key, without names of a hub."""
    if config is None:
        return {}
    data = config.data
    named = {
        "model": config.model,
        **{f"roles.{role}.model": role_config.model for role, role_config in config.roles.items()},
        **{f"data.train.{n}" if n else "data.train": source.path for n, source in enumerate(data.train)},
        **{f"data.eval.{name}": source.path for name, source in data.eval.items()},
    }
    return {key: os.path.abspath(path) for key, path in named.items() if path is not None and not is_hub_name(path)}


def problems(reports: Sequence[NodeReport]) -> list[str]:
    """Return a line for each problem, starting with the node's name."""
    answered = [report for report in reports if report.versions]
    have = sum(bool(report.devices) for report in reports)
    lines = [
        f"{report.node} has {name} {report.versions[name]}, and {answered[0].node} has {usual}; install one version "
        "everywhere"
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
