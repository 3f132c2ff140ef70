"""An agent for any OpenAI-compatible server: it calls a calculator, and tries again after a wrong answer.

    python examples/outside_agent/agent.py http://localhost:8000/v1 'what is 7 times 8' 56

It does not know Braid and needs only Python. `braid train` calls `agent` for each row, with an address for that row.
"""

from __future__ import annotations

import json
import sys
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

TRIES, TURNS = 2, 4
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name.capitalize()} two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
    for name in ("add", "multiply")
]
DIRECT = build_opener(ProxyHandler({}))


def agent(base_url: str, example: dict[str, Any]) -> float:
    """Return 1 for the right answer, 0.5 if it needed a second conversation, and 0 for no answer."""
    for number in range(TRIES):
        if converse(base_url, example["prompt"]) == example["answer"]:
            return 1 / (number + 1)
    return 0.0


def converse(base_url: str, question: str) -> str:
    """Start a conversation, execute the model's calls, and return its answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(TURNS):
        message = chat(base_url, messages)
        messages.append(message)
        if not message.get("tool_calls"):
            return str(message["content"]).strip()
        for call in message["tool_calls"]:
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": calculate(**call["function"])})
    return ""


def chat(base_url: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the next message of the model."""
    body = json.dumps({"model": "actor", "messages": messages, "tools": TOOLS}).encode()
    asked = Request(f"{base_url}/chat/completions", body, {"Content-Type": "application/json"})
    with DIRECT.open(asked) as answer:
        return dict(json.load(answer)["choices"][0]["message"])


def calculate(name: str, arguments: str) -> str:
    """Return the result of a call, as text for the model."""
    try:
        a, b = (int(json.loads(arguments)[key]) for key in ("a", "b"))
    except (KeyError, TypeError, ValueError) as error:
        return f"error: {error}"
    return str(a + b if name == "add" else a * b)


if __name__ == "__main__":
    url, prompt, answer = sys.argv[1:]
    print(agent(url, {"prompt": prompt, "answer": answer}))
