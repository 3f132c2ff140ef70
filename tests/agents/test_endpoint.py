"""An agent that only speaks HTTP is recorded token by token, and its rows are trained on exactly those tokens."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from typing import Any

import aiohttp
import pytest
import torch

from braidrl.agents.endpoint import Endpoint
from braidrl.agents.keys import endpoint_key
from braidrl.agents.player import AgentPlayer
from braidrl.agents.streamed_turns import TurnStream
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling, trajectory_columns
from braidrl.config import EnvironmentConfig
from braidrl.data.rows import FinishReason
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.engines.stepping import EngineReplica
from braidrl.errors import UserError
from tests.agents.chat import Recorder, Script, make_chat_tokenizer, make_rows, turn_template
from tests.agents.test_turns import engine_parts, packed_log_probs

LIMITS = Limits(at_once=8, timeout_s=20, max_turns=8, max_sequence_tokens=400)
USER = [{"role": "user", "content": "a b"}]
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


async def post(url: str, messages: list[Any], key: str = "-", **more: Any) -> tuple[int, Any]:
    """Send the messages as any client library does; return the status and the answer."""
    body, headers = {"model": "m", "messages": messages, **more}, {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/chat/completions", json=body, headers=headers) as response,
    ):
        return response.status, await response.json()


async def chatting(url: str, example: dict[str, Any]) -> float:
    """Hold a conversation of three turns, then a second conversation."""
    messages: list[Any] = [{"role": "user", "content": example["prompt"]}]
    for number in range(3):
        status, body = await post(url, messages, max_tokens=6 + number)
        assert status == 200, body
        messages += [body["choices"][0]["message"], {"role": "user", "content": f"higher {number}"}]
    status, body = await post(url, [{"role": "user", "content": "again"}])
    return 0.5 * body["usage"]["completion_tokens"] ** 0


def test_each_agent_conversation_is_one_row_with_the_engines_tokens() -> None:
    tokenizer, model = engine_parts("chatml")
    recorder = Recorder(EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, 400))))
    rows = make_rows(tokenizer, ["the number", "a b"], samples=3)

    async def run() -> list[Any]:
        async with Endpoint(
            recorder, turn_template(tokenizer), TurnSampling(SamplingParams(max_tokens=9), 400)
        ) as endpoint:  # type: ignore[arg-type]
            return await AgentPlayer(endpoint, chatting, limits=LIMITS).play(rows)

    played = asyncio.run(run())
    for episode, uid in zip(played, rows.uids(), strict=True):
        trajectory, seen = episode, recorder.seen[uid]
        assert (episode.turns, episode.score, episode.failure) == (4, 0.5, None)
        assert len(trajectory.sequence_lengths) == 2, "the second conversation is a sequence of its own"
        whole = [*seen[2][0], *seen[2][1], *seen[3][0], *seen[3][1]]
        assert trajectory.tokens == whole
        for earlier, later in pairwise(seen[:3]):
            assert later[0][: sum(map(len, earlier))] == [*earlier[0], *earlier[1]]
    table = rows.with_columns(trajectory_columns(played, LIMITS))
    torch.testing.assert_close(table["rollout_log_probs"].values, packed_log_probs(model, table), rtol=0, atol=1e-5)
    assert len({tuple(e.tokens) for e in played}) == 6, "every row has its own random numbers"


def test_tool_calls_and_results_have_the_format_that_clients_expect() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    script = Script(tokenizer, ['so <tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>', "it is 12"])

    async def run() -> tuple[Any, Any, Any]:
        async with Endpoint(script, turn_template(tokenizer), TurnSampling(SamplingParams(), 600)) as endpoint:  # type: ignore[arg-type]
            url = endpoint.open(Trajectory((0, 0, 0)))
            messages: list[Any] = [{"role": "user", "content": "look"}]
            _, first = await post(url, messages, tools=TOOLS)
            message = first["choices"][0]["message"]
            result = {"role": "tool", "content": "12", "tool_call_id": message["tool_calls"][0]["id"]}
            _, second = await post(url, [*messages, message, result], tools=TOOLS)
            return first["choices"][0], second["choices"][0], await endpoint.close((0, 0, 0))

    first, second, session = asyncio.run(run())
    assert first["finish_reason"] == "tool_calls" and first["message"]["content"] == "so"
    assert first["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 3}'}
    assert second["message"] == {"role": "assistant", "content": "it is 12"} and second["finish_reason"] == "stop"
    assert len(session.sequence_lengths) == 1, "the second request continues the first"
    assert "<tool_response>\n12\n</tool_response>" in tokenizer.decode(session.tokens)


def test_unsupported_requests_get_an_error_and_leave_the_row_unchanged() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    user = [{"role": "user", "content": "a"}]

    async def run() -> tuple[list[tuple[int, str]], Any]:
        async with Endpoint(
            Script(tokenizer, ["b"]), turn_template(tokenizer), TurnSampling(SamplingParams(), 60)
        ) as endpoint:  # type: ignore[arg-type]
            url = endpoint.open(Trajectory((0, 0, 0)))
            with pytest.raises(ValueError, match="open already"):
                endpoint.open(Trajectory((0, 0, 0)))
            answers = [
                await post(url, user, audio=True),
                await post(url, user, n=9),
                await post(url, []),
                await post(url, ["a"]),
                await post(url, [{"role": "user", "content": "a " * 60}]),
                await post(url.replace("0.0.0", "0.0.1").replace("127.0.0.1.", ""), user),
            ]
            return [(status, body["error"]["message"]) for status, body in answers], await endpoint.close((0, 0, 0))

    answers, session = asyncio.run(run())
    statuses, messages = zip(*answers, strict=True)
    assert statuses == (400, 400, 400, 400, 400, 404)
    for message, part in zip(
        messages,
        [
            "'audio' is not served",
            "n must be at most 8",
            "`messages` must be",
            "a message is",
            "leaves no room",
            "no session",
        ],
        strict=True,
    ):
        assert part in message
    assert session.tokens == []


MALFORMED: dict[str, tuple[Any, str]] = {
    "no JSON": (b"{", "the body is not JSON"),
    "no text": (b"\xff\xfe", "the body is not JSON"),
    "too deep": (b"[" * 100_000, "the body is not JSON"),
    "no object": (b"[1]", "`messages` must be"),
    "half a token": ({"max_tokens": 8.5}, "max_tokens must be a whole number from 1 on, not 8.5"),
    "no number": ({"max_tokens": "8"}, "max_tokens must be a whole number"),
    "no tokens": ({"max_completion_tokens": 0}, "max_completion_tokens must be a whole number"),
    "infinity": ({"max_tokens": float("inf")}, "max_tokens must be a whole number"),
    "content of numbers": ({"messages": [{"role": "user", "content": [1, 2]}]}, "the content of a message is text"),
    "a picture": (
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "the content of a message is text",
    ),
    "an object as content": (
        {"messages": [{"role": "user", "content": {"text": "a"}}]},
        "the content of a message is text",
    ),
    "no stop": ({"stop": [""]}, "stop must be a text that is not empty"),
    "a stop of numbers": ({"stop": 3}, "stop must be a text that is not empty"),
    "a schema": ({"response_format": {"type": "json_object"}}, 'response_format must be {"type": "text"}'),
    "a forced tool": ({"tool_choice": "required"}, 'tool_choice must be "auto"'),
    "log-probs": ({"logprobs": True}, "'logprobs' is not served here; leave it out"),
    "calls of nothing": ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "none for the chat template"),
    "tools of nothing": ({"tools": 3}, "`tools` must be a list of functions"),
}


def test_a_malformed_request_gets_its_reason_and_affects_no_other_row() -> None:
    tokenizer, model = engine_parts("chatml")
    user = [{"role": "user", "content": "a"}]

    async def send(url: str, body: Any) -> tuple[int, str]:
        data = body if isinstance(body, bytes) else json.dumps({"messages": user, **body}).encode()
        headers = {"Content-Type": "application/json"}
        async with (
            aiohttp.ClientSession() as client,
            client.post(f"{url}/chat/completions", data=data, headers=headers) as response,
        ):
            answer = await response.json()
            return response.status, answer.get("error", {}).get("message", "")

    async def run() -> tuple[dict[str, tuple[int, str]], list[int], Any, Any]:
        engine = EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, 400)))
        async with Endpoint(
            engine, turn_template(tokenizer), TurnSampling(SamplingParams(max_tokens=9), 400)
        ) as endpoint:
            bad, good = endpoint.open(Trajectory((0, 0, 0))), endpoint.open(Trajectory((0, 0, 1)))
            answers = {name: await send(bad, body) for name, (body, _) in MALFORMED.items()}
            served = [(await send(url, {"max_tokens": 8.0}))[0] for url in (bad, good)]
            stranger = good.replace("0.0.1.", "0.0.0.")
            served.append((await send(stranger, {}))[0])
            return answers, served, await endpoint.close((0, 0, 0)), await endpoint.close((0, 0, 1))

    answers, served, bad, good = asyncio.run(run())
    for name, (_, reason) in MALFORMED.items():
        assert answers[name][0] == 400 and reason in answers[name][1], (name, answers[name])
    assert served == [200, 200, 404], "8.0 equals 8; a client can only use its own row"
    assert bad.turns == good.turns == 1


def test_agents_that_fail_or_take_too_long_end_their_own_rows() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    rows = make_rows(tokenizer, ["fine", "raise", "hang", "silent", "word"])

    async def agent(url: str, example: dict[str, Any]) -> Any:
        if example["prompt"] != "silent":
            await post(url, [{"role": "user", "content": "a"}])
        if example["prompt"] == "raise":
            raise KeyError("plan")
        if example["prompt"] == "hang":
            await post(url, [{"role": "user", "content": "b"}])
            await asyncio.sleep(100)
        return "no score" if example["prompt"] == "word" else 1

    async def run() -> list[Any]:
        limits = Limits(at_once=8, timeout_s=1.5, max_turns=8, max_sequence_tokens=60)
        async with Endpoint(
            Script(tokenizer, ["b"]), turn_template(tokenizer), TurnSampling(SamplingParams(), 60)
        ) as endpoint:  # type: ignore[arg-type]
            return await AgentPlayer(endpoint, agent, limits=limits).play(rows)

    played = asyncio.run(run())
    assert [e.failure for e in played] == [None, "KeyError", "timeout", "no call", "TypeError"]
    assert [e.turns for e in played] == [1, 1, 2, 0, 1]
    assert [e.finish_reason for e in played].count(FinishReason.ERROR) == 4
    assert trajectory_columns(played, LIMITS)["action_tokens"].tolist()[3] == 0  # type: ignore[union-attr]


def test_a_cancelled_agent_aborts_its_turn_and_closes_its_session() -> None:
    tokenizer, uid = make_chat_tokenizer("chatml"), (0, 0, 0)

    class Endless(Script):
        """An engine whose turns end only when they are aborted."""

        aborted = asyncio.Event()

        async def submit(self, request: Request) -> Response:
            answer = await super().submit(request)
            await self.aborted.wait()
            return answer

        async def abort(self, uid: Any) -> None:
            self.aborted.set()

    async def agent(url: str, example: dict[str, Any]) -> float:
        await post(url, USER)
        return 1.0

    async def run() -> None:
        engine: Any = Endless(tokenizer, ["b"])
        async with Endpoint(engine, turn_template(tokenizer), TurnSampling(SamplingParams(), 60)) as endpoint:
            playing = asyncio.ensure_future(
                AgentPlayer(endpoint, agent, limits=LIMITS).play(make_rows(tokenizer, ["a"]))
            )
            while not engine.turns:
                await asyncio.sleep(0.01)
            playing.cancel()
            await asyncio.wait((playing,), timeout=10)
            assert playing.cancelled() and engine.aborted.is_set()
            with pytest.raises(KeyError):
                await endpoint.close(uid)

    asyncio.run(run())


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    tokenizer = make_chat_tokenizer(None)
    with pytest.raises(UserError, match="has no chat template"):
        Endpoint(Script(tokenizer, ["b"]), turn_template(tokenizer), TurnSampling(SamplingParams(), 60))  # type: ignore[arg-type]


def test_a_clients_stop_text_is_cut_from_the_reply_but_trained() -> None:
    tokenizer, model = engine_parts("chatml")
    user, uid = [{"role": "user", "content": "a"}], (0, 0, 0)

    async def run() -> tuple[str, str, list[int], list[int]]:
        engine = EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, 400)))
        async with Endpoint(
            engine, turn_template(tokenizer), TurnSampling(SamplingParams(max_tokens=40), 400)
        ) as endpoint:
            result = []
            for stop in (None, [" "], " "):
                _, body = await post(endpoint.open(Trajectory(uid)), user, stop=stop)
                session = await endpoint.close(uid)
                result.append((body["choices"][0]["message"]["content"], session.tokens))
            assert result[1] == result[2], "a text counts as a list with one entry"
            return result[0][0], result[1][0], result[0][1], result[1][1]

    whole, ended, tokens, cut = asyncio.run(run())
    assert " " in whole and ended == whole.partition(" ")[0]
    assert tokens[: len(cut)] == cut and len(cut) < len(tokens) and " " in tokenizer.decode(cut)


def test_a_client_finds_the_model_and_gets_errors_for_other_paths() -> None:
    tokenizer = make_chat_tokenizer("chatml")

    async def run() -> list[tuple[int, Any]]:
        async with Endpoint(
            Script(tokenizer, ["b"]), turn_template(tokenizer), TurnSampling(SamplingParams(), 60)
        ) as endpoint:  # type: ignore[arg-type]
            url = endpoint.open(Trajectory((0, 0, 0)))
            answers = []
            async with aiohttp.ClientSession() as client:
                for path in ("/models", "/models/org/mine", "/responses", "/chat/completions"):
                    async with client.get(url + path) as response:
                        answers.append((response.status, await response.json()))
                async with client.get(url.replace("0.0.0", "0.0.1") + "/models") as response:
                    answers.append((response.status, await response.json()))
            return answers

    listed, named, unknown, wrong, stranger = asyncio.run(run())
    assert listed[0] == 200 and [model["id"] for model in listed[1]["data"]] == ["actor"]
    assert named[0] == 200 and named[1]["id"] == "org/mine"
    assert unknown[0] == 404 and "only POST /v1/chat/completions" in unknown[1]["error"]["message"]
    assert wrong[0] == 404 and stranger[0] == 404 and "no session" in stranger[1]["error"]["message"]


async def streamed(url: str, **body: Any) -> list[Any]:
    """Return the data of each event of a turn."""
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/chat/completions", json={"model": "m", "stream": True, **body}) as response,
    ):
        assert (response.status, response.content_type) == (200, "text/event-stream")
        result = [event.removeprefix("data: ") for event in (await response.text()).split("\n\n") if event]
    return [data if data == "[DONE]" else json.loads(data) for data in result]


class PausedAmidATurn(EngineReplica):
    """Engine that finishes a turn only after its client received some pieces of it."""

    client_has_some: asyncio.Event

    async def hold(self) -> None:
        step = self.engine.step
        self.engine.step = list  # type: ignore[method-assign]
        await self.client_has_some.wait()
        self.engine.step = step  # type: ignore[method-assign]

    async def submit(self, request: Request) -> Response:
        def hear(number: int, token: int) -> None:
            assert request.on_token is not None
            request.on_token(number, token)
            if number == 20:
                self._holding = asyncio.ensure_future(self.hold())

        return await super().submit(replace(request, on_token=hear))


async def pieces(engine: PausedAmidATurn, url: str) -> list[str]:
    """Return the pieces of a streamed turn's text."""
    result, engine.client_has_some = [], asyncio.Event()
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{url}/chat/completions", json={"stream": True, "messages": USER}) as response,
    ):
        async for line in response.content:
            data = json.loads(line[6:]) if line.startswith(b"data: {") else {}
            (choice,) = data.get("choices") or [{}]
            text = choice.get("delta", {}).get("content")
            result += [text] if text else []
            if len(result) == 2:
                engine.client_has_some.set()
    return result


