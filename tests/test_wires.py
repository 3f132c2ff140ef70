"""Each way in which processes talk is used by the listed files alone (docs/architecture.md, How processes talk)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.tiny import ROOT

WIRES = {
    # Kinds of call.
    "ray": {
        "cluster/ray_cluster.py",
        "cli/doctor.py",
        "runtimes/hybrid/driver.py",
        "runtimes/hybrid/group.py",
        "runtimes/hybrid/hybrid_worker.py",
    },
    "zmq": {"queue/transport.py"},
    "multiprocessing": {
        "cluster/local.py",
        "cluster/child.py",
        "sandbox/hosts.py",
        "data/prompts.py",  # removes a folder at the end of the process
    },
    "subprocess": {
        "cluster/local.py",
        "rewards/programs.py",
        "native/building.py",
        "runtimes/prepare/setup.py",
        "sandbox/walls.py",  # commands that are waited for
    },
    "socket": {
        "cluster/local.py",
        "engines/engine_process.py",  # ends of inherited connections
        "sandbox/hosts.py",
        "sandbox/host.py",
        "sandbox/copies.py",
        "agents/sandboxed.py",
        "agents/endpoint.py",
        "agents/listening.py",  # HTTP
        "cluster/locations.py",  # datagrams of a machine's ranks
        "cluster/process_groups.py",
        "engines/spanning.py",
        "queue/transfer_queue.py",
        "cluster/ray_cluster.py",
        "cli/doctor.py",  # addresses and ports
    },
    "aiohttp": {
        "engines/http/http_engine.py",
        "rewards/services.py",
        "agents/endpoint.py",
        "agents/listening.py",
        "agents/streamed_turns.py",
    },
    "http": {
        "observe/rollouts_page.py",  # a page for this machine's browser
        "data/images.py",  # images at addresses
        "engines/http/http_engine.py",  # numbers of answers
    },
    "mcp": {"agents/libraries.py"},
    "redis": {"queue/storage.py"},
    # Formats.
    "msgspec": {
        "data/messages.py",
        "engines/engine_process.py",
        "engines/requests.py",  # JSON that vLLM passes through
        "observe/trace.py",  # lines of a timeline
        "runtimes/saving/checkpoints.py",  # the state of a checkpoint, which a person may have edited
    },
    "struct": {
        "cluster/locations.py",
        "data/messages.py",
        "engines/engine_process.py",
        "sandbox/host.py",
        "sandbox/copies.py",
        "sandbox/fork_gate.py",  # also values of the kernel's
    },
    "safetensors": {
        "weights/checkpoint_files.py",
        "training/roles/checkpoint.py",
        "training/lora.py",
        "runtimes/saving/checkpoints.py",
    },
}
"""The files that import a module with which processes talk."""
ABSENT = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "xmlrpc",
    "socketserver",
    "requests",
    "httpx",
    "websockets",
    "grpc",
    "zerorpc",
    "rpyc",
    "protobuf",
    "pyarrow.flight",
    "torch.distributed.rpc",
}
"""Modules that no file imports: other ways to do the same."""
PICKLING = {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"}
"""Functions of torch.distributed that pickle what they send."""


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the names of imported modules, also of those imported by name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (one.value for one in node.args if isinstance(one, ast.Constant))


def test_notices_in_a_store_have_one_file() -> None:
    package, calls = ROOT / "braidrl", {"check", "set", "add", "get"}
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in calls:
                store = ast.unparse(node.func.value).rpartition(".")[2].lstrip("_")
                assert store != "store" or path.name == "process_groups.py", f"{path.name}:{node.lineno}"


def test_the_listed_files_alone_talk_and_in_no_other_way() -> None:
    package, users = ROOT / "braidrl", {module: set[str]() for module in WIRES}
    for path in package.rglob("*.py"):
        name, tree = str(path.relative_to(package)), ast.parse(path.read_text())
        for module in imported(tree):
            assert module not in ABSENT and module.split(".")[0] not in ABSENT, f"{name} imports {module}"
            if (top := module.split(".")[0]) in users:
                users[top].add(name)
        called = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        assert not called & PICKLING, name
    assert users == WIRES
