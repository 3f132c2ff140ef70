"""Transcripts of the official clients, run in a process of an environment that has them.

python official_clients.py openai|anthropic '{"words": URL, ...}' ──▶ the number of requests, as JSON

Each answer and each event must be what the client's own types say: they are validated, which the clients do not do.
"""

import importlib
import json
import sys
from typing import Any

REQUESTS = {"count": 0}
TOOL = {"name": "look", "description": "Look at a place.", "parameters": {"type": "object", "properties": {}}}
KEY = "s3cret"


def valid(found: Any) -> Any:
    """Return what a client made of an answer, if it has the types that the client's own class names."""
    return type(found).model_validate(found.to_dict())


def expect(kind: type[Exception], call: Any, part: str, **arguments: Any) -> None:
    """Check that a call raises an error of the client, whose message has a part."""
    raised = None
    try:
        call(**arguments)
    except kind as error:
        raised = str(error)
    assert raised is not None and part in raised, raised


def make(client: Any, url: str, key: str = KEY, **more: Any) -> Any:
    def count(response: Any) -> None:
        REQUESTS["count"] += 1

    http = importlib.import_module("httpx2" if client.__module__.startswith("anthropic") else "httpx")
    counted = http.Client(event_hooks={"response": [count]})
    return client(base_url=url, api_key=key, max_retries=0, http_client=counted, **more)


def chat(urls: dict[str, str]) -> None:
    import openai

    client = make(openai.OpenAI, urls["words"])
    assert valid(client.models.list()).data[0].id == "actor" and valid(client.models.retrieve("mine")).id == "mine"
    user: Any = [{"role": "user", "content": "a b"}]
    create = client.chat.completions.create
    first = valid(create(model="m", messages=user))
    assert first.choices[0].message.content == "one two" and first.choices[0].finish_reason == "stop"
    assert first.usage.total_tokens == first.usage.prompt_tokens + first.usage.completion_tokens
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}]
    assert valid(create(model="m", messages=parts, temperature=0.3, seed=3)).choices[0].message.content == "one two"
    system: Any = [{"role": "system", "content": "be short"}, *user]
    assert valid(create(model="m", messages=system)).choices[0].message.role == "assistant"
    assert valid(create(model="m", messages=user, max_tokens=1)).choices[0].finish_reason == "length"
    assert valid(create(model="m", messages=user, stop=[" two"])).choices[0].message.content == "one"
    several = valid(create(model="m", messages=user, n=3))
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    chunks = [valid(chunk) for chunk in create(model="m", messages=user, stream=True)]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "one two"
    chunks = [
        valid(chunk)
        for chunk in create(model="m", messages=user, stream=True, n=2, stream_options={"include_usage": True})
    ]
    assert {choice.index for chunk in chunks for choice in chunk.choices} == {0, 1} and chunks[-1].usage.total_tokens
    with client.chat.completions.stream(model="m", messages=user) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.content == "one two"

    tools: Any = [{"type": "function", "function": TOOL}]
    with_tools = make(openai.OpenAI, urls["calls"]).chat.completions
    asked = valid(with_tools.create(model="m", messages=user, tools=tools))
    assert asked.choices[0].finish_reason == "tool_calls"
    calls = asked.choices[0].message.tool_calls
    assert [json.loads(call.function.arguments) for call in calls] == [{"at": 3}, {"at": 4}]
    results = [{"role": "tool", "tool_call_id": call.id, "content": "12"} for call in calls]
    history: Any = [*user, asked.choices[0].message.to_dict(), *results]
    assert valid(with_tools.create(model="m", messages=history, tools=tools)).choices[0].message.content == "it is 12"
    chunks = [valid(c) for c in with_tools.create(model="m", messages=user, tools=tools, stream=True)]
    assert sum(len(chunk.choices[0].delta.tool_calls or ()) for chunk in chunks) == 2

    for fault, more in (("logprobs", {"logprobs": True}), ("response_format", {"response_format": {"type": "x"}})):
        expect(openai.BadRequestError, create, fault, model="m", messages=user, **more)
    expect(openai.BadRequestError, create, "messages", model="m", messages=[])
    stranger = make(openai.OpenAI, urls["words"], key="other")
    expect(openai.AuthenticationError, stranger.models.list, "API key")
    lost = make(openai.OpenAI, urls["words"].replace("sessions/0.", "sessions/7."))
    expect(openai.NotFoundError, lost.chat.completions.create, "no session", model="m", messages=user)
    expect(openai.NotFoundError, client.embeddings.create, "is not served", model="m", input="a")


