"""A judge and a reward server, as real servers: what they are asked, what becomes of their answers, and how often they
are asked again.
"""

from __future__ import annotations

import asyncio
import contextlib
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
        app.router.add_post("/elsewhere/chat/completions", self.elsewhere)
        app.router.add_post("/large/chat/completions", self.large)
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
        said = (
            question
            if question.startswith("SAY")
            else "I cannot say."
            if "silent" in question
            else "Score: 2 would be low.\n**Score: 7.5**"
        )
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

    async def elsewhere(self, request: web.Request) -> web.Response:
        raise web.HTTPTemporaryRedirect(f"http://127.0.0.1:{self.port}/v1/chat/completions")

    async def large(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(ConnectionError):
            for _ in range(700):
                await answer.write(bytes(1 << 20))
        return answer

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
    results = outcomes("judge", params, words)
    assert [one.score for one in results] == [*[0.75] * 8, None, None]
    assert [one.failure for one in results] == [*[None] * 8, "exception", "exception"]
    assert "the judge wrote no score: 'I cannot say.'" in results[8].detail and "400 no such model" in results[9].detail
    assert sum(one.metrics["retries"] for one in results if not one.failure) == 2
    assert results[0].correct and results[0].metrics | {"retries": 0} == {
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


SAID = {
    "Score: 8": 0.8,
    "**Score**: 8": 0.8,
    "**Score:** 8/10": 0.8,
    "Score: **8.5**.": 0.85,
    "Score: 1e1": 1.0,
    "Score: 25e-1": 0.25,
    r"Score: $\boxed{7}$": 0.7,
    "Score: 85": None,
    "Score: 8/100": None,
    "Score: -3": None,
    "Score: 1e2": None,
    "Score: 10,000": None,
    "Score: eight": None,
    '{"reason": "good", "score": 8}': 0.8,
    "Final score = [[7]]": 0.7,
    "Score: 4 out of 5": None,
    "Score: **4**/5": None,
    "Score: 80%": None,
    "Score: 7-8": None,
    "First Score: 3.\nOr rather Score: 7 to 8": None,
    "<think>Score: 3</think>\nScore: 9": 0.9,
    "<think>perhaps Score: 3": None,
}


def test_a_judges_score_is_read_with_its_markup_and_refused_beyond_its_scale(service: Service) -> None:
    params = {"url": f"http://127.0.0.1:{service.port}/v1", "model": "m", "template": "SAY {response}"}
    results = dict(zip(SAID, outcomes("judge", params, [*SAID]), strict=True))
    assert {text: one.score for text, one in results.items()} == SAID
    assert all("scale" in results[text].detail for text in ("Score: 85", "Score: 8/100", "Score: -3", "Score: 1e2"))


def test_a_judge_of_another_scale_and_pattern_has_its_own_bounds(service: Service) -> None:
    url = f"http://127.0.0.1:{service.port}/v1"
    params = {"url": url, "model": "m", "template": "SAY {response}", "pattern": r"is (-?[0-9]+)", "scale": 100}
    results = outcomes("judge", params, ["it is 85", "it is -20", "it is 101"])
    assert [one.score for one in results] == [0.85, -0.2, None]


@pytest.mark.parametrize(("place", "said"), [("elsewhere", "307"), ("large", "bytes")])
def test_a_judge_that_redirects_or_answers_without_end_fails_its_row(service: Service, place: str, said: str) -> None:
    params = {"url": f"http://127.0.0.1:{service.port}/{place}", "model": "m", "template": "SAY {response}"}
    (result,) = outcomes("judge", params, ["Score: 9"])
    assert result.failure == "exception" and said in result.detail and not service.asked


def test_a_reward_server_is_asked_for_rows_together_and_answers_for_each(service: Service) -> None:
    words = ["half", "right", "both", "odd"] * 4
    service.busy = 1
    params = {"url": f"http://127.0.0.1:{service.port}/rewards", "batch": 8, "wait_s": 0.001}
    results = outcomes("remote", params, words)
    assert [(one.score, one.correct) for one in results[:3]] == [(0.5, None), (None, True), (0.25, True)]
    assert results[3].failure == "exception" and "no such language" in results[3].detail
    assert [one.score for one in results] == [one.score for one in results[:4]] * 4
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
    (result,) = outcomes("remote", {"url": "http://127.0.0.1:9/rewards", "retries": 2, "wait_s": 0.001}, ["half"])
    assert result.failure == "exception" and "3 requests, the last one ClientConnectorError" in result.detail


def test_a_missing_key_is_reported_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    params = {"url": "http://127.0.0.1:9", "key": "JUDGE_KEY"}
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    with pytest.raises(
        UserError,
        match=r"reward.verify=remote: .*JUDGE_KEY, .*; write export",
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
