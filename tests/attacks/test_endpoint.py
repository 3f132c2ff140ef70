"""Attacks on the endpoint: a request of one row neither delays nor shuts out another, whatever it is."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
import resource
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from braidrl.agents import endpoint as endpoints
from braidrl.agents.endpoint import MOST_REQUESTS, Endpoint
from braidrl.agents.streamed_turns import TurnStream
from braidrl.agents.tool_calls import FORMATS
from braidrl.agents.trajectory import Trajectory, TurnSampling
from braidrl.engines.requests import SamplingParams
from tests.agents.chat import Script, make_chat_tokenizer, turn_template

TOKENIZER = make_chat_tokenizer("chatml")
USER = [{"role": "user", "content": "a"}]
MOST_S = 0.2
"""Seconds for which one request may delay another."""


class Delays:
    """The longest time that the event loop computed between two looks, in CPU seconds: other programs do not count."""

    longest = 0.0

    async def watch(self) -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0.002)
            now = time.thread_time()
            self.longest, before = max(self.longest, now - before), now


@asynccontextmanager
async def served(
    texts: list[str] | None = None, tokens: int = 400, seconds: float = 0.0
) -> AsyncIterator[tuple[Endpoint, Delays]]:
    script, delays = Script(TOKENIZER, texts or ["b"], seconds), Delays()
    async with Endpoint(
        script, turn_template(TOKENIZER), TurnSampling(SamplingParams(max_tokens=tokens), tokens)
    ) as endpoint:  # type: ignore[arg-type]
        watching = asyncio.ensure_future(delays.watch())
        try:
            yield endpoint, delays
        finally:
            watching.cancel()


async def send(url: str, body: Any, path: str = "chat/completions", **headers: str) -> tuple[int, str]:
    data = body if isinstance(body, bytes) else json.dumps({"messages": USER, **body}).encode()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(30)) as client:
        try:
            async with client.post(
                f"{url}/{path}", data=data, headers={"Content-Type": "application/json", **headers}
            ) as answer:
                return answer.status, await answer.text()
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
            return 0, "closed"


LONG: dict[str, tuple[dict[str, Any], int]] = {
    "a stop text of a megabyte": ({"stop": ["1 " * 500_000], "stream": True}, 400),
    "a stop text of one letter": ({"stop": ["a" * 100_000], "stream": True}, 400),
    "many stop texts": ({"stop": ["ab"] * 100_000, "stream": True}, 400),
    "stop texts that nearly match": (
        {"stop": ["a" * 255 + letter for letter in "bcdefghijklmnopq"], "stream": True},
        200,
    ),
    "a message of a megabyte": ({"messages": [{"role": "user", "content": "ab 12 " * 160_000}]}, 400),
    "many messages": ({"messages": USER * 30_000}, 400),
    "many parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 20_000}]}, 400),
    "long tools": ({"tools": [{"type": "function", "function": {"name": "x" * 900_000}}]}, 400),
    "a longer body": ({"model": "x" * 9_000_000}, 413),
    "a long name": ({"model": "x" * 900_000}, 400),
    "a long number": (b'{"messages": [], "max_tokens": ' + b"9" * 900_000 + b"}", 400),  # type: ignore[dict-item]
    "deep": (b'{"messages": ' + b"[" * 500_000, 400),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("kind", LONG)
def test_a_long_request_is_answered_and_does_not_hold_the_loop(kind: str) -> None:
    body, status = LONG[kind]

    async def run() -> tuple[int, int, float]:
        async with served(["a " * 100]) as (endpoint, delays):
            await send(endpoint.open(Trajectory((0, 0, 0))), {})
            bad, good = endpoint.open(Trajectory((0, 0, 1))), endpoint.open(Trajectory((0, 0, 2)))
            delays.longest = 0.0
            answers = await asyncio.gather(send(bad, body), send(good, {}))
            return answers[0][0], answers[1][0], delays.longest

    bad, good, longest = asyncio.run(run())
    assert bad == status and good == 200
    assert longest < MOST_S, f"the loop stood still for {longest:.3f} s"


def test_streamed_pieces_end_before_a_stop_text_in_linear_time() -> None:
    stops = ["aab", "ba", "aaaaab"]
    text = "".join("ab"[n * n % 7 % 2] for n in range(60)) + "aaaaab"
    for begin in range(40):
        whole = text[begin:]
        said = whole[: min(place for stop in stops if (place := whole.find(stop)) >= 0)]
        stream = TurnStream(lambda tokens: "".join(map(chr, tokens)), stops)
        for number, character in enumerate(whole):
            stream.add_token(number, ord(character))
            stream.add_piece()
            assert said.startswith("".join(stream.pieces))
            assert len("".join(stream.pieces)) >= min(len(said), number + 1 - max(map(len, stops)))
        assert "".join(stream.pieces) == said
    stream = TurnStream(lambda tokens: "a" * len(tokens), ["a" * 255 + letter for letter in "bcdefghijklmnopq"])
    start = time.thread_time()
    for number in range(2_000):
        stream.add_token(number, 0)
        stream.add_piece()
    assert time.thread_time() - start < 1.0 and len("".join(stream.pieces)) == 2_000 - 255


OVER_AND_OVER = (
    "<function=",
    "<tool_call>",
    "<parameter=a>",
    "[TOOL_CALLS]",
    "<arg_key>a",
    "<｜tool▁call▁begin｜>",
    "{};",
    "<arg_key></arg_key>",
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("text", OVER_AND_OVER)
def test_what_a_model_writes_over_and_over_is_parsed_in_linear_time(name: str, text: str) -> None:
    for started in ("", "<function=a>", "<tool_call>", "[TOOL_CALLS]a{"):
        start = time.thread_time()
        FORMATS[name].rewritten(started + text * (100_000 // len(text)), ())
        assert time.thread_time() - start < 0.5


async def half(url: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Begin something, and send no more."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


BODIES = ("announced", "chunked", "compressed", "slow", "of many rows")


@pytest.mark.parametrize("kind", BODIES)
def test_unfinished_bodies_take_little_memory_and_no_other_rows_turn(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "BODY_S", 0.5)
    if kind == "of many rows":
        monkeypatch.setattr(endpoints, "ALL_BYTES", 4 << 20)
    part, packed = b"x" * 1_000_000, gzip.compress(bytes(80_000_000), 1)
    sent = {
        "announced": b"Content-Length: 60000000\r\n\r\n" + part,
        "chunked": b"Transfer-Encoding: chunked\r\n\r\n" + 3 * (b"%x\r\n" % len(part) + part + b"\r\n"),
        "compressed": b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(packed) + packed,
        "slow": b"Content-Length: 1000\r\n\r\n{",
        "of many rows": b"Content-Length: 1000000\r\n\r\n" + part[:900_000],
    }[kind]

    async def run() -> tuple[int, list[bytes], int]:
        async with served() as (endpoint, _):
            bad, good = endpoint.open(Trajectory((0, 0, 0))), endpoint.open(Trajectory((0, 0, 1)))
            await send(good, {})
            before = resident_bytes()
            urls = [endpoint.open(Trajectory((1, 0, n))) if kind == "of many rows" else bad for n in range(25)]

            async def unfinished(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
                head = f"POST {urlsplit(url).path}/chat/completions HTTP/1.1\r\nHost: a\r\n".encode()
                try:
                    return await half(url, head + sent)
                except ConnectionError:
                    return None

            started = [one for one in await asyncio.gather(*map(unfinished, urls)) if one]
            status, _ = await send(good, {})
            grown = resident_bytes() - before
            answers = [await asyncio.wait_for(reader.read(20), 20) for reader, _ in started]
            for _, writer in started:
                writer.close()
            return status, answers, grown

    status, answers, grown = asyncio.run(run())
    assert status == 200 and grown < 120 << 20
    expected = {b"413", b"429"} | {"slow": {b"408"}, "compressed": {b"400"}, "of many rows": {b"503", b"408"}}.get(
        kind, set()
    )
    assert kind != "of many rows" or b"503" in {answer[9:12] for answer in answers}
    assert {answer[9:12] for answer in answers if answer} <= expected


HOLD = """
import resource, socket, sys
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
host, port, sent, held = sys.argv[1], int(sys.argv[2]), bytes.fromhex(sys.argv[3]), []
for number in range(300):
    held.append(socket.create_connection((host, port)))
    try:
        held[-1].send(sent)
    except OSError:
        pass
