"""Sums and products with a calculator: the model must call the right tool, read its result and repeat it as the answer.

user       what is 7 times 8
assistant  <tool_call>{"name": "multiply", "arguments": {"a": 7, "b": 8}}</tool_call>
tool       56
assistant  56
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from braidrl.agents.tools import ToolEnvironment
from braidrl.agents.turns import Observation

WORDS = {"add": "plus", "multiply": "times"}
CALLS = [f'<tool_call>{{"name": "{name}", "arguments": {{"a":' for name in WORDS]
MARKS = ["<user>", "<assistant>", "<tool>"]
TEMPLATE = """{%- for message in messages %}{{ "<" + message.role + ">" + message.content + "<end>" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}"""


def add(a: int, b: int) -> int:
    """The sum of two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


def multiply(a: int, b: int) -> int:
    """The product of two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a * b


class Calculator(ToolEnvironment):
    """An environment worth 1 for the right answer."""

    def __init__(self) -> None:
        super().__init__([add, multiply])

    def answered(self, text: str) -> Observation:
        return Observation(done=True, reward=float(text.strip() == self.example["answer"]))


def problems(count: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """Return (tool, a, b) with numbers below 10."""
    source = random.Random(seed)
    for _ in range(count):
        yield source.choice(list(WORDS)), source.randrange(10), source.randrange(10)


def question(tool: str, a: int, b: int) -> dict[str, Any]:
    result = add(a, b) if tool == "add" else multiply(a, b)
    return {"prompt": f"what is {a} {WORDS[tool]} {b}", "answer": str(result)}


def call(tool: str, a: int, b: int) -> str:
    """Return the call in the tokenizer's tokens, joined by spaces."""
    return f'<tool_call>{{"name": "{tool}", "arguments": {{"a": {a} , "b": {b} }}}}</tool_call>'


def answers(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return the answers of a teacher without tools, who guesses in half of the examples."""
    source = random.Random(seed)
    for problem in problems(count, seed):
        asked = question(*problem)
        yield {
            "prompt": asked["prompt"],
            "response": asked["answer"] if source.random() < 0.5 else str(source.randrange(19)),
        }


def demonstrations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return both turns of a teacher that takes any tool in three of five examples, and is therefore wrong in three of
    ten.
    """
    source = random.Random(seed)
    for tool, a, b in problems(count, seed):
        asked, taken = question(tool, a, b)["prompt"], source.choice(list(WORDS)) if source.random() < 0.6 else tool
        result = question(taken, a, b)["answer"]
        yield {"prompt": asked, "response": call(taken, a, b), "answer": result}
        earlier = [("user", asked), ("assistant", call(taken, a, b)), ("tool", result)]
        messages = [{"role": role, "content": content} for role, content in earlier]
        yield {"prompt": messages, "response": result, "answer": result}
