"""A server that hangs, breaks off, answers nonsense or floods: each is its row's counted failure."""

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
from aiohttp import web

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.player import AgentPlayer, EnvironmentPlayer
from braidrl.agents.sandboxed import EnvironmentHosts
from braidrl.agents.trajectory import Limits, trajectory_columns
from braidrl.config import EnvironmentConfig
from braidrl.data.rows import FinishReason
from braidrl.engines.requests import SamplingParams
from tests.agents.chat import Script, make_chat_tokenizer, make_rows, turn_template
from tests.attacks.test_verifiers import has_walls
from tests.tiny import ROOT

pytest.importorskip("mcp", reason="mcp is not installed")
pytestmark = pytest.mark.skipif(not has_walls("process"), reason="this system gives no process namespaces of its own")
OPENENV, VERIFIERS = (ROOT / "build" / f"{name}-venv" / "bin" / "python" for name in ("environments", "verifiers"))
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


def check_counted_rows(names: dict[str, str], **settings: Any) -> None:
    """Play a row in each environment, by its behaviour, at the same time: each is a counted failure without memory."""
    tokenizer = make_chat_tokenizer(None)
    configs = [EnvironmentConfig(name=name, timeout_s=4.0, memory_gib=2.0, **settings) for name in names.values()]
    hosts = [EnvironmentHosts(config) for config in configs]
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
    reasons = {one: trajectory.failure for one, trajectory in zip(names, trajectories, strict=True)}
    assert all(reasons.values()), reasons
    assert trajectory_columns(trajectories, LIMITS)["finish_reason"].tolist() == [FinishReason.ERROR] * len(names)  # type: ignore[union-attr]
    assert time.monotonic() - began < 30
    assert psutil.Process().memory_info().rss - before < FLOOD


def test_every_misbehaviour_of_a_server_is_a_counted_row_and_takes_no_memory(address: str) -> None:
    check_counted_rows({one: f"mcp:{address}/{one}" for one in ("hang", "half", "nonsense", "floods")})


async def misbehave(request: web.Request) -> web.StreamResponse:
    """Answer each message of a session as the address says."""
    kind, session = request.match_info["kind"], web.WebSocketResponse()
    if kind == "refuses":
        return web.Response(status=500)
    await session.prepare(request)
    async for _ in session:
        if kind == "hang":
            await asyncio.sleep(60)
        if kind == "half" and request.transport is not None:
            request.transport.write(b"\x81\x7e\x10\x00{")
            request.transport.abort()
        said = {"nonsense": "{]", "another": "[]", "floods": json.dumps({"type": "x", "data": "x" * FLOOD})}
        await session.send_str(said.get(kind, ""))
    return session


@pytest.fixture
def sessions() -> Iterator[str]:
    """Serve sessions of the kind that OpenEnv's client opens, and return the address."""
    loop, started = asyncio.new_event_loop(), threading.Event()
    server, ports = web.Application(), list[int]()
    server.router.add_get("/{kind}/ws", misbehave)

    async def serve() -> None:
        runner = web.AppRunner(server)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        ports.append(runner.addresses[0][1])
        started.set()

    def run() -> None:
        loop.run_until_complete(serve())
        loop.run_forever()

    threading.Thread(target=run, daemon=True).start()
    assert started.wait(10)
    yield f"http://127.0.0.1:{ports[0]}"
    loop.call_soon_threadsafe(loop.stop)


@pytest.mark.soak
def test_every_misbehaviour_behind_openenv_is_a_counted_row_and_takes_no_memory(sessions: str) -> None:
    if not OPENENV.parents[1].joinpath("installed").exists():
        pytest.skip("make environments has not installed openenv")
    kinds = ("hang", "half", "nonsense", "another", "floods", "refuses")
    check_counted_rows({one: f"openenv:{sessions}/{one}" for one in kinds}, python=OPENENV)


@pytest.mark.soak
def test_every_misbehaviour_behind_verifiers_is_a_counted_row_and_takes_no_memory(address: str) -> None:
    if not VERIFIERS.parents[1].joinpath("installed").exists():
        pytest.skip("make environments has not installed verifiers")
    servers, rewards = ["hang", "half", "nonsense", "floods"], ["sleeps", "takes", "text", "list", "nan", "infinite"]
    params = {"address": address, "servers": servers, "rewards": [*rewards, "setup", "fine", "grows"]}
    name = f"verifiers:{ROOT / 'tests' / 'attacks' / 'verifiers_tasks.py'}"
    config = EnvironmentConfig(name=name, params=params, python=VERIFIERS, timeout_s=25.0, memory_gib=2.0)
    limits = Limits(at_once=4, timeout_s=25.0, max_turns=2, max_sequence_tokens=500)
    tokenizer, hosts = make_chat_tokenizer("chatml"), EnvironmentHosts(config)
    rows, script, template = make_rows(tokenizer, ["?"] * 13), Script(tokenizer, ["ab"]), turn_template(tokenizer)
    try:
        act, listener = hosts.find(name), hosts.listener(name)
        before = psutil.Process().memory_info().rss

        async def run() -> list[Any]:
            async with Endpoint(script, template, SamplingParams(), 500, listener=listener) as endpoint:  # type: ignore[arg-type]
                return await AgentPlayer(endpoint, act, limits=limits).play(rows)

        played = asyncio.run(run())
    finally:
        hosts.close()
    assert psutil.Process().memory_info().rss - before < FLOOD
    failures = {one: trajectory.failure for one, trajectory in zip([*servers, *params["rewards"]], played, strict=True)}
    assert (failures.pop("fine"), failures.pop("grows")) == (None, None), "the other rows go on"
    assert all(failures.values()), failures
    # verifiers asks a server again and again, until the time is over.
    assert {one: failures[one] for one in (*servers, "sleeps")} == dict.fromkeys((*servers, "sleeps"), "timeout")
    assert failures["nan"] == failures["infinite"] == "TypeError"
    assert all(len(trajectory.detail) < 2000 for trajectory in played)
