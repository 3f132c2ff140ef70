"""Every API of the endpoint: the official clients accept it, and it leads to the same tokens and the same row."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

from braidrl.agents.dialects.dialect import joined, split_reasoning
from braidrl.agents.endpoint import Endpoint
from braidrl.agents.trajectory import Limits, Trajectory, TurnSampling, trajectory_columns
from braidrl.agents.turns import TurnTemplate
from braidrl.algorithms.ragged import Ragged
from braidrl.engines.embedded.embedded_engine import Decoding, EmbeddedEngine
from braidrl.engines.requests import Request, Response, SamplingParams
from braidrl.engines.stepping import EngineReplica
from tests.agents.chat import Script, make_chat_tokenizer, turn_template
from tests.agents.test_turns import engine_parts
from tests.cases import soak_but
from tests.engines.served import vllm_python

CALL = '<tool_call>{{"name": "look", "arguments": {{"at": {}}}}}</tool_call>'
CALLS = f"so {CALL.format(3)}{CALL.format(4)}"
THOUGHT = "<think>so it is</think>12"
PARTS = {"words": ("one two",), "calls": (CALLS, "it is 12"), "thoughts": (THOUGHT,)}
PARTS |= {f"{name} of responses": PARTS[name] for name in ("calls", "thoughts")}


class Cast(Script):
    """An engine whose rows each play one of the parts, by their sample number."""

    async def submit(self, request: Request) -> Response:
        self.texts = list([*PARTS.values()][request.uid[2]])
        # The calls are answered once; every other turn calls again.
        answers_calls = "tool_response" in self.tokenizer.decode(request.prompt[-60:])
        self.turns[request.uid] = int(len(self.texts) > 1 and answers_calls)
        return await super().submit(request)


@pytest.mark.parametrize("client", [pytest.param("openai", marks=pytest.mark.soak), "anthropic"])
def test_the_official_client_accepts_a_transcript_of_thirty_requests(client: str) -> None:
    python = vllm_python() or Path(sys.executable)  # its environment has both clients
    tokenizer = make_chat_tokenizer("chatml")

    async def run() -> tuple[int, bytes, bytes, list[Trajectory]]:
        async with Endpoint(
            Cast(tokenizer, []),
            turn_template(tokenizer),
            TurnSampling(SamplingParams(max_tokens=200), 2000),
            key="s3cret",
        ) as endpoint:  # type: ignore[arg-type]
            rows = [Trajectory((0, 0, number)) for number in range(len(PARTS))]
            urls = json.dumps(dict(zip(PARTS, map(endpoint.open, rows), strict=True)))
            script = Path(__file__).parent / "official_clients.py"
            pipe = asyncio.subprocess.PIPE
            process = await asyncio.create_subprocess_exec(python, script, client, urls, stdout=pipe, stderr=pipe)
            output, failed = await process.communicate()
            return process.returncode or 0, output, failed, rows

    status, output, failed, rows = asyncio.run(run())
    assert status == 0, failed.decode()[-3000:]
    assert json.loads(output)["count"] >= 30
    assert sum(row.turns for row in rows) >= 15


Say = Callable[[str], Awaitable[None]]
USERS = ("a b", "higher", "lower 12")


async def post(url: str, path: str, body: Any) -> Any:
    async with aiohttp.ClientSession() as client, client.post(url.removesuffix("/v1") + path, json=body) as response:
        assert response.status == 200, await response.text()
        return await response.json()


def chat(url: str, template: TurnTemplate) -> Say:
    said: list[Any] = []

    async def say(text: str) -> None:
        said.append({"role": "user", "content": text})
        answer = await post(url, "/v1/chat/completions", {"messages": said})
        said.append(answer["choices"][0]["message"])

    return say


def responses(url: str, template: TurnTemplate) -> Say:
    items: list[Any] = []

    async def say(text: str) -> None:
        items.append({"role": "user", "content": text})
        items.extend((await post(url, "/v1/responses", {"input": items}))["output"])

    return say


def messages(url: str, template: TurnTemplate) -> Say:
    said: list[Any] = []

    async def say(text: str) -> None:
        said.append({"role": "user", "content": text})
        answer = await post(url, "/v1/messages", {"messages": said, "max_tokens": 30})
        said.append({"role": "assistant", "content": answer["content"]})

    return say


def by_tokens(path: str, body: Callable[[list[int]], Any]) -> Callable[[str, TurnTemplate], Say]:
    def begin(url: str, template: TurnTemplate) -> Say:
        ids: list[int] = []

        async def say(text: str) -> None:
            following = template.following(text, ids[-1]) if ids else template.first(text)
            ids.extend(following.ids)
            ids.extend((await post(url, path, body(ids)))["choices"][0]["token_ids"])

        return say

    return begin


DRIVERS = {
    "chat": chat,
    "responses": responses,
    "messages": messages,
    "completions": by_tokens("/v1/completions", lambda ids: {"prompt": ids, "return_token_ids": True}),
    "token_ids": by_tokens("/inference/v1/generate", lambda ids: {"token_ids": ids, "sampling_params": {}}),
}


@pytest.mark.parametrize("style", soak_but(["chatml"], ["chatml", "thinking"]))
def test_one_conversation_has_the_same_tokens_and_row_in_every_dialect(style: str) -> None:
    tokenizer, model = engine_parts(style)
    template = turn_template(tokenizer)

    async def run(begin: Callable[[str, TurnTemplate], Say]) -> Trajectory:
        engine = EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, 400)))
        async with Endpoint(engine, template, TurnSampling(SamplingParams(max_tokens=30), 400)) as endpoint:
            say = begin(endpoint.open(row := Trajectory((0, 3, 1))), template)
            for text in USERS:
                await say(text)
            assert row.turns == len(USERS)
            return row

    limits = Limits(at_once=1, timeout_s=9, max_turns=9, max_sequence_tokens=400)
    rows = {name: asyncio.run(run(begin)) for name, begin in DRIVERS.items()}
    columns = {name: trajectory_columns([row], limits) for name, row in rows.items()}
    assert len(rows["chat"].sequence_lengths) == 1
    for name, row in rows.items():
        assert row.tokens == rows["chat"].tokens, name
        for column, value in columns["chat"].items():
            other = columns[name][column]
            both = (value.values, other.values) if isinstance(value, Ragged) else (value, other)
            torch.testing.assert_close(*both, rtol=0, atol=0, msg=f"{name}: {column}")


def test_a_branch_or_a_second_agent_continues_with_the_exact_tokens_of_its_turn() -> None:
    tokenizer, model = engine_parts("chatml")

    async def run() -> Trajectory:
        engine = EngineReplica(EmbeddedEngine(model, tokenizer, Decoding(16, 600)))
        async with Endpoint(
            engine, turn_template(tokenizer), TurnSampling(SamplingParams(max_tokens=8), 600)
        ) as endpoint:
            url, path = endpoint.open(row := Trajectory((0, 0, 0))), "/v1/chat/completions"
            user, more = {"role": "user", "content": "a b"}, {"role": "user", "content": "more"}
            choices = (await post(url, path, {"messages": [user], "n": 2}))["choices"]
            for choice in choices:  # both branches continue; the first is not the last sequence any more
                await post(url, path, {"messages": [user, choice["message"], more]})
            return row

    row = asyncio.run(run())
    ends = [0]
    for length in row.sequence_lengths:
        ends.append(ends[-1] + length)
    sequences = [row.tokens[begin:end] for begin, end in pairwise(ends)]
    actions = [row.actions[begin:end] for begin, end in pairwise(ends)]
    first, second, of_first, of_second = sequences
    assert of_first[: len(first)] == first and of_second[: len(second)] == second
    assert not any(actions[2][: len(first)]), "a turn is trained once, in the sequence that sampled it"
    assert row.turns == 4 and sum(map(sum, actions)) == row.action_tokens


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize(
    "text", ["", "a", "<think>so</think>12", "so</think>12", "<think>so", "<thin", "a <think>b</think>", "</think>"]
)
def test_reasoning_is_split_from_a_text_and_joined_to_the_same_text(text: str, opened: bool) -> None:
    parts = split_reasoning(text, opened)
    again = parts.text if parts.thought is None else joined(parts.thought, parts.signature) + parts.text
    assert again == text
    for end in range(len(text) + 1):  # what is streamed is never taken back
        some = split_reasoning(text[:end], opened, is_over=False)
        assert (parts.thought or "").startswith(some.thought or "") and parts.text.startswith(some.text)
