"""A real Redis server for tests, installed if it is missing and apt-get can install it."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest

from braidrl.errors import UserError
from braidrl.queue.storage import open_storage
from tests.tiny import free_port


@pytest.fixture(scope="session")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Serve on a free local port for the whole session, and yield the address."""
    pytest.importorskip("redis")
    if shutil.which("redis-server") is None and os.geteuid() == 0 and shutil.which("apt-get"):
        install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", "redis-server"]
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(install, capture_output=True, timeout=300, env=environment)
    program = shutil.which("redis-server")
    if program is None:
        pytest.skip("there is no redis-server, and apt-get cannot install one here")
    port = free_port()
    folder = tmp_path_factory.mktemp("redis")
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--dir", str(folder)]
    server = subprocess.Popen([program, *arguments], stdout=subprocess.DEVNULL)
    address, deadline = f"redis://127.0.0.1:{port}/0", time.monotonic() + 30
    while True:
        try:
            open_storage(address, "0", "test")
            break
        except UserError:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    yield address
    server.terminate()
    server.wait(60)
