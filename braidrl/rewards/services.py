"""Rewards from services: a language model as judge, and a user's reward server. Both handle many rows concurrently.

judge   a row ─prompt─▶ POST {url}/chat/completions
    ─text──▶ score       cached on disk, so that no request is repeated
remote  rows ─batches─▶ POST {url} {"items": [...]} ─▶ {"results": [...]}

A request that fails temporarily (429, 500 and above, a lost connection) is repeated with growing delays.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from braidrl.data.chat import text_of
from braidrl.parsing import parse_json
from braidrl.rewards.verifiers import Score

TEMPLATE = """You are given a question, a reference answer, and a response. Judge how good the response is.

Question: {prompt}

Reference answer: {answer}

Response: {response}

Give your reasons in a few sentences. Then write "Score: " and a number from 0 to 10 on a line of its own."""
MARKUP = r"[\s*_`$(\[\"']*"
NUMBER = r"-?[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]{1,2})?"
OF = r"(?:[\s*_`)\]]*(?:/|out\s+of)[\s*_`(\[]*[0-9]+(?:\.[0-9]+)?|\s*\\?%)"
"""The end of the scale behind a score, as in 8/10, 4 out of 5 and 80%."""
SCORE = rf"(?i:score){MARKUP}[:=]{MARKUP}(?:\\boxed\{{)?({NUMBER}{OF}?)(?![0-9,.]*[0-9]|\s*(?:[-\u2013]|to)\s*[0-9])"
SCORED = rf"(?i:score){MARKUP}[:=]{MARKUP}(?:\\boxed\{{)?-?[0-9]"
THOUGHT = re.compile(r".*</think>|<think>.*", re.DOTALL)
"""A judge's reasoning; without an end it is all that the judge wrote."""
ANSWER_BYTES = 16 << 20
"""Bytes of a service's answer that are read."""
GATHER_S = 0.02
"""Seconds for which a batch waits for further rows."""
LONGEST_WAIT_S = 30.0
BUSY = 429


class Refused(Exception):
    """A service's permanent refusal of a request."""


_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Semaphore]] = WeakKeyDictionary()
_batches: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], Batches]]" = WeakKeyDictionary()


async def judge(
    prompt: Any,
    response: str,
    answer: Any,
    *,
    url: str,
    model: str,
    template: str | None = None,
    pattern: str = SCORE,
    scale: float = 10.0,
    correct_from: float = 0.5,
    key: str | None = None,
    settings: Mapping[str, Any] | None = None,
    concurrency: int = 16,
    retries: int = 5,
    wait_s: float = 0.5,
    cache: str | None = None,
    prices: Sequence[float] = (0.0, 0.0),
) -> Score:
    """Return a judge model's score divided by `scale`; a response is right from `correct_from` on.

    The model at the OpenAI-compatible address `url` reads `template` with {prompt}, {response} and {answer} filled in;
    the last match of `pattern` in its answer is the score. `key` names the variable that holds the address's key;
    `settings` are further request fields, such as temperature. At most `concurrency` requests are open; each is
    repeated up to `retries` times, after `wait_s` seconds, then twice as long each time. `cache` is a folder of
    answers. `prices` per million tokens read and written give the cost metric.
    """
    fields = {"prompt": as_text(prompt), "response": response, "answer": as_text(answer)}
    messages = [{"role": "user", "content": filled(template or TEMPLATE, fields)}]
    body = {"model": model, "messages": messages, "temperature": 0.0, **(settings or {})}
    digest = hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()
    cache_file = Path(cache).expanduser() / f"{digest}.json" if cache else None
    tries = 0
    if cache_file is not None and cache_file.is_file():
        reply = json.loads(cache_file.read_text())
    else:
        gates = _gates.setdefault(asyncio.get_running_loop(), {})
        async with gates.setdefault(url, asyncio.Semaphore(concurrency)):
            reply, tries = await asked(f"{url.rstrip('/')}/chat/completions", body, key, retries, wait_s)
    message = reply["choices"][0]["message"]
    verdict = THOUGHT.sub("", text_of(message.get("content") or ""))
    if not verdict:
        raise ValueError(f"the judge wrote no answer: {str(message.get('refusal') or message)[:80]!r}")
    matches = re.findall(pattern, verdict)
    # A score that the default pattern refuses, such as 7-8, is not replaced by an earlier one.
    if not matches or (pattern == SCORE and len(re.findall(SCORED, verdict)) > len(matches)):
        raise ValueError(f"the judge wrote no score: {verdict[-80:]!r}")
    score = number_of(matches[-1], scale, lowest=0.0 if pattern == SCORE else -scale) / scale
    if cache_file is not None and tries:
        cache_file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = cache_file.with_name(f".{cache_file.name}.{os.getpid()}")
        unfinished.write_text(json.dumps(reply))
        unfinished.replace(cache_file)
    usage = reply.get("usage") or {}
    read, written = (float(usage.get(name) or 0) if tries else 0.0 for name in ("prompt_tokens", "completion_tokens"))
    metrics = {
        "prompt_tokens": read,
        "completion_tokens": written,
        "cost": (read * prices[0] + written * prices[1]) / 1e6,
        "cached": float(not tries),
        "retries": float(max(0, tries - 1)),
    }
    return Score(score, score >= correct_from, metrics)


def number_of(text: str, scale: float, lowest: float) -> float:
    """Return a judge's score. Raises ValueError for a score outside its scale."""
    number = re.match(rf"\s*({NUMBER})", text)
    end = re.search(r"([0-9.]+)\Z|%", text[number.end() :]) if number else None
    score = float(number[1] if number else text)
    if not lowest <= score <= scale or (end and float(end[1] or 100) != scale):
        raise ValueError(f"the judge's score is {text!r}, and the scale ends at {scale:g}; set `scale`")
    return score


