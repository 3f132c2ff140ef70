"""A server may close idle connections while the run trains."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from dataclasses import replace

from braidrl.engines.http.dialects import VLLM, ServerNeeds
from braidrl.engines.http.http_engine import HttpEngine, ServerSpec
from tests.engines.tiny import make_tokenizer

SERVER = """
import asyncio
from aiohttp import web

async def serve():
    app = web.Application()
    async def echo(asked):
        return web.json_response(await asked.json())
    async def settings(asked):
        return web.json_response({})
    app.add_routes([web.post("/echo", echo), web.get("/settings", settings)])
    runner = web.AppRunner(app, keepalive_timeout=2.5)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    print(site._server.sockets[0].getsockname()[1], flush=True)
    await asyncio.Event().wait()

asyncio.run(serve())
"""


def test_a_connection_that_a_server_has_closed_meanwhile_is_not_used_again() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True) as process,
        asyncio.Runner() as runner,
    ):
        try:
            assert process.stdout is not None
            undemanding = replace(VLLM, settings="/settings", missing=lambda info, needs: None)
            spec = ServerSpec(undemanding, make_tokenizer(), (), {}, 1, ServerNeeds(8), limit_s=30.0)
            engine = HttpEngine(f"http://127.0.0.1:{process.stdout.readline().strip()}", spec)
            runner.run(engine.start())
            assert runner.run(engine.ask("POST", "/echo", {"n": 1})) == {"n": 1}
            time.sleep(3.5)
            assert runner.run(engine.ask("POST", "/echo", {"n": 2})) == {"n": 2}
            runner.run(engine.close())
        finally:
            process.kill()
