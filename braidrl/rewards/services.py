"""Rewards from services: a language model as judge, and a reward server of your own. Both are asked for many rows at a time.

judge    a row ──prompt──▶ POST {url}/chat/completions ──text──▶ score           kept on disk, so that the same question is asked once
remote   rows ──batches──▶ POST {url} {"items": [...]} ──▶ {"results": [...]}

A request that is refused for the moment (429, 500 and above, a lost connection) is made again, later each time.
"""

import asyncio
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from braidrl.rewards.verifiers import Score

TEMPLATE = """You are given a question, a reference answer, and a response. Judge how good the response is.

Question: {prompt}

Reference answer: {answer}

Response: {response}

Give your reasons in a few sentences. Then write "Score: " and a number from 0 to 10 on a line of its own."""
SCORE = r"Score:\s*\**\s*(-?[0-9]+(?:\.[0-9]+)?)"
GATHER_S = 0.02
"""How long a batch waits for further rows."""
LONGEST_WAIT_S = 30.0
"""Between two tries of a request."""
BUSY = 429


class Refused(Exception):
    """A service's answer that asking again would not change."""


Gates = dict[str, asyncio.Semaphore]
_gates: WeakKeyDictionary[asyncio.AbstractEventLoop, Gates] = WeakKeyDictionary()
_batches: "WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, Batches]]" = WeakKeyDictionary()


async def judge(
    prompt: Any, response: str, answer: Any, *, url: str, model: str, template: str | None = None, pattern: str = SCORE,
    scale: float = 10.0, correct_from: float = 0.5, key: str | None = None, settings: Mapping[str, Any] | None = None,
    concurrency: int = 16, retries: int = 5, wait_s: float = 0.5, cache: str | None = None, prices: Sequence[float] = (0.0, 0.0),
) -> Score:  # fmt: skip
    """Return the score that a model behind an OpenAI-compatible address gives, over `scale`; right from `correct_from` on.

    The model reads `template` with {prompt}, {response} and {answer} filled in, and the last match of `pattern` in what it writes is the
    score. `key` names the variable that holds the address's key, `settings` are further ones of the request, such as temperature. At most
    `concurrency` requests are open; one is made again up to `retries` times, after `wait_s` and then twice as long each time. `cache` is
    a folder of answers. `prices` are those of a million tokens read and written, for the metric of cost.
    """
    question = filled(template or TEMPLATE, {"prompt": shown(prompt), "response": response, "answer": shown(answer)})
    body = {"model": model, "messages": [{"role": "user", "content": question}], "temperature": 0.0, **(settings or {})}
    kept = Path(cache).expanduser() / f"{digest([url, body])}.json" if cache else None
    tries = 0
    if kept is not None and kept.is_file():
        reply = json.loads(kept.read_text())
    else:
        gates = _gates.setdefault(asyncio.get_running_loop(), {})
        async with gates.setdefault(url, asyncio.Semaphore(concurrency)):
            reply, tries = await asked(f"{url.rstrip('/')}/chat/completions", body, key, retries, wait_s)
    score = score_of(reply["choices"][0]["message"]["content"], pattern) / scale
    if kept is not None and tries:
        keep(kept, reply)
    usage = reply.get("usage") or {}
    read, written = (float(usage.get(name) or 0) if tries else 0.0 for name in ("prompt_tokens", "completion_tokens"))
    metrics = {
        "prompt_tokens": read, "completion_tokens": written, "cost": (read * prices[0] + written * prices[1]) / 1e6,
        "cached": float(not tries), "retries": float(max(0, tries - 1)),
    }  # fmt: skip
    return Score(score, score >= correct_from, metrics)


async def remote(
    prompt: Any, response: str, answer: Any, metadata: Mapping[str, Any], source: str, *, url: str, batch: int = 32,
    key: str | None = None, retries: int = 5, wait_s: float = 0.5,
) -> Any:  # fmt: skip
    """Return what a reward server gives: a score, right or wrong, or both. Up to `batch` rows go in one request.

    It is sent `{"items": [{"prompt", "response", "answer", "metadata", "source"}, ...]}`, and answers `{"results": [...]}` in their order,
    each a number, true or false, `{"score": ..., "correct": ...}`, or `{"error": "why"}`, that row's failure. `key` names the variable that
    holds the server's key; a request is made again up to `retries` times, after `wait_s` and then twice as long each time.
    """
    item = {"prompt": prompt, "response": response, "answer": answer, "metadata": dict(metadata), "source": source}
    batches = _batches.setdefault(asyncio.get_running_loop(), {})
    settings = (url, batch, key, retries, wait_s)
    result = await batches.setdefault(digest(settings), Batches(*settings)).ask(item)
    if isinstance(result, dict):
        if "error" in result:
            raise Refused(f"{url}: {result['error']}")
        return Score(float(result["score"]), result.get("correct"))
    return result


