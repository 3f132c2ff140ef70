"""Issues of a repository with one file: an operator is wrong, and the tests say which one is right.

user       total of a and b must be their product
assistant  <tool_call>{"name": "bash", "arguments": {"command": "sed -i 's/@/ * /' total.py"}}</tool_call>
tool       0
assistant  <tool_call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_..."}}</tool_call>
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

OPERATORS = {"sum": "+", "product": "*", "difference": "-", "remainder": "%"}
FIX = '<tool_call>{"name": "bash", "arguments": {"command": "sed -i \'s/@/'
FILE = "/' total.py\"}}</tool_call>"
SUBMIT = (
    '<tool_call>{"name": "bash", "arguments": {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}}</tool_call>'
)
MARKS = ["<system>", "<user>", "<assistant>", "<tool>"]
TEMPLATE = """{%- for message in messages %}{{ "<" + message.role + ">" + message.content + "<end>" }}{% endfor %}
{%- if add_generation_prompt %}{{ "<assistant>" }}{% endif %}"""


def issue(word: str, a: int, b: int) -> dict[str, Any]:
    """Return an issue, the files of its repository, and its tests."""
    right = eval(f"{a} {OPERATORS[word]} {b}")
    return {
        "prompt": f"total of {a} and {b} must be their {word}",
        "files": {"total.py": "def total(a, b):\n    return a @ b\n"},
        "tests": {"test_total.py": f"from total import total\n\nassert total({a}, {b}) == {right}\n"},
    }


def issues(count: int, seed: int) -> Iterator[tuple[str, int, int]]:
    """Return (word, a, b) with different numbers, of which no two operators make the same."""
    source = random.Random(seed)
    while count:
        word, a, b = source.choice(list(OPERATORS)), source.randrange(1, 10), source.randrange(1, 10)
        if len({eval(f"{a} {sign} {b}") for sign in OPERATORS.values()}) == len(OPERATORS):
            count -= 1
            yield word, a, b


def demonstrations(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Return both turns of a teacher that takes any operator in three of five examples."""
    source = random.Random(seed)
    for word, a, b in issues(count, seed):
        sign = OPERATORS[source.choice(list(OPERATORS)) if source.random() < 0.6 else word]
        fix, asked = f"{FIX} {sign} {FILE}", issue(word, a, b)["prompt"]
        opening = [{"role": "system", "content": "shell"}, {"role": "user", "content": asked}]
        yield {"prompt": opening, "response": fix, "answer": ""}
        answered = [{"role": "assistant", "content": fix}, {"role": "tool", "content": "0 "}]
        yield {"prompt": [*opening, *answered], "response": SUBMIT, "answer": ""}