def completions(urls: dict[str, str]) -> None:
    import openai

    create = make(openai.OpenAI, urls["words"]).completions.create
    first = valid(create(model="m", prompt="a b"))
    assert first.choices[0].text == "one two" and first.choices[0].finish_reason == "stop"
    assert valid(create(model="m", prompt="a bone two and")).choices[0].text == "one two"
    ids = valid(create(model="m", prompt=[5, 6, 7], extra_body={"return_token_ids": True}))
    assert ids.choices[0].prompt_token_ids == [5, 6, 7] and ids.choices[0].token_ids
    assert len(valid(create(model="m", prompt="a b", n=2)).choices) == 2
    chunks = [valid(chunk) for chunk in create(model="m", prompt="a b", stream=True)]
    assert "".join(chunk.choices[0].text for chunk in chunks) == "one two"
    expect(openai.BadRequestError, create, "prompt", model="m", prompt=["a", "b"])


def responses(urls: dict[str, str]) -> None:
    import openai

    client = make(openai.OpenAI, urls["words"])
    create, user = client.responses.create, {"role": "user", "content": "a b"}
    first = valid(create(model="m", input="a b"))
    assert first.output_text == "one two" and first.status == "completed" and first.usage.output_tokens > 1
    items: Any = [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a b"}]}]
    assert valid(create(model="m", input=items, instructions="be short")).output_text == "one two"
    more: Any = [user, *first.to_dict()["output"], {"role": "user", "content": "more"}]
    assert valid(create(model="m", input=more)).output_text == "one two"
    cut = valid(create(model="m", input="a b", max_output_tokens=1))
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    events = [valid(event) for event in create(model="m", input="a b", stream=True)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert events[-1].type == "response.completed" and events[-1].response.output_text == "one two"
    with client.responses.stream(model="m", input="a b") as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "one two"

    tools: Any = [{"type": "function", "strict": False, **TOOL}]
    called = make(openai.OpenAI, urls["calls of responses"]).responses
    asked = valid(called.create(model="m", input=[user], tools=tools))
    calls = [item for item in asked.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"at": 3}, {"at": 4}]
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": "12"} for call in calls]
    answer = valid(called.create(model="m", input=[user, *asked.to_dict()["output"], *results], tools=tools))
    assert answer.output_text == "it is 12"
    streamed = [valid(event) for event in called.create(model="m", input=[user], tools=tools, stream=True)]
    assert [event.type for event in streamed].count("response.function_call_arguments.done") == 2

    thinking = make(openai.OpenAI, urls["thoughts of responses"]).responses
    first = valid(thinking.create(model="m", input=[user]))
    assert first.output[0].content[0].text == "so it is" and first.output_text == "12"
    more = [user, *first.to_dict()["output"], {"role": "user", "content": "more"}]
    events = [valid(event) for event in thinking.create(model="m", input=more, stream=True)]
    assert "response.reasoning_text.done" in [event.type for event in events]
    expect(openai.BadRequestError, create, "previous_response_id", model="m", input="a", previous_response_id="x")
    expect(openai.BadRequestError, create, "web_search", model="m", input="a", tools=[{"type": "web_search"}])


def messages(urls: dict[str, str]) -> None:
    import anthropic

    client = make(anthropic.Anthropic, urls["words"].removesuffix("/v1"))
    assert valid(client.models.list()).data[0].id == "actor" and valid(client.models.retrieve("mine")).id == "mine"
    user: Any = [{"role": "user", "content": "a b"}]
    create, given = client.messages.create, {"model": "m", "max_tokens": 200}
    first = valid(create(messages=user, **given))
    assert first.content[0].text == "one two" and first.stop_reason == "end_turn" and first.usage.output_tokens > 1
    blocks: Any = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": " b"}]}]
    assert valid(create(messages=blocks, system="be short", **given)).content[0].text == "one two"
    system: Any = [{"type": "text", "text": "be short", "cache_control": {"type": "ephemeral"}}]
    assert valid(create(messages=user, system=system, **given)).role == "assistant"
    more: Any = [*user, {"role": "assistant", "content": first.to_dict()["content"]}, {"role": "user", "content": "c"}]
    assert valid(create(messages=more, metadata={"user_id": "x"}, **given)).stop_reason == "end_turn"
    assert valid(create(model="m", max_tokens=1, messages=user)).stop_reason == "max_tokens"
    stopped = valid(create(messages=user, stop_sequences=["!", " two"], **given))
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " two")
    short, long = (client.messages.count_tokens(model="m", messages=each) for each in (user, more))
    assert valid(short).input_tokens == first.usage.input_tokens < valid(long).input_tokens
    events = [valid(event) for event in create(messages=user, stream=True, **given)]
    kinds = [event.type for event in events]
    assert kinds[:2] == ["message_start", "content_block_start"] and kinds[-2:] == ["message_delta", "message_stop"]
    with client.messages.stream(messages=user, **given) as stream:
        assert "".join(stream.text_stream) == "one two" and valid(stream.get_final_message()).content[0].text
    with client.messages.stream(messages=user, stop_sequences=[" two"], **given) as stream:
        assert stream.get_final_message().stop_sequence == " two"

    tools: Any = [{"name": TOOL["name"], "description": TOOL["description"], "input_schema": TOOL["parameters"]}]
    called = make(anthropic.Anthropic, urls["calls"].removesuffix("/v1")).messages
    asked = valid(called.create(messages=user, tools=tools, tool_choice={"type": "auto"}, **given))
    uses = [block for block in asked.content if block.type == "tool_use"]
    assert asked.stop_reason == "tool_use" and [use.input for use in uses] == [{"at": 3}, {"at": 4}], asked
    results = [{"type": "tool_result", "tool_use_id": use.id, "content": "12"} for use in uses]
    turn = {"role": "assistant", "content": asked.to_dict()["content"]}
    history: Any = [*user, turn, {"role": "user", "content": results}]
    assert valid(called.count_tokens(model="m", messages=history, tools=tools)).input_tokens > 20
    assert valid(called.create(messages=history, tools=tools, **given)).content[0].text == "it is 12"
    with called.stream(messages=user, tools=tools, **given) as stream:
        uses = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert [use.input for use in uses] == [{"at": 3}, {"at": 4}]
    wrong = [{**results[0], "is_error": True, "content": [{"type": "text", "text": "no"}]}, results[1]]
    history = [*user, turn, {"role": "user", "content": [*wrong, {"type": "text", "text": "so?"}]}]
    assert valid(called.create(messages=history, tools=tools, **given)).content[0].text == "it is 12"
    assert valid(called.create(messages=user, tools=tools, stream=False, **given)).stop_reason == "tool_use"

    thinking = make(anthropic.Anthropic, urls["thoughts"].removesuffix("/v1")).messages
    budget: Any = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "model": "m", "max_tokens": 2048}
    first = valid(thinking.create(messages=user, **budget))
    assert (first.content[0].thinking, first.content[1].text) == ("so it is", "12")
    turn = {"role": "assistant", "content": first.to_dict()["content"]}
    history = [*user, turn, {"role": "user", "content": "more"}]
    with thinking.stream(messages=history, **budget) as stream:
        final = stream.get_final_message()
    assert (final.content[0].thinking, final.content[1].text) == ("so it is", "12")
    assert final.content[0].signature == first.content[0].signature
    events = [valid(event) for event in thinking.create(messages=user, stream=True, **budget)]
    assert "signature_delta" in [e.delta.type for e in events if e.type == "content_block_delta"]

    image: Any = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "http://a/b"}}]}]
    expect(anthropic.BadRequestError, create, "image", messages=image, **given)
    expect(anthropic.BadRequestError, create, "tool_choice", messages=user, tool_choice={"type": "any"}, **given)
    search: Any = [{"type": "web_search_20250305", "name": "web_search"}]
    expect(anthropic.BadRequestError, create, "runs on a server", messages=user, tools=search, **given)
    expect(anthropic.BadRequestError, create, "max_tokens", messages=user, model="m", max_tokens=0)
    expect(anthropic.BadRequestError, create, "stop_sequences", messages=user, stop_sequences=[""], **given)
    expect(anthropic.BadRequestError, create, "leaves no room", messages=[{**user[0], "content": "a " * 3000}], **given)
    expect(anthropic.BadRequestError, create, "a role", messages=[{"role": "robot", "content": "a"}], **given)
    stranger = make(anthropic.Anthropic, urls["words"].removesuffix("/v1"), key="other").messages
    expect(anthropic.AuthenticationError, stranger.create, "authentication_error", messages=user, **given)
    lost = make(anthropic.Anthropic, urls["words"].replace("sessions/0.", "sessions/7.").removesuffix("/v1")).messages
    expect(anthropic.NotFoundError, lost.create, "not_found_error", messages=user, **given)


if __name__ == "__main__":
    addresses = json.loads(sys.argv[2])
    for transcript in {"openai": (chat, completions, responses), "anthropic": (messages,)}[sys.argv[1]]:
        transcript(addresses)
    print(json.dumps(REQUESTS))
