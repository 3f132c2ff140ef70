"""A judge and a reward server, as real servers: what they are asked, what becomes of their answers, and how often they
are asked again.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from braidrl.config import RewardConfig
from braidrl.errors import UserError
from braidrl.rewards.pool import CallOutcome, RewardPool
from braidrl.rewards.services import as_text, filled
from braidrl.rewards.verifier import Completion, resolve


class Service:
    """A server in a thread, which notes what it is asked; the first `busy` requests it refuses for the moment."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.busy = self.most_open = self.open = 0
        self.loop = asyncio.new_event_loop()
        self.port = 0
        ready = threading.Event()
        self.thread = threading.Thread(target=self.serve, args=(ready,))
        self.thread.start()
        assert ready.wait(60)

    def serve(self, ready: threading.Event) -> None:
        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", self.judge), web.post("/rewards", self.rewards)])
        runner = web.AppRunner(app)
        self.loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self.loop.run_until_complete(site.start())
        self.port = runner.addresses[0][1]
        ready.set()
        self.loop.run_forever()
        self.loop.run_until_complete(runner.cleanup())
        self.loop.close()

    async def noted(self, request: web.Request) -> dict[str, Any]:
        body: dict[str, Any] = await request.json()
        if self.busy:
            self.busy -= 1
            raise web.HTTPTooManyRequests(headers={"Retry-After": "0"})
        self.asked.append(body)
        self.keys.append(request.headers.get("Authorization"))
        return body

    async def judge(self, request: web.Request) -> web.Response:
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        try:
            body = await self.noted(request)
            await asyncio.sleep(0.01)
        finally:
            self.open -= 1
        question = body["messages"][0]["content"]
        if "forbidden" in question:
            raise web.HTTPBadRequest(text="no such\nmodel")
        said = "I cannot say." if "silent" in question else "Score: 2 would be low.\n**Score: 7.5**"
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        return web.json_response({"choices": [{"message": {"content": said}}], "usage": usage})

    async def rewards(self, request: web.Request) -> web.Response:
        items = (await self.noted(request))["items"]
        results = {
            "half": 0.5,
            "right": True,
            "both": {"score": 0.25, "correct": True},
            "odd": {"error": "no such language"},
        }
        return web.json_response({"results": [results[item["response"]] for item in items]})

    def close(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()


@pytest.fixture
def service() -> Iterator[Service]:
    one = Service()
    yield one
    one.close()


def outcomes(name: str, params: dict[str, Any], responses: list[str], **settings: Any) -> list[CallOutcome]:
    verifier = resolve(name, params)
    with RewardPool(RewardConfig(timeout_s=60, **settings)) as pool:
        rows = [Completion([{"role": "user", "content": "2+2="}], one, "4", {"level": 3}, "sums") for one in responses]
        return [future.result(120) for future in [pool.submit(row, verifier) for row in rows]]


def test_a_judges_answer_gives_score_and_cost_and_is_cached(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    service.busy = 2
    params = {
        "url": f"http://127.0.0.1:{service.port}/v1/",
        "model": "large",
        "key": "JUDGE_KEY",
        "template": "{prompt} is {answer}, not {response}",
        "settings": {"max_tokens": 64},
        "concurrency": 2,
        "wait_s": 0.001,
        "cache": str(tmp_path / "kept"),
        "prices": [2.0, 10.0],
    }
    # The sandbox without a network is for code that is not trusted; a judge is asked from outside of it.
    # The first two requests, which any rows may make, are refused as too many: rows that fail come last.
    words = ["four", "five {answer}", *map(str, range(6)), "silent", "forbidden"]
    found = outcomes("judge", params, words)
    assert [one.score for one in found] == [*[0.75] * 8, None, None]
    assert [one.failure for one in found] == [*[None] * 8, "exception", "exception"]
    assert "the judge wrote no score: 'I cannot say.'" in found[8].detail and "400 no such model" in found[9].detail
    assert sum(one.metrics["retries"] for one in found if not one.failure) == 2
    assert found[0].correct and found[0].metrics | {"retries": 0} == {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "cost": (100 * 2 + 20 * 10) / 1e6,
        "cached": 0,
        "retries": 0,
    }
    asked = {
        "model": "large",
        "temperature": 0.0,
        "max_tokens": 64,
        "messages": [{"role": "user", "content": "user: 2+2= is 4, not five {answer}"}],
    }
    assert asked in service.asked and len(service.asked) == len(words) and set(service.keys) == {"Bearer sesame"}
    assert service.most_open == 2
    again = outcomes("judge", params, words[:2])
    assert [(one.score, one.metrics["cached"], one.metrics["cost"]) for one in again] == [(0.75, 1, 0)] * 2
    assert len(service.asked) == len(words), "what was kept is not asked for again"


def test_a_reward_server_is_asked_for_rows_together_and_answers_for_each(service: Service) -> None:
    words = ["half", "right", "both", "odd"] * 4
    service.busy = 1
    params = {"url": f"http://127.0.0.1:{service.port}/rewards", "batch": 8, "wait_s": 0.001}
    found = outcomes("remote", params, words)
    assert [(one.score, one.correct) for one in found[:3]] == [(0.5, None), (None, True), (0.25, True)]
    assert found[3].failure == "exception" and "no such language" in found[3].detail
    assert [one.score for one in found] == [one.score for one in found[:4]] * 4
    items = [item for body in service.asked for item in body["items"]]
    assert (
        sorted(item["response"] for item in items) == sorted(words)
        and max(len(body["items"]) for body in service.asked) <= 8
    )
    expected = {
        "prompt": [{"role": "user", "content": "2+2="}],
        "answer": "4",
        "metadata": {"level": 3},
        "source": "sums",
    }
    assert all({**item, "response": ""} == {**expected, "response": ""} for item in items)


def test_an_unreachable_server_fails_each_row_after_its_retries() -> None:
    (found,) = outcomes("remote", {"url": "http://127.0.0.1:9/rewards", "retries": 2, "wait_s": 0.001}, ["half"])
    assert found.failure == "exception" and "no answer in 3 requests, the last one ClientConnectorError" in found.detail


def test_a_missing_key_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"url": "http://127.0.0.1:9", "key": "JUDGE_KEY"}
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(
        UserError,
        match=r"reward.verify=remote: its key is to be in the variable JUDGE_KEY, which is not set; write export",
    ):
        outcomes("remote", params, ["half"])


def test_a_template_is_filled_at_once_and_with_what_people_read() -> None:
    fields = {
        "prompt": as_text([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        "answer": as_text([1, 2]),
    }
    assert (
        filled('{prompt} {answer} {other} {"a": 1}', fields | {"response": ""})
        == 'user: a\n\nassistant: b [1, 2] {other} {"a": 1}'
    )
    assert filled("{response}", {"response": "{answer}", "answer": "4"}) == "{answer}", (
        "a response cannot ask for the answer"
    )
