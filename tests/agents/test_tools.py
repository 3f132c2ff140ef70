"""Tool calls in the format of Hermes and Qwen are executed together and answered in order."""

from __future__ import annotations

import asyncio
import json

from braidrl.agents.tool_calls import ToolCall, parse_tool_calls
from braidrl.agents.tools import ToolEnvironment
from braidrl.agents.turns import Observation
from tests.agents.chat import make_chat_tokenizer, turn_template
from tests.engines.virtual_time import run_virtually


async def wait(seconds: float) -> str:
    """Waits.

    Args:
        seconds: how long
    """
    await asyncio.sleep(seconds)
    return f"waited {seconds:g}"


def divide(a: int, b: int) -> float:
    """Divides.

    Args:
        a: dividend
        b: divisor
    """
    return a / b


class Task(ToolEnvironment):
    def __init__(self) -> None:
        super().__init__([wait, divide])

    def answered(self, text: str) -> Observation:
        return Observation(done=True, reward=float(text.strip() == self.example["answer"]))


def call(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def contents(observation: Observation) -> list[str]:
    assert all(message["role"] == "tool" for message in observation.said)  # type: ignore[index]
    return [message["content"] for message in observation.said]  # type: ignore[index]


def test_several_calls_of_a_turn_are_read_in_order_among_other_text() -> None:
    text = f"I need both. {call('wait', seconds=1)} and\n{call('divide', a=6, b=2)} done"
    assert parse_tool_calls(text) == [ToolCall("wait", {"seconds": 1}), ToolCall("divide", {"a": 6, "b": 2})]
    assert parse_tool_calls("6 / 2 = 3") == []


def test_calls_that_cannot_be_made_say_why() -> None:
    faults = {
        "<tool_call>{'name': 1}</tool_call>": "the call is not JSON: Expecting property name",
        "<tool_call>[1]</tool_call>": 'a call is an object {"name": ..., "arguments": {...}}',
        '<tool_call>{"name": "wait", "arguments": [1]}</tool_call>': "the arguments must be an object",
        '<tool_call>{"name": "wa': "the call is not JSON: Unterminated string",
    }
    for text, fault in faults.items():
        (parsed,) = parse_tool_calls(text)
        assert parsed.fault is not None and parsed.fault.startswith(fault)


def test_calls_of_one_turn_run_concurrently_and_are_answered_in_order() -> None:
    async def run() -> tuple[list[str], float]:
        observation = await Task().step(call("wait", seconds=3) + call("wait", seconds=2) + call("wait", seconds=1))
        return contents(observation), asyncio.get_running_loop().time()

    assert run_virtually(run()) == (["waited 3", "waited 2", "waited 1"], 3.0)


def test_the_model_reads_a_tools_error_and_continues() -> None:
    text = call("divide", a=1, b=0) + call("multiply", a=1) + call("divide", c=1) + "<tool_call>no</tool_call>"
    by_zero, unknown, wrong, unread = contents(asyncio.run(Task().step(text)))
    assert by_zero == "error: ZeroDivisionError: division by zero"
    assert unknown == "error: no tool is called 'multiply'; there are wait, divide"
    assert wrong.startswith("error: TypeError") and unread.startswith("error: the call is not JSON")


def test_a_turn_without_calls_is_the_answer() -> None:
    async def run(text: str) -> Observation:
        task = Task()
        await task.reset({"answer": "3"})
        return await task.step(text)

    assert asyncio.run(run(" 3 ")) == Observation(done=True, reward=1.0)
    assert asyncio.run(run("4")).reward == 0.0
    assert contents(asyncio.run(run(call("divide", a=6, b=2)))) == ["3.0"]


def test_the_chat_template_shows_the_tools_and_frames_their_results() -> None:
    tokenizer = make_chat_tokenizer("chatml")
    template, task = turn_template(tokenizer), Task()
    first = tokenizer.decode(template.first("6/2?", task.tools).ids)
    schemas = [json.loads(line) for line in first.split("<tools>\n")[1].split("\n</tools>")[0].splitlines()]
    assert [schema["function"]["name"] for schema in schemas] == ["wait", "divide"]
    observation = asyncio.run(task.step(call("divide", a=6, b=2) + call("divide", a=9, b=2)))
    assert tokenizer.decode(template.following(observation.said, tokenizer.eos_token_id, task.tools).ids) == (
        "\n<|im_start|>user\n<tool_response>\n3.0\n</tool_response>\n<tool_response>\n4.5\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
