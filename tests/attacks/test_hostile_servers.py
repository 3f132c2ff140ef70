"""A server that hangs, breaks off, answers nonsense or floods: each is its row's counted failure."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiohttp import web

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.player import AgentPlayer, EnvironmentPlayer
from braidrl.agents.sandboxed import EnvironmentHosts
from braidrl.agents.trajectory import Limits, TurnSampling, trajectory_columns
from braidrl.config import EnvironmentConfig
from braidrl.data.rows import FinishReason
from braidrl.engines.requests import SamplingParams
from braidrl.observe.metrics import read_metrics
from examples.tool_arithmetic import demo as tool_arithmetic
from tests.agents.chat import Script, make_chat_tokenizer, make_rows, turn_template
from tests.agents.library_servers import OPENENV, VERIFIERS, calculator, guessing_game, need
from tests.attacks.disturbed import FAULTS, disturbed
from tests.attacks.test_verifiers import has_walls
from tests.commands import Command
from tests.tiny import ROOT, settings

pytest.importorskip("mcp", reason="mcp is not installed")
pytestmark = pytest.mark.skipif(not has_walls("process"), reason="this system gives no process namespaces of its own")
FLOOD, PIECE = 50 << 20, b"x" * (1 << 20)
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
        start, end = b'{"jsonrpc": "2.0", "id": 0, "result": {"text": "', b'"}}'
        self.reply(start, length=len(start) + FLOOD + len(end))
        # In pieces: this process is the one whose memory is measured.
        for _ in range(FLOOD // len(PIECE)):
            self.wfile.write(PIECE)
        self.wfile.write(end)

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
            players = [
                EnvironmentPlayer(script, make, template, TurnSampling(SamplingParams(), 500), limits=LIMITS)
                for make in made
            ]  # type: ignore[arg-type]
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


def serve_sessions(ready: Connection) -> None:
    """Serve sessions of the kind that OpenEnv's client opens, and send the port."""

    async def serve() -> None:
        server = web.Application()
        server.router.add_get("/{kind}/ws", misbehave)
        runner = web.AppRunner(server)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        ready.send(runner.addresses[0][1])
        await asyncio.Event().wait()

    asyncio.run(serve())


@pytest.fixture
def sessions() -> Iterator[str]:
    """Yield the address of a server in a process of its own: the memory of this one is measured."""
    spawning = multiprocessing.get_context("spawn")
    receiver, sender = spawning.Pipe(duplex=False)
    process = spawning.Process(target=serve_sessions, args=(sender,), daemon=True)
    process.start()
    assert receiver.poll(60)
    yield f"http://127.0.0.1:{receiver.recv()}"
    process.kill()
    process.join()


@pytest.mark.soak
def test_every_misbehaviour_behind_openenv_is_a_counted_row_and_takes_no_memory(sessions: str) -> None:
    need(OPENENV)
    kinds = ("hang", "half", "nonsense", "another", "floods", "refuses")
    check_counted_rows({one: f"openenv:{sessions}/{one}" for one in kinds}, python=OPENENV)


@pytest.mark.soak
def test_every_misbehaviour_behind_verifiers_is_a_counted_row_and_takes_no_memory(address: str) -> None:
    need(VERIFIERS)
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
            async with Endpoint(script, template, TurnSampling(SamplingParams(), 500), listener=listener) as endpoint:  # type: ignore[arg-type]
                return await AgentPlayer(endpoint, act, limits=limits).play(rows)

        played = asyncio.run(run())
    finally:
        hosts.close()
    assert psutil.Process().memory_info().rss - before < FLOOD
    failures = {one: trajectory.failure for one, trajectory in zip([*servers, *params["rewards"]], played, strict=True)}
    assert (failures.pop("fine"), failures.pop("grows")) == (None, None), "the other rows go on"
    assert all(failures.values()), failures
    # verifiers asks a server again and again, until the time is over.
    assert failures["hang"] == failures["sleeps"] == "timeout"
    assert {failures[one] for one in ("half", "nonsense", "floods")} <= {"RuntimeError", "timeout"}
    assert failures["nan"] == failures["infinite"] == "TypeError"
    assert all(len(trajectory.detail) < 2000 for trajectory in played)