def test_turns_that_wait_when_a_session_closes_are_not_played() -> None:
    tokenizer = make_chat_tokenizer("chatml")

    class Busy(Script):
        """An engine that does not know the row yet when it is to be aborted, and ends its turn only after that."""

        async def submit(self, request: Request) -> Response:
            await aborted.wait()
            return await super().submit(request)

        async def abort(self, uid: Any) -> None:
            aborted.set()
            raise KeyError(uid)

    async def run() -> None:
        engine: Any = Busy(tokenizer, ["one", "two"])
        async with Endpoint(
            engine, turn_template(tokenizer), TurnSampling(SamplingParams(max_tokens=9), 400)
        ) as endpoint:
            url = endpoint.open(Trajectory((0, 0, 0)))
            tasks = [asyncio.ensure_future(post(url, USER)) for _ in range(3)]
            (waiting,) = endpoint._sessions.values()
            while waiting.requests < 3 or not waiting.lock.locked():
                await asyncio.sleep(0.01)
            session = await endpoint.close((0, 0, 0))
            assert session.turns == 1
            assert sorted([status for status, _ in await asyncio.gather(*tasks)]) == [200, 400, 400]
            assert session.turns == 1

    aborted = asyncio.Event()
    asyncio.run(run())


def test_a_turn_is_sent_piece_by_piece_while_the_engine_draws_it() -> None:
    tokenizer, model = engine_parts("chatml")
    engine, template = PausedAmidATurn(EmbeddedEngine(model, tokenizer, Decoding(16, 400))), turn_template(tokenizer)

    async def run() -> None:
        async with Endpoint(engine, template, TurnSampling(SamplingParams(max_tokens=40, ends=False), 400)) as endpoint:
            url = endpoint.open(Trajectory((0, 0, 0)))
            result = await asyncio.wait_for(pieces(engine, url), 60)
            session = await endpoint.close((0, 0, 0))
            assert "".join(result) == template.text(session.tokens[-session.turn_lengths[-1] :])

    asyncio.run(run())


