"""A server of tools that hangs, breaks off, answers nonsense or floods: each is its row's counted failure."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import psutil
import pytest

from braidrl.agents.player import EnvironmentPlayer
from braidrl.agents.sandboxed import EnvironmentHosts
from braidrl.agents.trajectory import Limits, trajectory_columns
from braidrl.config import EnvironmentConfig
from braidrl.data.rows import FinishReason
from braidrl.engines.requests import SamplingParams
from tests.agents.chat import Script, make_chat_tokenizer, make_rows, turn_template
from tests.attacks.test_verifiers import has_walls

pytest.importorskip("mcp", reason="mcp is not installed")
pytestmark = pytest.mark.skipif(not has_walls("process"), reason="this system gives no process namespaces of its own")
FLOOD = 50 << 20
LIMITS = Limits(at_once=8, timeout_s=4.0, max_turns=2, max_sequence_tokens=500)


class Hostile(BaseHTTPRequestHandler):
    """Answers each request as its path says."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        getattr(self, self.path.strip("/"))()

    def hang(self) -> None:
        time.sleep(60)

    def half(self) -> None:
        self.reply(b'{"jsonrpc": "2.0", "id": 0, "res', length=1000)
        self.connection.close()

    def nonsense(self) -> None:
        self.reply(b"{]")

    def floods(self) -> None:
        text = json.dumps({"jsonrpc": "2.0", "id": 0, "result": {"text": "x" * FLOOD}}).encode()
        self.reply(text)

    def reply(self, content: bytes, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content) if length is None else length))
        self.end_headers()
        self.wfile.write(content)
        self.wfile.flush()

    def do_GET(self) -> None:
        self.send_error(405)

    do_DELETE = do_GET

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Hostile) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_every_misbehaviour_of_a_server_is_a_counted_row_and_takes_no_memory(address: str) -> None:
    tokenizer = make_chat_tokenizer(None)
    behaviours = ("hang", "half", "nonsense", "floods")
    hosts = [
        EnvironmentHosts(EnvironmentConfig(name=f"mcp:{address}/{one}", timeout_s=4.0, memory_gib=2.0))
        for one in behaviours
    ]
    try:
        made = [host.find(str(host.settings.name)) for host in hosts]
        before, began = psutil.Process().memory_info().rss, time.monotonic()

        async def all_of_them() -> list[Any]:
            script, template = Script(tokenizer, ["ab"]), turn_template(tokenizer)
            players = [EnvironmentPlayer(script, make, template, SamplingParams(), limits=LIMITS) for make in made]  # type: ignore[arg-type]
            played = await asyncio.gather(*(player.play(make_rows(tokenizer, ["?"])) for player in players))
            return [trajectory for (trajectory,) in played]

        trajectories = asyncio.run(all_of_them())
    finally:
        for host in hosts:
            host.close()
    reasons = {one: trajectory.failure for one, trajectory in zip(behaviours, trajectories, strict=True)}
    assert all(reasons.values()), reasons
    assert trajectory_columns(trajectories, LIMITS)["finish_reason"].tolist() == [FinishReason.ERROR] * len(behaviours)  # type: ignore[union-attr]
    assert time.monotonic() - began < 30
    assert psutil.Process().memory_info().rss - before < FLOOD