print("held", flush=True)
sys.stdin.read()
"""


IDLE = {"silent": b"", "half a line": b"POST /sessions/", "answered": b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"}


@pytest.mark.parametrize("kind", IDLE)
@pytest.mark.parametrize("room", [20, 200])
def test_idle_connections_block_no_row_and_are_logged_in_one_line(
    kind: str, room: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> list[int]:
        async with served() as (endpoint, _):
            address = urlsplit(endpoint.open(Trajectory((9, 9, 9))))
            holder = await asyncio.create_subprocess_exec(
                sys.executable,
                "-I",
                "-S",
                "-c",
                HOLD,
                str(address.hostname),
                str(address.port),
                IDLE[kind].hex(),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
            )
            assert holder.stdin is not None and holder.stdout is not None
            assert await asyncio.wait_for(holder.stdout.readline(), 20) == b"held\n"
            outcomes = [await answered(endpoint.open(Trajectory((0, 0, number)))) for number in range(4)]
            holder.stdin.close()
            await holder.wait()
            return outcomes

    async def answered(url: str) -> int:
        # This process also needs a descriptor for its own end, until the endpoint has closed idle connections.
        end, status = time.monotonic() + 10, 0
        while not status and time.monotonic() < end:
            status, _ = await send(url, {})
        return status

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + room, before[1]))
    try:
        with caplog.at_level(logging.WARNING):
            assert asyncio.run(run()) == [200] * 4
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    (record,) = caplog.records
    assert "client holds connections" in record.getMessage()


def test_a_row_has_few_requests_at_a_time_and_others_are_refused() -> None:
    async def run() -> list[int]:
        async with served(seconds=0.3) as (endpoint, _):
            url = endpoint.open(Trajectory((0, 0, 0)))
            return [status for status, _ in await asyncio.gather(*(send(url, {}) for _ in range(MOST_REQUESTS + 5)))]

    assert sorted(asyncio.run(run())) == [200] * MOST_REQUESTS + [429] * 5
