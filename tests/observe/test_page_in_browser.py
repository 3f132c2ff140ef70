"""The page of recorded rollouts works in a browser: it filters, opens an episode and shows its turns.

The browser is `BRAID_BROWSER`, or a Chromium on the path.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from braidrl.observe.rollouts_page import PageServer
from tests.observe.test_episodes import WORDS, run, write_seeing_run  # noqa: F401  `run` is a fixture

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = os.environ.get("BRAID_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = [pytest.mark.soak, pytest.mark.skipif(BROWSER is None, reason="no Chromium is here")]


class Tab:
    """A page in a browser, driven by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket, self.number, self.faults = socket, 0, list[Any]()

    async def call(self, method: str, **parameters: Any) -> Any:
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while (answer := await self.socket.receive_json(timeout=30)).get("id") != self.number:
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.faults.append(answer["params"])
        return answer["result"]

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def becomes(self, expression: str, wanted: Any) -> None:
        """Wait until an expression has a value."""
        limit = time.monotonic() + 30
        while (value := await self.value(expression)) != wanted:
            assert time.monotonic() < limit, f"{expression} is {value!r}, not {wanted!r}"
            await asyncio.sleep(0.05)

    async def enter(self, field: str, text: str) -> None:
        """Write into a field of the form, as a user who then leaves it."""
        field = f"document.querySelector('#filter [name={field}]')"
        await self.value(f"{field}.value = '{text}'; {field}.dispatchEvent(new Event('change', {{bubbles: true}}))")


@asynccontextmanager
async def tab_at(address: str, folder: Path) -> AsyncIterator[Tab]:
    """Open an address in a browser of its own."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    process = subprocess.Popen([str(BROWSER), *flags, f"--user-data-dir={folder}", address], stderr=subprocess.DEVNULL)
    try:
        port, limit = folder / "DevToolsActivePort", time.monotonic() + 60
        while not port.exists() or not port.read_text().strip():
            assert process.poll() is None and time.monotonic() < limit
            await asyncio.sleep(0.1)
        at = f"http://127.0.0.1:{port.read_text().split()[0]}/json/list"
        async with aiohttp.ClientSession() as session:
            pages: list[Any] = []
            while not pages:
                async with session.get(at) as answer:
                    pages = [one for one in await answer.json() if one["type"] == "page"]
            async with session.ws_connect(pages[0]["webSocketDebuggerUrl"]) as socket:
                tab = Tab(socket)
                for domain in ("Runtime", "Log"):
                    await tab.call(f"{domain}.enable")
                yield tab
    finally:
        process.kill()
        process.wait()


@contextmanager
def served(folder: Path) -> Iterator[PageServer]:
    with PageServer(folder) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def page(run: Path) -> Iterator[PageServer]:  # noqa: F811
    with served(run) as server:
        yield server


def test_a_browser_filters_opens_an_episode_and_finds_its_turns(page: PageServer, tmp_path: Path) -> None:
    async def look() -> None:
        async with tab_at(page.address, tmp_path) as tab:
            rows = "document.querySelectorAll('#rows tr').length"
            await tab.becomes(rows, 12)
            await tab.enter("min_reward", "2.5")
            await tab.becomes(rows, 3)
            await tab.enter("ended", "stop")
            await tab.becomes(rows, 2)
            await tab.value("document.querySelector('#rows tr').click()")
            turns = "[...document.querySelectorAll('.segment.model')].map((s) => s.querySelector('.head').textContent)"
            await tab.becomes(f"{turns}.length", 3)
            assert [text.split(",")[0] for text in await tab.value(turns)] == ["turn 1", "turn 2", "turn 3"]
            said = await tab.value("document.querySelector('#episode').textContent")
            assert WORDS[5] in said and await tab.value("document.querySelectorAll('#episode script').length") == 0
            colours = "new Set([...document.querySelectorAll('.segment.model .token')].map((t) => t.style.background))"
            assert await tab.value(f"{colours}.size") > 1, "tokens are shaded by their advantages"
            await tab.enter("min_reward", "much")
            await tab.becomes("document.querySelector('#error').textContent.includes('min_reward')", True)
            faults = [fault for fault in tab.faults if "min_reward" not in str(fault) and "400" not in str(fault)]
            assert not faults, faults

    asyncio.run(look())


def test_a_browser_shows_the_image_of_an_observation_between_its_turns(tmp_path: Path) -> None:
    write_seeing_run(tmp_path / "run")

    async def look(address: str) -> None:
        async with tab_at(address, tmp_path / "browser") as tab:
            await tab.becomes("document.querySelectorAll('#rows tr').length", 1)
            await tab.value("document.querySelector('#rows tr').click()")
            images = "[...document.querySelectorAll('#episode img')]"
            await tab.becomes(
                f"{images}.map((i) => i.complete && [i.naturalWidth, i.naturalHeight].join('x')).join()", "8x8"
            )
            places = "[...document.querySelectorAll('.segment')].map((s) => s.querySelectorAll('img').length)"
            assert await tab.value(places) == [0, 0, 1, 0], "it stands in the observation"
            assert not tab.faults, tab.faults

    with served(tmp_path / "run") as server:
        asyncio.run(look(server.address))