KINDS = "fine fine fine sleeps raises exits takes floods nothing nan text shape"


@contextmanager
def hostile(library: str, fails: bool) -> Iterator[dict[str, Any]]:
    """Yield the setting `rollout.environment` of a library of which some tasks or connections misbehave, or with
    `fails` all.
    """
    faults = ("closes",) if fails else FAULTS
    if library in ("gem:", "gem:rg:"):
        pytest.importorskip("gem", reason="gem-llm is not installed")
        yield {"name": f"{library}hostile", "python": sys.executable, "variables": ["HOSTILE"]}
    elif library == "textarena:":
        need(OPENENV)
        yield {"name": "textarena:hostile", "python": str(OPENENV), "variables": ["HOSTILE"]}
    elif library == "verifiers:":
        need(VERIFIERS)
        rewards = ["setup"] if fails else ["fine", "setup", "nan", "sleeps"]
        path = ROOT / "tests" / "attacks" / "verifiers_tasks.py"
        yield {"name": f"verifiers:{path}", "python": str(VERIFIERS), "params": {"rewards": rewards}}
    elif library == "openenv:":
        params = {"action": "message", "observation": "said"}
        with guessing_game() as port, disturbed(port, faults) as other:
            yield {"name": f"openenv:http://127.0.0.1:{other}", "python": str(OPENENV), "params": params}
    else:
        with calculator() as port, disturbed(port, faults) as other:
            yield {"name": f"mcp:http://127.0.0.1:{other}/mcp"}


@pytest.mark.soak
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fails", [False, True], ids=["some", "all"])
@pytest.mark.parametrize("library", ["gem:", "gem:rg:", "mcp:", "openenv:", "textarena:", "verifiers:"])
def test_a_run_counts_what_a_library_does_to_it_and_ends_with_a_reason_if_all_rows_fail(
    library: str, fails: bool, tmp_path: Path
) -> None:
    tool_arithmetic.prepare(tmp_path / "task", 0)
    plugin = ROOT / "tests" / "attacks" / f"{library.partition(':')[0]}_plugin"
    variables = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{plugin}" if plugin.is_dir() else str(ROOT),
        "HOSTILE": "raises" if fails else KINDS,
    }
    # A row of verifiers starts a program, which takes two seconds of a processor.
    prompts, samples, limit_s = (3, 2, 25.0) if library == "verifiers:" else (8, 4, 5.0)
    with hostile(library, fails) as environment:
        environment |= {"sandbox": "process", "timeout_s": limit_s, "memory_gib": 1.0, "max_turns": 2}
        tree = settings(
            tmp_path,
            tmp_path / "task" / "untrained",
            tmp_path / "task" / "train.jsonl",
            rollout={
                "samples_per_prompt": samples,
                "max_response_tokens": 2,
                "max_sequence_tokens": 800,
                "environment": environment,
            },
            trainer={"steps": 1 if fails else 2, "prompts_per_step": prompts},
            trackers=[],
        )
        (tmp_path / "run.yaml").write_text(json.dumps(tree))
        with Command(["train", str(tmp_path / "run.yaml")], tmp_path, variables) as process:
            output = " ".join("".join(text or "" for text in process.communicate(timeout=280)).split())
    assert process.returncode == int(fails), output[-2000:]
    assert "Traceback" not in output, output[-2000:]
    if fails:
        assert f"every one of {prompts * samples} trajectories failed; most often: " in output, output[-2000:]
        return
    lines = read_metrics(tmp_path / "run")
    counted = [{name: n for name, n in line.items() if name.startswith("environment/failures/")} for line in lines]
    memory = lines[-1]["memory/actor.generate/resident_max"]
    print(f"{library} {counted} of {prompts * samples} trajectories, {memory / 2**20:.0f} MiB")
    assert len(lines) == 2 and all(0 < sum(failures.values()) < prompts * samples for failures in counted)
    assert memory < 1.5 * 2**30