def test_a_streamed_piece_has_whole_characters_and_no_part_of_a_stop_text() -> None:
    decode = turn_template(tokenizer := make_chat_tokenizer("chatml")).text
    # Three characters could begin the stop text, and are sent with the end of the turn.
    for text, told in (("né 🙂 a bcd", "né 🙂 a "), ("né STOP x", "né "), ("a STO b S", "a STO ")):
        turn = TurnStream(decode, ["STOP"])
        for number, token in enumerate(tokenizer.encode(text)):
            turn.add_token(number, token)
            turn.add_token(0, token)
            turn.add_piece()
        assert "".join(turn.pieces) == told and len(turn.pieces) > 1


CALL = 'so <tool_call>{"name": "look", "arguments": {"at": 3}}</tool_call>'


def test_a_turn_is_streamed_as_chunks_that_add_up_to_the_message() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    user = {"role": "user", "content": "look"}

    async def run() -> tuple[list[Any], Any, Any]:
        async with Endpoint(
            Script(tokenizer, [CALL, "it is 12"]), turn_template(tokenizer), TurnSampling(SamplingParams(), 600)
        ) as endpoint:  # type: ignore[arg-type]
            url = endpoint.open(Trajectory((0, 0, 0)))
            chunks = await streamed(url, messages=[user], tools=TOOLS, stream_options={"include_usage": True})
            (call,) = chunks[1]["choices"][0]["delta"]["tool_calls"]
            del call["index"]
            message = {"role": "assistant", "content": "so", "refusal": None, "tool_calls": [call]}
            result = {"role": "tool", "content": "12", "tool_call_id": call["id"]}
            _, second = await post(url, [user, message, result], tools=TOOLS)
            return chunks, second, await endpoint.close((0, 0, 0))

    chunks, second, session = asyncio.run(run())
    assert chunks[-1] == "[DONE]" and chunks[-2]["usage"]["completion_tokens"] > 3
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks[:3]] == [None, None, "tool_calls"]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": "so"}
    assert second["choices"][0]["message"]["content"] == "it is 12"
    assert len(session.sequence_lengths) == 1, "the joined chunks equal the message"


def test_an_endpoint_that_others_reach_has_a_key_and_obeys_no_other() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    parts = (Script(tokenizer, ["b"]), turn_template(tokenizer), TurnSampling(SamplingParams(), 60))
    with pytest.raises(UserError, match=r"rollout.environment.host=0.0.0.0 .*no key"):
        endpoint_key(EnvironmentConfig(host="0.0.0.0"))

    async def run() -> Any:
        async with Endpoint(*parts, host="0.0.0.0", key="s3cret") as endpoint:  # type: ignore[arg-type]
            url = endpoint.open(Trajectory((0, 0, 0)))
            for key in ("-", "s3cre", "s3crets", "é"):
                status, refused = await post(url, USER, key)
                assert (status, refused["error"]["message"]) == (401, "the API key is not this endpoint's")
            return await post(url, USER, "s3cret"), (await endpoint.close((0, 0, 0))).turns

    (_, served), turns = asyncio.run(run())
    assert served["choices"][0]["message"]["content"] == "b" and turns == 1
