"""Servers of the libraries of environments, for tests."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from braidrl.config import load_config
from braidrl.data.rows import Rows
from braidrl.observe.recorded_rows import read_rollouts
from braidrl.observe.rollouts import rollout_path
from braidrl.runtimes.restarts import train
from tests.tiny import ROOT, free_port

OPENENV, VERIFIERS, AGENTS = (
    ROOT / "build" / f"{name}-venv" / "bin" / "python" for name in ("environments", "verifiers", "agents")
)
"""Interpreters of the environments that `make environments` and `make agents` install."""


def need(python: Path) -> None:
    """Skip the test where the library of this interpreter is not installed."""
    if not python.parents[1].joinpath("installed").exists():
        pytest.skip(f"neither make environments nor make agents has made {python.parents[1].name}")


def one_step(config: Path, *overrides: str) -> tuple[Path, Rows]:
    """Train one step on three rows of one prompt; return the run and its rows."""
    size = ["trainer.steps=1", "trainer.prompts_per_step=1", "rollout.samples_per_prompt=3", "threads=1"]
    run = train(load_config(config, [*size, *overrides]))
    return run, read_rollouts(rollout_path(run, 1))


@contextmanager
def calculator() -> Iterator[int]:
    """Serve the tools of the example over HTTP, and yield the port."""
    pytest.importorskip("mcp", reason="mcp is not installed")
    import uvicorn

    from examples.tool_arithmetic.server import server

    with socket.create_server(("127.0.0.1", 0)) as listener:
        running = uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical"))
        thread = threading.Thread(target=running.run, args=([listener],), daemon=True)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            running.should_exit = True
            thread.join(30)


@contextmanager
def guessing_game() -> Iterator[int]:
    """Serve the example's environment by openenv, and yield the port."""
    need(OPENENV)
    port, file = free_port(), ROOT / "examples" / "guess_number" / "openenv_server.py"
    server = subprocess.Popen([OPENENV, str(file), str(port)])
    try:
        deadline = time.monotonic() + 120
        while not answers(port):
            assert server.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        yield port
    finally:
        server.kill()
        server.wait()


def answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False