async def remote(
    prompt: Any,
    response: str,
    answer: Any,
    metadata: Mapping[str, Any],
    source: str,
    *,
    url: str,
    batch: int = 32,
    key: str | None = None,
    retries: int = 5,
    wait_s: float = 0.5,
) -> Any:
    """Return a reward server's score, right or wrong, or both. Up to `batch` rows go in one request.

    The server is sent `{"items": [{"prompt", "response", "answer", "metadata", "source"}, ...]}`, and answers
    `{"results": [...]}` in their order, each a number, true or false, `{"score": ..., "correct": ...}`, or `{"error":
    "why"}`, that row's failure. `key` names the variable that holds the server's key; a request is repeated up to
    `retries` times, after `wait_s` seconds, then twice as long each time.
    """
    item = {"prompt": prompt, "response": response, "answer": answer, "metadata": dict(metadata), "source": source}
    batches = _batches.setdefault(asyncio.get_running_loop(), {})
    settings = (url, batch, key, retries, wait_s)
    result = await batches.setdefault(settings, Batches(*settings)).ask(item)
    if isinstance(result, dict):
        if "error" in result:
            raise Refused(f"{url}: {result['error']}")
        return Score(float(result["score"]), result.get("correct"))
    return result


@dataclass
class Batches:
    """A batcher that joins rows requested at about the same time into requests to one server."""

    url: str
    size: int
    key: str | None
    retries: int
    wait_s: float
    waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = field(default_factory=list)
    sent: set[asyncio.Task[None]] = field(default_factory=set)

    async def ask(self, item: dict[str, Any]) -> Any:
        """Return the server's result for a row."""
        loop = asyncio.get_running_loop()
        result: asyncio.Future[Any] = loop.create_future()
        self.waiting.append((item, result))
        if len(self.waiting) >= self.size:
            self.send()
        elif len(self.waiting) == 1:
            loop.call_later(GATHER_S, self.send)
        return await result

    def send(self) -> None:
        """Send a request for all waiting rows."""
        rows, self.waiting = self.waiting, []

        async def request() -> None:
            try:
                items = [item for item, _ in rows]
                reply, _ = await asked(self.url, {"items": items}, self.key, self.retries, self.wait_s)
                results = reply.get("results")
                if not isinstance(results, list) or len(results) != len(rows):
                    raise Refused(f"{self.url}: `results` is no list of {len(rows)}")
                for (_, future), result in zip(rows, results, strict=True):
                    if not future.done():  # a row's time limit may have expired
                        future.set_result(result)
            except Exception as error:
                for _, future in rows:
                    if not future.done():
                        future.set_exception(error)

        if rows:
            task = asyncio.get_running_loop().create_task(request())
            self.sent.add(task)
            task.add_done_callback(self.sent.discard)


async def asked(url: str, body: Any, key: str | None, retries: int, wait_s: float) -> tuple[dict[str, Any], int]:
    """Return a service's answer, a JSON object, and the number of requests made. Raises Refused or ConnectionError."""
    # Imported here: other verifiers do not need it, and it is optional.
    from aiohttp import ClientError, ClientSession

    headers = {"Authorization": f"Bearer {os.environ[key]}"} if key else {}
    trouble, wait = "", wait_s
    async with ClientSession(headers=headers) as session:
        for tries in range(1, retries + 2):
            try:
                async with session.post(url, json=body, allow_redirects=False) as answer:
                    content = bytearray()
                    async for piece in answer.content.iter_chunked(1 << 16):
                        content += piece
                        if len(content) > ANSWER_BYTES:
                            raise Refused(f"{url}: its answer has more than {ANSWER_BYTES} bytes")
                    text = content.decode(errors="replace")
                    if answer.status < 300:
                        with contextlib.suppress(ValueError):
                            if isinstance(
                                value := parse_json(text, ANSWER_BYTES, finite=False, refuse_surrogates=False), dict
                            ):
                                return value, tries
                        raise Refused(f"{url}: its answer is no JSON object: {text[:80]!r}")
                    trouble = f"{answer.status} {' '.join(text.split())[:200]}"
                    if answer.status < 400:
                        raise Refused(
                            f"{url}: {answer.status}, a redirection to {answer.headers.get('Location', '')!r}"
                        )
                    if answer.status != BUSY and answer.status < 500:
                        raise Refused(f"{url}: {trouble}")
                    after = answer.headers.get("Retry-After", "")  # seconds, or a date
                    wait = max(wait, float(after) if after.isdecimal() else 0.0)
            except ClientError as error:
                trouble = f"{type(error).__name__}: {error}"
            if tries <= retries:
                await asyncio.sleep(min(wait, LONGEST_WAIT_S))
                wait *= 2
    raise ConnectionError(f"{url}: no answer in {retries + 1} requests, the last one {trouble}")


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Fill all fields of a template together, so that a field's name inside a response stays unchanged."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in fields), lambda match: fields[match[0][1:-1]], template)


def as_text(value: Any) -> str:
    """Return text unchanged, chat messages by role, other values as JSON."""
    if isinstance(value, list) and all(isinstance(message, dict) and "content" in message for message in value):
        return "\n\n".join(f"{message.get('role', 'user')}: {text_of(message['content'])}" for message in value)
    return value if isinstance(value, str) else json.dumps(value)