class Batches:
    """Gathers rows that are asked for at about the same time into requests to one server."""

    def __init__(self, url: str, size: int, key: str | None, retries: int, wait_s: float) -> None:
        self.url, self.size, self.key, self.retries, self.wait_s = url, size, key, retries, wait_s
        self.waiting: list[tuple[dict[str, Any], asyncio.Future[Any]]] = []
        self.sent = set[asyncio.Task[None]]()

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
        """Ask for all rows that are waiting."""
        rows, self.waiting = self.waiting, []
        if rows:
            task = asyncio.get_running_loop().create_task(self._send(rows))
            self.sent.add(task)
            task.add_done_callback(self.sent.discard)

    async def _send(self, rows: list[tuple[dict[str, Any], asyncio.Future[Any]]]) -> None:
        try:
            reply, _ = await asked(self.url, {"items": [item for item, _ in rows]}, self.key, self.retries, self.wait_s)
            results = reply.get("results")
            if not isinstance(results, list) or len(results) != len(rows):
                raise Refused(f"{self.url}: `results` is no list of {len(rows)}")
            for (_, future), result in zip(rows, results, strict=True):
                if not future.done():  # a row's limit may have passed meanwhile
                    future.set_result(result)
        except Exception as error:
            for _, future in rows:
                if not future.done():
                    future.set_exception(error)


async def asked(url: str, body: Any, key: str | None, retries: int, wait_s: float) -> tuple[dict[str, Any], int]:
    """Return a service's answer to a POST, a JSON object, and how many requests it took.

    Raises Refused for an answer that says no, ConnectionError where none comes after `retries` further requests.
    """
    # Imported here: other verifiers do not need it, and it need not be installed.
    from aiohttp import ClientError, ClientSession

    headers = {"Authorization": f"Bearer {os.environ[key]}"} if key else {}
    said, wait = "", wait_s
    async with ClientSession(headers=headers) as session:
        for tries in range(1, retries + 2):
            try:
                async with session.post(url, json=body) as answer:
                    if answer.status < 400:
                        return object_of(url, await answer.text()), tries
                    said = f"{answer.status} {' '.join((await answer.text()).split())[:200]}"
                    if answer.status != BUSY and answer.status < 500:
                        raise Refused(f"{url}: {said}")
                    wait = max(wait, seconds_of(answer.headers.get("Retry-After")))
            except ClientError as error:
                said = f"{type(error).__name__}: {error}"
            if tries <= retries:
                await asyncio.sleep(min(wait, LONGEST_WAIT_S))
                wait *= 2
    raise ConnectionError(f"{url}: no answer in {retries + 1} requests, the last one {said}")


def object_of(url: str, text: str) -> dict[str, Any]:
    """Return a JSON object. Raises Refused for anything else."""
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise Refused(f"{url}: its answer is no JSON object: {text[:80]!r}")
    return found


def seconds_of(header: str | None) -> float:
    """Return what a Retry-After header asks for in seconds, 0 for a date or nothing."""
    return float(header) if header and header.isdecimal() else 0.0


def filled(template: str, fields: Mapping[str, str]) -> str:
    """Return a template with its fields replaced at once: a field that a response names is left as it is written."""
    return re.sub("|".join(rf"\{{{name}\}}" for name in fields), lambda match: fields[match[0][1:-1]], template)


def shown(value: Any) -> str:
    """Return text as it is, chat messages by role, anything else as JSON."""
    if isinstance(value, list) and all(isinstance(one, dict) and "content" in one for one in value):
        return "\n\n".join(f"{one.get('role', 'user')}: {one['content']}" for one in value)
    return value if isinstance(value, str) else json.dumps(value)


def score_of(text: str, pattern: str) -> float:
    """Return the number in the last match of a pattern. Raises ValueError where there is none."""
    found = re.findall(pattern, text)
    if not found:
        raise ValueError(f"the judge wrote no score: {text[-80:]!r}")
    return float(found[-1])


def digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def keep(path: Path, reply: Mapping[str, Any]) -> None:
    """Write an answer, whole or not at all, for whoever asks the same later."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(reply))
    unfinished.replace(path)
